"""Quantizing, dequantizing and laying out as torch operators, which is how torch.compile sees them.

A traced call becomes one node that runs the same code as an eager call, on every device, so the bytes are the same.
The operators are opaque to Inductor on purpose. If it compiled the reference, bytes would differ: its division on a
card is not IEEE's. They are no `triton_op`s either: Inductor would compile their kernels with its own options, without
maxnreg and enable_fp_fusion=False, on which bytes depend. Eager calls bypass them: an operator costs microseconds.

The same operators serve all recipes. A recipe is named by a key, the class's full name and its layout id, so that
packages that were built twice are never confused. `gathered_in_graphs` has those for gathered weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from layoutc.runtime import library
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.facts import Facts, Layout
from layoutc.runtime.kernels import launch, plans
from layoutc.runtime.random_bits import Seed, draw_seed, seed_tensor
from layoutc.runtime.torch_private import traced
from layoutc.runtime.weight.recipe_methods import RecipeMethods
from layoutc.runtime.weight.returned_buffers import (
    distinct,
    first_of_planes,
    laid_out_names,
    named,
    needed_planes,
    quantized_names,
)

_recipes: dict[str, type[RecipeMethods]] = {}
_levels: dict[str, Callable[[Tensor], Tensor]] = {}  # by layout id


def register(cls: type[RecipeMethods]) -> str:
    """Registers a recipe's class; returns the key under which operators find it. The last class of a key wins."""
    key = f"{cls.__module__}.{cls.__qualname__} {cls.LAYOUT.layout_id}"
    _recipes[key] = cls
    if cls.LAYOUT.level is not None:
        _levels[cls.LAYOUT.layout_id] = cls.LAYOUT.level
    return key


def recipe_of(key: str) -> type[RecipeMethods]:
    """The class that was registered under a key. Raises LayoutError if this process has none."""
    cls = _recipes.get(key)
    if cls is None:
        raise LayoutError(
            f"this process has no recipe {key}: import its package, in the version that the graph was traced with"
        )
    return cls


# ---------------------------------------------------------------------------------------------- what the runtime calls
def quantize(
    cls: type[RecipeMethods],
    x: Tensor,
    amax: Tensor | None,
    orientations: Sequence[str],
    out: Mapping[str, Tensor] | None = None,
    seed: Tensor | None = None,
) -> dict[str, Tensor]:
    """(m, k) values -> the planes of orientations, as `quantize_matrix`. `out` is ignored while calls are traced.

    seed: as from `seed_of`, which is asked for one if there is none.
    """
    seed = seed_of(cls, x) if seed is None else seed
    if not traced(x):
        return cls.quantize_matrix(x, amax, orientations, out, seed)
    names = cls.LAYOUT.written(x.shape[0], x.shape[1], orientations)
    return dict(zip(names, _quantize(x, amax, cls.KEY, list(orientations), seed), strict=True))


def seed_of(cls: type[RecipeMethods], x: Tensor, seed: Seed | None = None) -> Tensor | None:
    """The seed of the random bits that round x, (1,) int64 on its device; None for recipes without them.

    seed: the caller's; default: drawn from torch's default generator of the device, in a traced graph each time that
    the graph runs. Raises as seed_tensor, and ValueError for a seed of a recipe that rounds to nearest.
    """
    if not cls.LAYOUT.stochastic:
        if seed is not None:
            raise ValueError(f"{cls.LAYOUT.name} takes no seed: it rounds elements to nearest")
        return None
    if seed is not None:
        return seed_tensor(seed, x.device)
    return _draw_seed(x) if traced(x) else draw_seed(x)


