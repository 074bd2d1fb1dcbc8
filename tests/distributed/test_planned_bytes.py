"""`layoutc plan` counts what FSDP2 does: bytes of collectives, and of all storages that live, on every rank.

A small Llama and a small mixture of experts of transformers are sharded and trained as users do it; what was sent in
each pass, held between steps and held at the highest point is counted in torch, and must be the plan's, to the byte.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from harness import Ranks, mesh_of, preload
from places import ROOT
from storages import gathered, live_bytes, look_at_what_comes
from torch import Tensor
from torch.distributed._functional_collectives import (
    all_gather_tensor,
    all_gather_tensor_autograd,
    reduce_scatter_tensor_autograd,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

import layoutc
from layoutc.budget.choice import Picks
from layoutc.budget.groups import groups_of
from layoutc.budget.mesh import Mesh
from layoutc.budget.shards import Dtypes, Resident, indices, resident
from layoutc.budget.totals import Setting, budget
from layoutc.cli.reading import plan_of
from layoutc.estimate.links import Links
from layoutc.estimate.machine import H200, NVLINK
from layoutc.estimate.state import EXCHANGED, wire_of
from layoutc.estimate.work import Load, Use
from layoutc.models import config as configs
from layoutc.runtime.fsdp2 import exchange as exchanges
from layoutc.runtime.fsdp2 import on_gather as arriving
from layoutc.runtime.fsdp2.exchange import GradientBuffer
from layoutc.runtime.fsdp2.replicas import Replicas, Sender
from layoutc.runtime.fsdp2.steady_group import SteadyGroup
from layoutc.runtime.fsdp2.wire import _index as block_indices
from layoutc.runtime.quantize import block_edges
from layoutc.runtime.sharding import registry
from layoutc.runtime.torch_private import gloo_threads, local_tensor

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None, reason="needs transformers: pip install 'layoutc[integrations]'"
)
preload(*(f"transformers.models.{kind}.modeling_{kind}" for kind in ("llama", "mixtral", "qwen3_moe")))
HEADS = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
# Rows that two and four ranks share unequally, or cut inside blocks of some recipes.
KINDS: dict[str, dict[str, Any]] = {
    "llama": {**HEADS, "hidden_size": 96, "intermediate_size": 160, "head_dim": 32, "vocab_size": 416},
    "mixtral": {
        **{**HEADS, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": 225},
        **{"num_local_experts": 6, "num_experts_per_tok": 2},
    },
}
MIXTURE: dict[str, Any] = {
    **{**HEADS, "hidden_size": 64, "moe_intermediate_size": 96, "head_dim": 16, "vocab_size": 225},
    **{"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True},
}
MIXED = Dtypes()  # fp32 parameters, gathered in bf16, reduced in fp32
SINGLE = Dtypes(2, 2, 2)


EXCHANGING: list[bool] = []
AMONG: list[bool] = []  # while replicas add up their sums


def _mark_exchanges() -> None:
    """Makes the all-gathers about blocks that cuts split known as such."""
    original: Any = block_edges._all_gather
    if hasattr(original, "marked"):
        return

    def marked(*args: Any, **kwargs: Any) -> Any:
        EXCHANGING.append(True)
        try:
            return original(*args, **kwargs)
        finally:
            EXCHANGING.pop()

    marked.marked = True  # type: ignore[attr-defined]
    block_edges._all_gather = marked


class Counted(TorchDispatchMode):
    """Bytes that this rank puts into collectives, by kind: those of reduce-scatters are what it has left, and those of
    exchanged gradients what it sends to each rank."""

    def __init__(self, look: Callable[..., None] = lambda *buffers: None) -> None:
        super().__init__()
        self.nbytes: Counter[str] = Counter()
        self.look = look

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and AMONG:  # codes, and sums, that replicas send each other
            kind, tensors = "replicated", [args[1][0] if func is torch.ops.c10d.alltoall_base_.default else args[1]]
            self.look(leaving=args[:2])
            self.nbytes[kind] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        elif func.namespace == "c10d":
            if func is torch.ops.c10d._allgather_base_.default:
                kind, tensors = ("exchanged" if EXCHANGING else "gathered"), [args[1]]
                if not EXCHANGING:
                    self.look(args[0])
            elif func is torch.ops.c10d._reduce_scatter_base_.default:
                kind, tensors = "reduced", [args[0]]
                self.look(args[0], args[1])
            elif func is torch.ops.c10d.alltoall_base_.default:  # of which a rank keeps one part
                kind, tensors = "exchanged gradients", [args[1][0]]
                self.look(leaving=args[:2])
            else:
                tensors = list(args[0]) if func is torch.ops.c10d.allreduce_.default else []
                kind = "replicated" if callers_file().endswith("_fsdp_collectives.py") else "exchanged"
            self.nbytes[kind] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        elif func.namespace == "fsdp":  # copies into and out of the buffers of collectives
            joined = args[0] if func is torch.ops.fsdp.chunk_cat.default else args[:1]  # whole gradients
            buffers = ((kwargs or {}).get("out"), *joined)
            # What stands for a buffer of exchanged gradients has no bytes of its own.
            self.look(*(one for one in buffers if isinstance(one, Tensor) and not isinstance(one, GradientBuffer)))
        return func(*args, **(kwargs or {}))


class Watched:
    """The most bytes that gathers and gradients have held, of the storages that live at each look."""

    def __init__(self, model: Any) -> None:
        self.model, self.most = model, 0
        self.buffers: dict[int, tuple[StorageWeakRef, int]] = {}
        self.leaving: list[StorageWeakRef] = []
        self.held: list[StorageWeakRef] = []  # of these, by something else than gloo's threads

    def look(self, *buffers: Tensor, leaving: Sequence[Tensor] = ()) -> None:
        """buffers: of the collective that runs. leaving: more of them, which nothing holds at the next other look, once
        gloo's threads have let go too."""
        self.leaving += [StorageWeakRef(one.untyped_storage()) for one in leaving]
        for _ in range(0 if leaving else 1 if all(one in self.held for one in self.leaving) else 20):
            self.leaving = [one for one in self.leaving if not one.expired()]
            if not self.leaving:
                break
            gloo_threads.let_go()
        self.held = self.held if leaving else self.leaving
        held: list[Any] = list(gathered(self.model).values())
        gradients = []
        modules = set(self.model.modules())
        for param, _ in registry.parameters():
            if param._module_info.module in modules:
                held += [getattr(param, "unsharded_accumulated_grad", None), param.sharded_param.grad]
                whole: Any = getattr(param, "_unsharded_param", None)
                if whole is not None and whole.grad is not None:
                    gradients.append(local_tensor(whole.grad))
        # FSDP2's loops over gradients hold some of them after the parameter has let go.
        for tensor in (*buffers, *leaving, *gradients):
            storage = tensor.untyped_storage()
            self.buffers[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self.buffers = {at: one for at, one in self.buffers.items() if not one[0].expired()}
        live = {at: size for at, (_, size) in self.buffers.items()}
        held = [local_tensor(one) for one in held if one is not None]
        live |= {one.untyped_storage().data_ptr(): size for one in held if (size := one.untyped_storage().nbytes())}
        self.most = max(self.most, sum(live.values()))


def _fields(kind: str) -> dict[str, Any]:
    return KINDS.get(kind, MIXTURE)


def planned(
    kind: str, how: str, recipe: str, head: bool, mesh: Mesh, dtypes: Dtypes, only: tuple[str, ...] = ()
) -> tuple[Any, Use, Setting]:
    """What is given to `budget`."""
    model = configs.read({"model_type": kind, **_fields(kind)}, kind)
    use = Use("plain")
    if how != "plain":
        use = Use(recipe, plan_of(ROOT / "specs" / f"{recipe}.yaml"), cast=how == "cast")
    picks = Picks(only, experts=True, leave=() if head else ("lm_head.weight",))
    return model, use, Setting(picks, dtypes, Load(8, 8), Links(NVLINK, NVLINK), H200)


def built(kind: str, how: str, recipe: str, takes: set[str], ranks: Mesh, dtypes: Dtypes) -> Any:
    """The model of transformers, sharded by layers, and experts by themselves if ranks have some of them each. takes:
    the weights that the plan says are quantized."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **_fields(kind))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model = model.to(torch.float32 if dtypes == MIXED else torch.bfloat16)
    convert = {"quantized": layoutc.quantize_, "cast": layoutc.cast_on_gather_, "plain": None}[how]
    if convert is not None:
        assert set(convert(model, recipe, param_filter=sorted(takes))) == takes
    mesh = _mesh(ranks)
    if ranks.tensor > 1:
        _cut_matrices(model, mesh["tensor"])
        mesh = mesh["shards"]
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if dtypes == MIXED else MixedPrecisionPolicy()
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    if ranks.experts_dim:
        options["shard_placement_fn"] = lambda param: Shard(1) if param.dim() == 3 else None
    for layer in model.model.layers:
        if ranks.experts > 1:
            parts = _parts(ranks)
            _part_experts(layer.mlp.experts, parts["experts"])
            fully_shard(layer.mlp.experts, **{**options, "mesh": parts["shards"]})
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def _part_experts(module: Any, mesh: DeviceMesh) -> None:
    """Expert parallelism: a rank has some of the experts, and multiplies the tokens of all ranks that they are for."""
    for name, weight in list(module.named_parameters()):
        setattr(module, name, torch.nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)])))

    def forward(tokens: Tensor, index: Tensor, shares: Tensor) -> Tensor:
        tokens, shares = (all_gather_tensor_autograd(one, 0, mesh) for one in (tokens, shares))
        index = all_gather_tensor(index, 0, mesh)
        out = torch.zeros_like(tokens)
        gate_up, down = (weight.to_local() for weight in (module.gate_up_proj, module.down_proj))
        for expert in range(len(down)):
            token, at = torch.where(index == expert + mesh.get_local_rank() * len(down))
            gate, up = linear(tokens[token], gate_up[expert]).chunk(2, -1)
            mixed = linear(module.act_fn(gate) * up, down[expert]) * shares[token, at, None]
            out = out.index_add(0, token, mixed.to(out.dtype))
        return reduce_scatter_tensor_autograd(out, "sum", 0, mesh)

    module.forward = forward


def _cut_matrices(model: Any, mesh: DeviceMesh) -> None:
    """Tensor parallelism, as `cut` of layoutc/models/architectures.yaml says."""
    rows = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    columns = ("self_attn.o_proj", "mlp.down_proj")
    for layer in model.model.layers:
        styles = {name: ColwiseParallel() for name in rows} | {name: RowwiseParallel() for name in columns}
        parallelize_module(layer, mesh, styles)
    whole = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, whole)


def _mesh(ranks: Mesh) -> Any:
    if ranks.tensor > 1:
        return mesh_of(ranks.shards, ranks.tensor, names=("shards", "tensor"))
    return (
        mesh_of(ranks.replicas, ranks.shards, names=("copies", "shards"))
        if ranks.replicas > 1
        else mesh_of(ranks.world)
    )


def _parts(ranks: Mesh) -> Any:
    """The mesh that experts are sharded and parted over."""
    return mesh_of(ranks.expert_shards, ranks.experts, names=("shards", "experts"))


def loss_of(model: Any, number: int) -> Any:
    ids = torch.randint(0, 200, (1, 8), generator=torch.Generator().manual_seed(number))
    return model(input_ids=ids, labels=ids).loss


def storages(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of some tensors."""
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


def counts_as_planned(case: Case, replicas: int, experts_dim: int, tensor: int, experts: int) -> tuple[int, int]:
    """Asserts what each pass sends, what lives, and what lived at the highest point; returns (held here, planned)."""
    _mark_exchanges()
    kind, how, recipe, head, mixed, _, travels = case
    exchange, on_gather = travels.startswith("exchange"), True if travels.startswith("values") else None
    recipe_of = "grad_fp8" if travels == "exchange in codes" else None
    only = ("*proj*", "*embed_tokens*", "*lm_head*") if travels == "values of the root" else ()
    dtypes = MIXED if mixed else SINGLE
    mesh = Mesh(dist.get_world_size(), replicas, tensor, experts, experts_dim)
    rank = dist.get_rank() // mesh.tensor % mesh.shards
    described, use, at = planned(kind, how, recipe, head, mesh, dtypes, only)
    wire = wire_of(plan_of(ROOT / "specs" / f"{recipe_of}.yaml")) if recipe_of else EXCHANGED if exchange else None
    use = replace(use, exchange=wire, among=wire if recipe_of else None, on_gather=on_gather)
    found = budget(described, use, mesh, at)
    groups = groups_of(described, use, at.picks, mesh, dtypes)
    takes = {
        f"{layer.name}.{member.weight.name}".lstrip(".")
        for layer, own in zip(described.all_layers, (groups.root, *groups.layers), strict=True)
        for group in own
        for member in group.members
        if member.piece.plan is not None
    }
    assert how == "plain" or len(takes) >= (12 if tensor == 1 else 8), takes
    _mesh(mesh)
    _parts(mesh)
    look_at_what_comes()
    block_indices.cache_clear()
    before = live_bytes()
    model = built(kind, how, recipe, takes, mesh, dtypes)
    if exchange:
        layoutc.exchange_gradients(model, recipe_of, replicas=recipe_of)
    if on_gather:
        assert len(layoutc.set_products_(model, "dequantize", dequantize="gather")) == len(takes)
    optimizer = layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-3)
    watched = Watched(model)
    for number in range(3):
        forward, backward, update = Counted(watched.look), Counted(watched.look), Counted()
        watched.most = 0
        with looking_at_groups(watched), forward:
            loss = loss_of(model, number)
        peak_forward, watched.most = watched.most, 0
        with looking_at_groups(watched), backward:
            loss.backward()
        del loss
        assert storages(p.grad._local_tensor for p in model.parameters()) == found.resident.gradients
        with update:
            optimizer.step()
        if number < 2:
            optimizer.zero_grad()
    traffic = found.traffic
    assert (forward.nbytes["gathered"], backward.nbytes["gathered"]) == (traffic.forward, traffic.backward)
    exchanged = sum(group.sent_gradients for group in groups.every if group.exchanges)
    assert (exchanged > 0) == exchange == found.exchange
    assert backward.nbytes["exchanged gradients"] == exchanged
    assert backward.nbytes["reduced"] + exchanged == traffic.reduced
    assert backward.nbytes["replicated"] == traffic.replicated
    assert sum(one.nbytes["exchanged"] for one in (forward, backward, update)) == traffic.exchanged
    assert (peak_forward, watched.most) == (found.peaks.forward, found.peaks.backward), (watched.most, found.peaks)
    here = Resident(left=indices(groups.pieces))
    for piece in groups.pieces:
        here += resident(piece, rank if piece.placed.ranks == mesh.shards else rank // experts, dtypes)
    seeds = 2 * sum(group.exchanges for group in groups.every) if recipe_of else 0  # a number of 8 bytes each
    others = before + storages(model.buffers()) + 8 * seeds
    held = live_bytes(others + here.total) - others
    assert held == here.total, (held, here)
    return held, found.resident.total


def callers_file() -> str:
    """The file that called torch.distributed's all_reduce."""
    frame = sys._getframe(1)
    while frame is not None and "fully_shard" not in frame.f_code.co_filename:
        frame = frame.f_back  # type: ignore[assignment]
    return frame.f_code.co_filename if frame is not None else ""


@contextmanager
def looking_at_groups(watched: Watched) -> Iterator[None]:
    """Also looks where a group has just been gathered, where it has its gradients and still is, where the part of a
    gradient that FSDP2 takes has just been cut, where gradients that were exchanged are about to be added up, and where
    weights are about to be dequantized on gather."""
    looked_at = [(FSDPParamGroup, "_to_unsharded"), (FSDPParamGroup, "post_backward"), (SteadyGroup, "post_backward")]
    originals = {(cls, name): getattr(cls, name) for cls, name in looked_at}
    cut, add_up = FSDPParam._get_grad_inner_tensor, exchanges.rank_sum
    quantize, add_codes, add_among = Sender.quantized, Sender.add, Replicas.add_up
    exchanged = exchanges.ExchangeOfCodes.exchanged
    dequantize = arriving.dequantize_all

    def looking(original: Callable[..., Any]) -> Callable[..., Any]:
        def looked(self: Any, *args: Any) -> Any:
            watched.look()
            return original(self, *args)

        return looked

    def cutting(self: Any, gradient: Tensor) -> Tensor:
        part = cut(self, gradient)
        watched.look(part)
        return part

    def adding_up(parts: Tensor, out: Tensor, divisor: int) -> None:
        watched.look(out, leaving=[parts])
        add_up(parts, out, divisor)

    def quantizing(self: Any, values: Tensor) -> Tensor:
        found = quantize(self, values)
        watched.look(leaving=[values, found])
        return found

    def adding_codes(self: Any, rows: Tensor, out: Tensor, by: Any) -> None:
        watched.look(out, leaving=[rows])
        add_codes(self, rows, out, by)

    def adding_among(self: Any, values: Tensor, by: Any) -> None:
        watched.look(values)
        AMONG.append(True)
        try:
            add_among(self, values, by)
        finally:
            AMONG.pop()

    def exchanging(self: Any, out: Tensor, *args: Any) -> bool:
        watched.look(out)
        return exchanged(self, out, *args)

    def dequantizing(arrivals: Any) -> Any:
        watched.look()
        return dequantize(arrivals)

    for (cls, name), original in originals.items():
        setattr(cls, name, looking(original))
    FSDPParam._get_grad_inner_tensor = cutting
    exchanges.rank_sum = adding_up
    Sender.quantized, Sender.add, Replicas.add_up = quantizing, adding_codes, adding_among
    exchanges.ExchangeOfCodes.exchanged = exchanging
    arriving.dequantize_all = dequantizing
    try:
        yield
    finally:
        FSDPParam._get_grad_inner_tensor, exchanges.rank_sum = cut, add_up
        Sender.quantized, Sender.add, Replicas.add_up = quantize, add_codes, add_among
        exchanges.ExchangeOfCodes.exchanged = exchanged
        arriving.dequantize_all = dequantize
        for (cls, name), original in originals.items():
            setattr(cls, name, original)


class Case(NamedTuple):
    """travels: what does, beside gradients that are reduced: codes; values on gather, or those of the root too, which
    stay; gradients that are exchanged; those that are exchanged as codes, and their sums among replicas too."""

    kind: str
    how: str
    recipe: str
    head: bool
    mixed: bool
    mesh: str
    travels: str


# How ranks are laid out: how many, replicas, the dim that experts are cut on, parts of matrices, parts of experts.
MESHES = {
    "two": (2, 1, 0, 1, 1),
    "rows of experts": (2, 1, 1, 1, 1),  # Shard(1), as torchtitan cuts experts where there are more ranks than experts
    "four": (4, 1, 0, 1, 1),
    "copies": (4, 2, 0, 1, 1),  # HSDP: gradients are also added up among replicas
    "copies, rows of experts": (4, 2, 1, 1, 1),
    "parts": (4, 1, 0, 2, 1),  # FSDP2 under tensor parallelism, whose own collectives are not the plan's
    # Expert parallelism, as torchtitan lays it out: FSDP2 cuts experts over the ranks that have the same ones, three
    # over two ranks or all of them on one, and all else over all ranks. What becomes of tokens is not the plan's.
    "experts": (4, 1, 0, 1, 2),
    "rows of parted experts": (4, 1, 1, 1, 2),
    "an expert each": (4, 1, 0, 1, 4),
}
CASES = [
    Case("llama", "plain", "", False, False, "two", "codes"),
    Case("mixtral", "quantized", "hybrid_fp8", True, True, "two", "codes"),
    Case("mixtral", "quantized", "int8_rowwise", False, True, "two", "exchange"),
    Case("mixtral", "quantized", "fp8_current", True, True, "two", "values of the root"),
    Case("llama", "quantized", "nvfp4", True, False, "two", "values"),
    Case("llama", "quantized", "mxfp8_frozen", True, True, "two", "codes"),  # backward reads forward's codes
    Case("llama", "cast", "fp8_delayed", True, True, "two", "values of the root"),
    Case("llama", "cast", "fp8_block", False, True, "two", "exchange"),
    Case("mixtral", "cast", "nvfp4", True, True, "rows of experts", "codes"),
    Case("mixtral", "cast", "nvfp4", True, True, "copies", "codes"),  # each pass has an amax of its own
    Case("mixtral", "plain", "", False, True, "copies, rows of experts", "exchange"),
    Case("llama", "quantized", "fp8_delayed", False, False, "copies", "codes"),
    Case("llama", "plain", "", False, True, "copies", "exchange in codes"),
    Case("mixtral", "quantized", "mxfp8", True, False, "copies", "exchange in codes"),
    Case("llama", "cast", "fp8_current", True, True, "parts", "exchange"),
    Case("llama", "quantized", "nvfp4", False, True, "parts", "values"),
    Case("mixtral", "cast", "nvfp4", False, False, "four", "values"),  # a rank has none of the experts
    Case("mixtral", "quantized", "mxfp8", False, True, "experts", "exchange"),
    Case("mixtral", "cast", "mxfp8", True, False, "rows of parted experts", "codes"),
    Case("qwen3_moe", "quantized", "nvfp4", False, True, "an expert each", "values"),
]


def test_cases_have_every_pair_of_choices() -> None:
    """Of all but the meshes, of which each has a case; but gradients of 16 bits are not exchanged, and plain weights
    have neither codes nor a head to choose."""
    tied = {("plain", "values"), ("plain", True), ("exchange", "single")}
    choices = [
        (one.kind, one.how, travels, "mixed" if one.mixed else "single", one.head)
        for one in CASES
        if one.kind != "qwen3_moe"
        for travels in [one.travels.removesuffix(" of the root").removesuffix(" in codes")]
    ]
    for first, second in itertools.combinations(range(5), 2):
        values = ({one[at] for one in choices} for at in (first, second))
        found = {(one[first], one[second]) for one in choices}
        assert set(itertools.product(*values)) - found <= tied
    assert {one.mesh for one in CASES} == MESHES.keys()


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)).replace(" ", "_"))
def test_ranks_send_and_hold_what_is_planned(two: Ranks, four: Ranks, case: Case) -> None:
    """A case for every pair of choices: what tests/budget/test_budgets.py says of the integers holds for all others."""
    ranks, replicas, dim, tensor, experts = MESHES[case.mesh]
    held = (two if ranks == 2 else four).run(counts_as_planned, case, replicas, dim, tensor, experts)
    assert max(here for here, _ in held) == held[0][1]
