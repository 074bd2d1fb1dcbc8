"""Context parallelism: sequences cut over ranks; keys and values gathered, or sent round a ring by torch's own loop.

The oracle trains plain weights, which are given the dequantized values before each step, in the same way on the same
ranks, so that no order of sums differs; its masters and its optimizer are those of one process.
"""

from __future__ import annotations

from typing import Any

import pytest
import ring_on_cpu
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from harness import Ranks, mesh_of
from models import assert_same_tensors, make_uneven, raw, recipe_module
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method

import layoutc

WIDTH, HEADS, WORDS, SEQUENCE, STEPS = 128, 4, 64, 32, 2
ROTATIONS = {"ring, allgather": "allgather", "ring, alltoall": "alltoall"}
# An older torch has it by the second name.
_gather: Any = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd


class TwoValues(torch.autograd.Function):
    """x w^T whose gradient of x is by other values of w: those of the other orientation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, columnwise: Tensor) -> Tensor:
        """x (..., k), weight and columnwise (m, k) -> (..., m)."""
        ctx.save_for_backward(x, columnwise)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """Of x and weight."""
        x, columnwise = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        return (flat @ columnwise).view(x.shape), flat.t() @ x.reshape(-1, x.shape[-1]), None


class Layer(nn.Linear):
    """A linear layer without a bias; of the oracle when it has `columnwise`."""

    columnwise: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        if self.columnwise is None:
            return F.linear(input, self.weight)
        found: Tensor = TwoValues.apply(input, self.weight, self.columnwise)
        return found


class Block(nn.Module):
    """Causal attention of four heads, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)])
        self.qkv, self.out = Layer(WIDTH, 3 * WIDTH, bias=False), Layer(WIDTH, WIDTH, bias=False)
        self.up, self.down = Layer(WIDTH, 2 * WIDTH, bias=False), Layer(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, gathered: DeviceMesh | None) -> Tensor:
        """(batch, sequence, width); gathered: the ranks that have the rest of the sequence, where none goes round."""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind()
        if gathered is None:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mixed = attention_of_gathered(q, k, v, gathered)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        found: Tensor = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return found


class Decoder(nn.Module):
    """Words at positions, two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = Layer(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor, places: Tensor, gathered: DeviceMesh | None = None) -> Tensor:
        """Words (batch, sequence) that lie at places (sequence) -> (batch, sequence, WORDS)."""
        x = self.words(words) + self.places(places)
        for block in self.blocks:
            x = block(x, gathered)
        found: Tensor = self.head(x)
        return found


def order(ranks: int) -> Tensor:
    """Positions as ranks have them: each has one chunk of the beginning and one of the end, so that all have as many
    keys to look at."""
    chunks = torch.arange(SEQUENCE).chunk(2 * ranks)
    return torch.cat([torch.cat([chunks[rank], chunks[-1 - rank]]) for rank in range(ranks)])


def attention_of_gathered(q: Tensor, k: Tensor, v: Tensor, mesh: DeviceMesh) -> Tensor:
    """As Llama 3 does: keys and values of all ranks, in their order, for this rank's queries."""
    at = order(mesh.size())
    k, v = (_gather(one.contiguous(), 2, mesh.get_group()).index_select(2, at.argsort()) for one in (k, v))
    mine = at.chunk(mesh.size())[mesh.get_local_rank()]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mine.unsqueeze(1) >= torch.arange(SEQUENCE))


def batch(step: int, replica: int) -> tuple[Tensor, Tensor]:
    """Two sequences of words, and the words that follow them."""
    words = torch.randint(WORDS, (2, SEQUENCE + 1), generator=torch.Generator().manual_seed(100 * step + replica))
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


def loss_of(model: nn.Module, how: str, step: int, mesh: DeviceMesh) -> Tensor:
    """Of this rank's words, and its gradients."""
    words, following = batch(step, mesh.get_local_rank("dp"))
    places = torch.arange(SEQUENCE)
    if how == "gathered":
        mine = order(mesh["cp"].size()).chunk(mesh["cp"].size())[mesh.get_local_rank("cp")]
        loss = F.cross_entropy(model(words[:, mine], mine, mesh["cp"]).flatten(0, 1), following[:, mine].flatten())
        loss.backward()
    else:
        ring_on_cpu.teach()
        set_rotate_method(ROTATIONS[how])
        buffers = [words, following, places]
        with context_parallel(mesh["cp"], buffers=buffers, buffer_seq_dims=[1, 1, 0], no_restore_buffers={*buffers}):
            loss = F.cross_entropy(model(words, places).flatten(0, 1), following.flatten())
            loss.backward()
    return loss.detach()


def built() -> Decoder:
    """The same plain model on every rank."""
    torch.manual_seed(0)
    model = Decoder()
    make_uneven(model)
    return model


