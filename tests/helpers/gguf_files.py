"""GGUF files of tiny models, as the package gguf writes them, with rows in the order of llama.cpp's converter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
VOCABULARY = 72
EXPERTS = 3


def config(layers: int = 1, **more: Any) -> Any:
    """A tiny Llama, whose columns are multiples of 256."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCABULARY, num_hidden_layers=layers, use_cache=False, tie_word_embeddings=False, **SIZES, **more
    )


class Part(nn.Module):
    """Modules by name, which FSDP2 takes as one; nobody runs it."""

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self) -> None:
        """As a module that is sharded must have."""


class Experts(nn.Module):
    """Weights of experts under transformers' names; nobody runs it. apart: gate and up are weights of their own."""

    def __init__(self, apart: bool, device: str) -> None:
        super().__init__()
        h, i = SIZES["hidden_size"], SIZES["intermediate_size"]
        shapes = {"gate_proj": (i, h), "up_proj": (i, h)} if apart else {"gate_up_proj": (2 * i, h)}
        for name, shape in (shapes | {"down_proj": (h, i)}).items():
            self.register_parameter(name, nn.Parameter(torch.zeros(EXPERTS, *shape, device=device)))

    def forward(self) -> None:
        """As a module that is sharded must have."""


def skeleton(layers: int = 1, device: str = "cpu", *, experts: bool = False, apart: bool = False) -> Any:
    """The parameters of such a Llama, or of such a Mixtral, under transformers' names, without transformers."""
    h, i = SIZES["hidden_size"], SIZES["intermediate_size"]
    kv = h * SIZES["num_key_value_heads"] // SIZES["num_attention_heads"]

    def linear(rows: int, columns: int) -> nn.Linear:
        return nn.Linear(columns, rows, bias=False, device=device)

    def layer() -> Part:
        attention = {"q_proj": linear(h, h), "k_proj": linear(kv, h), "v_proj": linear(kv, h), "o_proj": linear(h, h)}
        mlp: dict[str, nn.Module] = {"gate_proj": linear(i, h), "up_proj": linear(i, h), "down_proj": linear(h, i)}
        if experts:
            mlp = {"gate": linear(EXPERTS, h), "experts": Experts(apart, device)}
        norms = {name: nn.RMSNorm(h, device=device) for name in ("input_layernorm", "post_attention_layernorm")}
        return Part({"self_attn": Part(attention), "mlp": Part(mlp)} | norms)

    inner = {
        "embed_tokens": nn.Embedding(VOCABULARY, h, device=device),
        "layers": nn.ModuleList(layer() for _ in range(layers)),
        "norm": nn.RMSNorm(h, device=device),
    }
    return Part({"model": Part(inner), "lm_head": linear(VOCABULARY, h)})


