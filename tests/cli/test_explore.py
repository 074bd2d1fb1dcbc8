"""`layoutc show` with --html, --svg, --png and --serve: what is written, what is refused, what is served."""

from __future__ import annotations

import builtins
import http.client
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from places import SPECS

from layoutc.cli import explore
from layoutc.cli.app import main


def run(*args: object) -> Result:
    return CliRunner().invoke(main, ["show", "--specs", str(SPECS), *map(str, args)])


def test_a_page_of_several_recipes(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    result = run("nvfp4", "mxfp8", "--html", path, "--shape", "160x96", "--world", "5")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == ""
    text = path.read_text(encoding="utf-8")
    assert re.fullmatch(rf"wrote {re.escape(str(path))} \([\d,]+ bytes\)\n", result.stderr)
    assert "<title>nvfp4, mxfp8 - layoutc</title>" in text
    assert '"first":[160,96,5]' in text


def test_pictures(tmp_path: Path) -> None:
    pytest.importorskip("resvg_py", reason="needs resvg-py: pip install 'layoutc[png]'")
    drawn, image = tmp_path / "a.svg", tmp_path / "a.png"
    result = run("nvfp4", "--svg", drawn, "--png", image, "--picture", "columnwise_scale")
    if "finds no font" in result.stderr:
        pytest.skip("needs a font, such as DejaVu Sans: apt-get install fonts-dejavu-core")
    assert result.exit_code == 0, result.stderr
    assert "columnwise_scale, as the GEMM reads it" in drawn.read_text(encoding="utf-8")
    assert image.read_bytes().startswith(b"\x89PNG")


def test_an_svg_needs_no_other_package(tmp_path: Path) -> None:
    """Blocked imports stand for packages that are not installed."""
    path = tmp_path / "a.svg"
    program = (
        "import sys; sys.modules['resvg_py'] = None; from layoutc.cli.app import main;"
        f"main(['show', 'nvfp4', '--specs', {str(SPECS)!r}, '--svg', {str(path)!r}])"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=900)
    assert path.read_text(encoding="utf-8").startswith("<svg")


def test_png_without_its_package_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "resvg_py":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    result = run("nvfp4", "--png", tmp_path / "a.png")
    assert result.exit_code == 2
    assert "pip install 'layoutc[png]'" in result.stderr
    assert not (tmp_path / "a.png").exists()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["nvfp4", "mxfp8"], "tables show one RECIPE; several go with --html or --serve"),
        (["nvfp4", "mxfp8", "--svg", "a.svg"], "--svg and --png draw one recipe"),
        (["nvfp4", "--html", "a.html", "--picture", "rowwise_scale"], "the page has all buffers"),
        (["nvfp4", "nvfp4", "--html", "a.html"], "nvfp4 is named twice"),
        (["nvfp4", "--html", "a.html", "--json"], "go with --shape, --world and --picture alone"),
        (["nvfp4", "--port", "8000"], "go with --shape, --world and --picture alone"),
        (
            ["nvfp4", "--html", "a.html", "--shape", "33x64"],
            "rows in multiples of 16, not 33: m can be 32 or 48",
        ),
        (["nvfp4", "--svg", "a.svg", "--shape", "32x33"], "nvfp4 takes columns in multiples of 16, not 33"),
        (["nvfp4", "--svg", "a.svg", "--picture", "nonsense"], "nvfp4 has no buffer nonsense. It has rowwise_data"),
        (["nvfp4", "--html", "no/such/folder/a.html"], "no/such/folder/a.html: No such file or directory"),
        (["--checkpoint", ".", "--html", "a.html"], "the options for specs do not go with it"),
        (["--html", "a.html"], "name a RECIPE"),
    ],
)
def test_refusals(args: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_spec_with_errors_has_no_page(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("layoutc: 1\nname: bad\n", encoding="utf-8")
    result = run(bad, "--html", tmp_path / "a.html")
    assert result.exit_code == 1
    assert "bad.yaml" in result.stderr
    assert not (tmp_path / "a.html").exists()


# ------------------------------------------------------------------------------------------------------------- serving
def answer(make: Callable[[], str], path: str = "/", host: str | None = None) -> tuple[int, str, str]:
    """Status, type and text of one answer."""
    with explore.server_of(make, 0) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        place, port = server.server_address[:2]
        assert place == "127.0.0.1"
        connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=900)
        connection.request("GET", path, headers={"Host": host or f"127.0.0.1:{port}"})
        got = connection.getresponse()
        text = got.read().decode()
        connection.close()
        thread.join(timeout=900)
        return got.status, got.headers["Content-Type"], text


def fails(error: BaseException) -> Callable[[], str]:
    def make() -> str:
        raise error

    return make


def test_one_page_is_served_to_this_machine_alone() -> None:
    assert answer(lambda: "a page") == (200, "text/html; charset=utf-8", "a page")
    assert answer(lambda: "a page", "/?x")[0] == 200
    assert answer(lambda: "a page", host="localhost:80")[0] == 200
    assert answer(lambda: "a page", "/etc/passwd")[0] == 404
    assert answer(lambda: "a page", host="evil.example:80")[0] == 403, "a name that was pointed at this machine"


def test_what_went_wrong_is_served_in_words() -> None:
    assert answer(fails(click.UsageError("no such file")))[::2] == (500, "no such file")
    status, _, text = answer(fails(SystemExit(1)))
    assert (status, "on the terminal" in text) == (500, True)


def test_the_command_serves_and_reads_the_spec_again(tmp_path: Path) -> None:
    spec = tmp_path / "fp8_block.yaml"
    text = (SPECS / "fp8_block.yaml").read_text(encoding="utf-8")
    spec.write_text(text, encoding="utf-8")
    command = [sys.executable, "-u", "-m", "layoutc", "show", str(spec), "--serve"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.match(r"http://127\.0\.0\.1:(\d+)/", process.stdout.readline())
        assert found is not None

        def page() -> tuple[int, str]:
            connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=900)
            connection.request("GET", "/")
            got = connection.getresponse()
            return got.status, got.read().decode()

        assert page()[0] == 200
        spec.write_text(text.rstrip() + "\n# changed\n", encoding="utf-8")
        status, now = page()
        assert (status, "# changed" in now) == (200, True)
        spec.write_text("name: [", encoding="utf-8")
        assert page()[0] == 500
    finally:
        process.terminate()
        process.wait(timeout=900)


def test_a_port_in_use_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run("fp8_block", "--serve", "--port", port)
    assert result.exit_code == 2
    assert f"port {port} of 127.0.0.1" in result.stderr
    assert "name another with --port" in result.stderr
