"""Generated files against the disk, on systems whose paths are written in another way."""

from __future__ import annotations

from pathlib import Path, PurePath, PureWindowsPath

import pytest

from layoutc import files

FILES = {"__init__.py": f"{files.MARK}\n", "mine/__init__.py": f"{files.MARK}\n", "mine/layout.py": f"{files.MARK}\n"}


def test_names_of_generated_files_have_slashes_on_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a path below the output folder reads mine\\layout.py."""

    def relative_to(self: PurePath, *other: Path) -> PureWindowsPath:
        return PureWindowsPath(PurePath.relative_to(self, *other))

    monkeypatch.setattr(Path, "relative_to", relative_to)
    files.write(tmp_path, FILES, files.compare(tmp_path, FILES))
    assert (tmp_path / "mine" / "layout.py").read_text() == FILES["mine/layout.py"]
    assert [state.status for state in files.compare(tmp_path, FILES)] == ["same"] * 3
