"""Reads the `quantization_config` of checkpoint folders: where it is, and how programs and people spell it."""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from types import MappingProxyType
from typing import Any

# compressed-tensors before 0.7 writes the second key, MLX the third, and since MLX 0.20 the first too.
KEYS = ("quantization_config", "compression_config", "quantization")
# Other spellings of a key that the programs' own readers accept.
SPELLINGS: Mapping[str, str] = MappingProxyType({"w_bit": "bits", "wbits": "bits", "q_group_size": "group_size"})
OF_STORAGE = ("bnb_4bit_quant_storage",)  # keys with the dtype that headers state for the bytes of codes; it is kept
# Other keys for a list of modules that are not quantized, by the key that bindings use.
LISTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"modules_to_not_convert": ("ignored_layers",), "ignore": ("exclude_modules", "ignored_layers")}
)
OF_FORMAT = ("version", "checkpoint_format")  # older keys for `format`; without any, the binding's format is assumed
# transformers' defaults for missing keys.
DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "weight_block_size": [128, 128],
        "bnb_4bit_quant_type": "fp4",
        "bnb_4bit_use_double_quant": False,
        "bnb_4bit_quant_storage": "uint8",
    }
)

# auto-round's packings that are another program's, with its name; auto-round's loader takes "auto" for this one.
PACKING, PACKING_AUTO = re.compile(r"auto_round:(?:auto_)?(\w+q)"), "auto_round:auto_gptq"
# The formats whose tensors compressed-tensors' fallback format has for 8-bit weights, by their type.
OF_NAIVE: Mapping[Any, str] = MappingProxyType({"float": "float-quantized", "int": "int-quantized"})
# The `format` for auto-round's `data_type` and `bits`, where it packs as llm-compressor does.
OF_LLM_COMPRESSOR: Mapping[tuple[Any, Any], str] = MappingProxyType(
    {("mx_fp", 4): "mxfp4-pack-quantized", ("mx_fp", 8): "mxfp8-quantized"}
)
OF_MLX: Mapping[str, Any] = MappingProxyType({"mode": "affine"})  # MLX's defaults; its configs have no quant_method

# How programs convert their own files to plain weights, by quant_method; None: MLX, whose configs have none.
READ_AS_PLAIN: Mapping[str | None, str] = MappingProxyType(
    {
        None: "MLX writes plain weights of them: mlx_lm.convert --hf-path FOLDER --mlx-path PLAIN --dequantize",
        "bitsandbytes": "transformers makes a plain model of them: "
        "AutoModelForCausalLM.from_pretrained(FOLDER, device_map='cpu').dequantize()",
        "compressed-tensors": "transformers makes a plain model of them: AutoModelForCausalLM.from_pretrained(FOLDER, "
        "quantization_config=CompressedTensorsConfig(dequantize=True))",
        "fp8": "transformers makes a plain model of them: AutoModelForCausalLM.from_pretrained(FOLDER, "
        "quantization_config=FineGrainedFP8Config(dequantize=True))",
        "torchao": "transformers reads them: theirs = AutoModelForCausalLM.from_pretrained(FOLDER, device_map='cpu'), "
        "then model.load_state_dict({name: one.dequantize() for name, one in theirs.state_dict().items()})",
        "quanto": "optimum-quanto reads them: theirs = QuantizedModelForCausalLM.from_pretrained(FOLDER), then "
        "model.load_state_dict({name: one.dequantize() for name, one in theirs.named_parameters()})",
    }
)


def holder(config: MutableMapping[str, Any]) -> tuple[MutableMapping[str, Any], str] | None:
    """The mapping of a config.json that contains the `quantization_config`, and its key there. The mapping is the
    config, or that of a part of the model, such as `text_config`. None without a `quantization_config`."""
    for key in KEYS:
        if isinstance(config.get(key), MutableMapping):
            return config, key
    parts = [one for key, one in config.items() if key.endswith("_config") and isinstance(one, MutableMapping)]
    return next((found for part in parts if (found := holder(part)) is not None), None)


