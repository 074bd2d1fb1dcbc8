"""Gradients that travel as codes: sums are those of a model in numpy, to the bit, on two, three and four ranks."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterable, Mapping
from functools import cache, reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import unshipped
from harness import Ranks, mesh_of, on
from test_exchange import by_columns, counted, gradients
from test_fsdp2_options import LOOPS, built, sharded, stepped, two_steps
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import layoutc
from layoutc.build import operands
from layoutc.conformance.model.weights import Model
from layoutc.layout import layout
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.fsdp2 import exchange
from layoutc.runtime.fsdp2.replicas import Sender
from layoutc.runtime.kernels.rank_chunks import Chunks
from layoutc.runtime.kernels.rank_sums import Codes, sum_in_order
from layoutc.runtime.torch_private import local_tensor

SPECS = Path(__file__).parents[2] / "specs"
POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=True)
SEED = 0x9E3779B97F4A7C15F39CC0605CEDC834 % 2**63


@cache
def model_of(recipe: str) -> layout.Layout:
    path = SPECS / f"{recipe}.yaml"
    spec, _ = operands.read_spec(path.read_bytes(), str(path))
    assert spec is not None
    return layout.resolve(spec)


def seed_of(*numbers: int) -> int:
    """SplitMix64 of the seed and other numbers, by numpy."""
    state = np.uint64(0)
    with np.errstate(over="ignore"):
        for number in (SEED, *numbers):
            state += np.uint64(number) + np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state ^= state >> np.uint64(31)
    return int(state.astype(np.int64))


def in_rows(grads: Iterable[Tensor], ranks: int, columns: bool = False) -> np.ndarray:
    """Each rank's rows of each gradient, filled up with zeros, one after the other: (ranks, n) fp32. columns: its
    entries of the last dim instead."""
    rows: list[list[np.ndarray]] = [[] for _ in range(ranks)]
    for grad in grads:
        values = grad.float().numpy()
        if columns:
            for row, chunk in zip(rows, np.split(values, ranks, axis=-1), strict=True):
                row.append(chunk.reshape(-1))
            continue
        each = -(-len(values) // ranks)
        for rank in range(ranks):
            chunk = np.zeros((each, *values.shape[1:]), np.float32)
            own = values[rank * each : (rank + 1) * each]
            chunk[: len(own)] = own
            rows[rank].append(chunk.reshape(-1))
    return np.stack([np.concatenate(row) for row in rows])


def travelled(recipe: str, values: np.ndarray, seed: int) -> np.ndarray:
    """What codes of a rank's rows stand for."""
    n = values.shape[1]
    filled = np.pad(values, ((0, 0), (0, -n % 128)))
    model = Model(model_of(recipe), seed=seed)
    return model.values(model.quantize(filled), "rowwise", *filled.shape)[:, :n]


def added(recipe: str, sent: Mapping[int, np.ndarray], step: int, *more: int) -> np.ndarray:
    """(rows, n): what of each row is kept of what ranks have sent, in fp32, before it is divided. more: of the seed."""
    arrived = [travelled(recipe, rows, seed_of(0, rank, *more) + step) for rank, rows in sent.items()]
    found: np.ndarray = reduce(np.add, arrived)
    return found


