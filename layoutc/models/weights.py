"""A model as its weights: their names, shapes and kinds, and which of them FSDP2 shards together.

Pure data. Every reader in this package returns a `Model`, and nothing else depends on where it came from.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from math import prod
from typing import Literal, get_args

Kind = Literal["linear", "experts", "embedding", "norm", "bias", "router", "adapter", "other"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Cut = Literal["rows", "columns", "none"]  # how tensor parallelism splits a weight
MOST_LAYERS = 10_000  # per model
MOST_WEIGHTS = 2_000_000  # per model
MOST_SIZE = 2**40  # per dim


class ModelError(ValueError):
    """The input is not a valid model; the message says what is accepted."""


@dataclass(frozen=True)
class Weight:
    """A parameter. name: within its layer. shape: of the whole parameter, in elements.

    share: the fraction of tokens that each element is multiplied by (experts: chosen / total; 0: rows are looked up, or
    elements are added). cut: how tensor parallelism splits the parameter, if used. tied: full names of other parameters
    that share it. trains: False if it is frozen.
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
        """The number of elements of the whole parameter."""
        return prod(self.shape)

    @property
    def matrix(self) -> tuple[int, int]:
        """(rows, columns), with leading dims folded into rows; a vector is one column."""
        if len(self.shape) < 2:
            return self.elements, 1
        return prod(self.shape[:-1]), self.shape[-1]


@dataclass(frozen=True)
class Saved:
    """Bytes per token that forward saves for backward, for eager and for compiled modules."""

    eager: float
    compiled: float


@dataclass(frozen=True)
class Layer:
    """The parameters that FSDP2 gathers together. name: of the module; "" for the root, which has all the others.

    attention: half the sum of query and value columns; attention costs 4 times as many operations per pair of tokens.
    width: columns of activations that elementwise ops process. Both are 0 if unknown. saved: for activations in bf16;
    None if unknown.
    """

    name: str
    weights: tuple[Weight, ...]
    attention: float = 0.0
    width: int = 0
    saved: Saved | None = None

    @property
    def elements(self) -> int:
        """The number of elements of the layer."""
        return sum(weight.elements for weight in self.weights)


@dataclass(frozen=True)
class Model:
    """Layers in forward order, and the root. source: where the model was read from. notes: for users."""

    name: str
    source: str
    layers: tuple[Layer, ...]
    root: Layer
    notes: tuple[str, ...] = field(default=())

    @property
    def elements(self) -> int:
        """The number of elements of the model."""
        return sum(layer.elements for layer in (*self.layers, self.root))

    @property
    def all_layers(self) -> tuple[Layer, ...]:
        """The root, which is gathered first and kept, then the other layers."""
        return (self.root, *self.layers)

    def names(self) -> list[str]:
        """Full names of all parameters."""
        return [full_name(layer, weight) for layer in self.all_layers for weight in layer.weights]


def full_name(layer: Layer, weight: Weight) -> str:
    """A parameter's name in the model."""
    return f"{layer.name}.{weight.name}" if layer.name else weight.name


_LAYER = re.compile(r"^((?:[^.]+\.)*?[^.]+\.\d+)\.(.+)$")


def layer_of(name: str) -> tuple[str, str]:
    """`model.layers.3.mlp.up.weight` -> (`model.layers.3`, `mlp.up.weight`): up to the first number; else ("", name).

    Users pass the same modules to fully_shard: each element of the outermost module list.
    """
    found = _LAYER.match(name)
    return (found[1], found[2]) if found else ("", name)


def in_layers(
    name: str,
    source: str,
    weights: Iterable[Weight],
    notes: Iterable[str] = (),
    place: Callable[[str], tuple[str, str]] = layer_of,
) -> Model:
    """Groups weights with full names into a model's layers. Raises ModelError if there are no weights."""
    layers: dict[str, list[Weight]] = {"": []}
    for weight in weights:
        layer, rest = place(weight.name)
        layers.setdefault(layer, []).append(replace(weight, name=rest))
    root, *others = (Layer(layer, tuple(members)) for layer, members in layers.items())
    model = Model(name, source, tuple(others), root, tuple(notes))
    check(model)
    return model


def check_layers(source: str, what: str, count: int) -> None:
    """Raises ModelError for more than MOST_LAYERS layers."""
    if count > MOST_LAYERS:
        raise ModelError(f"{source}: {what} is {count}, and must be a whole number from 1 to {MOST_LAYERS:,}")


def check(model: Model) -> None:
    """Raises ModelError for a model with no weights, too many weights or layers, or a duplicate name."""
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
    """Guesses a parameter's kind from its name and dims, if there is no module to inspect."""
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
    """The model with a frozen base and trained adapters of this rank on each linear layer outside the root."""
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
