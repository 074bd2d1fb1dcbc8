"""Models as frozen bases with low-rank adapters of their linear layers, as PEFT's `all-linear` makes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from layoutc.models.weights import Layer, Model, Weight


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
