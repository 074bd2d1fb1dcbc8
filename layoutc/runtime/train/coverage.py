"""coverage: which weights of a model are quantized, which were left, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from layoutc.runtime.cast.tensor import find_cast
from layoutc.runtime.errors import check_model
from layoutc.runtime.facts import Layout
from layoutc.runtime.installed import Recipe
from layoutc.runtime.quantize.weights import FLOATS
from layoutc.runtime.sharding import gathered
from layoutc.runtime.stored_by_columns import is_stored_by_columns
from layoutc.runtime.train.choosing import DIMS, Use, foreign_class, uses
from layoutc.runtime.train.convert import recipe_class
from layoutc.runtime.weight.tensor import recipe_of

Kind = Literal["quantized", "cast on gather", "plain"]
# Modules whose matrices are not weights of products: lookup tables and filters.
_NOT_MULTIPLIED = (nn.Embedding, nn.EmbeddingBag, nn.modules.conv._ConvNd)


@dataclass(frozen=True)
class CoveredParameter:
    """One parameter. recipe: "" if it is plain. is_weight: of a linear layer or of experts, and so in the share.

    reason: why it was left plain; for a quantized one, what that costs in this model.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    elements: int
    kind: Kind
    recipe: str
    is_weight: bool
    reason: str

    def __str__(self) -> str:
        """A line for a reader."""
        return " ".join(cell for cell in _cells(self) if cell)


@dataclass(frozen=True)
class Coverage:
    """The result of `coverage`: a row for each parameter, in the model's order."""

    rows: tuple[CoveredParameter, ...]

    @property
    def elements(self) -> int:
        """The number of elements in all linear layers and experts."""
        return sum(row.elements for row in self.rows if row.is_weight)

    @property
    def quantized(self) -> int:
        """How many of these are quantized, or cast on gather."""
        return sum(row.elements for row in self.rows if row.is_weight and row.kind != "plain")

    @property
    def share(self) -> float:
        """`quantized` of `elements`, from 0 to 1."""
        return self.quantized / self.elements if self.elements else 0.0

    def __iter__(self) -> Iterator[CoveredParameter]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        """A table: the quantized share of all linear layers and experts, then a line for each parameter."""
        table = [_cells(row) for row in self.rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table)
        first = f"{self.quantized:,} of {self.elements:,} elements of linear layers and experts ({self.share:.1%})"
        return "\n".join([first, *(f"  {line}".rstrip() for line in lines)])


def _cells(row: CoveredParameter) -> tuple[str, ...]:
    how = row.recipe if row.kind == "quantized" else f"{row.recipe} on gather" if row.recipe else "plain"
    return row.name, "x".join(map(str, row.shape)), f"{row.elements:,}", how, row.reason


def coverage(model: nn.Module, recipe: Recipe | None = None) -> Coverage:
    """Lists the parameters that `quantize_`, `quantized_init` or `cast_on_gather_` chose, and why not the others.

    recipe: the recipe to check the shapes of plain parameters against; default: those that the model has. Call it
    before or after fully_shard: shapes and element counts are those of whole weights. A parameter that several modules
    share is listed once, by its first name. Runs nothing.

    Raises ValueError for an unknown recipe.

    Example:

        >>> model = nn.Sequential(nn.Linear(128, 128, bias=False))
        >>> layoutc.quantize_(model, "nvfp4")
        ['0.weight']
        >>> print(layoutc.coverage(model))
        16,384 of 16,384 elements of linear layers and experts (100.0%)
          0.weight  128x128  16,384  nvfp4
    """
    check_model(model, "coverage")
    places: dict[int, list[Use]] = {}
    for use in uses([model]):
        places.setdefault(id(use.param), []).append(use)
    same, gathered_as_values = list(places.values()), gathered.weights_of_values()
    params = [gathered_as_values.get(id(of_one[0].param), of_one[0].param) for of_one in same]
    given = [recipe_class(recipe).LAYOUT] if recipe is not None else []
    layouts = given or list({cls.LAYOUT.layout_id: cls.LAYOUT for cls in map(recipe_of, params) if cls}.values())
    return Coverage(tuple(_row(of_one, param, layouts) for of_one, param in zip(same, params, strict=True)))


def _row(same: list[Use], param: Tensor, layouts: list[Layout]) -> CoveredParameter:
    name, cls = same[0].name, recipe_of(param)
    layout = None if cls is None else cls.LAYOUT
    shape = tuple(param.shape)
    other = _no_weight(same)
    if layout is None:
        kind: Kind = "plain"
        reason = other or foreign_class(param) or _why_plain(shape, param.dtype, layouts)
    else:
        kind = "quantized" if find_cast(param) is None else "cast on gather"
        by_columns = layout.passes_differ and any(is_stored_by_columns(use.module, use.key) for use in same)
        costs = "read as x @ w: under FSDP2 each pass also gathers the planes of the other one, and overlaps nothing"
        reason = costs if by_columns else ""
    recipe = "" if layout is None else layout.name
    is_weight = not other or (layout is not None and len(shape) in DIMS)
    return CoveredParameter(name, shape, param.dtype, param.numel(), kind, recipe, is_weight, reason)


def _no_weight(same: list[Use]) -> str:
    """Why a parameter is not a weight of a linear layer or of experts; "" if it is."""
    dims = same[0].param.dim()
    if dims not in DIMS:
        return f"{dims} dim{'s' if dims != 1 else ''}"
    if all("bias" in use.key for use in same):
        return "a bias"
    kinds = {type(use.module).__name__ for use in same if isinstance(use.module, _NOT_MULTIPLIED)}
    return f"of {', '.join(sorted(kinds))}" if all(isinstance(use.module, _NOT_MULTIPLIED) for use in same) else ""


def _why_plain(shape: tuple[int, ...], dtype: torch.dtype, layouts: list[Layout]) -> str:
    if dtype not in FLOATS:
        return f"{str(dtype).removeprefix('torch.')} is not float32, bfloat16 or float16"
    for layout in layouts:
        try:
            layout.check_shape(shape, "")
        except ValueError as error:
            return f"not picked, and {str(error).removeprefix(': ').partition(', not shape')[0]}"
    return "not picked"
