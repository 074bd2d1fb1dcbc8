"""What `layoutc show` draws: the page for a browser, in a file or served to this machine, and pictures for papers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import click

from layoutc.cli.reading import plan_of
from layoutc.cli.shared import refuse, refusing

ADDRESS = "127.0.0.1"
SHOWN = ("layout.py", "tensor.py", "kernels.py")  # the generated files whose lines the page shows
ZOOM = 3.0  # pixels of a PNG for each unit of the SVG


@dataclass(frozen=True)
class Asked:
    """What the command line asks for. shape, world: None if they are left to the page."""

    paths: tuple[Path, ...]
    shape: tuple[int, int] | None
    world: int | None
    picture: str | None


def draw(asked: Asked, html: Path | None, serving: bool, port: int, svg: Path | None, png: Path | None) -> None:
    """Writes what is asked for, and serves the page last, until it is interrupted."""
    if (svg or png) and len(asked.paths) > 1:
        refuse("--svg and --png draw one recipe; name one")
    if asked.picture and not (svg or png):
        refuse("--picture goes with --svg and --png; the page has all buffers")
    text = _svg(asked) if svg or png else ""
    image = _png(text) if png else b""
    page = _page(asked) if html or serving else ""
    for path, content in ((html, page.encode()), (svg, text.encode()), (png, image)):
        if path is not None:
            with refusing(OSError):
                path.write_bytes(content)
            click.echo(f"wrote {path} ({len(content):,} bytes)", err=True)
    if serving:
        _serve(asked, port)


def _page(asked: Asked) -> str:
    """The page of all recipes that are asked for. Exits with findings of specs that have errors."""
    from layoutc.build import pipeline
    from layoutc.explorer import data, page

    plans = [plan_of(path) for path in asked.paths]
    names = [plan.layout.name for plan in plans]
    if twice := {name for name in names if names.count(name) > 1}:
        refuse(f"{', '.join(sorted(twice))} is named twice; name each recipe once")
    with refusing(ValueError, RuntimeError):
        stops = data.stops_of(plans, asked.shape, asked.world)
        recipes = []
        for plan, path in zip(plans, asked.paths, strict=True):
            content = path.read_bytes()
            files = pipeline.written(content, str(path))
            generated = {name: files[name] for name in SHOWN if name in files}
            spec = content.decode("utf-8").replace("\r\n", "\n")
            recipes.append(data.export(plan, spec, str(path), generated, stops))
        return page.render(data.Page(1, stops, tuple(recipes)))


def _svg(asked: Asked) -> str:
    from layoutc.explorer import data, svg

    plan = plan_of(asked.paths[0])
    with refusing(ValueError):
        m, k, world = data.stops_of([plan], asked.shape, asked.world).first
    names = [buffer.name for buffer in plan.layout.buffers]
    if asked.picture is not None and asked.picture not in names:
        refuse(f"{plan.layout.name} has no buffer {asked.picture}. It has {', '.join(names)}.")
    return svg.picture(plan, m, k, world, asked.picture)


def _png(text: str) -> bytes:
    try:
        import resvg_py
    except ImportError:
        refuse("--png needs the package resvg-py: pip install 'layoutc[png]'; or write --svg, which needs nothing")
    drawn: bytes = bytes(resvg_py.svg_to_bytes(svg_string=text, zoom=ZOOM))
    if drawn == bytes(resvg_py.svg_to_bytes(svg_string=text, zoom=ZOOM, skip_system_fonts=True)):
        refuse("--png finds no font on this machine, and would draw no text; install one, such as DejaVu Sans")
    return drawn


def _serve(asked: Asked, port: int) -> None:
    try:
        server = server_of(lambda: _page(asked), port)
    except OSError as error:
        refuse(f"port {port} of {ADDRESS}: {error.strerror}; name another with --port")
    with server:
        click.echo(f"http://{ADDRESS}:{server.server_address[1]}/  (Ctrl-C ends it; a reload reads the specs again)")
        sys.stdout.flush()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            click.echo("", err=True)


def server_of(make: Callable[[], str], port: int) -> ThreadingHTTPServer:
    """A server of one page on this machine alone, made anew for each request. port: 0 for any that is free."""

    class Handler(BaseHTTPRequestHandler):
        timeout = 30  # seconds that a request may take to arrive

        def do_GET(self) -> None:
            """The page, or why there is none."""
            host = (self.headers.get("Host") or "").rpartition(":")[0]
            if host not in (ADDRESS, "localhost"):  # a page elsewhere, whose name was pointed at this machine
                self._answer(403, "text/plain", f"ask for http://{ADDRESS}")
            elif self.path.partition("?")[0] != "/":
                self._answer(404, "text/plain", "there is one page: /")
            else:
                self._answer(*_made(make))

        def _answer(self, status: int, kind: str, text: str) -> None:
            content = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Nothing: one person looks at one page."""

    return ThreadingHTTPServer((ADDRESS, port), Handler)


def _made(make: Callable[[], str]) -> tuple[int, str, str]:
    """Status, type and text of an answer. A spec that has errors by now is reported on the terminal."""
    try:
        return 200, "text/html", make()
    except click.UsageError as error:
        return 500, "text/plain", error.message
    except SystemExit:
        return 500, "text/plain", "the spec has errors; they are on the terminal that serves this page"
