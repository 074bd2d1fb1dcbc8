"""Reads configs whose architecture `architectures.yaml` lacks: the installed transformers builds the model, on the meta
device. Runs no code but its own: not what `auto_map` names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from layoutc.models.modules import of_module
from layoutc.models.weights import MOST_LAYERS, Model, ModelError

# Where a config names no class: the first of these that has one for it.
AUTO = ("ImageTextToText", "Seq2SeqLM", "SpeechSeq2Seq", "CausalLM", "MaskedLM", "ImageClassification", "")
LEFT = ("model_type", "auto_map", "quantization_config", "torch_dtype", "transformers_version")


def knows(kind: Any) -> bool:
    """Whether transformers is installed, and has this model_type."""
    try:
        from transformers import CONFIG_MAPPING
    except ImportError:
        return False
    return isinstance(kind, str) and kind in CONFIG_MAPPING


def read(config: Mapping[str, Any], source: str) -> Model:
    """The model of a config that transformers knows. Raises ModelError for a config that it does not take."""
    _check_layers(config, source)
    import torch
    import transformers

    kind = config["model_type"]
    try:
        made = transformers.AutoConfig.for_model(kind, **{k: v for k, v in config.items() if k not in LEFT})
        model_class = next(_classes(config, type(made)), None)
        if model_class is None:
            raise ModelError(f"{source}: transformers has no model of the model_type {kind!r}")
        with torch.device("meta"):
            module = model_class(made)
    except ModelError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())[:300]
        raise ModelError(f"{source}: transformers {transformers.__version__} can't build it: {said}") from error
    model = of_module(module, kind, source)
    built = f"weights and layers are those of {model_class.__name__} of transformers {transformers.__version__}"
    return replace(model, notes=(built, *model.notes))


def _check_layers(config: Mapping[str, Any], source: str) -> None:
    """Raises ModelError for more layers than models have, before any is made."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            _check_layers(value, source)
        elif isinstance(value, int) and "layers" in name and value > MOST_LAYERS:
            raise ModelError(f"{source}: {name} is {value!r}, and must be at most {MOST_LAYERS:,}")


def _classes(config: Mapping[str, Any], made: type) -> Iterator[Any]:
    """The classes of a config's model: those that it names, and those that transformers' AutoModel would make."""
    import transformers

    for name in config.get("architectures") or ():
        if isinstance(found := getattr(transformers, name, None), type):
            yield found
    for name in AUTO:
        auto = getattr(transformers, f"AutoModelFor{name}" if name else "AutoModel")
        if made in auto._model_mapping:
            yield auto._model_mapping[made]
