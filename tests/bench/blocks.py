"""Llama-shaped blocks as `layoutc.budget` plans them, and a step of theirs: what points of `fit_steps.py` are of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from layoutc.budget.choice import Picks
from layoutc.budget.groups import groups_of
from layoutc.budget.mesh import Mesh, Placed
from layoutc.budget.shards import Dtypes, Piece, gathered
from layoutc.budget.totals import works_of
from layoutc.estimate.links import Link, Links
from layoutc.estimate.machine import Machine
from layoutc.estimate.work import Load, Parts, Runs, Use, Work, step
from layoutc.models import config
from layoutc.models.weights import Layer, Model, Weight

PLAIN = Picks()


@dataclass(frozen=True)
class Blocks:
    """A model, and what a rank feeds it in a step."""

    model: Model
    load: Load

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Of the matrices of a block."""
        return tuple((one.shape[0], one.shape[1]) for one in self.model.layers[0].weights if one.kind == "linear")

    def with_shapes(self, *shapes: tuple[int, int]) -> Blocks:
        """The same with these matrices alone."""
        linear = tuple(Weight(f"w{at}.weight", shape, "linear", 1.0) for at, shape in enumerate(shapes))
        layers = tuple(replace(one, weights=linear) for one in self.model.layers)
        return replace(self, model=replace(self.model, layers=layers))


@cache
def llama(
    dim: int, ffn: int, heads: int, kv_heads: int, layers: int, sequence: int, batch: int, vocabulary: int = 0
) -> Blocks:
    """Without an embedding and a head where there is no vocabulary."""
    fields: dict[str, Any] = {
        **{"model_type": "llama", "hidden_size": dim, "intermediate_size": ffn, "num_attention_heads": heads},
        **{"num_key_value_heads": kv_heads, "num_hidden_layers": layers, "vocab_size": vocabulary or 1},
    }
    model = config.read(fields, "blocks")
    ends = model.root.weights if vocabulary else ()
    root = tuple(replace(one, kind="other") for one in ends if one.kind != "norm")
    return Blocks(replace(model, root=Layer("", root)), Load(sequence * batch, sequence))


_WORKS: dict[object, tuple[Blocks, list[Work]]] = {}


def works(use: Use, blocks: Blocks, world: int) -> list[Work]:
    """What groups do; the same for all machines and links."""
    key = use.name, id(use.plan), use.cast, use.low, use.exchange, use.on_gather, id(blocks), world
    if key not in _WORKS:
        mesh = Mesh(world)
        made = works_of(blocks.model, groups_of(blocks.model, use, PLAIN, mesh, Dtypes()), mesh, 8)
        _WORKS[key] = blocks, made  # which keeps its id
    return _WORKS[key][1]


def estimate(
    use: Use, blocks: Blocks, world: int, link: Link, machine: Machine, runs: Runs = "compiled", together: int = 1
) -> Parts:
    """A step over hosts of eight ranks, of which each pair has this link."""
    root, *groups = works(use, blocks, world)
    return step(use, groups, root, blocks.load, Links(link, link), machine, runs, together)


@cache
def _placed(shape: tuple[int, int], world: int) -> Placed:
    return Placed(shape, world)


def sent(use: Use, shape: tuple[int, int], world: int, which: str) -> int:
    """The bytes of a weight that each rank sends in a pass."""
    piece = Piece(_placed(shape, world), use.plan, use.cast, on_gather=bool(use.plan and use.on_gather))
    return gathered(piece, which, Dtypes()).sent
