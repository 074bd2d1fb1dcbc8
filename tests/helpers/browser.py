"""Chromium, driven by chromedriver over plain HTTP: the WebDriver protocol of the W3C, and DevTools commands."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

INSTALL = "apt-get install -y chromium chromium-driver"
SWITCHES = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-color-profile=srgb")
KEYS = {"ArrowLeft": "\ue012", "ArrowUp": "\ue013", "ArrowRight": "\ue014", "ArrowDown": "\ue015", "End": "\ue010"}
KEYS |= {
    "Home": "\ue011",
    "PageUp": "\ue00e",
    "PageDown": "\ue00f",
    "Tab": "\ue004",
    "Shift": "\ue008",
    "Enter": "\ue007",
}


def missing() -> str:
    """Why there is no browser; "" if there is one."""
    lacking = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"needs {' and '.join(lacking)}: {INSTALL}" if lacking else ""


class Browser:
    """One window. Sizes and colours are those that `view` sets."""

    def __init__(self, port: int) -> None:
        self.base = f"http://127.0.0.1:{port}/session"
        options = {"args": list(SWITCHES), "binary": shutil.which("chromium")}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        made = self._ask("POST", "", {"capabilities": {"alwaysMatch": wanted}})
        self.base = f"{self.base}/{made['sessionId']}"

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"]) from error

    def view(self, width: int, height: int, *, dark: bool = False, scale: float = 1) -> None:
        """The window's size in CSS pixels, and the colours that its user prefers."""
        phone = width < 500
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": phone}
        self.devtools("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.devtools("Emulation.setEmulatedMedia", features=[scheme, still])

    def open(self, address: str) -> None:
        """Loads a page; another fragment of the same page counts as another page."""
        self._ask("POST", "/url", {"url": "about:blank"})
        self._ask("POST", "/url", {"url": address})

    def js(self, script: str, *arguments: object) -> Any:
        """What a function's body returns."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def later(self, script: str, *arguments: object) -> Any:
        """What a function's body hands to its last argument, a callback."""
        return self._ask("POST", "/execute/async", {"script": script, "args": list(arguments)})

    def devtools(self, command: str, **parameters: object) -> Any:
        """A command of the DevTools protocol."""
        return self._ask("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def point(self, x: float, y: float, *, press: bool = False) -> None:
        """Moves the pointer to a place of the window, and presses its button there."""
        moves: list[dict[str, object]] = [{"type": "pointerMove", "duration": 0, "x": round(x), "y": round(y)}]
        moves += [{"type": kind, "button": 0} for kind in ("pointerDown", "pointerUp")] if press else []
        self._ask("POST", "/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": moves}]})

    def keys(self, *names: str) -> None:
        """Presses keys one after the other; "Shift+" before a name holds that one."""
        strokes: list[dict[str, str]] = []
        for name in names:
            held, _, key = name.rpartition("+")
            downs = [KEYS[one] for one in (held, key) if one]
            strokes += [{"type": "keyDown", "value": one} for one in downs]
            strokes += [{"type": "keyUp", "value": one} for one in reversed(downs)]
        self._ask("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": strokes}]})

    def picture(self) -> bytes:
        """The window as PNG."""
        return base64.b64decode(self.devtools("Page.captureScreenshot")["data"])

    def messages(self) -> list[str]:
        """What the console has said since the last call."""
        return [entry["message"] for entry in self._ask("POST", "/se/log", {"type": "browser"})]

    def close(self) -> None:
        """Ends the browser."""
        self._ask("DELETE", "")


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser, which is gone afterwards."""
    driver = shutil.which("chromedriver")
    assert driver is not None, missing()
    process = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        said = ""
        while not (port := re.search(r"started successfully on port (\d+)", said)):
            line = process.stdout.readline()
            assert line, f"chromedriver did not start: {said}"
            said += line
        window = Browser(int(port[1]))
        try:
            yield window
        finally:
            window.close()
    finally:
        process.terminate()
        process.wait(timeout=20)
