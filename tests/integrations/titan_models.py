"""torchtitan's debug models, cut down to two layers (and eight small experts), and attention that a CPU can train."""

from __future__ import annotations

import dataclasses
from typing import Any

from torchtitan.config.override import derive, override
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.models.qwen3.config_registry import qwen3_moe_debug
from torchtitan.protocols.module import Module

SMALLER = {"num_experts": 8, "top_k": 2, "out_features": 8, "hidden_dim": 64}


@override(target=FlexAttention.Config, description="attention that has a backward on a CPU")
def attention(config: FlexAttention.Config) -> ScaledDotProductAttention.Config:
    """Causal, across documents."""
    return derive(config, ScaledDotProductAttention.Config)


def llama3() -> Any:
    """Linear layers."""
    config = llama3_debugmodel()
    del config.model_spec.model.layers[2:]
    return config


def qwen3() -> Any:
    """And experts."""
    config = qwen3_moe_debug()
    model = config.model_spec.model
    del model.layers[2:]
    for _, part, _, _ in model.layers[0].traverse(Module.Config, recurse=True):
        _make_smaller(part)
    for _, part, _, _ in model.layers[1].traverse(Module.Config, recurse=True):
        _make_smaller(part)
    return config


def deepseek_v3() -> Any:
    """Latent attention, a layer without experts, and one with shared experts beside the chosen ones."""
    config = deepseek_v3_debugmodel()
    del config.model_spec.model.layers[2:]
    return config


def _make_smaller(part: Any) -> None:
    for field in dataclasses.fields(part):
        if field.name in ("num_experts", "top_k") or (field.name, getattr(part, field.name)) in (
            ("out_features", 64),
            ("hidden_dim", 768),
        ):
            setattr(part, field.name, SMALLER[field.name])