def uneven(width: int = 37) -> nn.Sequential:
    """37 rows, whose last rank has fewer; 2 rows, of which some ranks have none; no multiples of blocks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 74), nn.GELU(), nn.Linear(74, width, bias=False), nn.Linear(width, 2))


def backward(model: nn.Module, rank: int, step: int) -> None:
    """Of data that each rank has others of in each step, in magnitudes that show the order of additions."""
    (width,) = {layer.in_features for layer in model.modules() if isinstance(layer, nn.Linear)} - {74}
    x = torch.randn(16, width, generator=torch.Generator().manual_seed(rank + 10 * step)).to(torch.bfloat16)
    (model(x).float().square().mean() * 1000.0**rank).backward()


def gradients_alone(step: int, ranks: int, over: int, width: int = 37, columns: bool = False) -> dict[int, np.ndarray]:
    """Of each rank, by a model that is not sharded: as in_rows, for `over` ranks."""
    found = {}
    for rank in range(ranks):
        alone = uneven(width).to(torch.bfloat16)
        backward(alone, rank, step)
        found[rank] = in_rows((param.grad for param in alone.parameters() if param.grad is not None), over, columns)
    return found


def are_shards_of(model: nn.Module, expected: np.ndarray, step: int = 0, alone: nn.Module | None = None) -> None:
    """A rank's gradients lie in `expected`, one after the other, each padded to the rows of the first rank. alone: the
    same model, not sharded."""
    at = 0
    for param, whole in zip(model.parameters(), (alone or uneven()).parameters(), strict=True):
        grad: Any = param.grad
        if grad is None:
            continue
        own, over = grad.to_local(), grad.device_mesh.size(-1)
        assert own.numpy().tobytes() == expected[at : at + own.numel()].tobytes(), (step, own.shape)
        rows = whole.shape[0] if grad.placements[-1].dim == 0 else None
        at += own.numel() if rows is None else -(-rows // over) * (whole.numel() // rows)
    assert at == len(expected)


WAYS_TO_SHARD: dict[str, dict[str, Any]] = {
    "rows": {},
    "columns": {"shard_placement_fn": by_columns},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


@pytest.mark.parametrize(
    ("recipe", "ranks", "way"),
    [
        *(("grad_fp8", 2, "rows"), ("grad_int4", 3, "rows"), ("grad_fp8", 4, "rows")),
        *(("grad_fp8", 2, "columns"), ("grad_int4", 2, "columns")),
        *(("grad_fp8", 3, "offloaded"), ("grad_int4", 4, "offloaded")),
    ],
)
@on("four")
def test_sums_are_those_of_a_model_in_numpy(recipe: str, ranks: int, way: str) -> None:
    """Two steps: random bits are others in each."""
    rank, mesh, columns = dist.get_rank(), mesh_of(ranks), way == "columns"
    if rank >= ranks:
        return
    width = 36 if columns else 37
    model = uneven(width)
    fully_shard(model, mesh=mesh, mp_policy=POLICY, **WAYS_TO_SHARD[way])
    layoutc.exchange_gradients(model, recipe, seed=SEED)
    for step in range(2):
        sent = gradients_alone(step, ranks, ranks, width, columns)
        expected = added(recipe, sent, step)[rank] / np.float32(ranks)
        model.zero_grad()
        with counted() as bytes_sent:
            backward(model, rank, step)
        are_shards_of(model, expected)
        assert not bytes_sent["reduce-scatters"]
        ((dtype, nbytes),) = bytes_sent["exchanges"]
        assert dtype is torch.uint8
        blocks = -(-len(expected) // 128)
        assert nbytes == ranks * (blocks * {"grad_fp8": 128, "grad_int4": 64}[recipe] + -(-4 * blocks // 16) * 16)


class Lossless:
    """In place of a recipe: gradients travel in fp32, so that sums of two ranks are those of FSDP2."""

    def __init__(self, recipe: str) -> None:
        self.layout = SimpleNamespace(name=recipe, multiple_k=128)

    def row(self, n: int) -> SimpleNamespace:
        return SimpleNamespace(nbytes=4 * n)

    def reads(self, chunks: Chunks) -> bool:
        return False

    def quantize(self, values: Tensor, seed: Tensor, rest: Tensor | None) -> Tensor:
        assert rest is None
        return values.float().view(torch.uint8)

    def add(self, rows: Tensor, out: Tensor, number: float, divides: bool, seed: Tensor) -> None:
        total = sum_in_order(rows.view(torch.float32))
        out.copy_(total / number if divides else total * number)


def is_that_of_fsdp2(use: str, loop: Callable[[Any], Any], replicas: str | None = None, **options: Any) -> None:
    """Values and gradients, with codes that lose nothing; all travel as these."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "Codes", Lossless)
        for exchanges in (False, True):
            model = sharded(built("fp8_block", use), **{"mp_policy": POLICY, **options})
            if exchanges:
                layoutc.exchange_gradients(model, "grad_fp8", replicas=replicas)
            with counted() as sent:
                values = loop(model)
            found.append((values, gradients(model)))
    (values, expected), (others, theirs) = found
    assert all(map(torch.equal, values, others))
    assert theirs.keys() == expected.keys()
    assert expected
    for name, grad in expected.items():
        assert torch.equal(theirs[name], grad), name
        assert theirs[name].dtype is grad.dtype
    assert sent["exchanges"]
    assert not sent["reduce-scatters"]


