"""PEFT: LoRA adapters merged into a quantized base, with the error that this makes. All else of PEFT works as it is."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

import layoutc
from layoutc.integrations.packages import needs
from layoutc.runtime.weight.tensor import QuantizedTensor

with needs("peft"):
    from peft.tuners.lora import LoraLayer


def merge(model: Any) -> tuple[nn.Module, dict[str, float]]:
    """PEFT's `merge_and_unload`: the base model with its active adapters merged; and, by the name of each quantized
    weight, the error of quantizing the sum again, as `layoutc.merge_` has it.

    The adapters of a layer are added together first, in fp32, so that the sum is quantized once.

    Raises ValueError, before anything is changed, for a model that is sharded, and for adapters with DoRA or a bias of
    their own on quantized layers.
    """
    layers: dict[str, Any] = {}
    for name, module in model.get_base_model().named_modules():
        if isinstance(module, LoraLayer):
            layers[name] = module
    for name, layer in layers.items():
        weight = layer.get_base_layer().weight
        if isinstance(weight, DTensor):
            raise ValueError(f"{name} is sharded: save the adapters, and merge them into a model that is not")
        if isinstance(weight.data, QuantizedTensor):
            for adapter in layer.active_adapters:
                if adapter in getattr(layer, "lora_variant", {}) or getattr(layer, "lora_bias", {}).get(adapter):
                    raise ValueError(f"{name}: adapter {adapter} is more than a product of two matrices: keep it apart")
    errors = {}
    for name, layer in layers.items():
        weight = layer.get_base_layer().weight
        adapters = [adapter for adapter in layer.active_adapters if adapter in layer.lora_A]
        if isinstance(weight.data, QuantizedTensor) and not layer.merged and adapters:
            delta = sum(layer.get_delta_weight(adapter).float() for adapter in adapters)
            errors[f"{name}.weight"] = layoutc.merge_(weight, delta.detach())
            layer.merged_adapters.extend(adapters)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All adapters are already merged")
        return model.merge_and_unload(), errors
