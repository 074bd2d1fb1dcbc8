"""What README includes from other files is as it stands there, and the reference names all that is public."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from places import ROOT

import layoutc
from layoutc import checkpoint

pytestmark = pytest.mark.checkout


def test_readme_shows_what_stands_in_the_files() -> None:
    """The spec, the generated hook, and the chart and table of recorded runs."""
    command = [sys.executable, str(ROOT / "tests" / "programs" / "front.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_the_reference_has_every_public_name() -> None:
    text = (ROOT / "docs" / "pages" / "reference" / "api.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^::: (\S+)$", text, re.M))
    public = {f"layoutc.{name}" for name in layoutc.__all__ if callable(getattr(layoutc, name))}
    public |= {f"layoutc.checkpoint.{name}" for name, value in vars(checkpoint).items() if callable(value)}
    assert named == public - {"layoutc.inspect"}, "docs/pages/reference/api.md"  # which is checkpoint.inspect
