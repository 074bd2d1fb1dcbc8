"""What FSDP2 lets a training loop choose: losses and gradients are those of plain weights with the same values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import Ranks, mesh_of
from models import recipe_module
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint
from weight_recipes import ALL_PAIRS

import layoutc
from layoutc.runtime.torch_private import local_tensor

WIDTH = 256
Found = list[Tensor]


class Block(nn.Module):
    """A layer with a bias, one without, and a second forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(n, WIDTH) -> the same."""
        added: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + added

    def other(self, x: Tensor) -> Tensor:
        """(n, WIDTH) -> the same."""
        taken: Tensor = self.down(self.up(x).tanh())
        return x - taken


def built(recipe: str, use: str, dtype: torch.dtype = torch.float32) -> Any:
    """use: quantized, cast, or plain with the values of both; "... on gather": these are dequantized on gather."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), Block()).to(dtype)
    if use == "plain":
        for block in model:
            for layer in (block.up, block.down):
                layer.weight.data = recipe_module(recipe).quantize(layer.weight.data).dequantize()  # type: ignore[union-attr]
    else:
        (layoutc.cast_on_gather_ if use.startswith("cast") else layoutc.quantize_)(model, recipe)
    if use.endswith("on gather"):
        layoutc.set_products_(model, "dequantize", dequantize="gather")
    return model


