"""transformers: experts by layoutc's own implementation, which moves tokens to experts and back in fewer passes.

import layoutc.integrations.transformers_experts  # registers it
model = AutoModelForCausalLM.from_pretrained(name)
model.set_experts_implementation("layoutc")
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from layoutc.integrations.packages import needs
from layoutc.runtime.products.experts import routed_experts

with needs("transformers"):
    from transformers.integrations import moe


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """As the other implementations of transformers: hidden_states (tokens, columns) -> the same.

    Experts without a gate, or with biases or a norm of their own, are computed by transformers' "grouped_mm".
    """
    if self.has_bias or not self.has_gate or getattr(self, "has_post_expert_norm", False):
        made: Tensor = moe.grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
        return made

    def compute(rows: Tensor, ends: Tensor) -> Tensor:
        both = moe._grouped_linear(rows, self.gate_up_proj, ends, is_transposed=self.is_transposed)
        gated: Tensor = self._apply_gate(both)
        out: Tensor = moe._grouped_linear(gated, self.down_proj, ends, is_transposed=self.is_transposed)
        return out

    return routed_experts(hidden_states, top_k_index, top_k_weights, self.num_experts, compute)


moe.ALL_EXPERTS_FUNCTIONS.register("layoutc", experts_forward)
