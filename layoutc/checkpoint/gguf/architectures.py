"""What tensors are called in GGUF files of an architecture, and how they differ from those of transformers' models.

Source: the tables of llama.cpp's converter, which the package gguf has as constants and as its tensor mapping; and how
the converter permutes rows. Architectures whose converter changes values, as Gemma's adds 1 to norms, are left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, cached_property
from typing import NamedTuple

# {n} is the number of a layer; what follows the last dot, weight or bias, is the same on both sides.
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
# Weights of experts, of three dims: what a model has as one may be several tensors, whose rows follow each other in the
# matrix of each expert.
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
    """A model of transformers. sizes: keys of files, without the architecture -> fields of its config. experts: it is
    for files that say how many experts there are. biases: fields -> the modules in files that have a bias if they are
    true. head: it has the field head_dim."""

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
# Dims of weights, outermost first, by names of fields: of configs, and of those that follow from them.
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

    modules: a module in files -> in transformers' model. rotated: modules in files whose rows, in each head, have pairs
    of rotary dims beside each other, where transformers' models have all first ones before all second ones: with the
    key that says how many heads there are, and the one that says it if that is left out; {arch} is the architecture.
    stacked: a parameter of transformers' model, of three dims -> the modules in files that hold it together.
    ignored: tensors that follow from the config, which no parameter holds. configs: what config.json of such models is
    made of; none where a file's keys say too little.
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
        # llama.cpp makes the weights of the chosen experts add up to 1, whatever the file says.
        configs=(
            Config("qwen3_moe", "Qwen3MoeForCausalLM", _SIZES | _QWEN3_MOE, {"norm_topk_prob": True}, experts=True),
        ),
    ),
    "phi3": Architecture({name: _DECODER[name] for name in _DECODER if "ffn_gate" not in name} | _FUSED),
}


class Place(NamedTuple):
    """Where files hold a parameter: tensors, whose rows follow each other in each of its matrices, and the module of
    the first, with {n}."""

    tensors: tuple[str, ...]
    module: str


class Names:
    """The names of one architecture, as functions."""

    def __init__(self, architecture: Architecture) -> None:
        self.architecture = architecture

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], str]]:
        """Of modules of transformers' models, and the modules in files."""
        return [(_pattern(ours), theirs) for theirs, ours in self.architecture.modules.items()]

    def in_files(self, parameter: str) -> Place | None:
        """Where files hold a parameter of transformers' model; None if it has no name there."""
        for ours, several in self.architecture.stacked.items():
            if (match := _pattern(ours).fullmatch(parameter)) is not None:
                return Place(tuple(f"{one.replace('{n}', match[1])}.weight" for one in several), several[0])
        module, _, last = parameter.rpartition(".")
        for pattern, theirs in self._patterns:
            if (match := pattern.fullmatch(module)) is not None and last in ("weight", "bias"):
                number = match[1] if match.groups() else ""
                return Place((f"{theirs.replace('{n}', number)}.{last}",), theirs)
        return None

    def parameter(self, tensor: str) -> str | None:
        """The parameter of transformers' model that a tensor holds, or a part of; None if none does."""
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
    """A name with {n}, whose group is the number."""
    return re.compile(re.escape(name).replace(r"\{n\}", r"(\d+)"))
