"""transformers: layoutc's implementation of experts, which moves tokens to experts and back in fewer passes.

import layoutc.integrations.transformers_experts  # registers it
model = AutoModelForCausalLM.from_pretrained(name)
model.set_experts_implementation("layoutc")
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from layoutc.integrations.packages import needs
from layoutc.runtime.products.experts import gated_experts, routed_experts

with needs("transformers"):
    from transformers.activations import ACT2FN
    from transformers.integrations.moe import (
        ALL_EXPERTS_FUNCTIONS,
        _default_apply_gate,
        _grouped_mm,
        grouped_mm_experts_forward,
    )

SILU = (nn.SiLU, type(ACT2FN["silu"]))


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Same signature as transformers' other implementations: hidden_states (tokens, columns) -> the same shape.

    Falls back to transformers' "grouped_mm" for experts without a gate, or with biases or a norm.
    """
    if self.has_bias or not self.has_gate or getattr(self, "has_post_expert_norm", False):
        made: Tensor = grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
        return made

    def multiply(rows: Tensor, weight: Any, offs: Tensor) -> Tensor:
        made: Tensor = _grouped_mm(rows, weight, offs)
        return made

    def as_read(weight: Any) -> Any:
        return weight if self.is_transposed else weight.transpose(-2, -1)

    gate_up, down = as_read(self.gate_up_proj), as_read(self.down_proj)
    if type(self)._apply_gate is _default_apply_gate and isinstance(self.act_fn, SILU):
        return gated_experts(hidden_states, top_k_index, top_k_weights, gate_up, down, multiply)

    def compute(rows: Tensor, ends: Tensor) -> Tensor:
        return multiply(self._apply_gate(multiply(rows, gate_up, ends)), down, ends)

    return routed_experts(hidden_states, top_k_index, top_k_weights, self.num_experts, compute)


ALL_EXPERTS_FUNCTIONS.register("layoutc", experts_forward)