def quantize_buffers(
    cls: type[RecipeMethods],
    x: Tensor,
    amax: Tensor | None,
    orientations: Sequence[str],
    swizzled: bool,
    typed: bool = False,
    seed: Tensor | None = None,
) -> dict[str, Tensor]:
    """(m, k) values -> the buffers of orientations that a GEMM reads: in one launch, where there is a kernel for it.

    amax: what `shared_amax` gives, for recipes that share one, in fp32 or in x's dtype; or that of each row, (m,), in
    traced calls of recipes that share one of the whole matrix and store none; default: that of x. typed:
    codes and scales have the dtypes of scaled_mm where that takes no view of each: in traced calls, and from kernels.
    seed: as for `quantize`.
    """
    layout, (m, k), chosen = cls.LAYOUT, x.shape, tuple(orientations)
    seed = seed_of(cls, x) if seed is None else seed
    if not traced(x):
        fused = cls.quantize_buffers(x, amax, chosen, swizzled, seed, typed)
        return _quantize_buffers_by_planes(cls, x, amax, chosen, swizzled, seed) if fused is None else fused
    outputs = _quantize_buffers(x, amax, cls.KEY, list(chosen), swizzled, typed, seed)
    made = dict(zip(distinct(layout, m, k, chosen, swizzled), outputs, strict=False))
    first = first_of_planes(layout, chosen, layout.laid_out(m, k, chosen, swizzled))
    known = _known(amax)
    buffers: dict[str, Tensor] = {}
    for name, facts in layout.buffers(m, k).items():
        if name == "amax":
            buffers[name] = outputs[-1] if known is None else stored_amax(layout, known)
        elif name in made:
            buffers[name] = made[name]
        elif name.split("_")[0] in chosen:
            buffers[name] = made[first[layout.as_stored[name]]].view(facts.shape)
    return buffers


def _known(amax: Tensor | None) -> Tensor | None:
    """The caller's amax if it is fp32; otherwise the operator that quantizes to buffers returns it in fp32."""
    return amax if amax is not None and amax.dtype == torch.float32 else None


def shared_amax(cls: type[RecipeMethods], x: Tensor) -> Tensor:
    """(m, k) values -> the amax that shards must agree on before they quantize: fp32, of `LAYOUT.amax_shape(k)`."""
    return _shared_amax(x, cls.KEY) if traced(x) else cls.shared_amax(x)


def stored_amax(layout: Layout, amax: Tensor) -> Tensor:
    """What the `amax` plane stores, as `LAYOUT.stored_amax`; computing a level divides."""
    traces = layout.level is not None and traced(amax)
    return _stored_amax(amax, layout.layout_id) if traces else layout.stored_amax(amax)


def dequantize(
    cls: type[RecipeMethods], planes: Mapping[str, Tensor], m: int, k: int, orientation: str, dtype: torch.dtype
) -> Tensor:
    """Planes -> the (m, k) values of an orientation, in `dtype`."""
    sources = cls.LAYOUT.sources[orientation]
    if not traced(planes[sources[0]]):
        return cls.matrix_values(planes, m, k, orientation, dtype)
    return _dequantize([planes[name] for name in sources], m, k, cls.KEY, orientation, dtype)


def lay_out(
    cls: type[RecipeMethods],
    planes: Mapping[str, Tensor],
    m: int,
    k: int,
    orientations: Sequence[str],
    swizzled: bool = False,
    typed: bool = False,
) -> dict[str, Tensor]:
    """Planes -> the buffers of orientations. A buffer that equals a plane is that plane, or a flat view of it.

    typed: in traced calls, those that are made have the dtypes of scaled_mm.
    """
    cls.LAYOUT.check_swizzled(swizzled)
    if not traced(next(iter(planes.values()))):
        return cls.lay_out(planes, m, k, tuple(orientations), swizzled)
    names = cls.LAYOUT.laid_out(m, k, orientations, swizzled)
    made: dict[str, Tensor] = {}
    if names:
        needed = [planes[name] for name in needed_planes(cls.LAYOUT, orientations)]
        made = dict(zip(names, _lay_out(needed, m, k, cls.KEY, list(orientations), swizzled, typed), strict=True))
    return named(cls.LAYOUT, planes, made, (m, k), orientations)


# --------------------------------------------------------------------------------------------------- what operators run
def _run_quantize(
    x: Tensor, amax: Tensor | None, recipe: str, orientations: list[str], seed: Tensor | None = None
) -> list[Tensor]:
    cls, (m, k) = recipe_of(recipe), x.shape
    planes = cls.quantize_matrix(x, amax, tuple(orientations), seed=seed)
    return [library.own(planes[name], amax) for name in cls.LAYOUT.written(m, k, orientations)]


