"""What MasterWeights keeps from step to step changes no bytes: launches, gradients' memory, states."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from kernels_on_cpu import use_kernels
from torch import Tensor, nn

import layoutc
from layoutc.runtime.quantize import prepared, weights
from layoutc.runtime.train import steps

RECIPES = ("mxfp8", "nvfp4", "fp8_delayed", "int8_rowwise", "nvfp4+mxfp8")


def build(recipe: str, dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    """Layers in one recipe, or in two by turns; with biases, which are plain."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(32, 32, dtype=dtype) for _ in range(4)])
    names = recipe.split("+")
    for index, layer in enumerate(model):
        layoutc.quantize_(layer, names[index % len(names)])
    return model


def adamw(model: nn.Module) -> Any:
    return layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), lr=0.1, weight_decay=0.1)


def give_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def raw(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def state_of(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Bytes of all planes, plain parameters and optimizer states."""
    found: dict[str, Tensor] = {}
    for name, param in model.named_parameters():
        planes = param.planes() if hasattr(param, "planes") else {"": param}
        found |= {f"{name}.{plane}": raw(value) for plane, value in planes.items()}
        found |= {f"{name} {key}": raw(value.float()) for key, value in optimizer.state.get(param, {}).items()}
    return found


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.fixture
def kernels_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels(monkeypatch)


def nothing(model: Any, optimizer: Any) -> None:
    """A step like the others."""


def one_without_gradient(model: Any, optimizer: Any) -> None:
    model[1].weight.grad = None


def new_planes(model: Any, optimizer: Any) -> None:
    model[2].weight.data = copy.deepcopy(model[2].weight.data)


def written(model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        model[0].weight.copy_(torch.full((32, 32), 3.0))


def loaded(model: Any, optimizer: Any) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def frozen(model: Any, optimizer: Any) -> None:
    model[3].weight.requires_grad_(False)
    model[3].weight.grad = None


def stops(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.0


def moves_again(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.1


def state_is_cleared(model: Any, optimizer: Any) -> None:
    optimizer.state.clear()


EVENTS: list[Callable[[Any, Any], None]] = [
    *(nothing, nothing, one_without_gradient, nothing, new_planes, written, loaded, stops, moves_again),
    *(state_is_cleared, frozen, nothing),
]


@pytest.mark.sample(1)
@pytest.mark.usefixtures("kernels_on_cpu")
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_kept_changes_no_bytes(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happens between the steps."""
    model, other = build(recipe), build(recipe)
    optimizer, fresh = adamw(model), adamw(other)
    launched = []
    original = prepared.Requantization.__call__
    monkeypatch.setattr(
        prepared.Requantization, "__call__", lambda self, pairs: (launched.append(len(pairs)), original(self, pairs))[1]
    )
    batched = recipe != "fp8_delayed"  # a history takes more than a launch
    for step, event in enumerate(EVENTS if batched else EVENTS[3:8]):
        for one, trained in ((model, optimizer), (other, fresh)):
            give_gradients(one, step)
            event(one, trained)
        optimizer.step()
        with mock.patch.object(prepared, "prepared", return_value=None):
            fresh._forget()
            fresh.step()
        assert_same(state_of(model, optimizer), state_of(other, fresh))
    assert launched == ([4, 4, 3, 4, 4, 4, 4, 4, 4, 3, 4] if batched else [])


@pytest.mark.usefixtures("kernels_on_cpu")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_launches_are_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And once more for weights in other memory."""
    model = build("nvfp4")
    optimizer, made = adamw(model), []
    original = prepared.prepared
    monkeypatch.setattr(prepared, "prepared", lambda *args: (made.append(args), original(*args))[1])
    monkeypatch.setattr(weights, "requantize_batch_", lambda *_: pytest.fail("one by one"))
    for step in range(3):
        give_gradients(model, step)
        optimizer.step()
    assert len(made) == 1
    new_planes(model, optimizer)
    give_gradients(model, 3)
    optimizer.step()
    assert len(made) == 2


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_copies_and_pickles_hold_nothing_that_is_kept() -> None:
    """They go on as the original does."""
    model = build("mxfp8")
    optimizer = adamw(model)
    give_gradients(model, 0)
    optimizer.step()
    both: Any = copy.deepcopy([model, optimizer])
    file = io.BytesIO()
    torch.save([model, optimizer], file)
    file.seek(0)
    read: Any = torch.load(file, weights_only=False)
    for one, trained in (both, read):
        assert list(map(id, one.parameters())) == [id(entry.param) for entry in trained._kept]
        assert trained._rewriting is None
        assert not trained._gradients._entries
    for one, trained in ((model, optimizer), both, read):
        give_gradients(one, 1)
        trained.step()
    assert_same(state_of(model, optimizer), state_of(*both))
    assert_same(state_of(model, optimizer), state_of(*read))


def test_gradients_have_memory_during_a_step_alone() -> None:
    """Those that are converted together; and a state keeps its dict from step to step."""
    model = build("mxfp8")
    optimizer = adamw(model)
    seen: list[Any] = []
    step = optimizer.inner.step

    def look() -> None:
        seen.append([param.grad.dtype for group in optimizer.inner.param_groups for param in group["params"]])
        step()

    optimizer.inner.step = look
    states = []
    for number in range(3):
        give_gradients(model, number)
        optimizer.step()
        states.append([id(optimizer.state[param]) for param in model.parameters()])
        assert len(optimizer._gradients._entries) == 8, "converted one by one"
        assert all(view.untyped_storage().nbytes() == 0 for view in optimizer._gradients._views)
    assert seen == [[torch.float32] * 8] * 3
    assert states[0] == states[1] == states[2]
    assert all(master.grad is None for master in optimizer._masters.values())


def test_room_for_gradients_is_cut_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece begins at a multiple of 16 bytes, whatever is before it, and takes no more."""
    monkeypatch.setattr(steps, "_CHUNK", 64)
    gradients, shapes = steps.Gradients(), [(3, 7), (5,), (8, 8), (2, 2), (100, 3)]
    masters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    entries: Any = [mock.Mock(master=master) for master in masters]
    gradients._prepare(entries, [torch.zeros(shape) for shape in shapes])
    assert [tuple(view.shape) for view in gradients._views] == shapes
    assert all(view.data_ptr() % 16 == 0 for view in gradients._views)
    assert [nbytes for _, nbytes in gradients._storages] == [4 * (24 + 8 + 64), 4 * (4 + 300)]