class Experts(nn.Module):
    """A matrix for each of four, one of which no token goes to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 32, 16, generator=torch.Generator().manual_seed(3)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("etm,emk->etk", x, self.weight[:3])


@on("two")
def test_gradients_of_experts() -> None:
    """Cut on experts and on their rows: as a reduce-scatter."""
    for dim in (0, 1):
        found = []
        for exchanges in (False, True):
            model = fully_shard(Experts(), mp_policy=POLICY, shard_placement_fn=lambda _, dim=dim: Shard(dim))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(exchange, "Codes", Lossless)
                if exchanges:
                    layoutc.exchange_gradients(model, "grad_fp8")
            model(torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(dist.get_rank()))).sum().backward()
            found.append(local_tensor(model.weight.grad))
        assert torch.equal(*found)
        assert found[0].shape == ((2, 32, 16), (4, 16, 16))[dim]


@pytest.mark.thorough
@on("two")
def test_masters_and_clipping_take_sums_of_codes() -> None:
    """Steps with codes lower the loss as much as those without do, within a fifth."""
    gains = []
    for recipe in (None, "grad_fp8", "grad_int4"):
        model = sharded(built("nvfp4", "quantized"), mp_policy=POLICY)
        if recipe is not None:
            layoutc.exchange_gradients(model, recipe)
        optimizer = layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-3)
        losses = []
        for _ in range(6):
            losses.append(float(stepped(model, 0)))
            norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            assert norm.full_tensor().isfinite()
            optimizer.step()
            optimizer.zero_grad()
        gains.append(losses[0] - losses[-1])
    assert gains[0] > 0
    assert all(0.8 * gains[0] < gain < 1.2 * gains[0] for gain in gains), gains


def frozen(model: Any) -> Any:
    for block in list(model)[:2]:
        block.up.weight.requires_grad_(False)
    return two_steps(model)


# FSDP2's loops; dtypes of sums; columns; CPU offload; frozen weights.
WAYS: dict[str, tuple[str, Callable[[Any], Any], dict[str, Any]]] = {
    "clipped": ("quantized", LOOPS["clipped"], {}),
    "by columns": ("cast", two_steps, {"shard_placement_fn": by_columns}),
    **{
        name: ("plain", LOOPS[name], {})
        for name in ("gradients_later", "summed", "left_out", "hooked", "backward_twice")
    },
    "sums in fp32": ("plain", two_steps, {"mp_policy": MixedPrecisionPolicy()}),
    "sums in bf16": ("plain", two_steps, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}),
    "sums in fp16": ("plain", two_steps, {"mp_policy": MixedPrecisionPolicy(torch.float16, torch.float16)}),
    "offloaded": ("plain", two_steps, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "frozen": ("plain", frozen, {}),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", WAYS)
@on("two")
def test_all_that_fsdp2_reduces_travels_as_codes(name: str) -> None:
    use, loop, options = WAYS[name]
    is_that_of_fsdp2(use, loop, **options)


def replicas() -> None:
    """Shards of two ranks, and two copies of them, which FSDP2 sums."""
    is_that_of_fsdp2("plain", two_steps, mesh=mesh_of(2, 2, names=("copies", "slices")))


def test_replicas_are_summed_by_fsdp2(four: Ranks) -> None:
    four.run(replicas)


@on("two")
def test_factors_and_other_operations() -> None:
    """By a factor, as NCCL would multiply before sums; a sum that is none is left to FSDP2, which is said once."""
    premultiplied = dist._make_nccl_premul_sum(0.25)
    values = torch.randn(2, 256, generator=torch.Generator().manual_seed(dist.get_rank()))
    kept = []
    for op in (premultiplied, dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        made = exchange.ExchangeOfCodes(2, Sender(Codes("grad_fp8"), 7, False), "layer")
        out = torch.empty(256)
        for _ in range(2):
            buffer = made.joined([values], 2, 512, torch.float32)
            if op is dist.ReduceOp.MAX:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(exchange, "reduce_scatter_single", lambda output, *_, **__: output.fill_(1))
                    if made.sender.left:
                        made(out, buffer, dist.group.WORLD, op)
                    else:
                        with pytest.warns(UserWarning, match="gradients of layer are reduced by FSDP2's own"):
                            made(out, buffer, dist.group.WORLD, op)
            else:
                made(out, buffer, dist.group.WORLD, op)
        kept.append(out)
    assert torch.equal(kept[0], kept[1] * 0.25)
    assert kept[2].eq(1).all()


@on("two")
def test_infinity_and_nan_arrive() -> None:
    """They reach the gradients of all ranks, as a GradScaler looks for them; other blocks stay finite."""
    for bad in (float("inf"), float("nan")):
        for recipe in ("grad_fp8", "grad_int4"):
            model = nn.Sequential(nn.Linear(256, 256, bias=False))
            fully_shard(model, mp_policy=POLICY)
            layoutc.exchange_gradients(model, recipe)
            x = torch.zeros(1, 256)
            x[0, 3] = bad if dist.get_rank() == 1 else 1.0
            model(x).float().sum().backward()
            grad: Any = local_tensor(model[0].weight.grad)
            assert not grad[:, :128].isfinite().any()
            assert grad[:, 128:].isfinite().all()


@on("two")
def test_what_codes_miss_is_sent_later() -> None:
    """What was sent of all steps is all gradients but for what the last step has missed; without, small ones are lost.
    fp8_block_1d rounds to nearest, as any recipe of one's own may."""
    rank = dist.get_rank()
    steps = 8
    grads = [torch.full((2, 256), 2.0**-21 * (1 + rank)) for _ in range(steps)]
    for grad in grads:
        grad[:, ::128] = 1.0
    for feeds_back in (False, True):
        made = exchange.ExchangeOfCodes(2, Sender(Codes("fp8_block_1d"), 0, feeds_back), "")
        total = torch.zeros(256)
        for grad in grads:
            out = torch.empty(256)
            made(out, made.joined([grad], 2, 512, torch.float32), dist.group.WORLD, dist.ReduceOp.SUM)
            total += out
        small = total.view(2, 128)[:, 1:]
        if feeds_back:
            rest: Any = made.sender.rest
            missed = [torch.empty_like(rest) for _ in range(2)]
            dist.all_gather(missed, rest)
            assert torch.equal(
                small + sum(missed)[rank].view(2, 128)[:, 1:], torch.full_like(small, steps * 3 * 2**-21)
            )
            assert small.gt(0).all()
        else:
            assert small.eq(0).all()


