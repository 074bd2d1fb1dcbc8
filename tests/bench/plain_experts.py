"""A decoder with experts in every layer, as Mixtral and Qwen3-MoE are, of torch alone: for machines without
transformers. Parameters have transformers' names; experts are stacked and multiplied as its "grouped_mm" does."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layoutc.runtime.products.experts import gated_experts


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Attention(nn.Module):
    """Causal, with fewer heads of keys and values than of queries."""

    def __init__(self, hidden: int, heads: int, shared: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.q_proj = nn.Linear(hidden, heads * size, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(hidden, shared * size, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(heads * size, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(batch, tokens, hidden)."""
        parts = (
            one(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for one in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k, v = parts
        q, k = (_rotated(one, cos, sin) for one in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        made: Tensor = self.o_proj(y.transpose(1, 2).flatten(2))
        return made


class Experts(nn.Module):
    """Stacked, gates over the others."""

    implementation = "grouped_mm"

    def __init__(self, hidden: int, inner: int, experts: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * inner, hidden) * 0.02)
        self.down_proj = nn.Parameter(torch.randn(experts, hidden, inner) * 0.02)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x: (tokens, hidden); chosen, weights: (tokens, experts of each)."""
        up, down = self.gate_up_proj.transpose(-2, -1), self.down_proj.transpose(-2, -1)
        if self.implementation == "layoutc":
            return gated_experts(x, chosen, weights, up, down)
        flat = chosen.flatten()
        order = torch.argsort(flat)
        ends = torch.histc(flat[order].float(), len(up), 0, len(up) - 1).cumsum(0).to(torch.int32)
        gate, others = F.grouped_mm(x[order // chosen.shape[1]], up, offs=ends).chunk(2, -1)
        made = F.grouped_mm(F.silu(gate) * others, down, offs=ends) * weights.flatten()[order, None]
        return made[torch.argsort(order)].unflatten(0, chosen.shape).sum(1).to(x.dtype)


class Mixture(nn.Module):
    """A router and its experts."""

    def __init__(self, hidden: int, inner: int, experts: int, each: int) -> None:
        super().__init__()
        self.each, self.gate, self.experts = (
            each,
            nn.Linear(hidden, experts, bias=False),
            Experts(hidden, inner, experts),
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, hidden)."""
        flat = x.flatten(0, 1)
        weights, chosen = torch.topk(self.gate(flat).float().softmax(-1), self.each)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        made: Tensor = self.experts(flat, chosen, weights)
        return made.view_as(x)


class Layer(nn.Module):
    """Attention and a mixture, each behind a norm and beside what it is given."""

    def __init__(self, config: Mapping[str, int]) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        heads = (config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        inner = config.get("moe_intermediate_size", config["intermediate_size"])
        experts = config.get("num_experts", config.get("num_local_experts", 0))
        self.input_layernorm, self.post_attention_layernorm = (nn.RMSNorm(hidden, eps=1e-6) for _ in range(2))
        self.self_attn = Attention(hidden, *heads)
        self.mlp = Mixture(hidden, inner, experts, config["num_experts_per_tok"])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(batch, tokens, hidden)."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        made: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return made


class Decoder(nn.Module):
    """Embeddings, layers and a norm."""

    def __init__(self, config: Mapping[str, int]) -> None:
        super().__init__()
        self.size = config["head_dim"]
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.RMSNorm(config["hidden_size"], eps=1e-6)

    def forward(self, ids: Tensor) -> Tensor:
        """(batch, tokens) -> (batch, tokens, hidden)."""
        x: Tensor = self.embed_tokens(ids)
        speed = 10000.0 ** (-torch.arange(0, self.size, 2, device=ids.device) / self.size)
        angle = torch.outer(torch.arange(ids.shape[1], device=ids.device), speed).repeat(1, 2)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        made: Tensor = self.norm(x)
        return made


class Model(nn.Module):
    """With a head and a loss, as transformers' models for causal language modelling."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=config["vocab_size"])
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)
        for name, param in self.named_parameters():
            if param.dim() == 2:
                nn.init.normal_(self.get_parameter(name), std=0.02)

    def set_experts_implementation(self, name: str) -> None:
        """Of all layers: "grouped_mm" or "layoutc"."""
        for module in self.modules():
            if isinstance(module, Experts):
                module.implementation = name

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        """The loss of each next token."""
        logits = self.lm_head(self.model(input_ids)).float()
        wanted = F.pad(labels, (0, 1), value=-100)[:, 1:]
        return SimpleNamespace(loss=F.cross_entropy(logits.flatten(0, 1), wanted.flatten()))
