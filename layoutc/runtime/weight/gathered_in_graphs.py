"""Operators by which compiled graphs read weights whose planes each pass replaces.

If forward and backward gather different planes, a graph can't hold planes: backward replaces what forward saved. So the
graph holds the weight's handle, and these operators read the weight's planes when they run. If the weight does not hold
an orientation in that pass, all ranks gather it, as in eager mode; recomputed activations then read what forward read.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layoutc.ints.rects import Rect
from layoutc.runtime import library
from layoutc.runtime.errors import LayoutError, MissingOrientation
from layoutc.runtime.facts import Facts, Layout
from layoutc.runtime.storage.planes import GatheredPlanes, TracedPlanes, owner
from layoutc.runtime.torch_private import called_in_inductor, lower_in_inductor, lowered_node
from layoutc.runtime.weight import operators
from layoutc.runtime.weight.recipe_methods import RecipeMethods
from layoutc.runtime.weight.returned_buffers import laid_out_names

aten = torch.ops.aten


# ---------------------------------------------------------------------------------------------- what the runtime calls
def dequantize(cls: type[RecipeMethods], handle: Tensor, window: Rect, orientation: str, dtype: torch.dtype) -> Tensor:
    """The (m, k) values of a window of the weight in an orientation, as one node of the graph."""
    return _dequantize(handle, list(window), cls.KEY, orientation, dtype)


def lay_out(
    cls: type[RecipeMethods], handle: Tensor, window: Rect, orientations: Sequence[str], swizzled: bool
) -> dict[str, Tensor]:
    """The buffers of a window's orientations; one aliases a plane only if Inductor proves that only products read it.

    One node per orientation, so that the graph drops unread ones and gathers nothing for them.
    """
    cls.LAYOUT.check_swizzled(swizzled)
    if "torch._inductor.lowering" in sys.modules:  # else no graph is compiled, or a cached one runs
        lower_in_inductor(_lay_out, _lower_lay_out)
    m, k = window.shape
    buffers: dict[str, Tensor] = {}
    for orientation in orientations:
        outputs = _lay_out(handle, list(window), cls.KEY, orientation, swizzled)
        buffers |= dict(zip(_names(cls.LAYOUT, m, k, orientation, swizzled), outputs, strict=True))
    return {name: buffers[name] for name in cls.LAYOUT.buffers(m, k) if name in buffers}


def planes(
    cls: type[RecipeMethods], handle: Tensor, matrix: tuple[int, int], orientations: Sequence[str]
) -> TracedPlanes:
    """All planes of the weight, for operators that neither dequantize nor lay it out."""
    needed = {name for orientation in orientations for name in cls.LAYOUT.sources[orientation]}
    names = [name for name in cls.LAYOUT.stored if name in needed]
    return TracedPlanes(handle, names, lambda name: _plane(handle, *matrix, cls.KEY, name))


def _sizes(window: Sequence[int]) -> tuple[int, int]:
    return window[1] - window[0], window[3] - window[2]


def _names(layout: Layout, m: int, k: int, orientation: str, swizzled: bool) -> dict[str, Facts]:
    """The buffers of one orientation and the amax, in order: name -> shape and dtype. Swizzled ones are flat."""
    made = layout.laid_out(m, k, (orientation,), swizzled)
    every = layout.buffers(m, k).items()
    return {name: made.get(name, facts) for name, facts in every if name.split("_")[0] in (orientation, "amax")}


# --------------------------------------------------------------------------------------------------- what operators run
def _run_dequantize(handle: Tensor, window: list[int], recipe: str, orientation: str, dtype: torch.dtype) -> Tensor:
    cls, (m, k) = operators.recipe_of(recipe), _sizes(window)
    gathered = owner(handle)
    whole = _now(cls, gathered, handle.device, orientation)
    assert gathered is not None, "_now() has found it"
    if gathered.matrix == (m, k):
        planes = [whole[name] for name in cls.LAYOUT.sources[orientation]]
        return operators.run_dequantize(planes, m, k, recipe, orientation, dtype)
    return library.own(cls.matrix_values(cls._cut(whole, *window), m, k, orientation, dtype), *whole.values())


def _run_lay_out(
    handle: Tensor, window: list[int], recipe: str, orientation: str, swizzled: bool, copies: bool = True
) -> list[Tensor]:
    """copies: False if planes may be returned without a copy."""
    cls, (m, k), gathered = operators.recipe_of(recipe), _sizes(window), owner(handle)
    whole, form = _now(cls, gathered, handle.device, orientation), _form(cls.LAYOUT, m, k, orientation, swizzled)
    if gathered is None or gathered.matrix != (m, k):
        buffers = cls.lay_out(cls._cut(whole, *window), m, k, (orientation,), swizzled)
        return library.own_all([buffers[name] for name in form.names], *whole.values())
    made: dict[str, Tensor] = {}
    for name, plane, shape in form.stored:
        one = whole[plane].clone() if copies else whole[plane]
        made[name] = one if one.shape == shape else one.view(shape)
    if form.laid:
        planes = [whole[name] for name in form.needed]
        laid = operators.run_lay_out(planes, m, k, recipe, [orientation], swizzled)
        made.update(zip(form.laid, laid, strict=True))
    return [made[name] for name in form.names]


class _Form(NamedTuple):
    """The buffers of an orientation: those that are made from planes, and those that are planes."""

    names: tuple[str, ...]
    laid: tuple[str, ...]
    needed: tuple[str, ...]  # planes that the former are made of
    stored: tuple[tuple[str, str, tuple[int, ...]], ...]  # name, plane and shape of each of the latter


@lru_cache(maxsize=1024)
def _form(layout: Layout, m: int, k: int, orientation: str, swizzled: bool) -> _Form:
    names = _names(layout, m, k, orientation, swizzled)
    laid, needed = laid_out_names(layout, (orientation,), swizzled)
    as_stored = layout.as_stored
    stored = [(name, as_stored[name], names[name].shape) for name in names if name in as_stored and name not in laid]
    return _Form(tuple(names), tuple(laid), tuple(needed), tuple(stored))


def _run_plane(handle: Tensor, m: int, k: int, recipe: str, name: str) -> Tensor:
    cls = operators.recipe_of(recipe)
    orientation = next(one for one, sources in cls.LAYOUT.sources.items() if name in sources)
    return _now(cls, owner(handle), handle.device, orientation)[name].clone()


def _now(
    cls: type[RecipeMethods], gathered: GatheredPlanes | None, device: torch.device, orientation: str
) -> Mapping[str, Tensor]:
    """The planes of an orientation of the whole weight: those that it holds, else planes gathered for this call.

    Raises MissingOrientation if the weight is gone, LayoutError if FSDP2 has freed its planes.
    """
    sources = cls.LAYOUT.sources[orientation]
    if gathered is not None and all(map(gathered.__contains__, sources)):
        found = {name: gathered[name] for name in sources}
        for plane in found.values():
            if not plane.untyped_storage().nbytes() and plane.numel():
                raise LayoutError(
                    f"a compiled graph reads {orientation} of {_named(cls, gathered.home())}, which FSDP2 has "
                    "resharded; call the module that has fully_shard, or unshard() it first"
                )
        return found
    shard = gathered.home() if gathered is not None else None
    if gathered is None or shard is None or orientation not in shard.orientations:
        raise MissingOrientation(
            f"a compiled graph reads {orientation} of {_named(cls, shard)}, but "
            + (f"its shard holds no {orientation}" if shard is not None else "FSDP2 does not hold that weight any more")
        )
    return gathered.home.fetch(orientation, device)


def _named(cls: type[RecipeMethods], shard: Any) -> str:
    name = None if shard is None else shard.weight_name
    return f"{name or 'a gathered weight'} in {cls.LAYOUT.name}"


# ----------------------------------------------------------------------------------------- shapes and dtypes, no values
def _fake_lay_out(
    handle: Tensor, window: list[int], recipe: str, orientation: str, swizzled: bool, copies: bool = True
) -> list[Tensor]:
    named = _names(operators.recipe_of(recipe).LAYOUT, *_sizes(window), orientation, swizzled)
    return [operators.empty_of(facts, handle) for facts in named.values()]


# ------------------------------------------------------------------------------------------------- in Inductor's graphs
def _lower_lay_out(lowerings: Any, *args: Any) -> Any:
    """The operator itself, without copies if only products inside the graph read its results."""
    only_read = len(args) == _COPIES and all(map(_is_only_multiplied, lowered_node().users))
    return called_in_inductor(_lay_out, *args, *([False] if only_read else []), reuses=not only_read)


def _is_only_multiplied(node: Any) -> bool:
    """True for a product, and for a view or a part that only products read."""
    if node.target in _PRODUCTS:
        return True
    return node.target in _VIEWS and bool(node.users) and all(map(_is_only_multiplied, node.users))


_PRODUCTS = (aten._scaled_mm.default, aten._scaled_mm_v2.default, aten._scaled_grouped_mm.default)
_VIEWS = (
    *(operator.getitem, aten.t.default, aten.transpose.int, aten.permute.default),
    *(aten.view.default, aten.view.dtype, aten.reshape.default),  # Inductor turns views into reshapes
    aten.slice.Tensor,
)
_COPIES = 5  # the position of `copies` in arguments

# A CUDA graph would always read the memory that the weight had during capture.
_TAGS = (torch.Tag.cudagraph_unsafe,)
_dequantize: Callable[..., Tensor] = library.define(
    "dequantize_gathered(Tensor handle, SymInt[] window, str recipe, str orientation, ScalarType dtype) -> Tensor",
    _run_dequantize,
    lambda handle, window, recipe, orientation, dtype: handle.new_empty(_sizes(window), dtype=dtype),
    _TAGS,
)
_lay_out: Callable[..., list[Tensor]] = library.define(
    "lay_out_gathered(Tensor handle, SymInt[] window, str recipe, str orientation, bool swizzled, "
    "bool copies=True) -> Tensor[]",
    _run_lay_out,
    _fake_lay_out,
    _TAGS,
)
_plane: Callable[..., Tensor] = library.define(
    "plane_gathered(Tensor handle, SymInt m, SymInt k, str recipe, str name) -> Tensor",
    _run_plane,
    lambda handle, m, k, recipe, name: operators.empty_of(
        operators.recipe_of(recipe).LAYOUT.planes(m, k)[name], handle
    ),
    _TAGS,
)
