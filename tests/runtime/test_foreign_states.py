"""States of torchao's and bitsandbytes' AdamW in layoutc.AdamW: the same bytes, or the same values."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import layoutc
import layoutc.recipes
from layoutc import checkpoint
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.optim.states import read

FORMS = {"adam_m8": "8bit", "moment_fp8": "fp8", "adam_m4": "4bit"}


def model_of(columns: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(columns, 24), nn.Linear(24, 8, bias=False))


def with_gradients(model: nn.Module, seed: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator)
    return list(model.parameters())


@pytest.mark.parametrize("columns", [512, 500], ids=["rows of whole blocks", "blocks that cross rows"])
@pytest.mark.parametrize("state", ["8bit", "fp32"])
def test_bitsandbytes_goes_on_here(columns: int, state: str) -> None:
    """Bytes where the recipe is the same, and else values, as its own map and blocks say; small ones in fp32."""
    optim: Any = pytest.importorskip("bitsandbytes.optim", reason="needs bitsandbytes")
    model = model_of(columns)
    theirs = optim.AdamW8bit(model.parameters(), lr=1e-3)
    for step in range(3):
        with_gradients(model, step)
        theirs.step()
    ours = layoutc.AdamW(model.parameters(), lr=1e-3, state=state)
    ours.load_state_dict(theirs.state_dict())
    for param in model.parameters():
        held, found = theirs.state[param], ours.state[param]
        assert found["step"] == held["step"] == 3
        for number, name in ((1, "exp_avg"), (2, "exp_avg_sq")):
            moment = found[name]
            if held[f"state{number}"].dtype == torch.float32:
                assert torch.equal(moment, held[f"state{number}"])
                continue
            codes, scales, table = (held[f"{key}{number}"] for key in ("state", "absmax", "qmap"))
            values = (table[codes.long()].flatten() * scales.repeat_interleave(256)[: codes.numel()]).view(codes.shape)
            if state == "fp32":
                assert torch.equal(moment, values)
            elif columns % 256 == 0:
                assert torch.equal(moment.planes()["rowwise_data"], codes)
                assert torch.equal(moment.planes()["rowwise_scale"].flatten(), scales)
            else:
                recipe = layoutc.recipes.adam_m8 if number == 1 else layoutc.recipes.adam_v8
                assert torch.equal(moment, recipe.quantize(values))
    with_gradients(model, 3)
    ours.step()


@pytest.mark.parametrize("recipe", FORMS)
@pytest.mark.parametrize("form", ["same", "other"])
def test_torchao_goes_on_here(recipe: str, form: str) -> None:
    """Its tensors of 8 bits, fp8 and 4 bits, with the codes that it made; and their values in another form."""
    optim: Any = pytest.importorskip("torchao.optim", reason="needs torchao")
    model = model_of(512)
    theirs = {
        "adam_m8": optim.AdamW8bit,
        "moment_fp8": lambda params, **kwargs: optim.AdamWFp8(params, block_size=128, **kwargs),
        "adam_m4": optim.AdamW4bit,
    }[recipe](model.parameters(), lr=1e-3)
    made: dict[nn.Parameter, dict[str, Tensor]] = {}
    for param in with_gradients(model, 1):  # what its step makes, which compiles a function for each shape
        state = theirs.state[param]
        state["step"] = torch.tensor(1.0)
        for name, values in (("exp_avg", param.grad * 0.1), ("exp_avg_sq", param.grad.square() * 1e-3)):
            state[name] = theirs._new_buffer(param, name == "exp_avg").copy_(values)
        made[param] = state
    ours = layoutc.AdamW(model.parameters(), state=FORMS[recipe] if form == "same" else "fp32")
    ours.load_state_dict(theirs.state_dict())
    for param, held in made.items():
        for name in ("exp_avg", "exp_avg_sq"):
            moment, their = ours.state[param][name], held[name]
            plain = not hasattr(their, "codes")
            assert torch.equal(read(moment).view(param.shape), their if plain else their.dequantize()) or (
                recipe == "moment_fp8" and name == "exp_avg_sq"  # its root is held here, in other codes
            )
            if form == "same" and not plain and (recipe, name) != ("moment_fp8", "exp_avg_sq"):
                codes, scales = moment.planes().values()
                assert torch.equal(codes.flatten().view(torch.uint8), their.codes.flatten().view(torch.uint8))
                assert torch.equal(scales.flatten(), their.scale)
    with_gradients(model, 2)
    ours.step()


def test_amsgrad_is_refused() -> None:
    model = model_of(512)
    theirs = torch.optim.AdamW(with_gradients(model, 1), amsgrad=True)
    theirs.step()
    ours, state = layoutc.AdamW(model.parameters()), theirs.state_dict()
    with pytest.raises(ValueError, match=re.escape("set state['param_groups'][0]['amsgrad'] = False")):
        ours.load_state_dict(state)
    state["param_groups"][0]["amsgrad"] = False
    ours.load_state_dict(state)
    assert {*ours.state[model[0].weight]} == {"step", "exp_avg", "exp_avg_sq"}


def fused_adam(model: nn.Module, step: Any, **options: Any) -> dict[str, Any]:
    """What the state_dict of Transformer Engine's FusedAdam returns: moments in fp32, steps of groups."""
    state = {
        number: {
            name: torch.randn(param.shape, generator=torch.Generator().manual_seed(number)).abs()
            for name in ("exp_avg", "exp_avg_sq", "master_param")
        }
        for number, param in enumerate(model.parameters())
    }
    group = {"lr": 0.25, "bias_correction": True, "betas": (0.5, 0.75), "eps": 1e-6, "weight_decay": 0.0, **options}
    return {"state": state, "param_groups": [{**group, "step": step, "params": [*state]}]}