def sharded(model: Decoder, mesh: DeviceMesh) -> Decoder:
    """Over all ranks, those of a sequence among them, as torchtitan does."""
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["dp", "cp"]._flatten("dp_cp"))
    return model


class Oracle:
    """Plain masters on each rank; a plain model under FSDP2 has the values that they are quantized to."""

    def __init__(self, recipe: str, mesh: DeviceMesh, names: list[str]) -> None:
        self.quantize = recipe_module(recipe).quantize
        self.masters = {name: param.detach().clone() for name, param in built().named_parameters()}
        self.optimizer = torch.optim.AdamW([*self.masters.values()], lr=1e-2)
        self.model = sharded(built(), mesh)
        self.names = names

    def codes(self) -> dict[str, Any]:
        """What the masters are quantized to."""
        return {name: self.quantize(self.masters[name]) for name in self.names}

    def step(self, how: str, step: int, mesh: DeviceMesh) -> tuple[float, dict[str, Tensor]]:
        """The loss before it, and this rank's gradients."""
        values = dict(self.masters)
        for name, codes in self.codes().items():
            values[name] = codes.values_of("rowwise", torch.float32)
            self.model.get_submodule(name.removesuffix(".weight")).columnwise = codes.values_of(
                "columnwise", torch.float32
            )
        for name, param in self.model.named_parameters():
            assert isinstance(param, DTensor)
            cut = distribute_tensor(values[name], param.device_mesh, param.placements, src_data_rank=None)
            param.to_local().data.copy_(cut.to_local())
        loss = loss_of(self.model, how, step, mesh)
        grads = {}
        for name, param in self.model.named_parameters():
            grads[name] = param.grad.to_local().clone()
            self.masters[name].grad = param.grad.full_tensor()
        self.optimizer.step()
        self.model.zero_grad()
        return loss.item(), grads


def trains_as_plain(recipe: str, use: str, how: str) -> None:
    """Losses, this rank's gradients, and in the end the codes, or the values that are cast."""
    mesh = mesh_of(dist.get_world_size() // 2, 2, names=("dp", "cp"))
    model = built()
    names = (layoutc.quantize_ if use == "quantized" else layoutc.cast_on_gather_)(model, recipe)
    assert len(names) == 9
    oracle = Oracle(recipe, mesh, names)
    sharded(model, mesh)
    adam, params = torch.optim.AdamW, model.parameters()
    optimizer = layoutc.MasterWeights(adam, params, lr=1e-2) if use == "quantized" else adam(params, lr=1e-2)
    losses = set()
    for step in range(STEPS):
        expected, grads = oracle.step(how, step, mesh)
        assert loss_of(model, how, step, mesh).item() == expected
        losses.add(expected)
        for name, param in model.named_parameters():
            assert isinstance(param.grad, DTensor)
            assert torch.equal(raw(param.grad.to_local()), raw(grads[name])), name
        optimizer.step()
        optimizer.zero_grad()
    assert len(losses) == STEPS
    codes = oracle.codes() if use == "quantized" else {}
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        whole: Any = param.full_tensor()
        if name in codes:
            assert_same_tensors(codes[name].planes(), whole.planes())
        else:
            assert torch.equal(raw(whole), raw(oracle.masters[name])), name


def is_whole_attention(how: str) -> tuple[float, float]:
    """The loss of a plain model over the ranks of a sequence, and of one process, whose sums are in another order."""
    mesh = mesh_of(dist.get_world_size() // 2, 2, names=("dp", "cp"))
    mean = loss_of(sharded(built(), mesh), how, 0, mesh)
    dist.all_reduce(mean, op=dist.ReduceOp.SUM, group=mesh.get_group("cp"))
    words, following = batch(0, mesh.get_local_rank("dp"))
    whole = F.cross_entropy(built()(words, torch.arange(SEQUENCE)).flatten(0, 1), following.flatten())
    return mean.item() / 2, whole.item()


@pytest.mark.parametrize("how", ["gathered", *ROTATIONS])
def test_queries_see_the_keys_of_all_ranks(two: Ranks, how: str) -> None:
    """Of the ways to cut sequences, not of weights."""
    for found, expected in two.run(is_whole_attention, how):
        assert found == pytest.approx(expected, rel=1e-5)


# Every pair of a way and a use; of fp8_block cuts lie inside of blocks.
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("recipe", "use", "how"),
    [
        ("mxfp8", "quantized", "gathered"),
        ("nvfp4", "cast", "gathered"),
        ("fp8_block", "quantized", "ring, allgather"),
        ("mxfp8", "cast", "ring, allgather"),
        ("nvfp4", "quantized", "ring, alltoall"),
        ("fp8_block", "cast", "ring, alltoall"),
    ],
)
def test_a_sequence_on_two_ranks(two: Ranks, recipe: str, use: str, how: str) -> None:
    two.run(trains_as_plain, recipe, use, how)
