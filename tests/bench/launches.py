"""Host time of launches on this card: python tests/bench/launches.py

Microseconds a call of 2000 calls without a synchronization, the best of five rounds; the card is idle before each. What
a call takes on the card is printed beside it: where that is longer, the host waits for it and its time is not its own.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl

from layoutc.runtime.kernels import amaxes
from layoutc.runtime.kernels import direct as triton_direct
from layoutc.runtime.kernels.launch_plan import LaunchPlan, launched

CALLS, ROUNDS = 2000, 5
SHAPE = (512, 4096)


@triton.jit
def empty_kernel(x, a, b, m, k, stride_m, stride_k, TILE: tl.constexpr, EVEN: tl.constexpr):
    """As many arguments as a small kernel has, and no work."""


def module(name: str, part: str) -> ModuleType:
    """A module of a recipe."""
    return importlib.import_module(f"layoutc.recipes.{name}.{part}")


def host(call: Callable[[], Any]) -> tuple[float, float]:
    """(microseconds of the host, microseconds until the card is done as well), a call."""
    for _ in range(20):
        call()
    found = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        issued = time.perf_counter() - start
        torch.cuda.synchronize()
        found.append((issued / CALLS * 1e6, (time.perf_counter() - start) / CALLS * 1e6))
    return min(found)


def show(label: str, call: Callable[[], Any]) -> None:
    """Prints one line."""
    issued, done = host(call)
    print(f"{label:<44} {issued:7.2f} us   {done:7.2f} us with the card")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Equal bytes in every plane."""
    return all(torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)) for name in a)


def main() -> None:
    """Prints the table; fails where a direct launch gives other bytes than an ordinary one."""
    print(f"torch {torch.__version__}, triton {triton.__version__}, {torch.cuda.get_device_name()}")
    print(f"direct launches: {'yes' if triton_direct.supported() else 'no, the ordinary way alone'}; {SHAPE}, bf16")
    x = torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16)
    a, b = torch.empty(64, device="cuda"), torch.empty(64, device="cuda")
    args = (x, a, b, *SHAPE, x.stride(0), x.stride(1), 128, True)
    options = {"num_warps": 1, "maxnreg": None, "enable_fp_fusion": False}
    show("empty kernel, Triton's launcher", lambda: empty_kernel[(1,)](*args, **options))
    show("empty kernel, by arguments", lambda: launched(empty_kernel, 1, args, 1))
    plan = LaunchPlan.of(empty_kernel, 1, args, 1)
    show("empty kernel, by a plan", lambda: plan(x, a, b))
    show("matrix_amax", lambda: amaxes.matrix_amax(x, None))
    for name in ("mxfp8", "nvfp4", "fp8_current"):
        show_recipe(name, x)


def show_recipe(name: str, x: torch.Tensor) -> None:
    """Prints the lines of one recipe."""
    recipe, kernels = importlib.import_module(f"layoutc.recipes.{name}"), module(name, "kernels").KERNELS
    layout = recipe.LAYOUT
    every, (m, k) = layout.orientations, SHAPE
    amax = recipe.Tensor.shared_amax(x) if layout.shares_amax else None
    out = kernels.quantize(x, amax, every)
    again = {plane: torch.zeros_like(stored) for plane, stored in out.items()}
    assert same(out, kernels.quantize(x, amax, every, again)), name  # the first was ordinary, the second direct
    q = recipe.quantize(x, amax=amax)
    held = q.planes()
    # As the launcher of Triton would: every other part of the host's work is the same.
    state_of, triton_direct.state_of = triton_direct.state_of, lambda _: None
    show(f"{name} kernels.quantize, out=, Triton's", lambda: kernels.quantize(x, amax, every, out))
    triton_direct.state_of = state_of
    show(f"{name} kernels.quantize, out=", lambda: kernels.quantize(x, amax, every, out))
    show(f"{name} kernels.quantize, new planes", lambda: kernels.quantize(x, amax, every))
    show(f"{name} kernels.dequantize", lambda: kernels.dequantize(held, m, k, every[0], torch.bfloat16))
    show(f"{name} kernels.quantize_buffers", lambda: kernels.quantize_buffers(x, amax, every))
    show(f"{name} kernels.lay_out", lambda: kernels.lay_out(held, m, k, every))
    show(f"{name} quantize(x, amax=, out=)", lambda: recipe.quantize(x, amax=amax, out=q))
    show(f"{name} quantize(x)", lambda: recipe.quantize(x))
    show(f"{name} dequantize()", q.dequantize)
    show(f"{name} buffers()", q.buffers)


if __name__ == "__main__":
    main()
