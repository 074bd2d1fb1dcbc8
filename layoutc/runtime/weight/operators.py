"""Quantizing, decoding and laying out as torch operators, which is how torch.compile sees them.

What is traced becomes one node that runs the very code that eager calls run, on every device: same bytes. An operator
is opaque to Inductor, which compiled from the reference would give others: its division on a card is not IEEE's. Nor is
it a `triton_op`: Inductor compiles a kernel that it sees with options of its own, and loses enable_fp_fusion=False, on
which bytes depend, and maxnreg. Eager calls do not pass through here: an operator costs several microseconds.

The operators serve all recipes. A recipe goes by a key, the class's full name and its layout id, so that packages built
twice, or again, never answer for each other. Those of `gathered` are for weights that FSDP2 gathers for each pass anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from layoutc.runtime.errors import LayoutError
from layoutc.runtime.facts import Facts, Layout
from layoutc.runtime.torch_private import FakeTensor, FunctionalTensor, dispatch_modes

if TYPE_CHECKING:
    from layoutc.runtime.weight.tensor import QuantizedTensor

_recipes: dict[str, type[QuantizedTensor]] = {}


def register(cls: type[QuantizedTensor]) -> str:
    """The key under which operators find a recipe; the class that was registered last under it is found."""
    key = f"{cls.__module__}.{cls.__qualname__} {cls.LAYOUT.layout_id}"
    _recipes[key] = cls
    return key


def recipe_of(key: str) -> type[QuantizedTensor]:
    """The class that was registered under a key. Raises LayoutError where there is none in this process."""
    found = _recipes.get(key)
    if found is None:
        raise LayoutError(f"no recipe {key} in this process: import its package, as built when the graph was traced")
    return found


def traced(x: Tensor) -> bool:
    """True where calls are recorded, by torch.compile, torch.export, make_fx or another dispatch mode."""
    if torch.compiler.is_compiling():
        return True
    return is_fake(x) or dispatch_modes() > 0


def is_fake(x: Tensor) -> bool:
    """True for the tensors without values with which torch traces."""
    return isinstance(x, (FakeTensor, FunctionalTensor))


# ---------------------------------------------------------------------------------------------- what the runtime calls
def quantize(
    cls: type[QuantizedTensor],
    x: Tensor,
    amax: Tensor | None,
    orientations: Sequence[str],
    out: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """(m, k) values -> the planes of orientations, as `_quantize_matrix` has them; new ones where calls are traced."""
    if not traced(x):
        return cls._quantize_matrix(x, amax, orientations, out)
    names = cls.LAYOUT.written(x.shape[0], x.shape[1], orientations)
    return dict(zip(names, _quantize(x, amax, cls.KEY, list(orientations)), strict=True))


def shared_amax(cls: type[QuantizedTensor], x: Tensor) -> Tensor:
    """(m, k) values -> what shards must agree on before they quantize, fp32."""
    return _shared_amax(x, cls.KEY) if traced(x) else cls._shared_amax(x)


def dequantize(
    cls: type[QuantizedTensor], planes: Mapping[str, Tensor], m: int, k: int, orientation: str, dtype: torch.dtype
) -> Tensor:
    """Planes -> (m, k) values of an orientation in a dtype."""
    sources = cls.LAYOUT.sources[orientation]
    if not traced(planes[sources[0]]):
        return cls._matrix_values(planes, m, k, orientation, dtype)
    return _dequantize([planes[name] for name in sources], m, k, cls.KEY, orientation, dtype)


def lay_out(
    cls: type[QuantizedTensor],
    planes: Mapping[str, Tensor],
    m: int,
    k: int,
    orientations: Sequence[str],
    swizzled: bool = False,
) -> dict[str, Tensor]:
    """Planes -> buffers of orientations; those that are planes are the tensors given, or flat views of them."""
    cls.LAYOUT.check_swizzled(swizzled)
    if not traced(next(iter(planes.values()))):
        return cls._lay_out(planes, m, k, tuple(orientations), swizzled)
    names = cls.LAYOUT.laid_out(m, k, orientations, swizzled)
    needed = _needed(cls.LAYOUT, orientations)
    made: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    if names:
        found = _lay_out([planes[n] for n in needed], m, k, cls.KEY, list(orientations), swizzled)
        made = dict(zip(names, found, strict=True))
    for name, (shape, _) in cls.LAYOUT.buffers(m, k).items():
        if name == "amax" or name.split("_")[0] in orientations:
            stored = None if name in made else planes[cls.LAYOUT.as_stored[name]]
            buffers[name] = made[name] if stored is None else stored.flatten() if len(shape) == 1 else stored
    return buffers


def _needed(layout: Layout, orientations: Sequence[str]) -> list[str]:
    """The planes that buffers of orientations are made of, in order."""
    found = {name for orientation in orientations for name in layout.sources[orientation]}
    return [name for name in layout.stored if name in found]


# --------------------------------------------------------------------------------------------------- what operators run
def _run_quantize(x: Tensor, amax: Tensor | None, recipe: str, orientations: list[str]) -> list[Tensor]:
    cls = recipe_of(recipe)
    planes = cls._quantize_matrix(x, amax, tuple(orientations))
    return [own(planes[name], amax) for name in cls.LAYOUT.written(x.shape[0], x.shape[1], orientations)]


def _run_shared_amax(x: Tensor, recipe: str) -> Tensor:
    return own(recipe_of(recipe)._shared_amax(x), x)


def _run_dequantize(planes: list[Tensor], m: int, k: int, recipe: str, orientation: str, dtype: torch.dtype) -> Tensor:
    cls = recipe_of(recipe)
    named = dict(zip(cls.LAYOUT.sources[orientation], planes, strict=True))
    return own(cls._matrix_values(named, m, k, orientation, dtype), *planes)


def _run_lay_out(
    planes: list[Tensor], m: int, k: int, recipe: str, orientations: list[str], swizzled: bool
) -> list[Tensor]:
    cls = recipe_of(recipe)
    named = dict(zip(_needed(cls.LAYOUT, orientations), planes, strict=True))
    buffers = cls._lay_out(named, m, k, tuple(orientations), swizzled)
    return [own(buffers[name], *planes) for name in cls.LAYOUT.laid_out(m, k, orientations, swizzled)]


def own(made: Tensor, *given: Tensor | None) -> Tensor:
    """What an operator may return: contiguous, and no alias of what it was given."""
    made = made.contiguous()
    storage = made.untyped_storage().data_ptr()
    shared = any(tensor is not None and tensor.untyped_storage().data_ptr() == storage for tensor in given)
    return made.clone() if shared and made.numel() else made


# ----------------------------------------------------------------------------------------- shapes and dtypes, no values
def _like(facts: Facts, x: Tensor) -> Tensor:
    return x.new_empty(facts.shape, dtype=facts.dtype)


def _fake_quantize(x: Tensor, amax: Tensor | None, recipe: str, orientations: list[str]) -> list[Tensor]:
    return [
        _like(facts, x) for facts in recipe_of(recipe).LAYOUT.written(x.shape[0], x.shape[1], orientations).values()
    ]


def _fake_shared_amax(x: Tensor, recipe: str) -> Tensor:
    return x.new_empty(recipe_of(recipe).LAYOUT.amax_shape(x.shape[1]), dtype=torch.float32)


def _fake_dequantize(planes: list[Tensor], m: int, k: int, recipe: str, orientation: str, dtype: torch.dtype) -> Tensor:
    return planes[0].new_empty((m, k), dtype=dtype)


def _fake_lay_out(
    planes: list[Tensor], m: int, k: int, recipe: str, orientations: list[str], swizzled: bool
) -> list[Tensor]:
    facts = recipe_of(recipe).LAYOUT.laid_out(m, k, orientations, swizzled)
    return [_like(fact, planes[0]) for fact in facts.values()]


_library: Any = torch.library.Library("layoutc", "DEF")  # type: ignore[no-untyped-call]


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any], tags: tuple[torch.Tag, ...] = ()) -> None:
    """An operator of torch.ops.layoutc: what it runs on every device, and what it says without values."""
    name = _library.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"layoutc::{name}", fake, lib=_library)


define(
    "quantize(Tensor x, Tensor? amax, str recipe, str[] orientations) -> Tensor[]",
    _run_quantize,
    _fake_quantize,
)
define("shared_amax(Tensor x, str recipe) -> Tensor", _run_shared_amax, _fake_shared_amax)
define(
    "dequantize(Tensor[] planes, SymInt m, SymInt k, str recipe, str orientation, ScalarType dtype) -> Tensor",
    _run_dequantize,
    _fake_dequantize,
)
define(
    "lay_out(Tensor[] planes, SymInt m, SymInt k, str recipe, str[] orientations, bool swizzled) -> Tensor[]",
    _run_lay_out,
    _fake_lay_out,
)
_quantize: Callable[..., list[Tensor]] = torch.ops.layoutc.quantize.default
_shared_amax: Callable[..., Tensor] = torch.ops.layoutc.shared_amax.default
_dequantize: Callable[..., Tensor] = torch.ops.layoutc.dequantize.default
_lay_out: Callable[..., list[Tensor]] = torch.ops.layoutc.lay_out.default
