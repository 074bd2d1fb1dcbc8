"""A spec under test: compiled into a temporary package, imported, and also read by the independent model."""

from __future__ import annotations

import hashlib
import importlib
import itertools
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import lcm, prod
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from layoutc.build import operands, pipeline
from layoutc.diagnostics.diagnostic import Diagnostic, has_errors
from layoutc.diagnostics.renderers import render
from layoutc.ints.sizes import up
from layoutc.layout.layout import Layout
from layoutc.plan.plan import Plan
from layoutc.spec.checks import read

if TYPE_CHECKING:
    from layoutc.conformance.model.weights import Model
    from layoutc.conformance.ranks import Ranks

Edit = Callable[[Path], None]
_numbers = itertools.count(1)
SEED = 0x243F6A8885A308D3  # of random bits: both words of the key are nonzero
LARGEST = 192  # rows or columns; larger blocks are tested only in part, since a weight may be smaller than a block


class BadSpec(Exception):
    """Raised for a spec with errors."""

    def __init__(self, diagnostics: list[Diagnostic]) -> None:
        super().__init__(render(diagnostics, "concise", False).rstrip())
        self.diagnostics = diagnostics


class Unusable(Exception):
    """Raised if a built package can't be imported."""


@dataclass
class Subject:
    """The spec that checks are run against."""

    path: Path
    layout: Layout
    plan: Plan
    package: ModuleType
    folder: Path
    seed: int = 0
    thorough: bool = False
    others: Mapping[str, Layout] = field(default_factory=dict)  # of the products' other operands, by recipe name
    ranks: Ranks | None = None  # processes for FSDP2 over gloo; None: not wanted
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The recipe's name."""
        return self.layout.name

    @property
    def facts(self) -> Any:
        """The generated LAYOUT."""
        return self.package.LAYOUT

    @property
    def tensor(self) -> Any:
        """The generated tensor class."""
        return self.package.Tensor

    @property
    def reference(self) -> Any:
        """The generated module `reference`."""
        return importlib.import_module(f"{self.package.__name__}.reference")

    @property
    def model(self) -> Model:
        """The independent model of the spec."""
        from layoutc.conformance.model.weights import Model

        return Model(self.layout, SEED)

    def quantize(self, x: Any, **given: Any) -> Any:
        """The generated `quantize`, with the model's seed if the recipe rounds by random bits."""
        return self.package.quantize(x, **({"seed": SEED} if self.layout.stochastic else {}), **given)

    @property
    def seeded(self) -> dict[str, Any]:
        """The model's seed as an argument of the reference and the kernels; {} if the recipe rounds to nearest."""
        import torch

        return {"seed": torch.tensor([SEED])} if self.layout.stochastic else {}

    def close(self) -> None:
        """Unloads and deletes the temporary package."""
        root = self.package.__name__.partition(".")[0]
        for name in [name for name in sys.modules if name == root or name.startswith(f"{root}.")]:
            del sys.modules[name]
        if str(self.folder) in sys.path:
            sys.path.remove(str(self.folder))
        shutil.rmtree(self.folder, ignore_errors=True)

    # ----------------------------------------------------------------------------------------------------------- shapes
    @property
    def units(self) -> tuple[int, int]:
        """The smallest weight that the recipe accepts."""
        return self.layout.multiple_m, self.layout.multiple_k

    @property
    def blocks(self) -> tuple[int, int]:
        """The largest block along each axis, without blocks that cover the whole axis; 1 if all do."""
        blocks = [source.quantization.block for source in self.layout.sources]
        return max((b.m or 1 for b in blocks), default=1), max((b.k or 1 for b in blocks), default=1)

    @property
    def rows(self) -> int:
        """A weight can be cut into weights at multiples of this many rows."""
        return lcm(self.plan.shard_rows, self.layout.multiple_m)

    @property
    def columns(self) -> int:
        """The same for columns."""
        return lcm(self.plan.column_multiple, self.layout.multiple_k)

    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes that exercise different cases: smallest, whole blocks, ragged, wide, tall, leading dims."""
        (um, uk), (bm, bk) = self.units, (min(size, LARGEST) for size in self.blocks)
        shapes: list[tuple[int, ...]] = [
            (um, uk),
            (up(2 * bm, um), up(2 * bk, uk)),
            (up(bm + 1, um), up(2 * bk + 3, uk)),
            (up(3, um), up(max(3 * bk, 40), uk)),
            (2, up(bm, um), up(bk + 5, uk)),
        ]
        if self.thorough:
            shapes += [
                (up(5 * bm - 1, um), up(bk - 1 or 1, uk)),
                (up(max(3 * bm, 70), um), up(7, uk)),
                (3, 2, up(bm, um), up(3 * bk, uk)),
                (up(130, um), up(260, uk)),
            ]
        return list(dict.fromkeys(shapes))

    def matrix(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """(m, k)."""
        return prod(shape[:-1]), shape[-1]

    def whole(self, rows: int = 2, columns: int = 2) -> tuple[int, int]:
        """The shape of a matrix of rows x columns units that can be cut and has at least a few values."""
        m, k = self.rows, self.columns
        return m * rows * max(1, 4 // m), k * columns * max(1, 8 // k)


def compile_subject(
    path: Path, *, seed: int = 0, thorough: bool = False, ranks: Ranks | None = None, edit: Edit | None = None
) -> Subject:
    """Builds a spec into a temporary package and imports it. edit: may change the package's folder before the import.

    Raises BadSpec for a spec with errors, OSError for an unreadable file, Unusable for one that can't be imported.
    """
    data = path.read_bytes()
    spec, diagnostics = read.read_spec_bytes(data, str(path))
    if spec is None:
        raise BadSpec([item for item in diagnostics if item.severity == "error"])
    digest = hashlib.sha256(data + str(path.resolve()).encode()).hexdigest()[:8]
    root = f"layoutc_conformance_{digest}_{next(_numbers)}"
    folder = Path(tempfile.mkdtemp(prefix="layoutc-test-"))
    others, findings = operands.layouts_of(spec, data, str(path))
    beside = [file for name, file in operands.files_of(str(path)).items() if name in others and name != spec.name]
    try:
        out = folder / root / "somewhere"  # generated code must work in any package
        result = pipeline.build([path, *beside], out, check=False)
        if has_errors([*findings, *result.diagnostics]):
            raise BadSpec([*findings, *result.diagnostics])
        (folder / root / "__init__.py").write_text("", encoding="utf-8")
        if edit is not None:
            edit(out / spec.name)
        sys.path.insert(0, str(folder))
        importlib.invalidate_caches()
        package = _import(f"{root}.somewhere.{spec.name}")
    except BaseException:
        if str(folder) in sys.path:
            sys.path.remove(str(folder))
        shutil.rmtree(folder, ignore_errors=True)
        raise
    plan = pipeline.plan_for(spec, others)
    return Subject(path, plan.layout, plan, package, folder, seed, thorough, others, ranks)


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise Unusable(f"the generated package can't be imported: {type(error).__name__}: {error}") from error
