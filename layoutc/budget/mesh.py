"""How ranks share a model: replicas, tensor and expert parallelism, and the ranks that FSDP2 shards each weight over.

Meshes are torchtitan's: ranks are replicas x shards x tensor-parallel ranks. Expert parallelism takes its ranks from
the last two dims; FSDP2 shards experts over the remaining ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from layoutc.estimate.links import Ring
from layoutc.ints.cuts import Cuts
from layoutc.ints.sizes import cdiv
from layoutc.models.weights import Weight


@dataclass(frozen=True)
class Mesh:
    """The number of ranks, and the degrees of HSDP (replicas), TP (parts of a matrix) and EP (some of the experts).

    experts_dim: the dim on which FSDP2 shards expert weights: 0 by default, or 1 through shard_placement_fn.
    """

    world: int
    replicas: int = 1
    tensor: int = 1
    experts: int = 1
    experts_dim: int = 0

    @property
    def shards(self) -> int:
        """Ranks that FSDP2 shards dense weights over."""
        return self.world // (self.replicas * self.tensor)

    @property
    def expert_shards(self) -> int:
        """Ranks that FSDP2 shards experts over."""
        if self.experts == 1:
            return self.shards
        return self.shards * self.tensor // self.experts

    def crosses(self, per_host: int) -> bool:
        """Whether shards span hosts: there are several hosts, and no host holds whole replicas."""
        sharded = max(self.shards, self.expert_shards) > 1
        return sharded and self.world > per_host and per_host % (self.shards * self.tensor) != 0

    def ring(self, ranks: int, apart: int, per_host: int) -> Ring:
        """The ring of `ranks` ranks with stride `apart`, on hosts of `per_host` ranks."""
        if self.world <= per_host or per_host % (ranks * apart) == 0:
            return Ring(ranks, ranks)
        return Ring(ranks, max(1, min(per_host // apart, ranks - 1)))

    def problem(self) -> str:
        """Why the mesh is impossible; "" if it is possible."""
        if self.world % (self.replicas * self.tensor):
            replicas = f"{self.replicas:,} replicas of {self.tensor:,} tensor-parallel ranks each"
            return f"{self.world:,} ranks can't be divided into {replicas}"
        if self.shards * self.tensor % self.experts:
            ranks = f"{self.shards * self.tensor:,} ranks of a replica"
            return f"{ranks} can't be divided among {self.experts:,} expert-parallel ranks"
        return ""


@dataclass(frozen=True)
class Placed:
    """The part of a weight that FSDP2 shards over `ranks` on `dim`. shape: its own, one of TP's and EP's `parts`."""

    shape: tuple[int, ...]
    ranks: int
    dim: int = 0
    parts: int = 1

    @property
    def matrix(self) -> tuple[int, int]:
        """(m, k) of the part, with leading dims flattened into rows."""
        return prod(self.shape[:-1]), self.shape[-1]

    @property
    def per_rank(self) -> int:
        """The length of the longest shard along the sharded dim."""
        return cdiv(self.shape[self.dim], self.ranks)

    @property
    def shard(self) -> int:
        """Elements of a shard, with FSDP2's padding."""
        return self.per_rank * prod(self.shape) // self.shape[self.dim]

    @property
    def whole(self) -> int:
        """Elements of the whole weight."""
        return prod(self.shape) * self.parts

    @property
    def columns(self) -> int:
        """Columns of a shard; 0 for a 1-D weight."""
        return 0 if len(self.shape) < 2 else self.per_rank if self.dim == len(self.shape) - 1 else self.shape[-1]

    @property
    def even(self) -> bool:
        """True if all shards have the same length."""
        return self.shape[self.dim] % self.ranks == 0

    @property
    def cuts(self) -> Cuts:
        """Where rows are cut, if sharded on dim 0; on another dim, each rank's matrix is uncut."""
        if self.dim:
            rows = self.shard // self.shape[-1]
            return Cuts(rows, rows, 1)
        inner = prod(self.shape[1:-1])
        return Cuts(self.matrix[0], self.per_rank * inner, self.ranks)


def place(weight: Weight, mesh: Mesh) -> Placed:
    """The largest part of a weight on one TP or EP rank, and how FSDP2 shards it."""
    shape = list(weight.shape)
    is_expert = weight.kind == "experts"
    ranks, parts = mesh.expert_shards if is_expert else mesh.shards, 1
    if is_expert and mesh.experts > 1:
        shape[0], parts = cdiv(shape[0], mesh.experts), mesh.experts
    elif weight.cut != "none" and mesh.tensor > 1:
        at = 0 if len(shape) == 1 else len(shape) - (2 if weight.cut == "rows" else 1)
        shape[at], parts = cdiv(shape[at], mesh.tensor), mesh.tensor
    dim = mesh.experts_dim if is_expert and len(shape) == 3 else 0
    return Placed(tuple(shape), ranks, dim, parts)


def uneven(weight: Weight, mesh: Mesh) -> str:
    """What TP or EP can't divide evenly; "" if nothing."""
    if weight.kind == "experts" and mesh.experts > 1:
        count = weight.shape[0]
        return f"{count} experts over {mesh.experts}" if count % mesh.experts else ""
    if weight.cut == "none" or mesh.tensor == 1:
        return ""
    at = 0 if len(weight.shape) == 1 else len(weight.shape) - (2 if weight.cut == "rows" else 1)
    size = weight.shape[at]
    return f"{size} {weight.cut} over {mesh.tensor}" if size % mesh.tensor else ""
