"""Kernels of every recipe on this card: checked against the reference byte for byte, then timed.

    python tests/bench/kernels.py check [RECIPE...] every recipe, ragged shapes, special values, all dtypes
    python tests/bench/kernels.py time [RECIPE...] medians in us and share of the bandwidth of a copy of the same size
    python tests/bench/kernels.py time-all         the same at every shape
    python tests/bench/kernels.py peers            the reference under torch.compile, and torchao's kernels

A share counts the fewest bytes that the work can move (x in, planes out) over the time, against those of a bf16 copy of
the same shape over its own, timed in the same way: on sets of inputs and outputs that L2 can't hold, one after another
in a CUDA graph; and with L2 flushed before every run, host included. Outputs of quantize are given.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

import torch
import triton

import layoutc.recipes
from layoutc.runtime import launch
from layoutc.runtime.numerics import tensor_amax

SHAPES = [(8192, 8192), (4096, 14336), (14336, 4096), (131072, 7168), (4096, 4096), (512, 4096), (4100, 5120)]
Row = dict[str, object]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SPECIAL = [float("nan"), -float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 3.4e38, 1e-45, -1e-40, 448.0, -6.0, 2.5]


def module(name: str, part: str) -> ModuleType:
    """A module of a recipe."""
    return importlib.import_module(f"layoutc.recipes.{name}.{part}")


def recipes() -> list[str]:
    """Recipes that have kernels."""
    folder = Path(layoutc.recipes.__file__).parent
    return sorted(path.parent.name for path in folder.glob("*/kernels.py"))


def weights(m: int, k: int, seed: int) -> dict[str, torch.Tensor]:
    """Ordinary values, any bits at all, and special values among ordinary ones; fp32."""
    generator = torch.Generator().manual_seed(seed)
    plain = torch.randn(m, k, generator=generator) * 0.02
    bits = torch.randint(-(2**31), 2**31 - 1, (m, k), generator=generator, dtype=torch.int64).to(torch.int32)
    wild = bits.view(torch.float32).nan_to_num(1.0)
    special = plain.clone()
    for value in SPECIAL:
        special.view(-1)[torch.randint(0, m * k, (1,), generator=generator)] = value
    return {"plain": plain, "wild": wild, "special": special, "zeros": torch.zeros(m, k)}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bytes, where all NaN count as one."""
    if not a.is_floating_point():
        return torch.equal(a, b)
    integer = {2: torch.int16, 4: torch.int32}[a.element_size()]
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and torch.equal(
        a.masked_fill(nan, 0).view(integer), b.masked_fill(nan, 0).view(integer)
    )


