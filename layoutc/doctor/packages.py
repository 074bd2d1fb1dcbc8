"""Compares installed packages with layoutc's metadata: which are required, and which add something."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, requires, version

from layoutc.doctor.findings import Line

_REQUIRED = re.compile(r"^([A-Za-z0-9][\w.-]*)\s*(?:\[[^\]]*\])?\s*\(?([^;)]*)\)?\s*(?:;(.*))?$")
_BOUND = re.compile(r"(<=|>=|==|!=|<|>)\s*(\d+(?:\.\d+)*)")
ADDS = {  # each package's extra, and what it is for
    "triton": ("triton", "kernels: without it, the reference runs, which is plain torch"),
    "safetensors": ("safetensors", "folders of safetensors"),
    "matplotlib": ("charts", "layoutc plan --chart"),
    "torchao": ("test", "comparisons with its recipes, in layoutc bench --peers"),
    "transformers": ("integrations", "layoutc.integrations.transformers"),
    "accelerate": ("integrations", "layoutc.integrations.accelerate"),
    "peft": ("integrations", "layoutc.integrations.peft"),
}


def numbers(text: str) -> tuple[int, ...]:
    """`2.13.0+cpu` -> (2, 13, 0): a version's leading numbers."""
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()


def satisfies(installed: str, bounds: str) -> bool:
    """Whether a version is within bounds such as `>=2.11,<2.15`."""
    have = numbers(installed)
    checks: dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
        ">=": lambda a, b: a >= b,
        "<=": lambda a, b: a[: len(b)] <= b,
        ">": lambda a, b: a[: len(b)] > b,
        "<": lambda a, b: a < b,
        "==": lambda a, b: a[: len(b)] == b,
        "!=": lambda a, b: a[: len(b)] != b,
    }
    return all(checks[sign](have, numbers(bound)) for sign, bound in _BOUND.findall(bounds))


def look(installed: Callable[[str], str] = version, stated: Callable[[str], list[str] | None] = requires) -> list[Line]:
    """Lines about Python, layoutc, and each package that is required or adds something."""
    return list(_lines(installed, stated))


def _lines(installed: Callable[[str], str], stated: Callable[[str], list[str] | None]) -> Iterator[Line]:
    python = ".".join(map(str, sys.version_info[:3]))
    is_new = sys.version_info >= (3, 11)
    found = f"{python}, {platform.platform()}"
    yield Line("Python", "fine" if is_new else "missing", found, "use Python 3.11 or later")
    try:
        yield Line("layoutc", "fine", installed("layoutc"))
        wanted = stated("layoutc") or []
    except PackageNotFoundError:
        yield Line("layoutc", "missing", "runs from a folder, and is not installed", "pip install layoutc")
        wanted = []
    bounds: dict[str, str] = {}
    for one in wanted:
        match = _REQUIRED.match(one)
        if match is None:
            continue
        name, bound, marker = match[1].lower(), match[2].strip(), match[3] or ""
        if "extra" not in marker:
            yield _needed(name, bound, installed)
        elif name in ADDS:
            bounds.setdefault(name, bound)
    for name, (extra, purpose) in ADDS.items():
        yield _adding(name, bounds.get(name, ""), extra, purpose, installed)


def _needed(name: str, bounds: str, installed: Callable[[str], str]) -> Line:
    try:
        found = installed(name)
    except PackageNotFoundError:
        return Line(name, "missing", "is not installed", f"pip install '{name}{bounds}'")
    fits = satisfies(found, bounds)
    said = found if fits else f"{found}, and layoutc runs with {bounds}"
    return Line(name, "fine" if fits else "missing", said, "" if fits else f"pip install '{name}{bounds}'")


def _adding(name: str, bounds: str, extra: str, purpose: str, installed: Callable[[str], str]) -> Line:
    fix = f"pip install 'layoutc[{extra}]'"
    try:
        found = installed(name)
    except PackageNotFoundError:
        return Line(name, "without", f"is not installed: {purpose}", fix)
    if not satisfies(found, bounds):
        return Line(name, "without", f"{found}, and layoutc runs with {bounds}: {purpose}", fix)
    return Line(name, "fine", found)