def holders(config: MutableMapping[str, Any]) -> list[MutableMapping[str, Any]]:
    """The mapping of `holder`, and those of model parts that repeat its `quantization_config`; [] without any."""
    first = holder(config)
    return _that_say(config, first[0][first[1]]) if first is not None else []


def _that_say(config: MutableMapping[str, Any], said: Any) -> list[MutableMapping[str, Any]]:
    parts = [one for key, one in config.items() if key.endswith("_config") and isinstance(one, MutableMapping)]
    own = [config] if any(config.get(key) == said for key in KEYS) else []
    return own + [one for part in parts if part != said for one in _that_say(part, said)]


def list_in(config: Mapping[str, Any], plain: str) -> str:
    """A config's key for the modules that are not quantized. plain: the binding's key."""
    return next((key for key in (plain, *LISTS.get(plain, ())) if key in config), plain)


def spelled(config: Mapping[str, Any]) -> dict[str, Any]:
    """A `quantization_config` in lower case, with keys and formats spelled as in bindings."""
    found: dict[str, Any] = {key: _lower(value) for key, value in config.items()}
    for other, key in (*SPELLINGS.items(), *(("format", key) for key in OF_FORMAT)):
        if other in found:
            found.setdefault(key, found[other])
    method = str(found.get("quant_method", ""))
    if True in (found.get("load_in_4bit"), found.get("load_in_8bit")):  # in transformers, these decide
        found["quant_method"] = "bitsandbytes"
    elif method.startswith("modelopt"):  # like vLLM: any variant, and the contents of ModelOpt's separate file
        inner = found.get(KEYS[-1])
        found |= {**(inner if isinstance(inner, Mapping) else {}), "quant_method": "modelopt"}
    elif "auto-round" in method:
        packing = found.get("packing_format") or found.get("backend") or "auto"  # older configs have `backend`
        form = found.get("data_type"), found.get("bits")
        if known := PACKING.fullmatch(PACKING_AUTO if packing == "auto" else str(packing)):
            found["quant_method"] = known[1]
        elif packing == "auto_round:llm_compressor" and form in OF_LLM_COMPRESSOR:
            found |= {"quant_method": "compressed-tensors", "format": OF_LLM_COMPRESSOR[form]}
    return found


def schemes_of(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Splits a config into one config per scheme. For ModelOpt's `quantized_layers`, each has the `quant_algo` of one
    scheme; for MLX's modules, the settings of one; for `config_groups`, one group, and its own `format` if it has one.
    Without several schemes, returns the config itself.
    """
    if isinstance(layers := config.get("quantized_layers"), Mapping) and layers:
        algos = dict.fromkeys(str(one.get("quant_algo")) for one in layers.values() if isinstance(one, Mapping))
        return [{**config, "quant_algo": algo} for algo in algos]
    if modules := modules_in(config):
        shared = {key: value for key, value in config.items() if key not in modules}
        found = [shared, *({**shared, **one} for one in modules.values() if one)]
        return [one for i, one in enumerate(found) if one not in found[:i]]
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        return [config]
    own = [one.get("format") if isinstance(one, Mapping) else None for one in groups.values()]
    return [
        {**config, "format": _format(form or config.get("format"), one), "config_groups": {key: one}}
        for (key, one), form in zip(groups.items(), own, strict=True)
    ]


def _format(form: Any, group: Any) -> Any:
    """A group's format, as bindings name it for its tensors."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if form != "naive-quantized" or not isinstance(weights, Mapping) or weights.get("num_bits") != 8:
        return form
    return OF_NAIVE.get(weights.get("type"), form)


def modules_in(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The per-module settings of an MLX config, by module name; {} for a module that is not quantized."""
    if "quant_method" in config or "bits" not in config:
        return {}
    stated = {key: one for key, one in config.items() if isinstance(one, Mapping | bool)}
    return {key: one if isinstance(one, Mapping) else {} for key, one in stated.items()}


def completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with its program's defaults for missing keys."""
    return {**DEFAULTS, **({} if "quant_method" in config else OF_MLX), **config}


def _lower(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _lower(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_lower(one) for one in value]
    return value.lower() if isinstance(value, str) else value
