"""Models as FSDP sees them: the weights of a group, how many groups there are, and the tokens of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

BF16, FP32 = 2, 4  # bytes


@dataclass(frozen=True)
class Block:
    """One FSDP group: the shapes of weights that a recipe quantizes, and the lengths of parameters that stay plain."""

    weights: tuple[tuple[int, int], ...]
    plain: tuple[int, ...] = ()

    @property
    def elements(self) -> int:
        """Of the weights."""
        return sum(m * k for m, k in self.weights)


@dataclass(frozen=True)
class Model:
    """Equal groups, and what a rank feeds them in a step: `batch` sequences. `root`: plain weights outside of groups.

    The first plain weight of the root is only read in rows (an embedding); the others multiply.
    """

    name: str
    block: Block
    groups: int
    dim: int
    ffn: int
    sequence: int
    batch: int
    root: tuple[tuple[int, int], ...] = ()

    @property
    def tokens(self) -> int:
        """Of a rank, in a step."""
        return self.sequence * self.batch


def llama(
    name: str,
    dim: int,
    ffn: int,
    heads: int,
    kv_heads: int,
    layers: int,
    sequence: int,
    batch: int,
    vocabulary: int = 0,
) -> Model:
    """A Llama-shaped model: attention with grouped keys and values, SwiGLU, two norms; a group for each layer.

    Raises ValueError for sizes that no such model has.
    """
    sizes = {"dim": dim, "ffn": ffn, "heads": heads, "kv-heads": kv_heads, "layers": layers}
    for what, size in (sizes | {"sequence": sequence, "batch": batch}).items():
        if size < 1:
            raise ValueError(f"{what} is {size}, and must be 1 or more")
    if dim % heads:
        raise ValueError(f"{dim} columns can't be divided among {heads} heads")
    if heads % kv_heads:
        raise ValueError(f"{heads} heads can't share {kv_heads} heads of keys and values equally")
    kv = dim // heads * kv_heads
    weights = ((dim, dim), (kv, dim), (kv, dim), (dim, dim), (ffn, dim), (ffn, dim), (dim, ffn))
    root = ((vocabulary, dim), (vocabulary, dim)) if vocabulary else ()
    return Model(name, Block(weights, (dim, dim)), layers, dim, ffn, sequence, batch, root)


# arXiv 2407.21783, table 3; vocabularies of 128,256, sequences of 8,192.
PRESETS: Mapping[str, Mapping[str, int]] = {
    name: dict(
        zip(("dim", "ffn", "heads", "kv_heads", "layers"), sizes, strict=True),
        sequence=8192,
        batch=1,
        vocabulary=128256,
    )
    for name, sizes in (
        ("llama-8b", (4096, 14336, 32, 8, 32)),
        ("llama-70b", (8192, 28672, 64, 8, 80)),
        ("llama-405b", (16384, 53248, 128, 8, 126)),
    )
}
