"""The weights that `quantize_` would quantize in a recipe, and why the others stay plain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

from layoutc.budget.mesh import Mesh, place, uneven
from layoutc.estimate.work import Use
from layoutc.models.weights import Layer, Model, Weight, full_name

REASONS: Mapping[str, str] = {
    "experts": "experts: quantize_ picks nn.Linear alone; --experts, or param_filter, picks these",
    "embedding": "an embedding",
    "norm": "a norm",
    "bias": "a bias",
    "router": "a router",
    "adapter": "an adapter",
    "other": "no nn.Linear",
}
DIMS = (2, 3)


@dataclass(frozen=True)
class Picks:
    """Selects weights. only: name patterns, as in param_filter; leave: name patterns of weights that stay plain;
    experts: include 3-D weights."""

    only: tuple[str, ...] = ()
    leave: tuple[str, ...] = ()
    experts: bool = False


def why_plain(layer: Layer, weight: Weight, use: Use, picks: Picks, mesh: Mesh) -> str:
    """Why a weight stays plain; "" if it is quantized."""
    plan = use.plan
    if plan is None:
        return "all weights are"
    name = full_name(layer, weight)
    if picks.only:
        if len(weight.shape) not in DIMS or not any(fnmatchcase(name, pattern) for pattern in picks.only):
            return "not among --only"
    elif weight.kind != "linear" and not (weight.kind == "experts" and picks.experts):
        return REASONS[weight.kind]
    if any(fnmatchcase(name, pattern) for pattern in picks.leave):
        return "among --leave"
    if weight.tied:
        return f"tied to {weight.tied[0]}, which quantize_ would untie"
    return _not_taken(weight, use, mesh)


def _not_taken(weight: Weight, use: Use, mesh: Mesh) -> str:
    assert use.plan is not None
    layout = use.plan.layout
    if what := uneven(weight, mesh):
        return f"{what} can't be divided"
    placed = place(weight, mesh)
    if placed.shape != weight.shape and weight.kind != "experts" and (why := _not_cut(weight, placed.shape, use)):
        return why
    if weight.kind == "experts" and mesh.experts == 1 and placed.shape != weight.shape and weight.cut == "rows":
        return f"{use.name} can be cut on the first dim and on the last one, not on the rows of each expert"
    for shape in dict.fromkeys((weight.shape, placed.shape)):
        m, k = prod(shape[:-1]), shape[-1]
        for size, multiple, words in ((m, layout.multiple_m, "rows"), (k, layout.multiple_k, "columns")):
            if size % multiple:
                return f"{use.name} takes {words} in multiples of {multiple}, not {size}: quantize_ refuses it"
    if placed.dim:
        if not placed.even:
            return f"{placed.shape[placed.dim]} rows of an expert over {placed.ranks} ranks can't be cut on dim 1"
        if placed.per_rank % use.plan.block_rows:
            return f"cuts on dim 1 would fall inside blocks of {use.plan.block_rows} rows, which FSDP2 can't gather"
    return ""


def _not_cut(weight: Weight, shape: tuple[int, ...], use: Use) -> str:
    """Why tensor parallelism can't cut a quantized weight into parts of this shape."""
    assert use.plan is not None
    rows, columns = shape[0], shape[-1]
    if weight.cut == "rows" and rows % use.plan.block_rows:
        return f"cuts of {rows} rows by tensor parallelism fall inside blocks of {use.plan.block_rows} rows"
    if weight.cut == "columns":
        if any(plane.per_k is None and plane.per_m is not None for plane in use.plan.layout.planes):
            return f"{use.name} has scales that cover whole rows, which tensor parallelism would cut"
        if columns % use.plan.column_multiple:
            return f"cuts of {columns} columns by tensor parallelism are not at multiples of {use.plan.column_multiple}"
    return ""


def check_patterns(model: Model, picks: Picks) -> None:
    """Raises ValueError for a pattern that matches no weight's name."""
    names = [full_name(u, w) for u in model.all_layers for w in u.weights if len(w.shape) in DIMS]
    for one in (*picks.only, *picks.leave):
        if not any(fnmatchcase(name, one) for name in names):
            some = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
            raise ValueError(f"no weight of 2 or 3 dims has a name like {one!r}; there are {len(names):,}: {some}")