def check(chosen: list[str]) -> int:
    """Prints every difference from the reference, run on the CPU and on the card; returns how many."""
    bad = runs = 0
    for name in chosen or recipes():
        reference, kernels, layout = module(name, "reference"), module(name, "kernels"), module(name, "layout").LAYOUT
        cls = importlib.import_module(f"layoutc.recipes.{name}").Tensor
        for shape in [(1, 1), (7, 33), (32, 32), (64, 160), (130, 257), (160, 288), (512, 4096), (1056, 2080)]:
            try:
                m, k = layout.check_shape(shape)
            except ValueError:
                continue
            for kind, x in weights(m, k, 0).items():
                for dtype in DTYPES:
                    given = x.to(dtype)
                    card = given.cuda()
                    amax = None
                    if layout.shares_amax:
                        amax = cls._shared_amax(given)
                        if not same(amax, cls._shared_amax(card).cpu()):
                            bad += 1
                            print("DIFFERS", name, shape, kind, dtype, "amax")
                    for orientations in {layout.orientations, *((o,) for o in layout.orientations)}:
                        # The reference runs on the CPU and on the card; of large weights, on the card alone.
                        shared = amax.cuda() if amax is not None else None
                        on_card = reference.quantize_reference(card, amax=shared, orientations=orientations)
                        expected = {plane: values.cpu() for plane, values in on_card.items()}
                        if m * k < 100_000:
                            expected = reference.quantize_reference(given, amax=amax, orientations=orientations)
                        out = {
                            n: torch.full_like(p, 0x5A if p.dtype == torch.uint8 else 1e30).cuda()
                            for n, p in expected.items()
                        }
                        made = kernels.quantize(card, shared, orientations, out)
                        strided = kernels.quantize(card.t().contiguous().t(), shared, orientations)
                        runs += 1
                        for plane, value in expected.items():
                            for which, found in (("kernel", made), ("strided", strided), ("reference", on_card)):
                                if not same(value, found[plane].cpu()):
                                    bad += 1
                                    where = (value != found[plane].cpu()).nonzero()[:2].tolist()
                                    pair = [(value[tuple(i)].item(), found[plane][tuple(i)].item()) for i in where]
                                    print("DIFFERS", which, name, shape, kind, dtype, orientations, plane, where, pair)
                        planes = {**expected, "amax": amax} if amax is not None else expected
                        moved = {n: p.cuda() for n, p in planes.items()}
                        planes = planes if m * k < 100_000 else moved
                        if not layout.history:
                            laid = reference.lay_out(planes, m, k, orientations)
                            for swizzled in (False, True) if layout.swizzled else (False,):
                                flags = (swizzled,) if layout.swizzled else ()
                                made = {"lay_out": kernels.lay_out(moved, m, k, orientations, *flags)}
                                if hasattr(kernels, "quantize_buffers"):
                                    made["buffers"] = kernels.quantize_buffers(card, shared, orientations, *flags)
                                for o in orientations if swizzled else ():
                                    laid[f"{o}_scale"] = reference.gemm_scale(laid, o)
                                for which, found in made.items():
                                    for buffer, entries in laid.items():
                                        if not same(entries.cpu(), found[buffer].cpu()):
                                            bad += 1
                                            print("DIFFERS", which, name, shape, kind, orientations, buffer)
                        for orientation in orientations:
                            values = reference.dequantize_reference(planes, m, k, orientation)
                            for to in DTYPES:
                                found = kernels.dequantize(moved, m, k, orientation, to)
                                if not same(values.to(to).cpu(), found.cpu()):
                                    bad += 1
                                    print("DIFFERS dequantize", name, shape, kind, dtype, orientation, to)
                if bad > 40:
                    return bad
        print(f"{name}: compared", flush=True)
    print(f"{runs} quantizations compared, {bad} differences")
    return bad


def median(work: Callable[[], object]) -> float:
    """Microseconds, host included, with L2 flushed before every run; what the flush left in L2 is written meanwhile."""
    return float(triton.testing.do_bench(work, warmup=15, rep=60, return_mode="median")) * 1e3


