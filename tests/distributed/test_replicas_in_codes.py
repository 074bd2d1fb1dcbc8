"""Sums that replicas of a shard (HSDP) send each other as codes: those of a model in numpy, to the bit, on all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import mesh_of, on
from test_exchange import by_columns
from test_fsdp2_options import LOOPS, built, sharded, stepped, two_steps
from test_gradient_codes import (
    POLICY,
    SEED,
    added,
    are_shards_of,
    backward,
    gradients_alone,
    in_rows,
    is_that_of_fsdp2,
    seed_of,
    travelled,
    uneven,
)
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import layoutc
from layoutc.cli.reading import plan_of
from layoutc.estimate.state import wire_of
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.fsdp2 import replicas

SPECS = Path(__file__).parents[2] / "specs"
AMONG = 1  # in the seed of codes among replicas, after the rank
NAMES = "copies", "slices"


@contextmanager
def counted(ranks: int) -> Iterator[list[int]]:
    """Bytes that this rank sends to each other one in collectives of so many ranks, but for FSDP2's own."""
    sent: list[int] = []

    def counting(collective: Callable[..., Any], out: torch.Tensor, given: torch.Tensor, **kwargs: Any) -> Any:
        if kwargs["group"].size() == ranks:
            sent.append(given.nbytes // (ranks if collective is exchange else 1))
        return collective(out, given, **kwargs)

    exchange = dist.all_to_all_single
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", partial(counting, exchange))
        patch.setattr(replicas, "all_gather_single", partial(counting, replicas.all_gather_single))
        yield sent


def kept_of_shards(first: str | None, sent: dict[int, np.ndarray], own: int, step: int) -> np.ndarray:
    """(1, n): what a rank of one replica has left of gradients of its ranks."""
    if first is None:
        total: np.ndarray = reduce(np.add, sent.values())
    else:
        total = added(first, sent, step)
    return total[own : own + 1] / np.float32(len(sent))


@pytest.mark.parametrize(
    ("first", "among", "feeds_back", "all_reduces_later"),
    [
        ("grad_fp8", "grad_int4", False, False),
        ("grad_int4", "grad_fp8", False, True),
        (None, "grad_int4", True, False),
    ],
)
@on("four")
def test_sums_of_replicas_are_those_of_a_model_in_numpy(
    first: str | None, among: str, feeds_back: bool, all_reduces_later: bool
) -> None:
    """Two replicas of two ranks, two steps: codes of whole shards travel. all_reduces_later: of both steps' sums."""
    own = dist.get_rank() % 2
    model = uneven()
    fully_shard(model, mesh=mesh_of(2, 2, names=NAMES), mp_policy=POLICY)
    layoutc.exchange_gradients(model, first, replicas=among, seed=SEED, error_feedback=feeds_back and first is None)
    missed = [np.float32(0), np.float32(0)]
    before: list[np.ndarray] | None = None
    for step in range(2):
        grads = gradients_alone(step, 4, 2)
        shards = [
            kept_of_shards(first, {rank: grads[rank] for rank in (2 * at, 2 * at + 1)}, own, step) for at in range(2)
        ]
        model.zero_grad()
        later = all_reduces_later and step == 0
        model.set_requires_all_reduce(not later)
        with counted(2) as sent:
            backward(model, dist.get_rank(), step)
        if later:
            before = shards
            continue
        if before is not None:
            shards = [now + then for now, then in zip(shards, before, strict=True)]
        sums = step - all_reduces_later  # so many were made before
        codes = []
        for at, shard in enumerate(shards):
            whole = shard + missed[at]
            codes.append(travelled(among, whole, seed_of(0, 2 * at + own, AMONG) + sums))
            missed[at] = whole - codes[at] if feeds_back else missed[at]
        are_shards_of(model, ((codes[0] + codes[1]) / np.float32(2))[0], step)
        n = shards[0].size
        (explained,) = layoutc.explain_gradients(model)
        assert (explained.replicas, explained.among, explained.sends_among) == (2, among, sent[-1])
        assert (sent[-1], 0) == wire_of(plan_of(SPECS / f"{among}.yaml")).among(n, 2, 4)
        assert len(sent) == 2
        assert explained.keeps == (4 * n if feeds_back else 0)


class Branches(torch.nn.Module):
    """A layer of one row, of which the second of two ranks has none, and which steps may leave out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up, self.one = torch.nn.Linear(37, 75), torch.nn.Linear(75, 1, bias=False)

    def forward(self, x: torch.Tensor, leaves_out: bool) -> torch.Tensor:
        found: torch.Tensor = self.up(x)
        return found if leaves_out else found * self.one(found)


def loss_of(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    x = torch.randn(16, 37, generator=torch.Generator().manual_seed(rank + 10 * step)).to(torch.bfloat16)
    loss: torch.Tensor = model(x, step > 1).float().square().mean()
    return loss


def coded(recipe: str, values: np.ndarray, missed: dict[int, np.ndarray], rank: int, seed: int) -> np.ndarray:
    """What codes of values stand for, and of what a rank's codes missed before, where these were as many."""
    before = missed.get(rank)
    whole = values + (before if before is not None and before.shape == values.shape else np.float32(0))
    found = travelled(recipe, whole, seed)
    missed[rank] = whole - found
    return found


@on("four")
def test_misses_of_both_levels_are_sent_later_and_short_shards_too() -> None:
    """Error feedback of both levels, of parameters that are all there in two steps, and not in the next two."""
    own = dist.get_rank() % 2
    model = fully_shard(Branches(), mesh=mesh_of(2, 2, names=NAMES), mp_policy=POLICY)
    layoutc.exchange_gradients(model, "grad_int4", replicas="grad_fp8", seed=SEED, error_feedback=True)
    missed: dict[int, np.ndarray] = {}
    missed_of_sums: dict[int, np.ndarray] = {}
    for step in range(4):
        alone, sums = Branches().to(torch.bfloat16), []
        for at in range(2):
            sent = []
            for rank in (2 * at, 2 * at + 1):
                alone.zero_grad()
                loss_of(alone, rank, step).backward()
                rows = in_rows((one.grad for one in alone.parameters() if one.grad is not None), 2)
                sent.append(coded("grad_int4", rows, missed, rank, seed_of(0, rank) + step))
            shard = (sent[0] + sent[1])[own : own + 1] / np.float32(2)
            rank = 2 * at + own
            sums.append(coded("grad_fp8", shard, missed_of_sums, rank, seed_of(0, rank, AMONG) + step))
        model.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        assert (model.one.weight.grad is None) == (step > 1)
        are_shards_of(model, ((sums[0] + sums[1]) / np.float32(2))[0], step, alone)


@on("four")
def test_parts_are_added_up_where_that_is_fewer_bytes() -> None:
    """Four replicas, sums in bf16: each adds up a quarter, whose sums the others are sent."""
    among = "grad_fp8"
    model, rank = uneven(), dist.get_rank()
    fully_shard(model, mesh=mesh_of(4, 1, names=NAMES), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    layoutc.exchange_gradients(model, replicas=among, seed=SEED)
    for step in range(2):
        grads = gradients_alone(step, 4, 1)
        n = grads[0].size
        part = -(-n // 512) * 128
        rows = {rank: np.pad(one, ((0, 0), (0, 4 * part - n))).reshape(4, part) for rank, one in grads.items()}
        total = added(among, rows, step, AMONG) / np.float32(4)
        expected = torch.from_numpy(total.reshape(-1)[:n]).to(torch.bfloat16).float().numpy()
        model.zero_grad()
        with counted(4) as sent:
            backward(model, rank, step)
        are_shards_of(model, expected)
        (explained,) = layoutc.explain_gradients(model)
        assert explained.sends_among == 3 * sum(sent)
        assert tuple(sent) == wire_of(plan_of(SPECS / f"{among}.yaml")).among(n, 4, 2)


def all_reduced_later(model: Any) -> Any:
    model.set_requires_all_reduce(False)
    return two_steps(model, lambda: model.set_requires_all_reduce(True))


# FSDP2's loops; dtypes of sums, of which 16 bits take parts; columns; CPU offload.
WAYS: dict[str, tuple[str, Callable[[Any], Any], dict[str, Any]]] = {
    "sums in fp16": ("plain", two_steps, {"mp_policy": MixedPrecisionPolicy(torch.float16, torch.float16)}),
    "all-reduced later": ("cast", all_reduced_later, {}),
    **{name: ("plain", LOOPS[name], {}) for name in ("gradients_later", "summed", "left_out", "hooked")},
    "by columns": ("cast", two_steps, {"shard_placement_fn": by_columns}),
    "sums in fp32": ("plain", two_steps, {"mp_policy": MixedPrecisionPolicy()}),
    "offloaded": ("plain", two_steps, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "clipped": ("quantized", LOOPS["clipped"], {}),
    "kept after forward": ("quantized", LOOPS["kept_after_forward"], {}),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", WAYS)
@on("four")
def test_all_that_fsdp2_all_reduces_travels_as_codes(name: str) -> None:
    use, loop, options = WAYS[name]
    is_that_of_fsdp2(use, loop, "grad_fp8", mesh=mesh_of(2, 2, names=NAMES), **options)


@on("four")
def test_replicas_are_needed_and_a_second_call_takes_effect() -> None:
    """Without replicas nothing is to be sent; a second call without a recipe for them leaves FSDP2 its all-reduce."""
    with pytest.raises(LayoutError, match="replicas='grad_fp8', but no shard of this model has replicas"):
        layoutc.exchange_gradients(sharded(built("fp8_block", "plain"), mp_policy=POLICY), replicas="grad_fp8")
    model = sharded(built("fp8_block", "plain"), mp_policy=POLICY, mesh=mesh_of(2, 2, names=NAMES))
    with pytest.raises(LayoutError, match="nvfp4 can't hold gradients on the wire"):
        layoutc.exchange_gradients(model, replicas="nvfp4")
    assert {one.among for one in layoutc.explain_gradients(model)} == {"all-reduce"}
    layoutc.exchange_gradients(model, replicas="grad_fp8")
    (line, *_) = map(str, layoutc.explain_gradients(model))
    assert "over 2 ranks, 263168 bytes, grad_fp8 among 2 replicas, 135696 bytes" in line, line
    layoutc.exchange_gradients(model)
    assert {one.among for one in layoutc.explain_gradients(model)} == {"all-reduce"}
    with counted(2) as sent:
        stepped(model, 0)
    assert len(sent) == len(model)  # of shards alone


@on("four")
def test_infinity_and_nan_arrive_at_all_replicas() -> None:
    for bad in (float("inf"), float("nan")):
        model = torch.nn.Sequential(torch.nn.Linear(256, 256, bias=False))
        fully_shard(model, mp_policy=POLICY, mesh=mesh_of(2, 2, names=NAMES))
        layoutc.exchange_gradients(model, replicas="grad_int4")
        x = torch.zeros(1, 256)
        x[0, 3] = bad if dist.get_rank() == 3 else 1.0
        model(x).float().sum().backward()
        grad: Any = model[0].weight.grad
        assert not grad.to_local()[:, :128].isfinite().any()
        assert grad.to_local()[:, 128:].isfinite().all()
