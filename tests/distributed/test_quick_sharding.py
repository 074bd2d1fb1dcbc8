"""Decisions about shardings that are repeated for other shapes are those that DTensor makes for each by itself."""

from __future__ import annotations

from typing import Any

import pytest
import quick_sharding
import torch
from harness import Ranks, mesh_of
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

OPERATORS = {
    "zeros_like": lambda a, b: torch.zeros_like(a),
    "zeros_like of bf16": lambda a, b: torch.zeros_like(a, dtype=torch.bfloat16),
    "sqrt": lambda a, b: a.abs().sqrt(),
    "div": lambda a, b: a / b,
    "div by a number": lambda a, b: a / 3.0,
    "mul_": lambda a, b: a.clone().mul_(b),
    "mul_ by a number": lambda a, b: a.clone().mul_(0.9),
    "add_": lambda a, b: a.clone().add_(b, alpha=2.0),
    "addcdiv_": lambda a, b: a.clone().addcdiv_(a, b, value=-0.1),
    "addcmul_": lambda a, b: a.clone().addcmul_(a, b, value=0.5),
    "detach": lambda a, b: a.detach(),
    "copy_": lambda a, b: a.clone().copy_(b),
    "lerp_": lambda a, b: a.clone().lerp_(b, 0.25),
}
SHAPES = ((8, 6), (3, 6), (1, 5), (16, 2), (7,), (2, 3, 4))
PLACEMENTS: tuple[tuple[Placement, Placement], ...] = (
    *((each, each) for each in (Shard(0), Replicate(), Partial())),
    *((Shard(0), Replicate()), (Shard(0), Partial()), (Replicate(), Shard(0))),
)


def decisions() -> int:
    """Results and where they lie, as of this torch's own propagation; how many shapes have asked it nothing."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    name, mesh = "propagate_op_sharding_non_cached", mesh_of(2)
    quick = getattr(ShardingPropagator, name)
    asked: list[Any] = []
    propagator: Any = DTensor._op_dispatcher.sharding_propagator

    def answers(own: bool) -> list[Any]:
        plain = quick.__wrapped__
        setattr(ShardingPropagator, name, plain if own else quick)
        propagator.propagate_op_sharding.cache_clear()
        torch._C._clear_DTensor_sharding_propagator_cache()
        found = []
        for shape in SHAPES:
            generator = torch.Generator().manual_seed(1)
            one, two = (torch.rand(shape, generator=generator) + 1 for _ in "ab")
            for placements in PLACEMENTS:
                a, b = (
                    distribute_tensor(x, mesh, [Replicate()]).redistribute(placements=[each])
                    if not each.is_partial()
                    else DTensor.from_local(x / 2, mesh, [each])
                    for x, each in zip((one, two), placements, strict=True)
                )
                for operator in OPERATORS.values():
                    try:
                        made = operator(a, b)
                    except RuntimeError as error:
                        found.append(str(error))
                        continue
                    found.append((made.placements, made.shape, made.stride(), made.dtype, made._local_tensor.tolist()))
        return found

    original = quick_sharding.stays
    quick_sharding.stays = lambda *args: (asked.append(args), original(*args))[1]
    try:
        expected, found, again = answers(True), answers(False), answers(False)
    finally:
        quick_sharding.stays = original
        setattr(ShardingPropagator, name, quick)
    assert found == expected
    assert again == expected
    return len(asked)


@pytest.mark.thorough
def test_decisions_are_dtensors_own(two: Ranks) -> None:
    """Of operands that lie alike and of others, of shapes with rows for each rank and without."""
    asked = two.run(decisions)
    alike = 2 * len(OPERATORS) + 2 * len(OPERATORS)
    assert all(0 < count < 3 * alike for count in asked), asked
