"""torchtitan: its trainer with a section `layoutc` in the config and on the command line.

    torchrun ... -m torchtitan.train --module layoutc.integrations.torchtitan --config llama3.llama3_8b \\
        --layoutc.recipe nvfp4 --layoutc.use quantized
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import layoutc
from layoutc.integrations.packages import needs
from layoutc.integrations.torchtitan_export import exporting, keep_fused, refuse_import, send_as_codes
from layoutc.runtime.products.parallel import multiply_parts_

with needs("torchtitan", "torchtitan"):
    from torchtitan import trainer as titan
    from torchtitan.components.optimizer import OptimizersContainer
    from torchtitan.config import ConfigManager
    from torchtitan.config.override import derive
    from torchtitan.protocols.model import ModelConfigConverter


class Converter(ModelConfigConverter):
    """Quantizes a model when it is built, before sharding. Configs in Python list it among their converters."""

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        """What of a model is quantized, and when. Texts below are those of --help."""

        recipe: str = ""
        """A recipe's name, such as nvfp4. None: the trainer is torchtitan's own."""
        use: Literal["quantized", "cast_on_gather"] = "quantized"
        """Weights that are stored quantized, under fp32 masters; or plain weights that are quantized when gathered."""
        param_filter: list[str] = field(default_factory=list)
        """Patterns of parameters' names, such as layers.*.weight,*.w?_*. None: weights of all linear layers."""
        share_amax: list[str] = field(default_factory=list)
        """Weights under one amax, as engines join them, such as wq+wk+wv,w1+w3. None: each has its own."""
        products: Literal["low_precision", "dequantize"] | None = None
        """How the chosen weights are multiplied. None: as layoutc.products says."""
        dequantize: Literal["gather", "layer"] | None = None
        """Where they are dequantized. None: as layoutc.dequantize says."""
        tokens: str = ""
        """The recipe that tokens travel as to experts of other ranks, such as fp8_rowwise. None: they travel as they
        are."""
        token_gradients: str = ""
        """The same of gradients, on their way to the experts' outputs."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """Makes the config build a converted model, and returns the config."""
        base, own = type(model_config), self.config

        class Converted(base):  # type: ignore[misc, valid-type]
            __slots__ = ()

            def build(self, **options: Any) -> Any:
                model = base.build(self, **options)
                convert = layoutc.quantize_ if own.use == "quantized" else layoutc.cast_on_gather_
                joined = [group.split("+") for group in own.share_amax]
                convert(model, own.recipe, param_filter=own.param_filter or None, share_amax=joined or False)
                if (own.products, own.dequantize) != (None, None):
                    layoutc.set_products_(model, own.products, dequantize=own.dequantize)
                keep_fused(model)
                return model

        model_config.__class__ = Converted  # in place: torchtitan holds this object
        return model_config


class Optimizers(OptimizersContainer):
    """torchtitan's optimizers on fp32 masters. After each step, computes the amaxes of weights that are cast."""

    STEPS_MASTERS = True  # also if weights are cast and have none: no warning is needed

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        masters: bool = True

    def __init__(self, config: Config, **options: Any) -> None:
        self._masters = config.masters
        if config.masters and config.implementation == "fused_opt_states_bf16":
            raise ValueError("MasterWeights has no --optimizer.implementation fused_opt_states_bf16: use fused")
        super().__init__(config, **options)
        multiply_parts_(module for part in self.model_parts for module in part.modules())  # after tensor parallelism

    def _resolve_optimizer_factory(self, name: str) -> Callable[..., Any]:
        factory: Any = OptimizersContainer._resolve_optimizer_factory(name)
        return partial(layoutc.MasterWeights, factory) if self._masters else factory

    def step(self, closure: Any = None) -> None:
        """Steps all optimizers, then computes the next gathers' amaxes in one all-reduce."""
        super().step(closure)
        for part in self.model_parts:
            layoutc.precompute_amaxes(part)


class Trainer(titan.Trainer):
    """torchtitan's trainer, with the recipe from the config's section `layoutc`."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.Trainer.Config):
        layoutc: Converter.Config = field(default_factory=Converter.Config)

    def __init__(self, config: Config) -> None:
        if config.layoutc.tokens or config.layoutc.token_gradients:
            send_as_codes(config.model_spec.model, config.layoutc.tokens, config.layoutc.token_gradients)
        if config.layoutc.recipe:
            spec, quantized = config.model_spec, config.layoutc.use == "quantized"
            refuse_import(config.checkpoint, config.layoutc.use)
            Converter(config.layoutc).convert(spec.model)
            config.optimizer = derive(config.optimizer, Optimizers.Config, masters=quantized)
            if quantized and spec.state_dict_adapter:
                spec.state_dict_adapter = exporting(spec.state_dict_adapter)
        super().__init__(config)


def __getattr__(name: str) -> Callable[[], Trainer.Config]:
    """`llama3.llama3_8b` is the config llama3_8b of torchtitan's module llama3, with the section `layoutc`."""
    module, _, config = name.rpartition(".")
    if not module:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; a config is MODULE.CONFIG")
    loaded, _ = ConfigManager()._load_config(["--module", module, "--config", config])
    if type(loaded) is not titan.Trainer.Config:
        raise TypeError(f"{name} has a trainer of its own, {type(loaded).__qualname__}: name Converter and Optimizers")
    return partial(derive, loaded, Trainer.Config)
