"""Kernels of every recipe on this card, compared with the reference byte for byte.

    python tests/bench/kernels.py check [RECIPE...] every recipe, ragged shapes, special values, all dtypes

Among them those of tests/unshipped, whose blocks are of other sizes than any shipped recipe has, and those of
tests/unshipped/exchanged, whose codes lie in other orders.
`layoutc bench` times them.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch
import triton

import layoutc.recipes
from layoutc.bench.peers import same
from layoutc.runtime.weight.returned_buffers import by_reference

sys.path.insert(0, str(Path(__file__).parent.parent / "helpers"))
import unshipped

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SPECIAL = [float("nan"), -float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 3.4e38, 1e-45, -1e-40, 448.0, -6.0, 2.5]


def module(name: str, part: str) -> ModuleType:
    """A module of a recipe."""
    return importlib.import_module(f"layoutc.recipes.{name}.{part}")


def recipes() -> list[str]:
    """Recipes that have kernels, and those that nobody ships."""
    folder = Path(layoutc.recipes.__file__).parent
    made = [*unshipped.add_all(), *unshipped.add_all(unshipped.EXCHANGED)]
    return [*sorted(path.parent.name for path in folder.glob("*/kernels.py")), *filter(has_kernels, made)]


def has_kernels(name: str) -> bool:
    """Whether a package has Triton kernels."""
    return importlib.util.find_spec(f"layoutc.recipes.{name}.kernels") is not None


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


def check(chosen: list[str]) -> int:
    """Prints every difference from the reference, run on the CPU and on the card; returns how many."""
    bad = runs = 0
    for name in chosen or recipes():
        unshipped.add_if_known(name)
        reference, kernels, layout = (
            module(name, "reference"),
            module(name, "kernels").KERNELS,
            module(name, "layout").LAYOUT,
        )
        cls = importlib.import_module(f"layoutc.recipes.{name}").Tensor
        for shape in [
            (1, 1),
            (7, 33),
            (32, 32),
            (64, 160),
            (130, 257),
            (160, 288),
            (480, 960),
            (512, 4096),
            (1056, 2080),
        ]:
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
                        amax = cls.shared_amax(given)
                        if not same(amax, cls.shared_amax(card).cpu()):
                            bad += 1
                            print("DIFFERS", name, shape, kind, dtype, "amax")
                    for orientations in {layout.orientations, *((o,) for o in layout.orientations)}:
                        # The reference runs on the CPU and on the card; of large weights, on the card alone.
                        shared = amax.cuda() if amax is not None else None
                        seed = {"seed": torch.tensor([m * k])} if layout.stochastic else {}
                        there = {n: one.cuda() for n, one in seed.items()}
                        on_card = reference.quantize_reference(card, amax=shared, orientations=orientations, **there)
                        expected = {plane: values.cpu() for plane, values in on_card.items()}
                        if m * k < 100_000:
                            expected = reference.quantize_reference(given, amax=amax, orientations=orientations, **seed)
                        out = {
                            n: torch.full_like(p, 0x5A if p.dtype == torch.uint8 else 6e4).cuda()
                            for n, p in expected.items()
                        }
                        makers = {"reference": on_card}
                        if kernels.quantize_tile is not None:
                            makers["kernel"] = kernels.quantize(card, shared, orientations, out, **there)
                            turned = card.t().contiguous().t()
                            makers["strided"] = kernels.quantize(turned, shared, orientations, **there)
                        runs += 1
                        for plane, value in expected.items():
                            for which, found in makers.items():
                                if not same(value, found[plane].cpu()):
                                    bad += 1
                                    where = (value != found[plane].cpu()).nonzero()[:2].tolist()
                                    pair = [(value[tuple(i)].item(), found[plane][tuple(i)].item()) for i in where]
                                    print("DIFFERS", which, name, shape, kind, dtype, orientations, plane, where, pair)
                        planes = {**expected, "amax": layout.stored_amax(amax)} if amax is not None else expected
                        moved = {n: p.cuda() for n, p in planes.items()}
                        planes = planes if m * k < 100_000 else moved
                        if not layout.history:
                            laid = by_reference(layout, reference, planes, (m, k), orientations)
                            for swizzled in (False, True) if layout.swizzled else (False,):
                                flags = (swizzled,) if layout.swizzled else ()
                                made = {"lay_out": kernels.lay_out(moved, m, k, orientations, *flags)}
                                if kernels.buffer_sizes is not None:
                                    made["buffers"] = kernels.quantize_buffers(
                                        card, shared, orientations, *flags, **there
                                    )
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


def main() -> None:
    """See the module's docstring."""
    command, *chosen = sys.argv[1:] or ["check"]
    if command != "check":
        sys.exit("times are measured by `layoutc bench`, or `python -m layoutc.bench`; this file only checks bytes")
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
    sys.exit(1 if check(chosen) else 0)


if __name__ == "__main__":
    main()
