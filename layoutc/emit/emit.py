"""Renders a plan to files. The result has no dates or versions, and does not depend on the machine."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from layoutc.emit.files_text import codebook_lines, container_lines, files_lines
from layoutc.emit.kernel_text import kernels_text
from layoutc.emit.recipe_text import header, recipe_text
from layoutc.plan.kernels import NoKernels, plan_kernels
from layoutc.plan.plan import Plan

FILES = ("__init__.py", "layout.py", "reference.py", "dispatch.py", "tensor.py")
OF_STATE = ("__init__.py", "layout.py", "reference.py", "tensor.py")  # of states and gradients, which are not gathered
KERNELS = "kernels.py"  # of recipes that have kernels
SHARED = ("reference.py", "dispatch.py", KERNELS)  # files that depend on the layout alone
BINDINGS = "files.py"  # of recipes whose specs state other checkpoint formats
LINE_LENGTH = 120

# Imports that a template's text may need; imports that a file does not use are removed.
_FACTS = ("Cards", "Facts", "Grouped", "Layout", "Operand", "Plane", "Products", "cdiv", "up")
_NAMES = re.compile(rf"(?<!\.)\b(?:{'|'.join(_FACTS)})\b")
_IMPORTS = f"from layoutc.runtime.facts import {', '.join(_FACTS)}"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        auto_reload=False,
        optimized=False,  # constant folding costs more than it saves
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["wrap"] = _wrap
    return environment


@cache  # recipes share most sentences
def _wrap(text: str, indent: int = 0) -> str:
    """Wraps a paragraph of a docstring. The template indents its first line."""
    lines = textwrap.wrap(text, LINE_LENGTH - indent, break_long_words=False, break_on_hyphens=False)
    return ("\n" + " " * indent).join(lines)


def emit(plan: Plan, sha256: str, base: str | None = None) -> dict[str, str]:
    """A plan -> {file name: text}, not yet formatted. `sha256`: the spec file's. base: a recipe in the same package
    with the same layout, from which arithmetic, kernels and cuts are imported."""
    kernels = plan_kernels(plan.layout)
    recipe = recipe_text(plan, sha256, has_kernels=not isinstance(kernels, NoKernels))
    state = plan.layout.use != "weight"
    shown = {**vars(recipe), "plan": plan, "layout": plan.layout, "imports_of_facts": _IMPORTS}
    files = {name: _render(f"{name}.j2", shown) for name in (OF_STATE if state else FILES)}
    if not isinstance(kernels, NoKernels):
        text = kernels_text(kernels, header(plan.layout.name, plan.layout_id))
        files[KERNELS] = _environment().get_template(f"{KERNELS}.j2").render(vars(text))
    for name in files if base else ():
        if name in SHARED:
            of_base = {"base": base, "module": name.removesuffix(".py")}
            files[name] = _render("shared.py.j2", shown | of_base)
    lines, containers = files_lines(plan.layout), container_lines(plan.layout)
    if lines or containers:
        names = ("EXPERTS", "FUSED", "MATRICES", "REST", "Binding", "BoundPlane", "Codes", "RecordBinding")
        used = ", ".join(name for name in names if re.search(rf"\b{name}\b", "\n".join([*lines, *containers])))
        view = shown | {"imports": used, "files": lines, "containers": containers}
        files[BINDINGS] = _render(f"{BINDINGS}.j2", view | {"codebooks": codebook_lines(plan.layout)})
    return files


def emit_index(recipes: list[tuple[str, str]]) -> str:
    """(name, summary) of every recipe -> the text of the package's __init__.py."""
    return _environment().get_template("index.py.j2").render(recipes=sorted(recipes))


def _render(template: str, shown: Mapping[str, object]) -> str:
    text = _environment().get_template(template).render(shown)
    return _without_unused_imports(text) if _IMPORTS in text else text


def _without_unused_imports(text: str) -> str:
    """The text without imports of facts, and of torch, that its code does not use."""
    code = re.sub(r'"""[\s\S]*?"""|"[^"\n]*"|#.*', "", text.replace(_IMPORTS, ""))
    words = set(_NAMES.findall(code))
    facts = [name for name in _FACTS if name in words]
    text = text.replace(f"{_IMPORTS}\n", f"from layoutc.runtime.facts import {', '.join(facts)}\n" if facts else "")
    return text if "torch." in code else text.replace("\nimport torch\n", "\n", 1)


def format_files(files: dict[str, str]) -> dict[str, str]:
    """Formats {path: text} by one call of ruff. Raises RuntimeError if a file is not valid Python."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name, text in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        command = [*_ruff(), "format", "--isolated", "--no-cache", f"--line-length={LINE_LENGTH}", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"a template wrote invalid Python, which is a bug in layoutc: {done.stderr.strip()}")
        return {name: (root / name).read_text(encoding="utf-8") for name in files}


def _ruff() -> list[str]:
    """The command that runs ruff. Prefers the one installed with layoutc, whose version is pinned.

    Raises RuntimeError if there is none.
    """
    beside = Path(sysconfig.get_path("scripts")) / "ruff"
    if beside.exists():
        return [str(beside)]
    if find_spec("ruff") is not None:
        return [sys.executable, "-m", "ruff"]
    if (on_path := shutil.which("ruff")) is None:
        raise RuntimeError("`layoutc build` formats with ruff, which is not installed: pip install 'ruff>=0.17,<0.18'")
    return [on_path]
