"""Renders a plan to files. Deterministic: no dates, no versions, nothing that depends on the machine."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from layoutc.emit.kernel_view import gap, is_grouped, kernels_view
from layoutc.emit.move_view import has_moves, is_fused
from layoutc.emit.recipe_view import recipe_view
from layoutc.plan.plan import Plan

FILES = ("__init__.py", "layout.py", "reference.py", "dispatch.py", "tensor.py")
KERNELS = "kernels.py"  # of recipes that have kernels
LINE_LENGTH = 120

# Names that templates may use from the runtime; each file imports those that its text mentions.
_IMPORTABLE = {
    "blocks": (
        "block_amax",
        "block_highest",
        "block_lowest",
        "block_sum",
        "from_blocks",
        "to_blocks",
        "to_float",
    ),
    "conversions": (
        "convert_to_e2m1",
        "convert_to_e2m3",
        "convert_to_e3m2",
        "convert_up_to_e8m0",
        "to_e2m1_words",
    ),
    "nibbles": ("from_nibbles", "store_nibbles", "to_nibbles"),
    "codes": (
        "F32_MAX",
        "cast_from_codes",
        "cast_to_codes",
        "divide",
        "floor_power_of_two",
        "from_codes",
        "from_exponents",
        "from_integer_codes",
        "isinf",
        "isnan",
        "like",
        "maximum",
        "minimum",
        "over_exponents",
        "pack",
        "to_codes",
        "to_exponents",
        "to_integer_codes",
        "to_small_codes",
        "unpack",
    ),
    "tiles": (
        "load",
        "load_runs",
        "load_words",
        "store",
        "store_words",
        "tile_of",
        "to_dtype",
        "round_up",
    ),
    "groups": ("DTYPES", "amax_at", "covered_member_of", "matrix_at", "member_of", "plane_at", "plane_like"),
    "turns": (
        "move_codes",
        "move_scales",
        "put_words",
        "spread_scales",
        "to_words",
        "turn_bytes",
        "turn_nibbles",
    ),
    "facts": ("Facts", "Layout", "Plane", "cdiv", "up"),
    "numerics": (
        "F32_MAX",
        "block_amax",
        "block_range",
        "block_sum",
        "cast_from_codes",
        "cast_to_codes",
        "column_amax",
        "divide",
        "floor_power_of_two",
        "from_blocks",
        "from_codes",
        "from_integer_codes",
        "least",
        "pack",
        "pad_to",
        "per_element",
        "repeat",
        "tensor_amax",
        "to_blocks",
        "to_codes",
        "to_integer_codes",
        "unpack",
    ),
}


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["wrap"] = _wrap
    environment.filters["guarded"] = _guarded
    environment.filters["pad"] = lambda text, rows, key: text.ljust(max(len(row[key]) for row in rows))
    return environment


def _guarded(text: str, condition: str) -> str:
    """Statements under a condition, if there is one."""
    if not condition:
        return text
    first = text[: len(text) - len(text.lstrip(" "))]
    return f"{first}{condition}\n" + textwrap.indent(text, "    ")


def _wrap(text: str, indent: int = 0) -> str:
    """A paragraph of a docstring, broken at the line length; the first line stands where the template puts it."""
    lines = textwrap.wrap(text, LINE_LENGTH - indent, break_long_words=False, break_on_hyphens=False)
    return ("\n" + " " * indent).join(lines)


def emit(plan: Plan, sha256: str) -> dict[str, str]:
    """A plan -> {file name: text}, before formatting. `sha256` is that of the spec file."""
    has_kernels = gap(plan) is None
    view = {**recipe_view(plan, sha256), "has_kernels": has_kernels, "fused": is_fused(plan.layout)}
    view["has_grouped_kernels"] = has_kernels and is_grouped(plan)
    view["lays_out"] = has_kernels and has_moves(plan.layout)
    found = {name: _render(f"{name}.j2", view) for name in FILES}
    if has_kernels:
        found[KERNELS] = _render(f"{KERNELS}.j2", {**view, **kernels_view(plan)})
    return found


def emit_index(recipes: list[tuple[str, str]]) -> str:
    """The package's __init__: (name, summary) of every recipe -> text."""
    return _environment().get_template("index.py.j2").render(recipes=sorted(recipes))


def _render(template: str, view: dict[str, Any]) -> str:
    """Renders twice: the first text tells which imports the second needs."""
    loaded = _environment().get_template(template)
    body = loaded.render(**view, imports=dict.fromkeys((*_IMPORTABLE, "torch"), ""), facts_imports="")
    code = _code(body)
    words = set(re.findall(r"(?<!\.)\b\w+\b(?!\.py)", code))
    imports: dict[str, Any] = {
        module: ", ".join(name for name in names if name in words) for module, names in _IMPORTABLE.items()
    }
    imports["torch"] = "torch." in code
    return loaded.render(**view, imports=imports, facts_imports=imports["facts"])


def _code(text: str) -> str:
    """The text without docstrings and comments, whose words are not uses."""
    return re.sub(r'"""[\s\S]*?"""|#.*', "", text)


def format_files(files: dict[str, str]) -> dict[str, str]:
    """The files as ruff formats them, in one process; raises RuntimeError with ruff's message when a file is not
    Python."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name, text in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        command = [*_ruff(), "format", "--isolated", "--no-cache", f"--line-length={LINE_LENGTH}", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"a template wrote what is not Python; this is a bug in layoutc: {done.stderr.strip()}")
        return {name: (root / name).read_text(encoding="utf-8") for name in files}


def _ruff() -> list[str]:
    """The ruff that is installed beside layoutc, before any other on the path: its version is pinned with layoutc's."""
    beside = Path(sysconfig.get_path("scripts")) / "ruff"
    if beside.exists():
        return [str(beside)]
    if find_spec("ruff") is not None:
        return [sys.executable, "-m", "ruff"]
    if (found := shutil.which("ruff")) is None:
        raise RuntimeError("`layoutc build` formats with ruff, which is not installed: pip install 'ruff>=0.17,<0.18'")
    return [found]
