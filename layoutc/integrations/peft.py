"""PEFT: merges LoRA adapters into a quantized base and reports the error. The rest of PEFT works unchanged."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import layoutc
from layoutc.integrations.packages import needs
from layoutc.runtime.storage import initial_values
from layoutc.runtime.weight.tensor import QuantizedTensor

with needs("peft"):
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer


def merge(model: Any) -> tuple[nn.Module, dict[str, float]]:
    """PEFT's `merge_and_unload`. Returns the base model with its active adapters merged, and by name of each quantized
    weight, the error of requantizing the sum, as from `layoutc.merge_`.

    Adds up a layer's adapters in fp32 first, so that the sum is quantized once.

    Raises ValueError, before it changes anything, for a sharded model, for adapters with DoRA or a bias on quantized
    layers, and for a transformers model whose adapters come from `add_adapter`.
    """
    if not hasattr(model, "get_base_model"):
        raise ValueError(
            f"{type(model).__name__} has adapters by its own add_adapter, which can't be unloaded: merge() each layer "
            "that is a peft.tuners.tuners_utils.BaseTunerLayer, and export merged_state(model)"
        )
    modules = model.get_base_model().named_modules()
    layers: dict[str, Any] = {name: module for name, module in modules if isinstance(module, LoraLayer)}
    for name, layer in layers.items():
        weight, _ = _weight(layer)
        if isinstance(weight, DTensor):
            raise ValueError(f"{name} is sharded: save the adapters, and merge them into a model that is not")
        if isinstance(weight.data, QuantizedTensor):
            for adapter in layer.active_adapters:
                if adapter in getattr(layer, "lora_variant", {}) or getattr(layer, "lora_bias", {}).get(adapter):
                    raise ValueError(
                        f"{name}: adapter {adapter} is more than a product of two matrices: keep it separate"
                    )
    errors = {}
    for name, layer in layers.items():
        weight, key = _weight(layer)
        adapters = [adapter for adapter in layer.active_adapters if adapter in layer.lora_A]
        if isinstance(weight.data, QuantizedTensor) and not layer.merged and adapters:
            delta = sum(layer.get_delta_weight(adapter).float() for adapter in adapters)
            errors[".".join([*(part for part in name.split(".") if part != "base_layer"), key])] = layoutc.merge_(
                weight, delta.detach()
            )
            layer.merged_adapters.extend(adapters)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All adapters are already merged")
        return model.merge_and_unload(), errors


def merged_state(model: Any) -> dict[str, Tensor]:
    """The base's parameters and buffers by the base model's names, including adapters that are merged now. For
    `export_safetensors`, `stream_export` and `export_gguf`, until the adapters are unmerged. The model is PEFT's or a
    transformers model with `add_adapter`, sharded or not.

    Raises ValueError for layers with unmerged adapters, for sharded weights without the merge (torch drops what DoRA,
    IA3 and `safe_merge=True` assign to their `.data`), and for modules trained as copies.
    """
    wrapped = hasattr(model, "get_base_model")
    base: nn.Module = model.get_base_model() if wrapped else model
    layers = {name: one for name, one in base.named_modules() if isinstance(one, BaseTunerLayer)}
    if apart := [name for name, one in layers.items() if {*one.active_adapters} - {*one.merged_adapters}]:
        how = "merge_adapter()" if wrapped else "merge() each of them"
        raise ValueError(f"{apart[0]} has adapters that are not merged, {len(apart)} layers in all: {how}")
    state = {}
    if unmoved := [name for name, one in layers.items() if one.merged_adapters and _took_nothing(one)]:
        raise ValueError(
            f"{unmoved[0]} is sharded, and nothing was merged into its weight, {len(unmoved)} layers in all: torch "
            "drops what DoRA, IA3 and safe_merge=True assign to its .data. unmerge_adapter(), and merge LoRA with "
            "safe_merge=False, or save the adapters and merge them where weights are whole"
        )
    for name, value in base.state_dict(keep_vars=True).items():
        if ".modules_to_save." in name or ".token_adapter." in name:
            raise ValueError(
                f"{name} is a trained copy (modules_to_save or trainable tokens): merge_and_unload() makes it part of "
                "the model"
            )
        if (own := _of_base(name, layers)) is not None:
            state[own] = value
    return state


def _weight(layer: Any) -> tuple[Any, str]:
    """The parameter that a layer's adapters change, and its key: "weight", or the name from `target_parameters`."""
    key = getattr(layer, "parameter_name", "weight")
    return getattr(layer.get_base_layer(), key, None), key


def _of_base(name: str, layers: Iterable[str]) -> str | None:
    """The base model's name of an entry in layers with adapters, perhaps nested; None for the adapters' own."""
    for layer in sorted(layers, key=len, reverse=True):
        if name.startswith(f"{layer}."):
            if not name.startswith(f"{layer}.base_layer."):
                return None
            name = layer + name.removeprefix(f"{layer}.base_layer")
    return name


def _took_nothing(layer: Any) -> bool:
    """Whether a quantized shard lacks its layer's merge: a merge keeps the weight's previous value with the shard."""
    local = getattr(_weight(layer)[0], "_local_tensor", None)
    if not isinstance(local, QuantizedTensor):
        return False
    base = initial_values.base(local.store)
    return base is None or base.weight is None or base.owner is None or base.owner() is not layer
