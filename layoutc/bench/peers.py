"""Peers for the benchmarks: the same work by plain torch under torch.compile, by torch's operators, and by torchao."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from layoutc.bench.clocks import Work
from layoutc.bench.jobs import DTYPES, Job, Shape, part, size
from layoutc.bench.plain import PARTS, NoPlain, Plain, Planes, Source, plain
from layoutc.runtime import numerics
from layoutc.runtime.weight.tensor import QuantizedTensor

MODE = "max-autotune-no-cudagraphs"
WRONG = 0.05  # of a peer's bytes: more differ than a card's divisions explain, so that it does other work
Quantize = Callable[[Tensor, Tensor | None], Planes]
Say = Callable[[str], object]


def compiled(function: Quantize) -> Quantize:
    """As its users would compile it."""
    torch._dynamo.reset()
    made: Any = torch.compile(function, mode=MODE, dynamic=False)
    return made  # type: ignore[no-any-return]


def compiled_jobs(name: str, cls: type[QuantizedTensor], shape: Shape, device: torch.device, say: Say) -> Iterator[Job]:
    """A recipe as its users would write it, and torchao's quantizer of its kind, both compiled, from bf16; says what
    there is not. Each job says how many of its bytes differ from the kernel's."""
    kernels, layout = part(cls, "kernels").KERNELS, cls.LAYOUT
    try:
        version = plain(layout, part(cls, "reference"), shape)
    except NoPlain as why:
        say(f"  {name}: no plain version: {why}")
        return
    x = torch.randn(shape, device=device, dtype=torch.bfloat16) * 0.02
    amax = cls.shared_amax(x) if layout.shares_amax else None
    planes: Planes = kernels.quantize(x, amax, layout.orientations)
    expected = planes | turned(planes, version)
    for label, function in (*_plain_forms(cls, version), *_torchao_forms(name, version, say)):
        try:
            call = compiled(function)
            outputs = call(x, amax)
        except Exception as error:  # what a peer can't do on this card must not end the run
            say(f"  {name} {label}: {type(error).__name__}: {error}".split("\n")[0])
            continue
        differs = share_of_bytes(outputs, expected)
        if differs > WRONG:
            say(f"  {name} {label}: {differs:.1%} of its bytes differ from the kernel's, so it is not timed")
            continue

        def make(call: Quantize = call) -> Work:
            own = x.clone()
            return lambda: call(own, amax)

        yield Job(name, label, "bfloat16", size([x, *outputs.values()]), make, differs=differs)


def _plain_forms(cls: type[QuantizedTensor], version: Plain) -> Iterator[tuple[str, Quantize]]:
    """One quantization; all of them; and both orientations from x and a transposed copy, which GEMMs want."""
    every = tuple(version.sources)
    for names in dict.fromkeys((every[:1], every)):
        yield f"quantize {'+'.join(names)}, torch.compile", lambda x, amax, names=names: version(x, amax, names)  # type: ignore[misc]
    if "columnwise" in cls.LAYOUT.orientations and cls.LAYOUT.as_stored.get("columnwise_data") != "rowwise_data":
        yield "quantize x and x.t(), torch.compile", version.turning()


def turned(planes: Planes, version: Plain) -> Planes:
    """Columnwise planes as transposed wholes, packed along their rows, named `turned_...`."""
    found: Planes = {}
    held = "columnwise" if "columnwise" in version.sources else "rowwise"
    bits = version.sources[held].element.bits
    for which in PARTS:
        plane = planes.get(f"{held}_{which}")
        if plane is None:
            continue
        if which == "data" and bits < 8:
            plane = numerics.pack(numerics.unpack(plane, bits, True).t().contiguous(), bits, True)
        else:
            plane = plane.t() if plane.dim() == 2 else plane
        found[f"turned_{which}"] = plane.contiguous()
    return found


def share_of_bytes(outputs: Planes, expected: Planes) -> float:
    """The share of the outputs' bytes that differ from those expected."""
    pairs = [(_bytes(made), _bytes(expected[name])) for name, made in outputs.items()]
    return sum(int((one != other).sum()) for one, other in pairs) / sum(len(one) for one, _ in pairs)


def _bytes(plane: Tensor) -> Tensor:
    return plane.contiguous().view(-1).view(torch.uint8)


# -------------------------------------------------------------------------------------------------------------- torchao
def _torchao_forms(name: str, version: Plain, say: Say) -> Iterator[tuple[str, Quantize]]:
    """torchao's quantizers to MX and to NVFP4, for recipes whose blocks and rounding they have."""
    source = next(iter(version.sources.values()))
    if source.rule.startswith("exponent"):
        quantizers, kind = _to_mx, "to_mx"
    elif source.rule == "two-level":
        quantizers, kind = _to_nvfp4, "nvfp4_quantize"
    else:
        return
    try:
        found = list(quantizers(source))
    except (ImportError, AttributeError, NoPlain) as why:
        say(f"  {name}: nothing by torchao's {kind}: {why}")
        return
    for how, one in found:
        yield f"quantize {how}, torchao {kind} compiled", _rowwise(one)
        if len(version.sources) == 2 and version.sources["columnwise"] == source.transposed():
            yield f"quantize {how}, x and x.t(), torchao {kind} compiled", _both(one)


def _rowwise(one: Quantize) -> Quantize:
    return lambda x, amax: {f"rowwise_{which}": plane for which, plane in one(x, amax).items()}


def _both(one: Quantize) -> Quantize:
    def both(x: Tensor, amax: Tensor | None) -> Planes:
        turns = {f"turned_{which}": plane for which, plane in one(x.t().contiguous(), amax).items()}
        return _rowwise(one)(x, amax) | turns

    return both


def _to_mx(source: Source) -> Iterator[tuple[str, Quantize]]:
    ao: Any = importlib.import_module("torchao.prototype.mx_formats.mx_tensor")
    element, (rows, columns) = source.element, source.block
    if rows != 1:
        raise NoPlain(f"its blocks have one row, and these {rows or 'all'}")
    dtype = element.dtype
    if dtype is None and (element.bits, element.mantissa, element.largest) == (4, 1, 6.0):
        dtype = torch.float4_e2m1fn_x2
    if dtype is None:
        raise NoPlain("it writes no packed elements of this format")
    mode = ao.ScaleCalculationMode.RCEIL if source.rule == "exponent-up" else ao.ScaleCalculationMode.FLOOR

    def quantize(x: Tensor, amax: Tensor | None) -> Planes:
        scale, codes = ao.to_mx(x, dtype, columns, mode)
        return {"data": codes, "scale": scale}

    yield f"1x{columns}", quantize


def _to_nvfp4(source: Source) -> Iterator[tuple[str, Quantize]]:
    ao: Any = importlib.import_module("torchao.prototype.mx_formats.nvfp4_tensor")
    if source.block != (1, 16):
        raise NoPlain(f"its blocks are 1x16, and these {'x'.join(str(size or 'all') for size in source.block)}")

    def quantize(x: Tensor, amax: Tensor | None) -> Planes:
        assert amax is not None
        scale, codes = ao.nvfp4_quantize(x, 16, ao.per_tensor_amax_to_scale(amax))
        return {"data": codes, "scale": scale}

    yield "1x16", quantize


def other_jobs(shape: Shape, device: torch.device, say: Say) -> Iterator[Job]:
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
