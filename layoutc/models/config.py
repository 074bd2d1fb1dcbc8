"""Reads Hugging Face configs: the weights that `architectures.yaml` defines for a model_type, with their sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from layoutc.models.expressions import evaluate
from layoutc.models.weights import MOST_LAYERS, MOST_SIZE, Layer, Model, ModelError, Saved, Weight, check

TABLE, KNOWN = (Path(__file__).with_name(f"{name}.yaml") for name in ("architectures", "known"))
OTHER_WAYS = (
    "for others, install a transformers that has it (pip install -U transformers), or give its safetensors index, or "
    "module:factory for a function that builds it"
)
HEAD = "ForCausalLM"  # of the classes whose weights the table has


@cache
def _said(path: Path) -> Mapping[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    found: Mapping[str, Any] = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
    return found


def table() -> Mapping[str, Any]:
    """The content of `architectures.yaml`."""
    return _said(TABLE)


def named() -> Mapping[str, Mapping[str, Any]]:
    """The configs of named models."""
    return _said(KNOWN)


def known() -> list[str]:
    """Every known model_type."""
    return sorted(kind for entry in table()["architectures"].values() for kind in entry["types"])


def serves(config: Mapping[str, Any]) -> bool:
    """Whether the table has the weights of this config's class."""
    named = config.get("architectures") or [HEAD]
    return config.get("model_type") in known() and all(str(one).endswith(HEAD) for one in named)


def read(config: Mapping[str, Any], source: str) -> Model:
    """The model of a config.

    Raises ModelError for an unknown model_type, a missing field, or implausible sizes.
    """
    kind = config.get("model_type")
    if not serves(config):
        what = f"the model_type {kind!r}"
        if kind in known():
            what += f" and is of {', '.join(map(str, config['architectures']))}"
        raise ModelError(
            f"{source} has {what}, whose weights are not known; known are language models of {', '.join(known())}; "
            f"{OTHER_WAYS}"
        )
    entry = next(one for one in table()["architectures"].values() if kind in one["types"])
    sizes = _Sizes(config, entry, source)
    count = sizes.whole("num_hidden_layers", MOST_LAYERS)
    sizes.check_heads()
    attention, width = sizes.number(entry["attention"]), int(sizes.number(entry["width"]))
    made: dict[tuple[str, ...], tuple[Weight, ...]] = {}
    layers = []
    for i in range(count):
        parts = tuple(sizes.parts(entry["layer"], i))
        if parts not in made:
            made[parts] = sizes.weights(parts)
        layers.append(Layer(f"model.layers.{i}", made[parts], attention, width, sizes.saved(parts)))
    root = sizes.weights(("ends",))
    if sizes.value("tie_word_embeddings"):
        # The head multiplies all tokens by the embedding, like any linear layer.
        root = tuple(
            replace(one, share=1.0, tied=("lm_head.weight",)) if one.kind == "embedding" else one for one in root
        )
    notes = tuple(entry.get("notes", ()))
    model = Model(str(kind), source, tuple(layers), Layer("", root, saved=sizes.saved(("ends",))), notes)
    check(model)
    return model


class _Sizes:
    """The fields of a config, including defaults, and the weights that follow from them."""

    def __init__(self, config: Mapping[str, Any], entry: Mapping[str, Any], source: str) -> None:
        again = {field: config[name] for name, field in entry.get("also", {}).items() if name in config}
        config = {**again, **config}
        self.source, self.fields = source, dict(config)
        self.derived_heads = "head_dim" in entry["defaults"] and config.get("head_dim") is None
        self.derived_heads &= "hidden_size" in str(entry["defaults"].get("head_dim"))
        nullable = entry.get("nullable", ())
        for field, default in entry["defaults"].items():
            if field not in config or (config[field] is None and field not in nullable):
                self.fields[field] = self.value(default) if isinstance(default, str) else default

    def value(self, text: Any) -> Any:
        """The value of an expression. Raises ModelError for a field that is missing, mistyped, NaN or infinite."""
        try:
            return evaluate(text, self.fields)
        except KeyError as error:
            raise ModelError(f"{self.source} has no {error.args[0]}, by which its weights are sized") from error
        except (TypeError, ValueError, ArithmeticError) as error:
            raise ModelError(f"{self.source}: {text} can't be worked out: {error}") from error

    def whole(self, text: str, most: int = MOST_SIZE) -> int:
        """A size. Raises ModelError unless it is a whole number from 1 to `most`."""
        value = self.value(text)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise ModelError(f"{self.source}: {text} is {value!r}, and must be a whole number from 1 to {most:,}")
        return value

    def number(self, text: Any) -> float:
        """A number, possibly fractional. Raises ModelError unless it is from 0 to MOST_SIZE."""
        value = self.value(text)
        if not isinstance(value, int | float) or not 0 <= value <= MOST_SIZE:
            raise ModelError(f"{self.source}: {text} is {value!r}, and must be a number from 0 to {MOST_SIZE:,}")
        return float(value)

    def check_heads(self) -> None:
        """Raises ModelError if heads can't share columns, or keys and values, equally."""
        heads, others = (self.fields.get(f"num_{what}_heads") for what in ("attention", "key_value"))
        if self.derived_heads and self.whole("hidden_size") % self.whole("num_attention_heads"):
            raise ModelError(
                f"{self.source}: {self.fields['hidden_size']} columns can't be divided among {heads} heads"
            )
        if others is not None and self.whole("num_attention_heads") % self.whole("num_key_value_heads"):
            raise ModelError(f"{self.source}: {heads} heads can't share {others} heads of keys and values equally")

    def saved(self, parts: Sequence[str]) -> Saved:
        """The bytes per token that the parts save for backward."""
        kept = [table()["saved"][part] for part in parts if part in table()["saved"]]
        return Saved(*(sum(self.number(one[at]) for one in kept) for at in (0, 1)))

    def parts(self, listed: Sequence[Any], i: int) -> list[str]:
        """The parts of layer `i`."""
        self.fields["i"] = i
        return [
            one if isinstance(one, str) else one["part"]
            for one in listed
            if isinstance(one, str) or self.value(one["if"])
        ]

    def weights(self, parts: Sequence[str]) -> tuple[Weight, ...]:
        """The parameters of `parts`, in order."""
        return tuple(
            self._weight(one)
            for part in parts
            for one in table()["parts"][part]
            if "if" not in one or self.value(one["if"])
        )

    def _weight(self, stated: Mapping[str, Any]) -> Weight:
        shape = tuple(self.whole(str(size)) for size in stated["shape"])
        share = self.number(stated["share"]) if "share" in stated else float(stated["kind"] == "linear")
        return Weight(stated["name"], shape, stated["kind"], share, stated.get("cut", "none"))
