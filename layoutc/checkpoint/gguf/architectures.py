"""Maps tensor names and row orders in GGUF files to those of transformers' models, by architecture.

Sources: llama.cpp's converter tables, which the package gguf has as constants and as its tensor mapping; and the
converter's row permutations. Architectures whose converter changes values are left out (Gemma's adds 1 to norms).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

# {n} is the layer index; the last part of a name (weight or bias) is the same on both sides.
_DECODER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.{n}.attn_norm": "model.layers.{n}.input_layernorm",
    "blk.{n}.attn_q": "model.layers.{n}.self_attn.q_proj",
    "blk.{n}.attn_k": "model.layers.{n}.self_attn.k_proj",
    "blk.{n}.attn_v": "model.layers.{n}.self_attn.v_proj",
    "blk.{n}.attn_output": "model.layers.{n}.self_attn.o_proj",
    "blk.{n}.ffn_norm": "model.layers.{n}.post_attention_layernorm",
    "blk.{n}.ffn_gate": "model.layers.{n}.mlp.gate_proj",
    "blk.{n}.ffn_up": "model.layers.{n}.mlp.up_proj",
    "blk.{n}.ffn_down": "model.layers.{n}.mlp.down_proj",
}
_NORMS_OF_HEADS = {
    "blk.{n}.attn_q_norm": "model.layers.{n}.self_attn.q_norm",
    "blk.{n}.attn_k_norm": "model.layers.{n}.self_attn.k_norm",
}
_ROUTER = {"blk.{n}.ffn_gate_inp": "model.layers.{n}.mlp.gate"}
# 3-D weights of experts. One parameter of the model may be several tensors in files: their rows are concatenated in
# each expert's matrix.
_EXPERTS = {
    "model.layers.{n}.mlp.experts.gate_up_proj": ("blk.{n}.ffn_gate_exps", "blk.{n}.ffn_up_exps"),
    "model.layers.{n}.mlp.experts.gate_proj": ("blk.{n}.ffn_gate_exps",),
    "model.layers.{n}.mlp.experts.up_proj": ("blk.{n}.ffn_up_exps",),
    "model.layers.{n}.mlp.experts.down_proj": ("blk.{n}.ffn_down_exps",),
}
_FUSED = {
    "blk.{n}.attn_qkv": "model.layers.{n}.self_attn.qkv_proj",
    "blk.{n}.ffn_up": "model.layers.{n}.mlp.gate_up_proj",
}


class Config(NamedTuple):
    """A transformers config. sizes: file keys, without the architecture -> config fields. experts: for files that state
    a number of experts. biases: fields -> the modules in files that have a bias if the field is true. head: the config
    has the field head_dim."""

    model_type: str
    name: str
    sizes: Mapping[str, str]
    fixed: Mapping[str, bool] = {}
    experts: bool = False
    biases: Mapping[str, str] = {}
    head: bool = True


_SIZES = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "feed_forward_length": "intermediate_size",
}
# Module -> dims of its weight, outermost first, as config fields or sizes derived from them.
_EXPERT = ("experts", "expert_rows", "hidden_size")
SHAPES: Mapping[str, tuple[str, ...]] = {
    "token_embd": ("vocab_size", "hidden_size"),
    "output_norm": ("hidden_size",),
    "output": ("vocab_size", "hidden_size"),
    "attn_norm": ("hidden_size",),
    "attn_q": ("query_rows", "hidden_size"),
    "attn_q_norm": ("head_dim",),
    "attn_k": ("key_rows", "hidden_size"),
    "attn_k_norm": ("head_dim",),
    "attn_v": ("key_rows", "hidden_size"),
    "attn_output": ("hidden_size", "query_rows"),
    "ffn_norm": ("hidden_size",),
    "ffn_gate": ("intermediate_size", "hidden_size"),
    "ffn_up": ("intermediate_size", "hidden_size"),
    "ffn_down": ("hidden_size", "intermediate_size"),
    "ffn_gate_inp": ("experts", "hidden_size"),
    "ffn_gate_exps": _EXPERT,
    "ffn_up_exps": _EXPERT,
    "ffn_down_exps": ("experts", "hidden_size", "expert_rows"),
}
_MIXTRAL = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
_QWEN3_MOE = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_LLAMA = {"attention_bias": "blk.0.attn_q", "mlp_bias": "blk.0.ffn_gate"}


class Architecture(NamedTuple):
    """The names of an architecture.

    modules: module in files -> module in transformers' model. rotated: modules in files whose rows interleave the two
    rotary dims of each pair (per head; transformers' models have all first dims before all second ones) -> the key for
    the number of heads, and its fallback; {arch} is the architecture. stacked: 3-D parameter of transformers' model ->
    the modules in files that hold it together. ignored: tensors that are derived from the config and that no parameter
    holds. configs: how to make config.json; () if a file's keys are not enough.
    """

    modules: Mapping[str, str]
    rotated: Mapping[str, tuple[str, ...]] = {}
    stacked: Mapping[str, tuple[str, ...]] = {}
    configs: tuple[Config, ...] = ()
    ignored: tuple[str, ...] = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


_Q, _KV = "{arch}.attention.head_count", "{arch}.attention.head_count_kv"
ARCHITECTURES = {
    "llama": Architecture(
        _DECODER | _ROUTER,
        {"blk.{n}.attn_q": (_Q,), "blk.{n}.attn_k": (_KV, _Q)},
        _EXPERTS,
        (
            Config("llama", "LlamaForCausalLM", _SIZES, biases=_LLAMA),
            Config("mixtral", "MixtralForCausalLM", _SIZES | _MIXTRAL, experts=True),
        ),
    ),
    "qwen2": Architecture(_DECODER, configs=(Config("qwen2", "Qwen2ForCausalLM", _SIZES, head=False),)),
    "qwen3": Architecture(_DECODER | _NORMS_OF_HEADS, configs=(Config("qwen3", "Qwen3ForCausalLM", _SIZES),)),
    "qwen3moe": Architecture(
        {name: _DECODER[name] for name in _DECODER if "_gate" not in name and "_up" not in name and "_down" not in name}
        | _NORMS_OF_HEADS
        | _ROUTER,
        stacked=_EXPERTS,
        # llama.cpp normalizes the weights of the chosen experts to sum to 1, whatever the file says.
        configs=(
            Config("qwen3_moe", "Qwen3MoeForCausalLM", _SIZES | _QWEN3_MOE, {"norm_topk_prob": True}, experts=True),
        ),
    ),
    "phi3": Architecture({name: _DECODER[name] for name in _DECODER if "ffn_gate" not in name} | _FUSED),
}


class Place(NamedTuple):
    """The tensors that hold a parameter, rows concatenated in each matrix; and the first one's module, with {n}."""

    tensors: tuple[str, ...]
    module: str


class Names(NamedTuple):
    """Translates the names of one architecture."""

    architecture: Architecture

    def in_files(self, parameter: str) -> Place | None:
        """The place of a parameter of transformers' model in files; None if it has no name there."""
        for ours, several in self.architecture.stacked.items():
            if (match := _pattern(ours).fullmatch(parameter)) is not None:
                return Place(tuple(f"{one.replace('{n}', match[1])}.weight" for one in several), several[0])
        module, _, last = parameter.rpartition(".")
        for theirs, ours in self.architecture.modules.items():
            if (match := _pattern(ours).fullmatch(module)) is not None and last in ("weight", "bias"):
                number = match[1] if match.groups() else ""
                return Place((f"{theirs.replace('{n}', number)}.{last}",), theirs)
        return None

    def parameter(self, tensor: str) -> str | None:
        """The parameter of transformers' model that a tensor holds, whole or in part; None if there is none."""
        module, _, last = tensor.rpartition(".")
        for ours, several in self.architecture.stacked.items():
            for one in several:
                if (match := _pattern(one).fullmatch(module)) is not None and last == "weight":
                    return ours.replace("{n}", match[1])
        for theirs, ours in self.architecture.modules.items():
            if (match := _pattern(theirs).fullmatch(module)) is not None and last in ("weight", "bias"):
                return f"{ours.replace('{n}', match[1] if match.groups() else '')}.{last}"
        return None


@cache
def _pattern(name: str) -> re.Pattern[str]:
    """The pattern for a name with {n}; its group is the index."""
    return re.compile(re.escape(name).replace(r"\{n\}", r"(\d+)"))
