"""What torch.compile asks of a wrapper: its plain tensors under names, and the rest as a value that can be compared."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from layoutc.ints.cuts import Halo
from layoutc.runtime.weight import gathered_in_graphs, operators
from layoutc.runtime.weight.planes import CutPlanes, Home, Window, owner

if TYPE_CHECKING:
    from layoutc.runtime.weight.tensor import QuantizedTensor


class Context(NamedTuple):
    """All that is not a tensor. Graphs are guarded by its equality and cached by its repr."""

    layout_id: str
    names: tuple[str, ...]
    matrix: tuple[int, int]
    orientations: tuple[str, ...]
    transposed: bool
    dtype: torch.dtype
    halo: Halo
    whole: tuple[int, int] | None  # (m, k) of a weight that each pass gathers anew, and which part of it this is
    window: Window | None


def flatten(tensor: QuantizedTensor) -> tuple[list[str], Context]:
    """Names of the planes, or of the handle that stands for them in graphs, and the context."""
    planes, whole, window = tensor._planes, None, None
    names = tuple(f"plane_{name}" for name in planes)
    if getattr(planes, "handle", None) is not None:
        names, (whole, window) = ("handle",), place(tensor)
    of = tensor._matrix, tensor._orientations, tensor._transposed, tensor.dtype, tensor._halo
    return list(names), Context(tensor.LAYOUT.layout_id, names, *of, whole, window)


def unflatten(
    cls: type[QuantizedTensor], inner: Mapping[str, Tensor], context: Context, shape: Iterable[int]
) -> QuantizedTensor:
    """Inverse of flatten. Raises ValueError for another layout id."""
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
    tensor._home = home
    return tensor


def _planes(cls: type[QuantizedTensor], inner: Mapping[str, Tensor], context: Context) -> MutableMapping[str, Tensor]:
    """What a tensor holds, or the weight that it is a piece of.

    What a graph returns is an alias of the gathered weight again; while a graph is traced, the weight is asked.
    """
    if context.whole is None:
        return {name.removeprefix("plane_"): inner[name] for name in context.names}
    if (held := owner(inner["handle"])) is not None:
        return held
    return gathered_in_graphs.planes(cls, inner["handle"], context.whole, context.orientations)


def inner(planes: Mapping[str, Tensor], name: str) -> Tensor | None:
    """What flatten names: a plane, or the handle."""
    if name.startswith("plane_"):
        return planes.get(name[6:])
    return getattr(planes, "handle", None) if name == "handle" else None


def place(tensor: QuantizedTensor) -> tuple[tuple[int, int], Window]:
    """(m, k) of the weight that a tensor is a piece of, or is, and the rows and columns that it covers."""
    planes = tensor._planes
    if isinstance(planes, CutPlanes):
        return planes.matrix, planes.window
    return tensor._matrix, (0, tensor._matrix[0], 0, tensor._matrix[1])


def _nothing(*_: Any) -> None:
    """In place of a weak reference to the shard, and of a gather: a graph finds both when it runs."""


_UNKNOWN = Home(_nothing, _nothing)  # type: ignore[arg-type]


def stable_hash(tensor: QuantizedTensor) -> str:
    """The same in every process for what compiles to the same code; anything that differs changes it."""
    return digest(tensor.KEY, tensor)


def digest(key: str, tensor: torch.Tensor) -> str:
    """A hash of what a wrapper is, `key` says which, and of all that its graph could depend on but values."""
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = [getattr(tensor, name) for name in names]
    facts = [(tuple(t.shape), tuple(t.stride()), t.dtype, t.device) for t in inner]
    outer = key, tuple(tensor.shape), tuple(tensor.stride()), tensor.requires_grad
    return hashlib.blake2b(repr((outer, context, facts)).encode(), digest_size=16).hexdigest()


def for_cache(tensor: torch.Tensor) -> tuple[type[str], tuple[str]] | None:
    """How a tensor without values is reduced: to its hash. None for one with values.

    Such tensors are pickled to make the keys of compiled graphs, before torch 2.13 by that alone.
    """
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    if not any(operators.is_fake(getattr(tensor, name)) for name in names):
        return None
    return str, (tensor._stable_hash_for_caching(),)  # type: ignore[attr-defined]
