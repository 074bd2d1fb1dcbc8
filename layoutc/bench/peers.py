"""Peers for the benchmarks: the same work by torch, torch.compile, and torchao if it is installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from layoutc.bench.clocks import Work
from layoutc.bench.jobs import DTYPES, Job, Shape, part, size
from layoutc.runtime.weight.tensor import QuantizedTensor

MODES = ("default", "max-autotune-no-cudagraphs")


def compiled_jobs(name: str, cls: type[QuantizedTensor], shape: Shape, device: torch.device) -> Iterator[Job]:
    """A recipe's reference under torch.compile, from bf16; says where its bytes differ from the kernel's."""
    kernels, reference, layout = part(cls, "kernels").KERNELS, part(cls, "reference"), cls.LAYOUT
    x = torch.randn(shape, device=device, dtype=torch.bfloat16) * 0.02
    amax = cls._shared_amax(x) if layout.shares_amax else None
    for orientations in dict.fromkeys((layout.orientations[:1], layout.orientations)):
        planes: dict[str, Tensor] = kernels.quantize(x, amax, orientations)
        nbytes = size([x, *planes.values()])
        for mode in MODES:
            torch._dynamo.reset()
            function: Any = torch.compile(reference.quantize_reference, mode=mode, dynamic=False)
            outputs = function(x, amax=amax, orientations=orientations)
            equal = all(same(planes[plane], outputs[plane]) for plane in planes)

            def make(function: Any = function, orientations: tuple[str, ...] = orientations) -> Work:
                return lambda: function(x, amax=amax, orientations=orientations)

            work = f"quantize {'+'.join(orientations)}, torch.compile {mode.split('-no')[0]}"
            yield Job(name, work + ("" if equal else ", other bytes"), "bfloat16", nbytes, make, in_graph=False)


def other_jobs(shape: Shape, device: torch.device, say: Callable[[str], object]) -> Iterator[Job]:
    """torch's own operators, and torchao's Triton kernels that run on this card; says what is not installed."""
    for dtype in DTYPES:
        x = torch.randn(shape, device=device, dtype=dtype)
        norm = partial(torch.linalg.vector_norm, x, torch.inf)
        yield _job("amax, torch.linalg.vector_norm", str(dtype)[6:], size([x]), norm)
    codes = torch.randint(0, 255, shape, dtype=torch.uint8, device=device)
    yield _job("bytes transposed, .t().contiguous()", "uint8", 2 * size([codes]), lambda: codes.t().contiguous())
    try:
        ao = importlib.import_module("torchao.prototype.blockwise_fp8_training.kernels")
    except ImportError as error:
        say(f"  torchao: {error}")
        return
    m, k = shape
    x = torch.randn(shape, device=device, dtype=torch.bfloat16) * 0.02
    for label, function, scales in (
        ("1x128", "triton_fp8_blockwise_act_quant_lhs", m * k // 128),
        ("128x1", "triton_fp8_blockwise_act_quant_rhs", m * k // 128),
        ("128x1 transposed", "triton_fp8_blockwise_act_quant_transposed_lhs", m * k // 128),
        ("128x128", "triton_fp8_blockwise_weight_quant_rhs", m * k // 16384),
        ("128x128 transposed", "triton_fp8_blockwise_weight_quant_transposed_rhs", m * k // 16384),
    ):
        quantize = getattr(ao, function, None)
        if quantize is None or m % 128 or k % 128:
            say(f"  torchao: no {function} for this shape")
            continue
        yield _job(f"quantize {label}, torchao", "bfloat16", 3 * m * k + 4 * scales, partial(quantize, x))


def _job(work: str, dtype: str, nbytes: int, call: Callable[[], object]) -> Job:
    return Job("", work, dtype, nbytes, lambda: call, in_graph=False)


def same(a: Tensor, b: Tensor) -> bool:
    """True for equal bytes, with all NaNs taken as equal."""
    if not a.is_floating_point():
        return torch.equal(a, b)
    integer = {2: torch.int16, 4: torch.int32}[a.element_size()]
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and torch.equal(
        a.masked_fill(nan, 0).view(integer), b.masked_fill(nan, 0).view(integer)
    )
