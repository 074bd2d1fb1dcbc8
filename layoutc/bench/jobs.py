"""The jobs that `layoutc bench` times on a card: a recipe's kernels, each time on new inputs and outputs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from layoutc.bench.clocks import Make, Work
from layoutc.ints.sizes import cdiv, up
from layoutc.runtime.kernels import amaxes
from layoutc.runtime.weight.tensor import QuantizedTensor

if TYPE_CHECKING:
    from layoutc.runtime.kernels.recipe_kernels import Kernels  # needs Triton; hooks are measured without

GROUPED = 16  # weights of a batch, which together have the wanted shape
DTYPES = (torch.bfloat16, torch.float32)
Shape = tuple[int, int]


class Job(NamedTuple):
    """A job to be timed. `make` makes the work on new inputs and outputs. differs: the share of a peer's bytes that are
    not those of our kernels."""

    recipe: str
    work: str
    dtype: str
    nbytes: int
    make: Make
    in_graph: bool = True
    differs: float | None = None


def part(cls: type[QuantizedTensor], name: str) -> ModuleType:
    """A module of the package that a class was generated into. Raises ImportError if it has none of that name."""
    return importlib.import_module(f"{cls.__module__.rpartition('.')[0]}.{name}")


def size(tensors: Iterable[Tensor]) -> int:
    """The bytes of all tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def amax_jobs(shape: Shape, dtype: torch.dtype, device: torch.device) -> Iterator[Job]:
    """Finding the largest magnitude of a weight."""
    x = torch.randn(shape, device=device, dtype=dtype)

    def make() -> Work:
        given = x.clone()
        return lambda: amaxes.matrix_amax(given, None)

    yield Job("", "amax", str(dtype)[6:], size([x]), make)


def kernel_jobs(
    name: str, cls: type[QuantizedTensor], shape: Shape, dtype: torch.dtype, device: torch.device
) -> Iterator[Job]:
    """Everything that a recipe's kernels do with a weight; what does not read x, from bf16 alone. Where no kernel
    quantizes, the reference makes the planes, and that is no job."""
    kernels, layout, label = part(cls, "kernels").KERNELS, cls.LAYOUT, str(dtype)[6:]
    m, k = shape
    x = torch.randn(shape, device=device, dtype=dtype) * 0.02
    amax = cls.shared_amax(x) if layout.shares_amax else None
    asked = {layout.orientations, *((one,) for one in layout.orientations)}
    for orientations in sorted(asked, key=len) if kernels.quantize_tile is not None else ():

        def quantize(orientations: tuple[str, ...] = orientations) -> Work:
            own = x.clone()
            planes = kernels.quantize(own, amax, orientations)
            return lambda: kernels.quantize(own, amax, orientations, planes)

        written = kernels.quantize(x, amax, orientations)
        yield Job(name, f"quantize {'+'.join(orientations)}", label, size([x, *written.values()]), quantize)
    planes = cls.quantize_matrix(x, amax, layout.orientations)
    stored = planes | ({"amax": layout.stored_amax(amax)} if amax is not None and "amax" in layout.stored else {})
    if not layout.history:
        yield from _buffer_jobs(name, cls, x, amax, stored)
    for orientation in layout.orientations if dtype == torch.bfloat16 else ():

        def dequantize(orientation: str = orientation) -> Work:
            own = {plane: values.clone() for plane, values in stored.items()}
            return lambda: kernels.dequantize(own, m, k, orientation, torch.bfloat16)

        nbytes = x.numel() * 2 + size(stored[plane] for plane in layout.sources[orientation])
        yield Job(name, f"dequantize {orientation}", label, nbytes, dequantize)
    yield from _group_jobs(name, cls, shape, dtype, device)