def sharded(model: Any, **options: Any) -> Any:
    for block in model:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def data(step: int) -> Tensor:
    """Other rows on each rank."""
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def stepped(model: Any, step: int, forward: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    loss = (forward or model)(data(step)).float().square().mean()
    loss.backward()
    return loss.detach()


def two_steps(model: Any, between: Callable[[], Any] = lambda: None) -> Found:
    """Gradients add up."""
    first = stepped(model, 0)
    between()
    return [first, stepped(model, 1)]


def gradients_later(model: Any) -> Found:
    model.set_requires_gradient_sync(False)
    return two_steps(model, lambda: model.set_requires_gradient_sync(True))


def kept_after_backward(model: Any) -> Found:
    model.set_reshard_after_backward(False)
    return two_steps(model, lambda: model.set_reshard_after_backward(True))


def kept_after_forward(model: Any) -> Found:
    model.set_reshard_after_forward(False)
    return two_steps(model, lambda: model.set_reshard_after_forward(True))


def prefetched(model: Any) -> Found:
    model[0].set_modules_to_forward_prefetch([model[1], model[2]])
    model[2].set_modules_to_backward_prefetch([model[1], model[0]])
    return two_steps(model)


def unsharded_by_hand(model: Any) -> Found:
    for handle in [block.unshard(async_op=True) for block in model]:
        handle.wait()

    def again() -> None:
        model[1].unshard()
        model[1].reshard()

    return two_steps(model, again)


def of_other_methods(model: Any) -> Found:
    for block in model:
        register_fsdp_forward_method(block, "other")
    return [stepped(model, step, lambda x: model[2].other(model[1].other(model[0].other(x)))) for step in (0, 1)]


def backward_in_parts(model: Any) -> Found:
    model.set_is_last_backward(False)
    return two_steps(model, lambda: model.set_is_last_backward(True))


def summed(model: Any) -> Found:
    model.set_force_sum_reduction_for_comms(True)
    return two_steps(model)


def backward_twice(model: Any) -> Found:
    loss = model(data(0)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return [loss.detach()]


def forward_twice(model: Any) -> Found:
    loss = model(data(0)).square().mean() + model(data(1)).square().mean()
    loss.backward()
    return [loss.detach()]


def kept_on_the_cpu(model: Any) -> Found:
    with torch.autograd.graph.save_on_cpu(), torch.autograd.detect_anomaly():
        return two_steps(model)


def evaluated_between(model: Any) -> Found:
    found: Found = []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found.append(model.eval()(data(2)).clone())
    return [*found, *two_steps(model.train())]


def left_out(model: Any) -> Found:
    model[1].forward = lambda x: x
    return two_steps(model)


def hooked(model: Any) -> Found:
    seen: Found = []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda one: seen.append(local_tensor(one.grad).clone()))
    return [*two_steps(model), *seen]


def clipped(model: Any) -> Found:
    found = two_steps(model)
    return [*found, nn.utils.clip_grad_norm_(model.parameters(), 0.01).full_tensor()]  # type: ignore[operator]


def recomputed(model: Any) -> Found:
    return [
        stepped(model, step, lambda x: checkpoint(model, x.requires_grad_(), use_reentrant=True)) for step in (0, 1)
    ]


#: What a loop does with a sharded model.
LOOPS = {
    loop.__name__: loop
    for loop in (
        *(two_steps, gradients_later, kept_after_backward, kept_after_forward, prefetched, unsharded_by_hand),
        *(of_other_methods, backward_in_parts, summed, backward_twice, forward_twice, kept_on_the_cpu),
        *(evaluated_between, left_out, hooked, clipped, recomputed),
    )
}


def ignoring(model: Any) -> Any:
    return sharded(model, ignored_params={model[1].up.weight, model[1].norm.weight})


def in_one_group(model: Any) -> Any:
    fully_shard([model[0], model[1]])
    return fully_shard(model)


def frozen(model: Any) -> Any:
    model[1].requires_grad_(False)
    model[0].up.weight.requires_grad_(False)
    return sharded(model)


def wrapped(model: Any) -> Any:
    for at, block in enumerate(model):
        model[at] = checkpoint_wrapper(block, CheckpointImpl.NO_REENTRANT)
    return sharded(model)


#: How a model is sharded.
WAYS: dict[str, Callable[[Any], Any]] = {
    **{way.__name__: way for way in (ignoring, in_one_group, frozen, wrapped)},
    "offloaded": lambda model: sharded(model, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "mixed": lambda model: sharded(
        model,
        mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32),
    ),
    "own dtypes": lambda model: sharded(
        model,
        mp_policy=MixedPrecisionPolicy(torch.float32, torch.bfloat16, cast_forward_inputs=False),
    ),
}


def equal_to_plain(recipe: str, case: str) -> None:
    """Losses, and each rank's gradients, to the bit."""
    found = []
    for use in ("plain", "quantized", "cast", "quantized on gather", "cast on gather"):
        model = built(recipe, use)
        if case == "replicas":
            model = sharded(model, mesh=mesh_of(2, dist.get_world_size() // 2, names=("copies", "slices")))
            model.set_requires_all_reduce(False)
            values = two_steps(model, lambda model=model: model.set_requires_all_reduce(True))  # type: ignore[misc]
        else:
            model = WAYS.get(case, sharded)(model)
            values = LOOPS.get(case, two_steps)(model)
        gradients = {name: param.grad for name, param in model.named_parameters()}
        found.append((values, gradients))
    (values, gradients), *others = found
    assert any(grad is not None for grad in gradients.values())
    for other, theirs in others:
        assert len(other) == len(values)
        assert all(map(torch.equal, other, values))
        for name, grad in gradients.items():
            own = theirs[name]
            assert (own is None) == (grad is None), name
            assert grad is None or torch.equal(local_tensor(own), local_tensor(grad)), name


RECIPES = ("fp8_block", "nvfp4")  # cuts inside of blocks; two planes, and a scale of all ranks
PAIRS = [
    (recipe, case)
    for at, case in enumerate([*LOOPS, *WAYS])
    for turn, recipe in enumerate(RECIPES)
    if ALL_PAIRS or at % len(RECIPES) == turn
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("recipe", "case"), PAIRS)
def test_it_is_as_with_plain_weights(two: Ranks, recipe: str, case: str) -> None:
    """What is left out by default runs with LAYOUTC_ALL_PAIRS=1."""
    two.run(equal_to_plain, recipe, case)


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", RECIPES if ALL_PAIRS else RECIPES[:1])
def test_gradients_of_replicas_are_summed_later(four: Ranks, recipe: str) -> None:
    four.run(equal_to_plain, recipe, "replicas")
