"""Kernels of every recipe on this card: checked against the reference byte for byte, then timed.

    python tests/bench/kernels.py check            every recipe, ragged shapes, special values, all dtypes
    python tests/bench/kernels.py time [RECIPE...] medians in us and share of the bandwidth of a copy of the same size
    python tests/bench/kernels.py time-all         the same at every shape
    python tests/bench/kernels.py peers            the reference under torch.compile, and torchao's kernels

A share counts the fewest bytes that the work can move (x in, planes out) over the time, against those of a bf16 copy of
the same shape over its own. L2 is flushed before every run, and outputs are allocated beforehand.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
import triton

import layoutc.recipes
from layoutc.runtime import launch
from layoutc.runtime.numerics import tensor_amax

SHAPES = [(8192, 8192), (4096, 14336), (14336, 4096), (131072, 7168), (4096, 4096), (512, 4096), (4100, 5120)]
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


def check() -> int:
    """Prints every difference from the reference, run on the CPU and on the card; returns how many."""
    bad = runs = 0
    for name in recipes():
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
                        expected = reference.quantize_reference(given, amax=amax, orientations=orientations)
                        out = {
                            n: torch.full_like(p, 0x5A if p.dtype == torch.uint8 else 1e30).cuda()
                            for n, p in expected.items()
                        }
                        shared = amax.cuda() if amax is not None else None
                        made = kernels.quantize(card, shared, orientations, out)
                        strided = kernels.quantize(card.t().contiguous().t(), shared, orientations)
                        on_card = reference.quantize_reference(card, amax=shared, orientations=orientations)
                        runs += 1
                        for plane, value in expected.items():
                            for which, found in (("kernel", made), ("strided", strided), ("reference", on_card)):
                                if not same(value, found[plane].cpu()):
                                    bad += 1
                                    where = (value != found[plane].cpu()).nonzero()[:2].tolist()
                                    pair = [(value[tuple(i)].item(), found[plane][tuple(i)].item()) for i in where]
                                    print("DIFFERS", which, name, shape, kind, dtype, orientations, plane, where, pair)
                        planes = {**expected, "amax": amax} if amax is not None else expected
                        if not layout.history:
                            moved = {n: p.cuda() for n, p in planes.items()}
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
                                        if not same(entries, found[buffer].cpu()):
                                            bad += 1
                                            print("DIFFERS", which, name, shape, kind, orientations, buffer)
                        for orientation in orientations:
                            values = reference.dequantize_reference(planes, m, k, orientation)
                            for to in DTYPES:
                                moved = {n: p.cuda() for n, p in planes.items()}
                                if not same(values.to(to), kernels.dequantize(moved, m, k, orientation, to).cpu()):
                                    bad += 1
                                    print("DIFFERS dequantize", name, shape, kind, dtype, orientation, to)
                if bad > 40:
                    return bad
        print(f"{name}: compared", flush=True)
    print(f"{runs} quantizations compared, {bad} differences")
    return bad


def median(work: Callable[[], object]) -> float:
    """Microseconds."""
    return float(triton.testing.do_bench(work, warmup=15, rep=60, return_mode="median")) * 1e3


def measure(name: str, shape: tuple[int, int], dtype: torch.dtype, copied: float) -> list[dict[str, object]]:
    """Times of one recipe's kernels at a shape."""
    kernels, layout = module(name, "kernels"), module(name, "layout").LAYOUT
    cls = importlib.import_module(f"layoutc.recipes.{name}").Tensor
    try:
        m, k = layout.check_shape(shape)
    except ValueError:
        return []
    x = torch.randn(m, k, device="cuda", dtype=dtype) * 0.02
    amax = cls._shared_amax(x) if layout.shares_amax else None
    found = []

    def note(what: str, nbytes: int, work: Callable[[], object]) -> None:
        took = median(work)
        share = nbytes / took / copied
        found.append(
            {"recipe": name, "what": what, "shape": shape, "dtype": str(dtype)[6:], "us": took, "share": share}
        )
        print(f"  {name:18} {what:24} {m}x{k} {str(dtype)[6:]:9} {took:9.1f} us  {share:6.3f}", flush=True)

    inward = x.numel() * x.element_size()
    options = {layout.orientations, *((o,) for o in layout.orientations)}
    for orientations in sorted(options, key=len):
        planes = kernels.quantize(x, amax, orientations)
        nbytes = inward + sum(p.numel() * p.element_size() for p in planes.values())
        note(
            "quantize " + "+".join(orientations),
            nbytes,
            lambda o=orientations, p=planes: kernels.quantize(x, amax, o, p),
        )
    planes = kernels.quantize(x, amax, layout.orientations)
    planes |= {"amax": amax} if "amax" in layout.stored else {}
    if dtype == torch.bfloat16 and not layout.history:
        laid = kernels.lay_out(planes, m, k, layout.orientations)
        held = {p.data_ptr() for p in planes.values()}
        made = [b for b in laid.values() if b.data_ptr() not in held]
        if made:
            read, written = (sum(p.numel() * p.element_size() for p in some) for some in (planes.values(), made))
            note("lay_out", min(read, written) + written, lambda: kernels.lay_out(planes, m, k, layout.orientations))
    for orientation in layout.orientations:
        used = [planes[n] for n in layout.sources[orientation]]
        nbytes = x.numel() * 2 + sum(p.numel() * p.element_size() for p in used)
        note(
            f"dequantize {orientation}",
            nbytes,
            lambda o=orientation: kernels.dequantize(planes, m, k, o, torch.bfloat16),
        )
    return found


def copy_rate(shape: tuple[int, int]) -> float:
    """Bytes a microsecond of a bf16 copy of this shape, read and written."""
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    return 2 * x.numel() * x.element_size() / median(lambda: y.copy_(x))


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
        sys.exit(1 if check() else 0)
    if command == "peers":
        return peers(chosen)
    shapes = SHAPES if command == "time-all" else SHAPES[:1]
    rows: list[dict[str, object]] = []
    for shape in shapes:
        copied = copy_rate(shape)
        print(f"copy {shape}: {copied / 1e6:.3f} TB/s", flush=True)
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.randn(shape, device="cuda", dtype=dtype)
            took = median(lambda x=x: launch.matrix_amax(x, None))
            norm = median(lambda x=x: torch.linalg.vector_norm(x, torch.inf))
            assert same(launch.matrix_amax(x, None), tensor_amax(x))
            nbytes = x.numel() * x.element_size()
            print(f"  amax {dtype}: {took:.1f} us {nbytes / took / copied:.3f}; vector_norm {norm:.1f} us", flush=True)
            del x
            for name in chosen or recipes():
                rows += measure(name, shape, dtype, copied)
    if out := os.environ.get("OUT"):
        Path(out, "kernels.json").write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
