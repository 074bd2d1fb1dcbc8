"""Converts states of torchao's and bitsandbytes' AdamW for layoutc.AdamW; bytes are kept if the layouts match."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layoutc.ints.sizes import cdiv
from layoutc.runtime import installed
from layoutc.runtime.optim.states import FORMS
from layoutc.runtime.sharding.meshes import with_local
from layoutc.runtime.train.steps import local_of
from layoutc.runtime.weight.tensor import QuantizedTensor

_WRAPPED = "__bnb_optimizer_quant_state__"  # bitsandbytes' key for states that are not DTensors


class Coded(NamedTuple):
    """A moment quantized in blocks of its flattened values. codes: two 4-bit codes per byte; table: their values."""

    codes: Tensor
    scales: Tensor
    block: int
    table: Tensor | None  # None: codes are values of an 8-bit dtype
    shape: torch.Size


def translated(state_dict: Mapping[str, Any], moments: Sequence[str]) -> dict[str, Any]:
    """A state dict with moments under AdamW's names, in recipes or fp32; other entries are unchanged.

    Raises ValueError for amsgrad states, which layoutc.AdamW does not support.
    """
    for number, group in enumerate(state_dict["param_groups"]):
        if group.get("amsgrad"):
            raise ValueError(
                f"parameter group {number} has amsgrad=True, which layoutc.AdamW does not support: to go on "
                f"without it, set state['param_groups'][{number}]['amsgrad'] = False"
            )
    return {
        **state_dict,
        "state": {key: _of_parameter(saved, moments) for key, saved in state_dict["state"].items()},
    }


def _of_parameter(saved: Any, moments: Sequence[str]) -> Any:
    if not isinstance(saved, Mapping):
        return saved
    state = {**saved, **saved.get(_WRAPPED, {})}
    state.pop(_WRAPPED, None)
    state.pop("max_exp_avg_sq", None)
    for number, name in enumerate(moments, 1):
        if f"state{number}" in state:
            state[name] = state.pop(f"state{number}")
            table, scales = state.pop(f"qmap{number}", None), state.pop(f"absmax{number}", None)
            if table is not None:
                codes = local_of(state[name])
                held = Coded(codes, scales[: cdiv(codes.numel(), 256)], 256, table, codes.shape)
                made = _in_recipe(held)
                state[name] = with_local(state[name], _values(held) if made is None else made.clone())
        elif isinstance(state.get(name), Tensor):
            local = local_of(state[name])
            if (found := taken(local)) is not local:
                state[name] = with_local(state[name], found.clone())
    return state


def as_recipe(value: Any) -> Any:
    """torchao's state as a tensor of the recipe that has its layout, in its own memory; any other tensor as it is."""
    held = _of_torchao(value)
    found = None if held is None else _in_recipe(held)
    return value if found is None else found


def taken(value: Tensor) -> Tensor:
    """As `as_recipe`; but torchao's states that no recipe has the layout of are fp32."""
    held, found = _of_torchao(value), as_recipe(value)
    return _values(held) if held is not None and found is value else found


def _of_torchao(value: Any) -> Coded | None:
    """The contents of a torchao state tensor; None for other tensors."""
    if not all(isinstance(getattr(value, name, None), Tensor) for name in ("codes", "scale")):
        return None
    return Coded(value.codes, value.scale, value.block_size, getattr(value, "qmap", None), value.shape)


def _in_recipe(held: Coded) -> QuantizedTensor | None:
    """A moment in the recipe that has its layout, in the same memory; None if no recipe does."""
    for cls in (installed.find(name).Tensor for names in FORMS.values() for name in names):
        if _is_layout(cls, held):
            m, k = held.shape[:-1].numel(), held.shape[-1]
            planes = {}
            for (name, facts), source in zip(cls.LAYOUT.planes(m, k).items(), (held.codes, held.scales), strict=True):
                planes[name] = source.view(facts.dtype).view(facts.shape)
            made: QuantizedTensor = cls(planes, held.shape, torch.float32, matrix=(m, k))
            return made
    return None


def _values(held: Coded) -> Tensor:
    """fp32 values, dequantized as the source package does."""
    codes = torch.stack([held.codes >> 4, held.codes & 15], -1) if _per_byte(held) == 2 else held.codes
    values = codes.float() if held.table is None else held.table.float()[codes.long()]
    return (values.flatten() * held.scales.repeat_interleave(held.block)[: values.numel()]).view(held.shape)


def _is_layout(cls: type[QuantizedTensor], held: Coded) -> bool:
    """Whether codes and scales are a recipe's planes: rows are whole blocks, and bytes decode to the same values."""
    per_byte, block = _per_byte(held), held.block
    stored = [plane.columns_per_value for plane in cls.LAYOUT.stored.values()]
    if len(held.shape) < 2 or held.shape[-1] % block or stored != [per_byte, block] or 256 * per_byte % block:
        return False
    m, every = 256 * per_byte // block, torch.arange(256, dtype=torch.uint8, device=held.codes.device)
    ones = held.scales.new_ones(m, 1, dtype=torch.float32)
    facts = cls.LAYOUT.planes(m, block)
    data, scale = facts
    planes = {data: every.view(facts[data].dtype).view(facts[data].shape), scale: ones}
    ours = cls.matrix_values(planes, m, block, cls.LAYOUT.orientations[0], torch.float32)
    theirs = _values(Coded(every.view(held.codes.dtype), ones.flatten(), block, held.table, torch.Size((m, block))))
    return torch.allclose(ours, theirs, rtol=0, atol=0, equal_nan=True)


def _per_byte(held: Coded) -> int:
    return 2 if 2 * held.codes.numel() == held.shape.numel() > 0 else 1
