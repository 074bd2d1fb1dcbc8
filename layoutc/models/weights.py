"""A model as its weights: what they are called, how large they are, what they are for, and which FSDP2 shards together.

Pure values. Every reader of this room makes a `Model`; nothing else knows where it came from.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from math import prod
from typing import Literal, get_args

Kind = Literal["linear", "experts", "embedding", "norm", "bias", "router", "adapter", "other"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Cut = Literal["rows", "columns", "none"]  # by tensor parallelism
MOST_LAYERS = 10_000  # of a model
MOST_WEIGHTS = 2_000_000  # of a model
MOST_SIZE = 2**40  # of a dim


class ModelError(ValueError):
    """What was given is no model, with what it could be."""


@dataclass(frozen=True)
class Weight:
    """A parameter. name: within its layer. shape: of the whole parameter, in elements.

    share: the part of tokens that each of its elements is multiplied with (experts: chosen over all of them; 0: rows
    are looked up, or elements are added). cut: how tensor parallelism splits it, if it is there. tied: full names of
    other parameters that are this one. trains: False if it is frozen.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    share: float = 0.0
    cut: Cut = "none"
    tied: tuple[str, ...] = ()
    trains: bool = True

    @property
    def elements(self) -> int:
        """Of the whole parameter."""
        return prod(self.shape)

    @property
    def matrix(self) -> tuple[int, int]:
        """(rows, columns), with leading dims as rows; a vector is a column."""
        if len(self.shape) < 2:
            return self.elements, 1
        return prod(self.shape[:-1]), self.shape[-1]


@dataclass(frozen=True)
class Saved:
    """Bytes that forward leaves for backward, of each token: of modules as called, and compiled."""

    eager: float
    compiled: float


@dataclass(frozen=True)
class Layer:
    """The parameters that FSDP2 gathers together. name: of the module; "" for the root, which has all that is left.

    attention: columns of queries and values, together, over 2: an attention layer multiplies 4 times as many by each
    pair of tokens. width: columns of activations that elementwise work goes through. Both 0 where unknown. saved: of
    activations in bf16; None where unknown.
    """

    name: str
    weights: tuple[Weight, ...]
    attention: float = 0.0
    width: int = 0
    saved: Saved | None = None

    @property
    def elements(self) -> int:
        """Of all its parameters."""
        return sum(weight.elements for weight in self.weights)


@dataclass(frozen=True)
class Model:
    """Layers in the order of forward, and the root apart. source: where it was read. notes: for readers."""

    name: str
    source: str
    layers: tuple[Layer, ...]
    root: Layer
    notes: tuple[str, ...] = field(default=())

    @property
    def elements(self) -> int:
        """Of all parameters."""
        return sum(layer.elements for layer in (*self.layers, self.root))

    @property
    def all_layers(self) -> tuple[Layer, ...]:
        """The root, which is gathered first and kept, and then the others."""
        return (self.root, *self.layers)

    def names(self) -> list[str]:
        """Full names of all parameters."""
        return [full_name(layer, weight) for layer in self.all_layers for weight in layer.weights]


def full_name(layer: Layer, weight: Weight) -> str:
    """As the model calls a parameter."""
    return f"{layer.name}.{weight.name}" if layer.name else weight.name


_LAYER = re.compile(r"^((?:[^.]+\.)*?[^.]+\.\d+)\.(.+)$")


def layer_of(name: str) -> tuple[str, str]:
    """`model.layers.3.mlp.up.weight` -> (`model.layers.3`, `mlp.up.weight`): up to the first number; else ("", name).

    That is what people give to fully_shard: each element of the outermost list of modules.
    """
    found = _LAYER.match(name)
    return (found[1], found[2]) if found else ("", name)


def in_layers(name: str, source: str, weights: Iterable[Weight], notes: Iterable[str] = ()) -> Model:
    """A model of weights with full names, each in the layer that its name says. Raises ModelError if there are none."""
    layers: dict[str, list[Weight]] = {"": []}
    for weight in weights:
        layer, rest = layer_of(weight.name)
        layers.setdefault(layer, []).append(replace(weight, name=rest))
    root, *others = (Layer(layer, tuple(members)) for layer, members in layers.items())
    model = Model(name, source, tuple(others), root, tuple(notes))
    check(model)
    return model


def check_layers(source: str, what: str, count: int) -> None:
    """Raises ModelError for more layers than are planned."""
    if count > MOST_LAYERS:
        raise ModelError(f"{source}: {what} is {count}, and must be a whole number from 1 to {MOST_LAYERS:,}")


def check(model: Model) -> None:
    """Raises ModelError for a model without weights, with too many of them or of layers, or with a name twice."""
    check_layers(model.source, "the number of layers", len(model.layers))
    names = model.names()
    if not names:
        raise ModelError(f"{model.source} has no weights")
    if len(names) > MOST_WEIGHTS:
        raise ModelError(f"{model.source} has {len(names):,} weights; the most that are planned is {MOST_WEIGHTS:,}")
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ModelError(f"{model.source} has {name} twice; give each weight a name of its own")
        seen.add(name)


_EMBEDDING = re.compile(r"(^|[._])(embed\w*|wte|wpe|tok_embeddings)([._]|$)")
_NORM = re.compile(r"(^|[._])\w*(norm|ln_\w+|layernorm)\w*([._]|$)")
_ROUTER = re.compile(r"(^|[._])(router|gate)\.(weight|bias|e_score_correction_bias)$")
_MATRIX = "*.weight"


def kind_by_name(name: str, shape: tuple[int, ...]) -> Kind:
    """What a parameter probably is, where there is no module to ask: by its name and its dims."""
    if name.endswith("bias") or "_bias" in name.rpartition(".")[2]:
        return "bias"
    if _EMBEDDING.search(name):
        return "embedding"
    if len(shape) < 2:
        return "norm" if _NORM.search(name) else "other"
    if _ROUTER.search(name):
        return "router"
    if len(shape) == 3 and "expert" in name:
        return "experts"
    return "linear" if len(shape) == 2 and (name == "weight" or fnmatchcase(name, _MATRIX)) else "other"


def adapted(model: Model, rank: int) -> Model:
    """The same, of which adapters of so many rows alone are trained: of each linear layer but those of the root."""
    layers = tuple(
        replace(layer, weights=tuple(one for weight in layer.weights for one in _with_adapters(weight, rank)))
        for layer in model.layers
    )
    root: Layer = replace(model.root, weights=tuple(replace(weight, trains=False) for weight in model.root.weights))
    notes = (
        *model.notes,
        f"the base is frozen; adapters of rank {rank} of the linear layers of each layer are trained",
    )
    return replace(model, layers=layers, root=root, notes=notes)


def _with_adapters(weight: Weight, rank: int) -> Iterator[Weight]:
    yield replace(weight, trains=False)
    if weight.kind == "linear":
        stem, (m, k) = weight.name.removesuffix(".weight"), weight.shape
        yield Weight(f"{stem}.lora_A.weight", (rank, k), "adapter", weight.share)
        yield Weight(f"{stem}.lora_B.weight", (m, rank), "adapter", weight.share)