def _quantize_buffers_by_planes(
    cls: type[RecipeMethods],
    x: Tensor,
    amax: Tensor | None,
    orientations: tuple[str, ...],
    swizzled: bool,
    seed: Tensor | None,
) -> dict[str, Tensor]:
    if amax is not None:
        rows = amax.numel() > 1 and cls.LAYOUT.amax_columns is None and not cls.LAYOUT.amax_of_matrices
        amax = (amax.amax(0, keepdim=True) if rows else amax).to(torch.float32)
    elif cls.LAYOUT.takes_amax(orientations):
        amax = cls.shared_amax(x)
    planes = cls.quantize_matrix(x, amax, orientations, None, seed)
    if amax is not None and "amax" in cls.LAYOUT.stored:
        planes = planes | {"amax": cls.LAYOUT.stored_amax(amax)}
    return cls.lay_out(planes, x.shape[0], x.shape[1], orientations, swizzled)


def _run_quantize_buffers(
    x: Tensor,
    amax: Tensor | None,
    recipe: str,
    orientations: list[str],
    swizzled: bool,
    typed: bool,
    seed: Tensor | None = None,
) -> list[Tensor]:
    chosen, x = tuple(orientations), launch.in_rows(x)
    like = launch.quantized_like(x, amax, chosen, swizzled, typed)
    plan = plans.cache.get((recipe, like)) if type(x) is Tensor else None
    if plan is not None:
        return plan(*[one for one in (x, amax, seed) if one is not None])  # type: ignore[no-any-return]
    cls, (m, k) = recipe_of(recipe), x.shape
    names = quantized_names(cls.LAYOUT, m, k, chosen, swizzled, _known(amax) is None)
    found = amax is None and cls.LAYOUT.takes_amax(chosen)
    amax = cls.shared_amax(x) if found else amax  # in its own memory
    if (fused := cls.quantize_buffers(x, amax, chosen, swizzled, seed, typed)) is not None:
        kernels = None if found or (seed is None and cls.LAYOUT.stochastic) else cls.quantizing_kernels(x)
        if kernels is not None:
            plans.cache[recipe, like] = kernels.again(like, names, typed)
        return _typed(cls.LAYOUT, names, [fused[name] for name in names], typed)  # new tensors, which a kernel wrote
    buffers = _quantize_buffers_by_planes(cls, x, amax, chosen, swizzled, seed)
    return _typed(cls.LAYOUT, names, library.own_all([buffers[name] for name in names], x, amax), typed)


def _typed(layout: Layout, names: Iterable[str], buffers: list[Tensor], typed: bool) -> list[Tensor]:
    """Buffers in the dtypes in which scaled_mm reads them, if they are wanted so."""
    dtypes = layout.operand_dtypes if typed else {}
    wanted = [dtypes.get(name, one.dtype) for name, one in zip(names, buffers, strict=True)]
    return [one if one.dtype == dtype else one.view(dtype) for one, dtype in zip(buffers, wanted, strict=True)]


def run_dequantize(planes: list[Tensor], m: int, k: int, recipe: str, orientation: str, dtype: torch.dtype) -> Tensor:
    """Planes, as `Layout.sources` names them -> new memory with the (m, k) values."""
    cls = recipe_of(recipe)
    named = dict(zip(cls.LAYOUT.sources[orientation], planes, strict=True))
    if (again := values_again(cls, named, m, k, orientation, dtype)) is not None:
        return again
    values = cls.matrix_values(named, m, k, orientation, dtype)
    return values if cls.usable_kernels(planes[0], dtype) is not None else library.own(values, *planes)


def values_again(
    cls: type[RecipeMethods], planes: Mapping[str, Tensor], m: int, k: int, orientation: str, dtype: torch.dtype
) -> Tensor | None:
    """As `dequantize`, by the launch plan for such planes; None without a kernel, or if kernels can't read them."""
    if (source := planes.get(cls.LAYOUT.sources[orientation][0])) is None:
        return None
    key = cls, m, k, orientation, dtype, source.device
    if (plan := plans.cache.get(key)) is None:
        if (plan := cls.values_plan(planes, m, k, orientation, dtype)) is None:
            return None
        plans.cache[key] = plan
    if (read := plan.read_of(planes)) is None:
        return None
    return plan(*read)[0]