def rotated(make: Callable[[], Callable[[], object]], nbytes: int) -> float:
    """Microseconds on the card: sets of inputs and outputs that exceed three times L2, one after another in a graph."""
    cache = torch.cuda.get_device_properties().L2_cache_size
    works = [make() for _ in range(max(2, -(-3 * cache // nbytes)))]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for work in works:
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [work() for work in works]
    times = []
    for _ in range(25):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) * 1e3 / len(works))
    del kept
    return statistics.median(times[5:])


def line(what: str, nbytes: int, make: Callable[[], Callable[[], object]], copied: tuple[float, float]) -> Row:
    """Both times of a piece of work, and their shares of a copy's bandwidth measured in the same way."""
    found = rotated(make, nbytes), median(make())
    shares = [nbytes / took / rate for took, rate in zip(found, copied, strict=True)]
    print(
        f"  {what:64} {found[0]:9.1f} us {shares[0]:6.3f}   flushed {found[1]:9.1f} us {shares[1]:6.3f}",
        flush=True,
    )
    torch.cuda.empty_cache()
    return {"what": what, "nbytes": nbytes, "us": found[0], "share": shares[0], "flushed": found[1]}


def measure(name: str, shape: tuple[int, int], dtype: torch.dtype, copied: tuple[float, float]) -> list[Row]:
    """Times of one recipe's kernels at a shape."""
    kernels, layout = module(name, "kernels"), module(name, "layout").LAYOUT
    cls = importlib.import_module(f"layoutc.recipes.{name}").Tensor
    try:
        m, k = layout.check_shape(shape)
    except ValueError:
        return []
    x = torch.randn(m, k, device="cuda", dtype=dtype) * 0.02
    amax = cls._shared_amax(x) if layout.shares_amax else None
    label = f"{name:14} {m}x{k} {str(dtype)[6:]:8}"
    rows = []

    def size(tensors: Iterable[torch.Tensor]) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    options = {layout.orientations, *((o,) for o in layout.orientations)}
    for orientations in sorted(options, key=len):

        def quantize(orientations: tuple[str, ...] = orientations) -> Callable[[], object]:
            given = x.clone()
            planes = kernels.quantize(given, amax, orientations)
            return lambda: kernels.quantize(given, amax, orientations, planes)

        written = kernels.quantize(x, amax, orientations)
        nbytes = size([x, *written.values()])
        rows.append(line(f"{label} quantize {'+'.join(orientations)}", nbytes, quantize, copied))
    planes = kernels.quantize(x, amax, layout.orientations)
    planes |= {"amax": amax} if "amax" in layout.stored else {}

    def copies() -> dict[str, torch.Tensor]:
        return {plane: values.clone() for plane, values in planes.items()}

    if not layout.history:
        flags = (True,) if layout.swizzled else ()
        laid = kernels.lay_out(planes, m, k, layout.orientations, *flags)
        if hasattr(kernels, "quantize_buffers"):

            def to_buffers() -> Callable[[], object]:
                given = x.clone()
                return lambda: kernels.quantize_buffers(given, amax, layout.orientations, *flags)

            rows.append(line(f"{label} quantize_buffers", size([x, *laid.values()]), to_buffers, copied))
        held = {plane.data_ptr() for plane in planes.values()}
        made = [buffer for buffer in laid.values() if buffer.data_ptr() not in held]
        if made and dtype == torch.bfloat16:

            def lay_out() -> Callable[[], object]:
                given = copies()
                return lambda: kernels.lay_out(given, m, k, layout.orientations, *flags)

            read, wrote = size(planes.values()), size(made)
            rows.append(line(f"{label} lay_out", min(read, wrote) + wrote, lay_out, copied))
    for orientation in layout.orientations if dtype == torch.bfloat16 else ():

        def dequantize(orientation: str = orientation) -> Callable[[], object]:
            given = copies()
            return lambda: kernels.dequantize(given, m, k, orientation, torch.bfloat16)

        nbytes = x.numel() * 2 + size(planes[plane] for plane in layout.sources[orientation])
        rows.append(line(f"{label} dequantize {orientation}", nbytes, dequantize, copied))
    return rows


def copy_rates(shape: tuple[int, int]) -> tuple[float, float]:
    """Bytes a microsecond of a bf16 copy of this shape, read and written; timed as `line` times."""
    nbytes = 4 * shape[0] * shape[1]

    def make() -> Callable[[], object]:
        x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        y = torch.empty_like(x)
        return lambda: y.copy_(x)

    found = nbytes / rotated(make, nbytes), nbytes / median(make())
    torch.cuda.empty_cache()
    return found


def copy_rate(shape: tuple[int, int]) -> float:
    """The second of copy_rates."""
    return copy_rates(shape)[1]


def amaxes(shape: tuple[int, int], copied: tuple[float, float]) -> list[Row]:
    """The largest magnitude of a weight, and what torch takes for it."""
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(shape, device="cuda", dtype=dtype)
        assert same(launch.matrix_amax(x, None), tensor_amax(x))
        works: dict[str, Callable[[torch.Tensor], object]] = {
            "amax": lambda x: launch.matrix_amax(x, None),
            "vector_norm": lambda x: torch.linalg.vector_norm(x, torch.inf),
            "fill (writes)": lambda x: x.fill_(1.0),
        }
        for what, work in works.items():

            def make(work: Callable[[torch.Tensor], object] = work, x: torch.Tensor = x) -> Callable[[], object]:
                given = x.clone()
                return lambda: work(given)

            label = f"{what:14} {shape[0]}x{shape[1]} {str(dtype)[6:]:8}"
            rows.append(line(label, x.numel() * x.element_size(), make, copied))
    return rows


def compiled(name: str, shape: tuple[int, int], copied: float) -> None:
    """A recipe's kernel beside its reference under torch.compile, which may differ in bytes."""
    kernels, reference, layout = module(name, "kernels"), module(name, "reference"), module(name, "layout").LAYOUT
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02
    amax = importlib.import_module(f"layoutc.recipes.{name}").Tensor._shared_amax(x) if layout.shares_amax else None
    for orientations in (layout.orientations[:1], layout.orientations):
        planes = kernels.quantize(x, amax, orientations)
        nbytes = x.numel() * 2 + sum(plane.numel() * plane.element_size() for plane in planes.values())
        works: dict[str, Callable[[], object]] = {"kernel": lambda: kernels.quantize(x, amax, orientations, planes)}  # noqa: B023
        for mode in ("default", "max-autotune-no-cudagraphs"):
            torch._dynamo.reset()
            function = torch.compile(reference.quantize_reference, mode=mode, dynamic=False)
            found = function(x, amax=amax, orientations=orientations)
            equal = all(same(planes[plane], found[plane]) for plane in planes)
            label = f"torch.compile {mode.split('-no')[0]}{'' if equal else ' (other bytes)'}"
            works[label] = lambda f=function: f(x, amax=amax, orientations=orientations)  # noqa: B023
        for label, work in works.items():
            took = median(work)
            print(
                f"  {name} {'+'.join(orientations):20} {label:44} {took:9.1f} us {nbytes / took / copied:6.3f}",
                flush=True,
            )


def torchao_kernels(shape: tuple[int, int], copied: float) -> None:
    """torchao's Triton kernels that run on this card, beside the recipe of the same blocks."""
    from torchao.prototype.blockwise_fp8_training import kernels as ao

    m, k = shape
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02
    for label, function, scales in (
        ("1x128", ao.triton_fp8_blockwise_act_quant_lhs, m * k // 128),
        ("128x1", ao.triton_fp8_blockwise_act_quant_rhs, m * k // 128),
        ("128x1 transposed", ao.triton_fp8_blockwise_act_quant_transposed_lhs, m * k // 128),
        ("128x128", ao.triton_fp8_blockwise_weight_quant_rhs, m * k // 16384),
        ("128x128 transposed", ao.triton_fp8_blockwise_weight_quant_transposed_rhs, m * k // 16384),
    ):
        took = median(lambda f=function: f(x))
        nbytes = 3 * m * k + 4 * scales
        print(f"  torchao {label:20} {took:9.1f} us {nbytes / took / copied:6.3f}", flush=True)


def peers(chosen: list[str]) -> None:
    """Others at the first two shapes."""
    for shape in SHAPES[:2]:
        copied = copy_rate(shape)
        print(f"copy {shape}: {copied / 1e6:.3f} TB/s", flush=True)
        for name in chosen or ["fp8_current", "fp8_block", "mxfp8", "nvfp4"]:
            compiled(name, shape, copied)
        try:
            torchao_kernels(shape, copied)
        except ImportError as error:
            print("  torchao:", error)
        x = torch.randint(0, 255, shape, dtype=torch.uint8, device="cuda")
        took = median(lambda x=x: x.t().contiguous())
        print(f"  torch, bytes transposed {took:9.1f} us {2 * x.numel() / took / copied:6.3f}", flush=True)


def main() -> None:
    """See the module's docstring."""
    command, *chosen = sys.argv[1:] or ["check"]
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
    if command == "check":
        sys.exit(1 if check(chosen) else 0)
    if command == "peers":
        return peers(chosen)
    shapes = SHAPES if command == "time-all" else SHAPES[:1]
    rows: list[Row] = []
    for shape in shapes:
        copied = copy_rates(shape)
        print(f"copy {shape}: {copied[0] / 1e6:.3f} TB/s, flushed {copied[1] / 1e6:.3f}", flush=True)
        rows += amaxes(shape, copied)
        for dtype in (torch.bfloat16, torch.float32):
            for name in chosen or recipes():
                rows += measure(name, shape, dtype, copied)
    if out := os.environ.get("OUT"):
        Path(out, "kernels.json").write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
