"""Flattening for torch.compile: a wrapper's plain tensors by name, and all the rest as one comparable value."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, MutableMapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layoutc.ints.cuts import Halo
from layoutc.ints.rects import Rect
from layoutc.runtime import GRAPHS, product_mode
from layoutc.runtime.product_mode import Settings
from layoutc.runtime.storage.planes import CutPlanes, Home, owner
from layoutc.runtime.storage.store import Stack
from layoutc.runtime.torch_private import is_fake, without_torch_function
from layoutc.runtime.weight import gathered_in_graphs
from layoutc.runtime.weight.plane_tensor import PlaneTensor

_HANDLE = "plane_handle"  # the inner tensor that represents planes which each pass replaces


class Context(NamedTuple):
    """Everything that is not a tensor. Graphs are guarded by its equality and cached by its repr."""

    layout_id: str
    names: tuple[str, ...]
    matrix: tuple[int, int]
    orientations: tuple[str, ...]
    transposed: bool
    dtype: torch.dtype
    halo: Halo
    stack: Stack | None  # the matrices with an amax each, if the outer shape, which a graph may not know, does not say
    whole: tuple[int, int] | None  # (m, k) of the gathered weight, if passes gather different planes
    window: Rect | None  # the part of it that this tensor is
    own_products: Settings | None  # its per-weight mode, which a traced tensor has too
    products: str  # the mode of its products: a graph traced under one mode must not run under another


class Flat(NamedTuple):
    """A flattened tensor, cached: a compiled graph flattens each weight three times in each call."""

    planes: Mapping[str, Tensor]
    facts: tuple[Any, ...]  # what the context was made of, except the planes' window
    context: Context


def flatten(tensor: PlaneTensor) -> tuple[list[str], Context]:
    """The names of the planes, or of the handle that stands for them in graphs; and the context."""
    store, flat = tensor.store, tensor.flat
    planes = store.planes
    with without_torch_function():
        dtype, stack = tensor.dtype, store.stack
        if stack is not None and stack == Stack.of(tensor.shape, tensor.transposed):
            stack = None
    of = store.matrix, store.declared, tensor.transposed, dtype, store.halo, stack
    products = tensor.own_products, product_mode.setting(tensor)
    facts = *planes, *of, *products
    if flat is None or flat.planes is not planes or flat.facts != facts:
        names, (whole, window) = tuple([f"plane_{name}" for name in planes]), (None, None)
        if getattr(planes, "handle", None) is not None:
            names, (whole, window) = (_HANDLE,), (store.whole, store.window)
        context = Context(tensor.LAYOUT.layout_id, names, *of, whole, window, *products)
        flat = tensor.flat = Flat(planes, facts, context)
    return list(flat.context.names), flat.context


def unflatten(
    cls: type[PlaneTensor], inner: Mapping[str, Tensor], context: Context, shape: Iterable[int]
) -> PlaneTensor:
    """The inverse of flatten. Raises ValueError for another layout id."""
    if context.layout_id != cls.LAYOUT.layout_id:
        raise ValueError(f"{cls.__name__} has layout {cls.LAYOUT.layout_id}, but the tensor has {context.layout_id}")
    matrix, home, planes = context.matrix, None, _planes(cls, inner, context)
    if context.whole is None or context.window is None:
        matrix = cls.LAYOUT.matrix_of(planes, matrix)
    else:
        home = getattr(planes, "home", _UNKNOWN)
        if matrix != context.whole:
            planes = CutPlanes(planes, context.whole, context.window, cls._cut)
    tensor = cls(
        planes,
        shape,
        context.dtype,
        matrix=matrix,
        orientations=context.orientations,
        transposed=context.transposed,
        halo=context.halo,
    )
    tensor.store.home, tensor.own_products = home, context.own_products
    if context.stack is not None:
        tensor.store.stack = context.stack
    return tensor


def _planes(cls: type[PlaneTensor], inner: Mapping[str, Tensor], context: Context) -> MutableMapping[str, Tensor]:
    """The planes of a tensor, or of the weight that it was cut from.

    A handle that a graph returns refers to the gathered weight; while the graph is traced, to planes that it records.
    """
    if context.whole is None:
        return {name.removeprefix("plane_"): inner[name] for name in context.names}
    if (gathered := owner(inner[_HANDLE])) is not None:
        return gathered
    return gathered_in_graphs.planes(cls, inner[_HANDLE], context.whole, context.orientations)


def add_inner(cls: type[PlaneTensor], planes: Iterable[str]) -> None:
    """Makes inner tensors attributes, under flatten's names. Those that a tensor lacks raise AttributeError."""
    for name in planes:
        setattr(cls, f"plane_{name}", property(partial(_plane, name)))
    setattr(cls, _HANDLE, property(partial(_plane, _HANDLE)))


def _plane(name: str, tensor: PlaneTensor) -> Tensor:
    planes = tensor.store.planes
    found: Tensor | None = getattr(planes, "handle", None) if name == _HANDLE else planes.get(name)
    if found is None:
        raise AttributeError(f"{type(tensor).__name__!r} object has no attribute {name!r}")
    return found


#: Unknown while tracing: a graph finds shard and gather when it runs.
_UNKNOWN = Home(lambda: None, lambda *_: {})


def digest(key: str, tensor: torch.Tensor) -> str:
    """A hash for compile caches, equal in all processes for tensors that compile to the same code. It covers `key`, the
    kind of wrapper, and all that a graph can depend on except values.

    That includes the recipes of products, which the layout id leaves out, and how this runtime traces graphs: torch
    keeps compiled graphs on disk, and would run those of another spec or of an older layoutc.
    """
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = [getattr(tensor, name) for name in names]
    facts = [(tuple(t.shape), tuple(t.stride()), t.dtype, t.device) for t in inner]
    traced = GRAPHS, tensor.LAYOUT.products  # type: ignore[attr-defined]
    outer = key, traced, tuple(tensor.shape), tuple(tensor.stride()), tensor.requires_grad
    return hashlib.blake2b(repr((outer, context, facts)).encode(), digest_size=16).hexdigest()


def for_cache(tensor: torch.Tensor) -> tuple[type[str], tuple[str]] | None:
    """How a fake tensor is pickled: as its hash. None for a tensor with values.

    Cache keys of compiled graphs are made from pickled fake tensors; before torch 2.13, from these alone.
    """
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    if not any(is_fake(getattr(tensor, name)) for name in names):
        return None
    return str, (tensor._stable_hash_for_caching(),)  # type: ignore[attr-defined]
