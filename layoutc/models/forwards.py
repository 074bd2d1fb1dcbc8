"""What forward of a transformers model saves for backward: counted in one call on the meta device.

Attention is counted as flash attention: it saves its inputs, its output, and an fp32 number for each row and head.
Compiled layers keep no copies in fp32, and recompute activation functions of all tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any

import torch

from layoutc.models.weights import Saved

TOKENS = 1024  # of the text that is counted, where positions suffice
BF16 = 2
FLASH = "layoutc_counted"
FUNCTIONS = ("Silu", "Gelu", "Relu", "Sigmoid", "Tanh")


@dataclass
class Counted:
    """What a module saves, in bytes of all its tokens. attention: its columns of queries and values over 2, of all
    calls. windowed: whether attention has a window. kept: by what made them, what compiled layers keep; copied: of what
    copies in fp32 are made, which are kept instead."""

    tokens: int = 1
    eager: int = 0
    attention: float = 0.0
    windowed: bool = False
    kept: dict[Any, int] = field(default_factory=dict)
    copied: dict[Any, int] = field(default_factory=dict)

    @property
    def saved(self) -> Saved:
        """Bytes per token."""
        compiled = sum({**self.copied, **self.kept}.values())
        return Saved(self.eager / self.tokens, compiled / self.tokens)


@dataclass
class _Run:
    """A forward that is being counted. at: the block that computes; "": none."""

    at: str = ""
    found: dict[str, Counted] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)
    storages: dict[int, Any] = field(default_factory=dict)  # alive, so that none has another's address

    @property
    def here(self) -> Counted:
        return self.found.setdefault(self.at, Counted())

    def enter(self, path: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        """A hook on a block, whose first argument has a row for each token."""
        self.at = path
        rows = args[0] if args else options["hidden_states"]
        self.here.tokens = self.found.setdefault("", Counted()).tokens = prod(rows.shape[:-1])

    def keep(self, tensor: Any) -> Any:
        """A hook on what is saved."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.storages:
            self.storages[storage._cdata] = tensor
            self.here.eager += storage.nbytes()
            if not _is_recomputed(tensor, self.here.tokens):
                self.here.kept[tensor.grad_fn or tensor] = storage.nbytes()
            elif tensor.dtype is torch.float32 and (copied := _copied(tensor)):
                self.here.copied[copied] = tensor.numel() * BF16
        return tensor


_RUNS: list[_Run] = []


def counted(module: Any, blocks: Collection[str], tokens: int = TOKENS) -> Mapping[str, Counted]:
    """By block, and of the rest as "". Has no blocks that the input does not pass; {} if forward needs values.

    Of blocks that are alike, two run: the first may save what all of them share.
    """
    run = _Run()
    module.to(torch.bfloat16).train()
    for tensor in (*module.parameters(), *module.buffers()):
        run.storages[tensor.untyped_storage()._cdata] = tensor
    alike: dict[Any, list[str]] = {}
    for path in blocks:
        alike.setdefault(_key(module.get_submodule(path)), []).append(path)
    for paths in alike.values():
        for path in paths:
            _watch(run, module.get_submodule(path), path, paths[1] if path in paths[2:] else None)
    _RUNS.append(run)
    try:
        module.set_attn_implementation(_flash())
        with torch.device("meta"), torch.autograd.graph.saved_tensors_hooks(run.keep, lambda tensor: tensor):
            module(**_inputs(module, tokens))
    except Exception:  # a model's own code, on tensors without values
        return {}
    finally:
        _RUNS.pop()
    again = {path: run.found[paths[1]] for paths in alike.values() for path in paths[2:] if paths[1] in run.found}
    return {**run.found, **again}


def _key(block: Any) -> Any:
    """What makes blocks alike: their modules, parameters and settings, but for the number of the layer."""
    return tuple(
        (path, type(one), *((key, value) for key, value in sorted(vars(one).items()) if _is_setting(key, value)))
        for path, one in block.named_modules()
    ), tuple((name, param.shape) for name, param in block.named_parameters())


def _is_setting(name: str, value: Any) -> bool:
    return isinstance(value, bool | int | float | str) and name not in ("layer_idx", "layer_id", "layer_number")


def _watch(run: _Run, block: Any, path: str, like: str | None) -> None:
    """Counts what a block saves; or has it return what the block `like` did."""
    if like is not None:
        block.forward = lambda *args, **options: run.outputs[like]
        return

    def leave(_: Any, args: Any, output: Any) -> None:
        run.at, run.outputs[path] = "", output

    block.register_forward_pre_hook(lambda _, args, options: run.enter(path, args, options), with_kwargs=True)
    block.register_forward_hook(leave)


def _inputs(module: Any, tokens: int) -> dict[str, Any]:
    """A text, an image or a sound of the usual size."""
    config, name = module.config, module.main_input_name
    if name == "pixel_values":
        size = config.image_size
        height, width = size if isinstance(size, list | tuple) else (size, size)
        return {name: torch.zeros(1, config.num_channels, height, width, dtype=torch.bfloat16)}
    tokens = min(tokens, getattr(config.get_text_config(), "max_position_embeddings", None) or tokens)
    ids = torch.zeros(1, tokens, dtype=torch.long)
    ones = torch.ones(1, tokens, dtype=torch.long, device="cpu")  # whose values models ask for
    found = {name: ids, "attention_mask": ones}
    if name == "input_features":
        found = {name: torch.zeros(1, config.num_mel_bins, 2 * config.max_source_positions, dtype=torch.bfloat16)}
    return {**found, "decoder_input_ids": ids} if config.is_encoder_decoder else {**found, "use_cache": False}


def _is_recomputed(tensor: Any, tokens: int) -> bool:
    """Whether compiled layers compute it again: a matrix in fp32, or cast from it, or an activation function of all
    tokens."""
    wide = tensor.dim() > 1 and tensor.shape[-1] > 1
    if wide and (tensor.dtype is torch.float32 or _copied(tensor)):
        return True
    of = tensor.grad_fn.name() if tensor.grad_fn is not None else ""
    return of.startswith(FUNCTIONS) and tokens in tensor.shape


def _copied(tensor: Any) -> Any:
    """What made the tensor that this one is a copy of, in another dtype; None if it is none."""
    made = tensor.grad_fn
    return made.next_functions[0][0] if made is not None and made.name() == "ToCopyBackward0" else None


@cache
def _flash() -> str:
    """The name of an attention of which only shapes count."""
    import transformers

    class Flash(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: Any, key: Any, value: Any) -> Any:
            batch, heads, tokens, _ = query.shape
            out = query.new_empty(batch, tokens, heads, value.shape[-1])
            ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:3], dtype=torch.float32))
            return out

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any = None, **options: Any) -> tuple[Any, None]:
        here = _RUNS[-1].here
        here.attention += query.shape[1] * (query.shape[-1] + value.shape[-1]) / 2
        here.windowed |= options.get("sliding_window") is not None
        return Flash.apply(query, key, value), None  # type: ignore[no-untyped-call]

    transformers.AttentionInterface.register(FLASH, attend)
    transformers.AttentionMaskInterface.register(FLASH, lambda *args, **options: None)
    return FLASH
