"""Entries that optimizers keep differently: options, numbers as tensors, steps of groups, and masters.

A flattened state dict names what an optimizer holds by "state", the weight and the key, and by "param_groups", the
group and the option. Another optimizer's checkpoint may lack an option, hold a learning rate as a tensor, count steps
for a group, or have no masters, since its weights are what it steps.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from layoutc.checkpoint.assembly import local_of
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.weight.tensor import QuantizedTensor

_STATE = re.compile(r"((?:.*?\.)?)state\.(.+)\.([^.]+)")
_OPTION = re.compile(r"((?:.*?\.)?)param_groups\.(.+)\.([^.]+)")
_MASTERS = ("master", "master_param")  # the second is Transformer Engine's and apex's


@dataclass
class Matches:
    """Where the checkpoint has what it does not hold under the state dict's own name, or not of the same kind.

    sources: the checkpoint's name for a name of the state dict. kept: options that it lacks, which keep their values.
    numbers: options and steps that are a tensor on one side and a number on the other. extra: the checkpoint's entries
    that need no counterpart: options that this optimizer lacks.
    """

    sources: dict[str, str] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    numbers: dict[str, Any] = field(default_factory=dict)
    extra: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, live: Mapping[str, Any], paths: Mapping[str, Any], metadata: Metadata) -> Matches:
        """live: the flattened state dict. paths: where each of its entries stands in the state dict."""
        found, there = cls(), metadata.state_dict_metadata
        stored_weights = _by_last(metadata.planner_data or {}, there)
        for name, value in live.items():
            if name not in there:
                found._find(name, live, stored_weights, there)
            kind = there.get(found.sources.get(name, name))
            if _is_number(value) and isinstance(kind, TensorStorageMetadata) and kind.size.numel() == 1:
                found.numbers[name] = torch.zeros(kind.size, dtype=kind.properties.dtype, device="cpu")
            elif isinstance(value, Tensor) and value.numel() == 1 and kind is not None:
                if not isinstance(kind, TensorStorageMetadata):
                    found.numbers[name] = None
                elif found.sources.get(name, name) != name:  # a step that a group counts
                    found.numbers[name] = torch.zeros(kind.size, dtype=kind.properties.dtype, device="cpu")
        live_weights = _by_last(paths, live)
        for name in there:
            if name in live:
                continue
            if option := _OPTION.fullmatch(name):
                if option[3] != "params" and f"{option[1]}param_groups.{option[2]}.lr" in live:
                    found.extra.add(name)
            elif (state := _STATE.fullmatch(name)) and state[3] in _MASTERS:
                weights = live_weights.get(state[2], [])
                if len(weights) == 1 and _takes_master(live, weights[0], state[1], state[2]):
                    found.sources[weights[0]] = name
        return found

    def _find(
        self, name: str, live: Mapping[str, Any], weights: Mapping[str, list[str]], there: Mapping[str, Any]
    ) -> None:
        """Looks for what stands for an entry that the checkpoint lacks."""
        if option := _OPTION.fullmatch(name):
            group, key = f"{option[1]}param_groups.{option[2]}", option[3]
            if key != "params" and f"{group}.lr" in there and not any(one.startswith(f"{name}.") for one in there):
                self.kept.add(name)
        elif state := _STATE.fullmatch(name):
            prefix, weight, key = state.groups()
            if key == "step":
                self.sources |= dict(
                    zip([name], (one for one in _steps(prefix, weight, live) if one in there), strict=False)
                )
            elif key == "master":
                of_state = f"{prefix}state.{weight}.master_param"
                candidates = [of_state] if of_state in there else weights.get(weight, [])
                if len(candidates) == 1 and isinstance(there[candidates[0]], TensorStorageMetadata):
                    self.sources[name] = candidates[0]

    def planned(self, live: Mapping[str, Any], metadata: Metadata) -> tuple[dict[str, Any], Metadata]:
        """The state dict and the metadata between which torch plans what to read."""
        entries = {name: self.numbers.get(name, value) for name, value in live.items() if name not in self.kept}
        there = metadata.state_dict_metadata
        renamed = {name: there[source] for name, source in self.sources.items()}
        return entries, replace(metadata, state_dict_metadata={**there, **renamed})


def number(name: str, value: Any, live: Any) -> Any:
    """A loaded number as the state dict has it: a number, or a tensor like its own."""
    if isinstance(value, Tensor):
        value = value.reshape(()).item()
    if not _is_number(value):
        raise LayoutError(f"{name} is {type(value).__name__} in the checkpoint, not a number")
    return torch.full_like(live, value) if isinstance(live, Tensor) else value


def option(name: str, value: Any, live: Any) -> Any:
    """A loaded plain value as the state dict has it: with tensors where it has them, as for betas, else numbers."""
    if isinstance(live, list | tuple) and isinstance(value, list | tuple) and len(live) == len(value):
        return type(live)([option(name, one, own) for one, own in zip(value, live, strict=True)])
    if not all(_is_number(one) or (isinstance(one, Tensor) and one.numel() == 1) for one in (value, live)):
        return value
    return number(name, value, live) if isinstance(value, Tensor) or isinstance(live, Tensor) else value


def lacking(name: str) -> str:
    """What to do about an entry of an optimizer that the checkpoint lacks; "" for other entries."""
    if not (state := _STATE.fullmatch(name)):
        return ""
    if state[3] == "master":
        return (
            f". No entry of the checkpoint is the weight {state[2]} alone, from which its master could start: save the "
            "model's weights beside the optimizer's state, both with get_state_dict's names"
        )
    return (
        ". bitsandbytes' states load in one process: dcp_to_torch_save(folder, file), of "
        "torch.distributed.checkpoint.format_utils, then optimizer.load_state_dict(torch.load(file)['optimizer']). "
        "To begin such state anew, leave the optimizer out of the state dict"
    )


def _steps(prefix: str, weight: str, live: Mapping[str, Any]) -> Iterator[str]:
    """Names under which an optimizer that counts steps for each group has those of a weight."""
    yield f"{prefix}param_groups.{weight}.step"
    for name, value in live.items():
        if (option := _OPTION.fullmatch(name)) and option[1] == prefix and option[3] == "params" and weight in value:
            yield f"{prefix}param_groups.{option[2]}.step"


def _by_last(paths: Mapping[str, Any], entries: Mapping[str, Any]) -> Mapping[str, list[str]]:
    """Names of entries that are no optimizer's, by the last part of their paths: a model's own names."""
    found = defaultdict(list)
    for name in entries:
        if not _OPTION.fullmatch(name) and name in paths:
            found[str(paths[name][-1])].append(name)
    return found


def _takes_master(live: Mapping[str, Any], weight: str, prefix: str, name: str) -> bool:
    """Whether a plain weight is what its optimizer steps, so that it takes the checkpoint's master."""
    own, moments = local_of(live[weight]), f"{prefix}state.{name}."
    is_plain = own is not None and not isinstance(own, QuantizedTensor) and own.is_floating_point()
    return is_plain and any(one.startswith(moments) for one in live)


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float)