@pytest.mark.parametrize("kind", ["AdamW", "MasterWeights"])
@pytest.mark.parametrize("step", [7, torch.tensor([7], dtype=torch.int32)], ids=["number", "tensor"])
def test_fused_adam_of_transformer_engine_goes_on_here(kind: str, step: Any) -> None:
    """Its masters, moments and steps."""
    model = model_of(512).bfloat16()
    saved = fused_adam(model, step)
    of: Any = layoutc.AdamW if kind == "AdamW" else partial(layoutc.MasterWeights, torch.optim.AdamW)
    ours = of(model.parameters())
    ours.load_state_dict(saved)
    for number, param in enumerate(model.parameters()):
        found = ours.state[param]
        assert found["step"] == 7
        assert torch.equal(ours.masters()[param], saved["state"][number]["master_param"])
        assert torch.equal(found["exp_avg_sq"], saved["state"][number]["exp_avg_sq"])
    assert ours.param_groups[0]["betas"] == (0.5, 0.75)

    for param in model.parameters():
        param.grad = torch.ones_like(param)
    ours.step()
    assert {int(state["step"]) for state in ours.state.values()} == {8}
    assert not any("step" in group for group in ours.param_groups)


def test_what_can_not_go_on_is_refused() -> None:
    model = model_of(512).bfloat16()
    ours = layoutc.AdamW(model.parameters())
    with pytest.raises(ValueError, match="bias_correction=False"):
        ours.load_state_dict(fused_adam(model, 7, bias_correction=False))
    saved = fused_adam(model, 7)
    del saved["param_groups"][0]["step"]
    with pytest.raises(ValueError, match="exp_avg_sq, but no step"):
        ours.load_state_dict(saved)
    saved = fused_adam(model, 7)
    saved["state"][1]["master_param"] = saved["state"][1]["master_param"].to(torch.int16)
    with pytest.raises(ValueError, match="store_param_remainders=False"):
        ours.load_state_dict(saved)
    assert not ours.state


def test_a_folder_of_bitsandbytes_says_what_loads_it(tmp_path: Path) -> None:
    """By torch's checkpoints, in one process: its moments have other names, so the load names the calls."""
    optim: Any = pytest.importorskip("bitsandbytes.optim", reason="needs bitsandbytes")
    model = model_of(512)
    theirs = optim.AdamW8bit(with_gradients(model, 1), lr=1e-3)
    theirs.step()
    theirs.zero_grad()
    dcp.save({"optimizer": get_optimizer_state_dict(model, theirs)}, checkpoint_id=tmp_path / "saved")
    ours = layoutc.AdamW(model.parameters(), state="8bit")
    with pytest.raises(LayoutError, match=r"exp_avg\. bitsandbytes' states .* dcp_to_torch_save\(folder, file\)"):
        checkpoint.load({"optimizer": get_optimizer_state_dict(model, ours)}, tmp_path / "saved")
    dcp_to_torch_save(tmp_path / "saved", tmp_path / "file")
    ours.load_state_dict(torch.load(tmp_path / "file")["optimizer"])
    weight = model[0].weight
    assert torch.equal(ours.state[weight]["exp_avg"].planes()["rowwise_data"], theirs.state[weight]["state1"])