def _buffer_jobs(
    name: str, cls: type[QuantizedTensor], x: Tensor, amax: Tensor | None, planes: dict[str, Tensor]
) -> Iterator[Job]:
    """What a GEMM reads, in its order of scales: from a weight at once, and from planes."""
    kernels: Kernels = part(cls, "kernels").KERNELS
    layout, swizzled, label = cls.LAYOUT, bool(cls.LAYOUT.swizzled), str(x.dtype)[6:]
    m, k = x.shape
    laid_out: dict[str, Tensor] = kernels.lay_out(planes, m, k, layout.orientations, swizzled)
    if kernels.buffer_sizes is not None:

        def to_buffers() -> Work:
            given = x.clone()
            return lambda: kernels.quantize_buffers(given, amax, layout.orientations, swizzled)

        yield Job(name, "quantize to buffers", label, size([x, *laid_out.values()]), to_buffers)
    nbytes = _moved(planes.values(), laid_out)
    if nbytes and x.dtype == torch.bfloat16:

        def lay_out() -> Work:
            given = {plane: values.clone() for plane, values in planes.items()}
            return lambda: kernels.lay_out(given, m, k, layout.orientations, swizzled)

        yield Job(name, "lay out", label, nbytes, lay_out)


def _moved(planes: Iterable[Tensor], buffers: dict[str, Tensor]) -> int:
    """The fewest bytes that making buffers from planes can move; 0 if all of them are planes."""
    planes = list(planes)
    addresses = {plane.data_ptr() for plane in planes}
    wrote = size(buffer for buffer in buffers.values() if buffer.data_ptr() not in addresses)
    return min(size(planes), wrote) + wrote


def _group_jobs(
    name: str, cls: type[QuantizedTensor], shape: Shape, dtype: torch.dtype, device: torch.device
) -> Iterator[Job]:
    """Many weights: quantized in one launch and in one launch each, and laid out."""
    layout, label = cls.LAYOUT, str(dtype)[6:]
    m, k = up(cdiv(shape[0], GROUPED), layout.multiple_m), shape[1]
    xs = [torch.randn(m, k, device=device, dtype=dtype) * 0.02 for _ in range(GROUPED)]
    shared = amaxes.batch_amaxes(xs, layout.amax_columns) if layout.shares_amax else None
    kernels, every = part(cls, "kernels").KERNELS, layout.orientations
    each = [None] * GROUPED if shared is None else shared
    shaped = [one if one is None else one.view(layout.amax_shape(k)) for one in each]
    outs = [cls.quantize_matrix(x, one, every) for x, one in zip(xs, shaped, strict=True)]
    suffix = f"{GROUPED} weights of {m}x{k}"
    works: dict[str, tuple[int, Callable[[], object]]] = {}
    if kernels.batched and kernels.quantize_tile is not None:
        nbytes = size(xs) + sum(size(out.values()) for out in outs)
        loop = lambda: [kernels.quantize(*one) for one in zip(xs, shaped, [every] * GROUPED, outs, strict=True)]  # noqa: E731
        works[f"quantize {suffix}, a launch each"] = nbytes, loop
        works[f"quantize {suffix}, one launch"] = nbytes, lambda: kernels.quantize_batch(xs, shared, every, outs)
    swizzled = bool(layout.swizzled)
    tensors = [_tensor(cls, out, one, (m, k)) for out, one in zip(outs, shaped, strict=True)]
    nbytes = GROUPED * _moved(tensors[0].planes().values(), tensors[0].buffers(swizzled=swizzled))
    if nbytes and dtype == torch.bfloat16 and kernels.lay_out_tile is not None:
        works[f"lay out {suffix}"] = nbytes, lambda: [t.buffers(swizzled=swizzled) for t in tensors]
    for what, (nbytes, work) in works.items():
        yield Job(name, what, label, nbytes, lambda work=work: work, in_graph=False)  # type: ignore[misc]


def _tensor(
    cls: type[QuantizedTensor], planes: dict[str, Tensor], amax: Tensor | None, shape: Shape
) -> QuantizedTensor:
    """A tensor of planes that kernels wrote; a history holds one amax."""
    stored = dict(planes)
    if amax is not None and "amax" in cls.LAYOUT.stored:
        stored["amax"] = amax.new_zeros(max(1, cls.LAYOUT.history))
        stored["amax"][:1] = cls.LAYOUT.stored_amax(amax)
    return cls(stored, shape, torch.bfloat16)