def layers(count: int) -> Any:
    torch.manual_seed(0)
    block = nn.Sequential(*(nn.Linear(128, 128, bias=False, dtype=torch.bfloat16) for _ in range(count)))
    return sharded(nn.Sequential(block), mp_policy=POLICY)


@on("two")
def test_misses_of_some_parameters_are_not_added_to_others() -> None:
    """Two layers of a group that train by turns: what codes of the first missed is not added to the second."""
    found = []
    for feeds_back in (False, True):
        model = layers(2)
        layoutc.exchange_gradients(model, "grad_int4", error_feedback=feeds_back)
        x = torch.randn(4, 128, generator=torch.Generator().manual_seed(dist.get_rank())).bfloat16()
        for turn in (0, 1):
            for at, layer in enumerate(model[0]):
                layer.requires_grad_(at == turn)
            model(x).float().square().sum().backward()
        found.append([one.grad.to_local() for one in model.parameters()])
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@on("two")
def test_sums_of_a_block_frozen_at_first_are_explained() -> None:
    """A block that is frozen in the first forward, of which FSDP2 then keeps no reduce_dtype."""
    for exchanges in (False, True):
        model = layers(1)
        if exchanges:
            layoutc.exchange_gradients(model)
        (before,) = layoutc.explain_gradients(model)
        x = torch.randn(4, 128, dtype=torch.bfloat16)
        model.requires_grad_(False)
        model(x)
        model.requires_grad_(True)
        with counted() as sent:
            model(x).sum().backward()
        (after,) = layoutc.explain_gradients(model)
        assert (before.into, before.way) == (torch.float32, "exchange" if exchanges else "reduce-scatter")
        assert (after.into, after.way, bool(after.reason)) == (None, "reduce-scatter", exchanges)
        assert not sent["exchanges"]
        assert [(torch.bfloat16, after.sends)] == sent["reduce-scatters"]