def run_lay_out(
    planes: list[Tensor], m: int, k: int, recipe: str, orientations: list[str], swizzled: bool, typed: bool = False
) -> list[Tensor]:
    cls, chosen = recipe_of(recipe), tuple(orientations)
    names, needed = laid_out_names(cls.LAYOUT, chosen, swizzled)
    named = dict(zip(needed, planes, strict=True))
    key = recipe, m, k, planes[0].device, chosen, swizzled, typed
    if (plan := plans.cache.get(key)) is not None and (read := plan.read_of(named)) is not None:
        return plan(*read)  # type: ignore[no-any-return]
    buffers = cls.lay_out(named, m, k, chosen, swizzled)
    made = [buffers[name] for name in names]
    if (kernels := cls.usable_kernels(planes[0])) is None:
        made = library.own_all(made, *planes)
    else:  # which writes new tensors
        moved = [name for name in kernels.moved if name in named]
        like = launch.laid_out_like(m, k, planes[0].device, chosen, swizzled, len(moved))
        plans.cache[key] = kernels.again(like, names, typed)
    return _typed(cls.LAYOUT, names, made, typed)


# ----------------------------------------------------------------------------------------- shapes and dtypes, no values
def empty_of(facts: Facts, x: Tensor) -> Tensor:
    """An uninitialized tensor on x's device."""
    return x.new_empty(facts.shape, dtype=facts.dtype)


def _fake_quantize(
    x: Tensor, amax: Tensor | None, recipe: str, orientations: list[str], seed: Tensor | None = None
) -> list[Tensor]:
    layout, (m, k) = recipe_of(recipe).LAYOUT, x.shape
    return [empty_of(facts, x) for facts in layout.written(m, k, orientations).values()]


def _fake_quantize_buffers(
    x: Tensor,
    amax: Tensor | None,
    recipe: str,
    orientations: list[str],
    swizzled: bool,
    typed: bool,
    seed: Tensor | None = None,
) -> list[Tensor]:
    layout, (m, k) = recipe_of(recipe).LAYOUT, x.shape
    results = distinct(layout, m, k, tuple(orientations), swizzled)
    made = _typed(layout, results, [empty_of(facts, x) for facts in results.values()], typed)
    if _known(amax) is None and "amax" in layout.as_stored:
        made.append(x.new_empty(layout.amax_shape(k), dtype=torch.float32))
    return made


def _fake_lay_out(
    planes: list[Tensor], m: int, k: int, recipe: str, orientations: list[str], swizzled: bool, typed: bool = False
) -> list[Tensor]:
    layout = recipe_of(recipe).LAYOUT
    results = layout.laid_out(m, k, orientations, swizzled)
    return _typed(layout, results, [empty_of(facts, planes[0]) for facts in results.values()], typed)


_quantize: Callable[..., list[Tensor]] = library.define(
    "quantize(Tensor x, Tensor? amax, str recipe, str[] orientations, Tensor? seed=None) -> Tensor[]",
    _run_quantize,
    _fake_quantize,
)
_quantize_buffers: Callable[..., list[Tensor]] = library.define(
    "quantize_buffers(Tensor x, Tensor? amax, str recipe, str[] orientations, bool swizzled, bool typed, "
    "Tensor? seed=None) -> Tensor[]",
    _run_quantize_buffers,
    _fake_quantize_buffers,
)
_draw_seed: Callable[..., Tensor] = library.define(
    "draw_seed(Tensor x) -> Tensor",
    draw_seed,
    lambda x: x.new_empty((1,), dtype=torch.int64),
    (torch.Tag.nondeterministic_seeded,),
)
_shared_amax: Callable[..., Tensor] = library.define(
    "shared_amax(Tensor x, str recipe) -> Tensor",
    lambda x, recipe: library.own(recipe_of(recipe).shared_amax(x), x),
    lambda x, recipe: x.new_empty(recipe_of(recipe).LAYOUT.amax_shape(x.shape[1]), dtype=torch.float32),
)
_stored_amax: Callable[..., Tensor] = library.define(
    "stored_amax(Tensor amax, str layout) -> Tensor",
    lambda amax, layout: library.own(_levels[layout](amax), amax),
    lambda amax, _: torch.empty_like(amax),
)
_dequantize: Callable[..., Tensor] = library.define(
    "dequantize(Tensor[] planes, SymInt m, SymInt k, str recipe, str orientation, ScalarType dtype) -> Tensor",
    run_dequantize,
    lambda planes, m, k, recipe, orientation, dtype: planes[0].new_empty((m, k), dtype=dtype),
)
_lay_out: Callable[..., list[Tensor]] = library.define(
    "lay_out(Tensor[] planes, SymInt m, SymInt k, str recipe, str[] orientations, bool swizzled, bool typed=False) "
    "-> Tensor[]",
    run_lay_out,
    _fake_lay_out,
)
