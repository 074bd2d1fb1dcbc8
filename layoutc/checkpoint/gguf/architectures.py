"""What tensors are called in GGUF files of an architecture, and how they differ from those of transformers' models.

Source: the tables of llama.cpp's converter, which the package gguf has as constants and as its tensor mapping; and how
the converter permutes rows. Architectures whose converter changes values, as Gemma's adds 1 to norms, are left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
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
_FUSED = {
    "blk.{n}.attn_qkv": "model.layers.{n}.self_attn.qkv_proj",
    "blk.{n}.ffn_up": "model.layers.{n}.mlp.gate_up_proj",
}


class Architecture(NamedTuple):
    """The names of an architecture.

    modules: a module in files -> in transformers' model. rotated: modules in files whose rows, in each head, have pairs
    of rotary dims beside each other, where transformers' models have all first ones before all second ones: with the
    key that says how many heads there are, and the one that says it if that is left out; {arch} is the architecture.
    ignored: tensors that follow from the config, which no parameter holds.
    """

    modules: Mapping[str, str]
    rotated: Mapping[str, tuple[str, ...]] = {}
    ignored: tuple[str, ...] = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


_Q, _KV = "{arch}.attention.head_count", "{arch}.attention.head_count_kv"
ARCHITECTURES = {
    "llama": Architecture(_DECODER, {"blk.{n}.attn_q": (_Q,), "blk.{n}.attn_k": (_KV, _Q)}),
    "qwen2": Architecture(_DECODER),
    "qwen3": Architecture(_DECODER | _NORMS_OF_HEADS),
    "phi3": Architecture({name: _DECODER[name] for name in _DECODER if "ffn_gate" not in name} | _FUSED),
}


class Names:
    """The names of one architecture, as functions."""

    def __init__(self, architecture: Architecture) -> None:
        self.architecture = architecture

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], str]]:
        """Of modules of transformers' models, and the modules in files."""
        pairs = self.architecture.modules.items()
        return [(re.compile(re.escape(ours).replace(r"\{n\}", r"(\d+)")), theirs) for theirs, ours in pairs]

    def in_files(self, parameter: str) -> tuple[str, str] | None:
        """(name of the tensor, its module with {n}) of a parameter of transformers' model; None if it has none."""
        module, _, last = parameter.rpartition(".")
        for pattern, theirs in self._patterns:
            if (match := pattern.fullmatch(module)) is not None and last in ("weight", "bias"):
                number = match[1] if match.groups() else ""
                return f"{theirs.replace('{n}', number)}.{last}", theirs
        return None

    def parameter(self, tensor: str) -> str | None:
        """The parameter of transformers' model that a tensor holds; None if none does."""
        module, _, last = tensor.rpartition(".")
        for theirs, ours in self.architecture.modules.items():
            match = re.fullmatch(re.escape(theirs).replace(r"\{n\}", r"(\d+)"), module)
            if match is not None and last in ("weight", "bias"):
                return f"{ours.replace('{n}', match[1] if match.groups() else '')}.{last}"
        return None