def exchanges_of(model: Any) -> list[Any]:
    groups = [block._get_fsdp_state()._fsdp_param_group for block in model]
    return [group._reduce_scatter_comm for group in groups]


@on("two")
def test_what_travels_is_explained() -> None:
    policy = {"mp_policy": POLICY}
    model = sharded(built("fp8_block", "quantized"), **policy)
    before = layoutc.explain_gradients(model)
    layoutc.exchange_gradients(model)
    as_they_are = layoutc.explain_gradients(model)
    layoutc.exchange_gradients(model, "grad_int4", error_feedback=True)
    coded = layoutc.explain_gradients(model)
    with counted() as sent:
        stepped(model, 0)
    assert [one.way for one in (before[0], as_they_are[0], coded[0])] == ["reduce-scatter", "exchange", "grad_int4"]
    assert [one.sends * 2 for one in coded] == [nbytes for _, nbytes in sent["exchanges"]][::-1]
    assert all(2 * new.sends == old.sends for new, old in zip(as_they_are, before, strict=True))
    kept = [4 * one.sender.rest.numel() for one in exchanges_of(model)]
    assert [one.keeps for one in coded] == kept
    assert "0: grad_int4 into torch.float32 over 2 ranks, " in str(coded[0])


@on("two")
def test_specs_say_how_gradients_travel() -> None:
    """Groups of weights whose spec says so send codes; others go as they are; two recipes in a group are refused."""
    for wire in ("grad_fp8", "grad_int4"):
        text = (SPECS / "mxfp8.yaml").read_text(encoding="utf-8").replace("name: mxfp8", f"name: by_{wire}")
        unshipped.add(f"by_{wire}", f"{text}reduce: {wire}\n")
    by = {wire: importlib.import_module(f"layoutc.recipes.by_{wire}") for wire in ("grad_fp8", "grad_int4")}
    model = sharded(built(by["grad_int4"], "quantized"), mp_policy=POLICY)
    named = sharded(built(by["grad_int4"], "cast"), mp_policy=POLICY)
    layoutc.exchange_gradients(model)
    assert [one.way for one in layoutc.explain_gradients(model)] == ["grad_int4"] * len(model)
    layoutc.exchange_gradients(named, "grad_fp8")
    assert {one.way for one in layoutc.explain_gradients(named)} == {"grad_fp8"}
    mixed = nn.Sequential(*(nn.Linear(128, 128, bias=False, dtype=torch.bfloat16) for _ in range(2)))
    for layer, recipe in zip(mixed, by.values(), strict=True):
        layoutc.cast_on_gather_(layer, recipe)
    with pytest.raises(
        LayoutError, match="by_grad_fp8 has `reduce: grad_fp8` and by_grad_int4 has `reduce: grad_int4`"
    ):
        layoutc.exchange_gradients(fully_shard(mixed, mp_policy=POLICY))