def records(kind: str, rows: int, columns: int, seed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Any bytes, but scales that are finite, of the size that weights have."""
    import gguf

    elements, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(seed)
    made = rng.integers(0, 256, (rows, columns // elements, nbytes), np.uint8)
    at = {"Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,), "Q5_K": (0, 2)}[kind]
    for place in at:
        scale = rng.uniform(0.5, 2, (*made.shape[:2], 1)) / (2**13 if kind != "Q6_K" else 2**16)
        made[..., place : place + 2] = scale.astype(np.float16).view(np.uint8)
    return made.reshape(rows, -1)


def in_file(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of q or k as llama.cpp's converter orders them."""
    return (
        values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    )


KINDS = {
    **dict.fromkeys(("token_embd", "ffn_down"), "Q6_K"),
    **dict.fromkeys(("attn_q", "attn_k", "attn_v", "output"), "Q8_0"),
    **dict.fromkeys(("attn_output", "ffn_gate", "ffn_up"), "Q4_K"),
}


OF_EXPERTS = KINDS | {"ffn_gate_exps": "Q4_K", "ffn_up_exps": "Q4_K", "ffn_down_exps": "Q6_K"}


def tensors(
    layers: int = 1, kinds: dict[str, str] | None = None, *, experts: bool = False
) -> dict[str, tuple[str, Any]]:
    """Name -> (type, bytes of records or fp32 values), in the order of a file."""
    h, i = SIZES["hidden_size"], SIZES["intermediate_size"]
    kv = h * SIZES["num_key_value_heads"] // SIZES["num_attention_heads"]
    shapes = {"attn_q": (h, h), "attn_k": (kv, h), "attn_v": (kv, h), "attn_output": (h, h)}
    mlp = {"ffn_gate": (i, h), "ffn_down": (h, i), "ffn_up": (i, h)}
    of_experts = {"ffn_gate_inp": (EXPERTS, h)} | {f"{name}_exps": (EXPERTS, *shape) for name, shape in mlp.items()}
    shapes |= of_experts if experts else mlp
    named: dict[str, tuple[int, ...]] = {"token_embd": (VOCABULARY, h)}
    for n in range(layers):
        named |= {f"blk.{n}.attn_norm": (h,), f"blk.{n}.ffn_norm": (h,)}
        named |= {f"blk.{n}.{name}": shape for name, shape in shapes.items()}
    named |= {"output_norm": (h,), "output": (VOCABULARY, h)}
    rng, made = np.random.default_rng(5), dict[str, tuple[str, Any]]()
    for seed, (name, shape) in enumerate(named.items()):
        kind = (kinds or OF_EXPERTS).get(name.rpartition(".")[2], "F32")
        values = rng.normal(1, 0.1, shape).astype(np.float32) if kind == "F32" else records(kind, *shape[-2:], seed)
        if len(shape) > 2:
            values = np.stack([records(kind, *shape[1:], 100 * n + seed) for n in range(shape[0])])
        made[f"{name}.weight"] = kind, values
    return made


def write(
    path: Path,
    layers: int = 1,
    kinds: dict[str, str] | None = None,
    *,
    experts: bool = False,
    architecture: str = "llama",
    split: int = 0,
    beside: Mapping[str, Any] | None = None,
    **more: Any,
) -> Path:
    """A file of a tiny Llama, or Mixtral, with a small vocabulary; the first of several, of at most `split` tensors
    each. beside: plain tensors that it has too. more: sizes of the config that it has otherwise."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split)
    if experts:
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(2)
    writer.add_name("tiny")
    writer.add_context_length(128)
    writer.add_embedding_length(SIZES["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(SIZES["intermediate_size"])
    writer.add_head_count(SIZES["num_attention_heads"])
    writer.add_head_count_kv(SIZES["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(64)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token {number}" for number in range(VOCABULARY)])
    writer.add_token_types([1] * VOCABULARY)
    writer.add_token_merges(["a b", "c d"])
    for key, value in more.items():
        getattr(writer, f"add_{key}")(value)
    for name, (kind, values) in tensors(layers, kinds, experts=experts).items():
        writer.add_tensor(name, values, raw_dtype=gguf.GGMLQuantizationType[kind] if kind != "F32" else None)
    for name, values in (beside or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if not split else min(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))


def expected(path: Path) -> dict[str, torch.Tensor]:
    """What the package gguf reads of a file, dequantized, by the names of transformers and in their order of rows."""
    import gguf
    from gguf.quants import dequantize

    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    parts = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    parts |= {f"attn_{one}": f"self_attn.{one}_proj" for one in "qkv"} | {"attn_output": "self_attn.o_proj"}
    parts |= {f"ffn_{one}": f"mlp.{one}_proj" for one in ("gate", "up", "down")}
    parts |= {"ffn_gate_inp": "mlp.gate"}
    found: dict[str, torch.Tensor] = {}
    files = sorted(path.parent.glob(f"{path.name.partition('-00001-of-')[0]}*.gguf")) if "-of-" in path.name else [path]
    for tensor in (tensor for file in files for tensor in gguf.GGUFReader(file).tensors):
        values, name = dequantize(tensor.data, tensor.tensor_type), tensor.name.removesuffix(".weight")
        if name.startswith("blk."):
            _, number, part = name.split(".")
            if part.endswith("_exps"):
                one = f"model.layers.{number}.mlp.experts.{part.removeprefix('ffn_').removesuffix('_exps')}_proj"
                found[one] = torch.from_numpy(np.array(values))
                continue
            if part in ("attn_q", "attn_k"):
                heads = SIZES["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
                each = values.shape[0] // heads
                values = values.reshape(heads, each // 2, 2, -1).swapaxes(1, 2).reshape(values.shape)
            name = f"model.layers.{number}.{parts[part]}"
        else:
            name = names[name]
        found[f"{name}.weight"] = torch.from_numpy(np.array(values))
    for name in [name for name in found if name.endswith("experts.gate_proj")]:
        module = name.removesuffix("gate_proj")
        found[f"{module}gate_up_proj"] = torch.cat([found[name], found[f"{module}up_proj"]], dim=1)
    return found
