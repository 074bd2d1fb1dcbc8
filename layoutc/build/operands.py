"""Finds and reads the recipes that a spec names: those of the other operands under `gemm`, and `reduce`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path

from layoutc.build import lookup
from layoutc.diagnostics.diagnostic import Diagnostic, has_errors, nearest
from layoutc.layout.layout import Layout, resolve
from layoutc.spec import source as yaml_source
from layoutc.spec.checks.read import read_spec_bytes
from layoutc.spec.schema import Spec
from layoutc.spec.source import Source

Key = tuple[str, ...]  # where a spec names a recipe


def layouts_of(spec: Spec, content: bytes, path: str) -> tuple[Mapping[str, Layout], list[Diagnostic]]:
    """The layouts of the recipes that a spec names, by name; and findings about those that are missing or invalid.

    A name is the spec's own, or that of a spec in the same folder or shipped with layoutc. content: the spec's file,
    for positions in it. Never raises.
    """
    named: list[tuple[Key, str | None]] = [(("reduce",), spec.reduce)]
    if spec.gemm is not None:
        named += [(("gemm", "activation"), spec.gemm.activation), (("gemm", "gradient"), spec.gemm.gradient)]
    found: dict[str, Layout] = {}
    findings: list[Diagnostic] = []
    for key, name in named:
        if name is None or name in found:
            continue
        if name == spec.name:
            found[name] = resolve(spec)
            continue
        file = files_of(path).get(name)
        if file is None:
            findings.append(_unknown(name, key, _source(content, path)))
            continue
        other, problems = _read(file)
        if other is None:
            findings.append(_broken(name, key, _source(content, path), file, problems))
        elif key == ("reduce",) and other.use != "wire":
            message = f"`{name}` is not a recipe for gradients on the wire"
            help = "name one with `use: wire`, as `reduce: grad_fp8`"
            findings.append(_source(content, path).find("LC908", message, key, help=help))
        else:
            found[name] = resolve(other)
    return found, findings


def base_of(layout: Layout, others: Mapping[str, Layout], path: str) -> str | None:
    """The recipe of a spec's activations, if it is in the same folder and has the same layout, thus the same code."""
    name = layout.others.activation if layout.others is not None else layout.name
    if name == layout.name or files_of(path)[name].parent != Path(path).parent:
        return None
    said = ("name", "summary", "others", "files", "containers", "reduce")  # no code depends on them
    return name if replace(others[name], **{key: getattr(layout, key) for key in said}) == layout else None


def files_of(path: str) -> dict[str, Path]:
    """The recipes that a spec may name -> their specs: from its folder, else shipped with layoutc."""
    return {**_shipped(), **{file.stem: file for file in lookup.specs_in(Path(path).parent)}}


@cache
def _shipped() -> dict[str, Path]:
    return lookup.by_package().get("layoutc", {})


@lru_cache(maxsize=64)
def read_spec(content: bytes, path: str) -> tuple[Spec | None, tuple[Diagnostic, ...]]:
    """read_spec_bytes, cached because many specs name the same recipes."""
    spec, findings = read_spec_bytes(content, path)
    return spec, tuple(findings)


def _read(file: Path) -> tuple[Spec | None, Sequence[Diagnostic]]:
    try:
        return read_spec(file.read_bytes(), str(file))
    except OSError as error:
        return None, [Diagnostic("LC908", f"this spec can't be read: {error.strerror}", str(file))]


def _source(content: bytes, path: str) -> Source:
    source, _ = yaml_source.read(content.decode("utf-8").replace("\r\n", "\n"), path)
    assert source is not None  # a spec was read from it
    return source


def _unknown(name: str, key: Key, source: Source) -> Diagnostic:
    names = sorted(files_of(source.path))
    meant = nearest(name, names)
    why = "looked for beside this spec, and among those that come with layoutc"
    help = f"write `{key[-1]}: {meant}`" if meant else f"name one of {', '.join(names)}"
    return source.find("LC908", f"there is no recipe `{name}`", key, why=why, help=help)


def _broken(name: str, key: Key, source: Source, file: Path, problems: Sequence[Diagnostic]) -> Diagnostic:
    first = next((one.message for one in problems if has_errors([one])), "")
    why, help = f"the first is: {first}", f"see them all with `layoutc check {file}`"
    return source.find("LC908", f"the spec of `{name}` has errors", key, why=why, help=help)