@on("two")
def test_recipes_that_ranks_would_have_to_agree_on_are_refused() -> None:
    model = sharded(built("fp8_block", "plain"), mp_policy=POLICY)
    for recipe, reason in (
        ("nvfp4", "its scales depend on an amax of the whole matrix"),
        ("fp8_block", "its blocks cover several rows"),
    ):
        with pytest.raises(LayoutError, match=f"{recipe} can't hold gradients on the wire: {reason}"):
            layoutc.exchange_gradients(model, recipe)
    with pytest.raises(ValueError, match="Did you mean grad_fp8"):
        layoutc.exchange_gradients(model, "grad_fp")
    assert {one.way for one in layoutc.explain_gradients(model)} == {"reduce-scatter"}


EXAMPLES = (0.0, -0.0, 1e-42, -3e-41, 1e-38, 1e-8, 3e-5, -0.001, 0.37, -1.0, 2.5, 1000.0)  # of blocks of their own size


@pytest.mark.parametrize("recipe", ["grad_fp8", "grad_int4"])
@pytest.mark.parametrize("draws", [4000, pytest.param(20000, marks=pytest.mark.thorough)])
def test_random_rounding_is_unbiased(recipe: str, draws: int) -> None:
    """The mean of draws is the value, within three standard errors: of blocks with an outlier, of numbers below the
    least normal one, of zeros, and of a normal distribution."""
    codes, values = Codes(recipe), torch.zeros(4, 128)
    seeded = torch.Generator().manual_seed(1)
    values[0] = torch.randn(128, generator=seeded)
    values[1] = torch.randn(128, generator=seeded) * 1e-41
    values[2, : len(EXAMPLES)] = torch.tensor(EXAMPLES)
    total, squares, each = torch.zeros(512, dtype=torch.float64), torch.zeros(512, dtype=torch.float64), 1000
    rows = values.view(1, 512).expand(each, 512).contiguous()
    for seed in range(draws // each):
        sent = codes.quantize(rows, torch.tensor([seed]))
        missed = codes._dequantized(sent, codes.row(512)).double() - values.view(512).double()
        total, squares = total + missed.sum(0), squares + missed.square().sum(0)
    mean = total / draws
    error = ((squares / draws - mean.square()).clamp(min=0) / draws).sqrt()
    exact = values.abs().amax(1, keepdim=True).expand(4, 128).reshape(512).double() * 2.0**-20  # scales are in fp32
    assert (mean.abs() <= 3 * error + exact + 2.0**-149).double().mean() > 0.99  # 0.27% of normal ones are past it
    assert (mean.abs() <= 5 * error + exact + 2.0**-149).all()
    assert mean.view(4, 128)[3].eq(0).all()
    assert error.view(4, 128)[0].gt(0).sum() > 100


def test_counters_are_of_the_element_and_the_step() -> None:
    """Rows of different ranks, steps and groups are rounded by other bits; the same ones by the same, as copies are."""
    codes = Codes("grad_fp8")
    values = torch.linspace(-1, 1, 512).expand(2, 512).contiguous()
    first, again, later = (codes.quantize(values, torch.tensor([seed])) for seed in (5, 5, 6))
    data = [codes.row(512).planes_in(one)["rowwise_data"] for one in (first, copy.copy(again), later)]
    assert torch.equal(data[0], data[1])
    assert not torch.equal(data[0], data[2])
    assert not torch.equal(data[0][0], data[0][1])
