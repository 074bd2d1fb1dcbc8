"""The loss curve of a small Llama at a learning rate that moves no code for a long time by itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import layoutc

RECIPES = ("fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4")
WIDTH, HEADS, STEPS = 32, 2, 30


class Block(nn.Module):
    """Attention and a gated feed-forward part, as in Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(n, t, WIDTH) -> the same."""
        heads = self.qkv(F.rms_norm(x, (WIDTH,))).unflatten(-1, (3, HEADS, -1)).transpose(1, 3).unbind(2)
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        gate, up = self.up(F.rms_norm(x, (WIDTH,))).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


class Llama(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.head = nn.Embedding(256, WIDTH), nn.Linear(WIDTH, 256, bias=False)
        self.blocks = nn.Sequential(Block())

    def forward(self, x: Tensor) -> Tensor:
        """(n, t) -> (n, t, 256)."""
        return self.head(F.rms_norm(self.blocks(self.bytes(x)), (WIDTH,)))  # type: ignore[no-any-return]


def text() -> tuple[Tensor, Tensor]:
    """Bytes of this file, and those that follow."""
    with open(__file__, "rb") as file:
        lines = torch.tensor(list(file.read(4 * 33))).view(4, 33)
    return lines[:, :-1], lines[:, 1:]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """The loss before each step, and after the last."""
    x, y = text()
    losses = []
    for step in range(steps + 1):
        loss = F.cross_entropy(model(x).float().flatten(0, 1), y.flatten())
        losses.append(loss.item())
        if step < steps:
            loss.backward()
            optimizer.step()
            model.zero_grad()
    return losses


def of_blocks(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and name.startswith("blocks")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Thousands of small products: threads would wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def trained() -> dict[str, Tensor]:
    """A model that has learnt something, in fp32: what remains to be learnt needs small steps."""
    torch.manual_seed(0)
    model = Llama()
    train(model, torch.optim.AdamW(model.parameters(), lr=3e-3), 30)
    return model.state_dict()


def curve(trained: dict[str, Tensor], recipe: str, use: str) -> tuple[list[float], list[Tensor]]:
    """Losses, and the fp32 values of the blocks' parameters, which alone are trained, at the end."""
    model = Llama()
    model.load_state_dict(trained)
    if use == "bf16":
        model.blocks.bfloat16()
    if use == "cast":
        layoutc.cast_on_gather_(model, recipe, filter_fn=of_blocks)
    elif use != "plain":
        layoutc.quantize_(model, recipe, filter_fn=of_blocks, keep_values=use != "coarse")
    optimizer = layoutc.MasterWeights(torch.optim.AdamW, model.blocks.parameters(), lr=1e-5)
    losses = train(model, optimizer, STEPS)
    return losses, list(optimizer.masters().values())


@pytest.fixture(scope="module")
def gain(trained: dict[str, Tensor]) -> float:
    """What the plain model gains in those steps."""
    losses, _ = curve(trained, "none", "plain")
    return losses[0] - losses[-1]


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", RECIPES)
def test_quantized_weights_train_as_those_cast_on_gather(trained: dict[str, Tensor], gain: float, recipe: str) -> None:
    """Within 1e-3 after 30 steps at lr 1e-5, and as far as the plain model, more or less.

    Where both have fp32 values, the arithmetic is the same: every loss and every value, to the bit. Gradients of bf16
    weights are rounded, so that they come close.
    """
    cast, params = curve(trained, recipe, "cast")
    quantized, masters = curve(trained, recipe, "fp32")
    rounded, _ = curve(trained, recipe, "bf16")
    assert abs(quantized[-1] - cast[-1]) < 1e-3
    assert abs(rounded[-1] - cast[-1]) < 1e-3
    assert quantized[0] - quantized[-1] > gain / 2
    assert quantized == cast
    for master, param in zip(masters, params, strict=True):
        assert torch.equal(master, getattr(param, "plain", param))


def test_masters_that_start_from_codes_hardly_move(trained: dict[str, Tensor], gain: float) -> None:
    """What the values are kept for."""
    coarse, _ = curve(trained, "mxfp8", "coarse")
    assert coarse[0] - coarse[-1] < gain / 4
