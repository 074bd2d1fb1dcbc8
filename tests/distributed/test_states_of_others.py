"""Checkpoints by torch of jobs with other optimizers, loaded into layoutc's, and the way back, on another world."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import Ranks, preload
from models import Model, build, shard
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor

import layoutc
from layoutc import checkpoint
from layoutc.runtime.errors import LayoutError

preload("torchao.optim")
WIDTH = 256  # columns of whole blocks of torchao's 8-bit states
FORMS: dict[str, Any] = {
    "plain": torch.optim.AdamW,
    "tensor": partial(
        torch.optim.AdamW, lr=torch.tensor(0.25), betas=(torch.tensor(0.5), torch.tensor(0.75)), foreach=False
    ),
    "fused": partial(torch.optim.AdamW, lr=torch.tensor(0.25), fused=True),
    "maximize": partial(torch.optim.AdamW, maximize=True),
    "amsgrad": partial(torch.optim.AdamW, amsgrad=True),
    "fp32": layoutc.AdamW,
    "8bit": partial(layoutc.AdamW, state="8bit"),
    "masters": partial(layoutc.MasterWeights, torch.optim.AdamW),
}


def job(form: str, recipe: str, seed: int) -> tuple[nn.Module, Any]:
    """A sharded model, plain if there is no recipe, and its optimizer, of two groups of parameters."""
    torch.manual_seed(seed)
    model = shard(build(recipe, WIDTH, seed=seed) if recipe else Model(WIDTH))
    made = FORMS[form] if form in FORMS else getattr(import_module("torchao.optim"), form)
    first, *others = model.parameters()
    return model, made([{"params": [first]}, {"params": others}])


def whole(value: Tensor) -> Tensor:
    """The fp32 values of a sharded state."""
    if not isinstance(value, DTensor):
        return value.float()
    local: Any = value.to_local()
    local = local.dequantize() if hasattr(local, "dequantize") and type(local) is not Tensor else local
    plain = DTensor.from_local(
        local.float(), value.device_mesh, value.placements, shape=value.shape, stride=value.stride()
    )
    return plain.full_tensor()


def held(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """All values of the state, and what is stepped."""
    masters = optimizer.masters() if hasattr(optimizer, "masters") else {}
    found = {name: whole(masters.get(param, param).detach()) for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        found |= {f"{name} {key}": whole(optimizer.state[param][key]) for key in ("step", "exp_avg", "exp_avg_sq")}
    return found


def saves(form: str, recipe: str, folder: str, flat: bool) -> None:
    with mock.patch.object(torch, "compile", lambda function, **_: function):  # torchao's step
        model, optimizer = job(form, recipe, 0)
        for step in range(2):
            for number, param in enumerate(model.parameters()):
                values, like = (
                    torch.randn(param.shape, generator=torch.Generator().manual_seed(9 * step + number)),
                    param,
                )
                assert isinstance(like, DTensor)
                param.grad = distribute_tensor(values, like.device_mesh, like.placements, src_data_rank=None)
            optimizer.step()
    dcp.save(state_of(model, optimizer, flat), checkpoint_id=folder)
    found = held(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(found, f"{folder}.values")


def state_of(model: nn.Module, optimizer: Any, flat: bool) -> dict[str, Any]:
    """As users save it."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=options), strict=True))


def loads(form: str, recipe: str, folder: str, flat: bool, exact: bool, convert: bool) -> dict[str, Any]:
    """Everything that the other job held, and in its bytes if no conversion is asked for; then a step."""
    options, expected = StateDictOptions(flatten_optimizer_state_dict=flat), torch.load(f"{folder}.values")
    if find_spec("torchao"):
        import_module("torchao.optim")  # lets torch read its classes
    with mock.patch.object(torch, "compile", lambda function, **_: function):
        model, optimizer = job(form, recipe, 1)
        state = state_of(model, optimizer, flat)
        own = [type(one) for one in optimizer.param_groups[0]["betas"]]
        checkpoint.load(state, folder, convert=convert)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options
        )
        for name, value in held(model, optimizer).items():
            if exact or " exp_" not in name:
                assert torch.equal(value, expected[name]), name
            else:
                torch.testing.assert_close(value, expected[name], atol=0.01 * float(expected[name].abs().max()), rtol=0)
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        optimizer.step()
    group, other = optimizer.param_groups
    assert [type(one) for one in group["betas"]] == own
    assert other | {"params": 0} == group | {"params": 0}
    assert type(other["lr"]) is type(group["lr"])
    return {"beta": float(group["betas"][0]), **{key: float(group.get(key, False)) for key in ("lr", "maximize")}}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("there", "of", "here", "to", "exact", "convert"),
    [
        ("AdamW8bit", "", "8bit", "", True, False),
        ("AdamW8bit", "", "fp32", "", True, True),
        ("AdamW4bit", "", "8bit", "", False, True),
        ("8bit", "", "AdamW8bit", "", True, False),
        ("plain", "", "fp32", "fp8_block", True, True),
        ("tensor", "", "masters", "nvfp4", True, True),
        ("fused", "", "8bit", "", False, True),
        ("maximize", "", "masters", "", True, False),
        ("fp32", "fp8_block", "plain", "", True, True),
        ("8bit", "nvfp4", "tensor", "", True, True),
        ("masters", "mxfp8", "AdamW8bit", "", False, True),
    ],
)
def test_a_job_goes_on_with_another_optimizer(
    two: Ranks,
    four: Ranks,
    tmp_path: Path,
    there: str,
    of: str,
    here: str,
    to: str,
    exact: bool,
    convert: bool,
) -> None:
    """Moments, steps, options, and the values that are stepped: a plain weight is the other's master."""
    if "bit" in there + here and (there + here).count("AdamW"):
        pytest.importorskip("torchao.optim", reason="needs torchao: pip install 'layoutc[integrations]'")
    folder, flat = str(tmp_path / "saved"), there in ("tensor", "AdamW8bit", "masters")
    two.run(saves, there, of, folder, flat)
    for found in four.run(loads, here, to, folder, flat, exact, convert):
        assert found["lr"] == pytest.approx(0.25 if there in ("tensor", "fused") else 1e-3, rel=1e-7)
        assert found["beta"] == pytest.approx(0.5 if there == "tensor" else 0.9, rel=1e-7)
        assert found["maximize"] == (there == "maximize")


def refuses(folder: str) -> list[str]:
    """Nothing of the model has moved after it."""
    found = []
    for form, recipe, parts in (("8bit", "", ("optimizer",)), ("masters", "nvfp4", ("optimizer",))):
        model, optimizer = job(form, recipe, 1)
        state = state_of(model, optimizer, False)
        before = held(model, optimizer)
        with pytest.raises(LayoutError) as caught:
            checkpoint.load({part: state[part] for part in parts}, folder, convert=True)
        assert all(torch.equal(value, before[name]) for name, value in held(model, optimizer).items())
        found.append(str(caught.value))
    return found


def test_states_that_no_rule_has_are_refused(two: Ranks, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    two.run(saves, "amsgrad", "", folder, False)
    for adamw, masters in two.run(refuses, folder):
        assert "max_exp_avg_sq" in adamw
        assert "max_exp_avg_sq" in masters
