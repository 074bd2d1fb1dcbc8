"""Layout facts as generated code states them: what is stored, what a GEMM reads, and what is gathered."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import lcm, prod
from typing import Any, Literal, NamedTuple

import torch

from layoutc.ints import gathers
from layoutc.ints.cuts import Cuts, sent_blocks
from layoutc.ints.sizes import cdiv, up
from layoutc.runtime.bindings.facts import Binding, RecordBinding

PassName = Literal["forward", "backward", "both"]
Group = tuple[int, str, int]  # of weights under one amax: the conversion that made it, its name, how many they are


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


class Facts(NamedTuple):
    """Shape and dtype of a plain tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return prod(self.shape) * self.dtype.itemsize


class Plane(NamedTuple):
    """How many rows and columns of the weight one entry of a stored plane covers; None: all of them.

    `columns_per_value` is 2 for a plane whose bytes pack two codes each.
    """

    rows_per_value: int | None
    columns_per_value: float | None


class Cards(NamedTuple):
    """Where a product has a kernel: compute capabilities from `least` up to, not including, `below`; and CPUs, or
    not."""

    least: tuple[int, int]
    below: tuple[int, int] | None = None
    cpu: bool = False


class Operand(NamedTuple):
    """How torch's scaled_mm reads an orientation.

    scaling: a name of torch.nn.functional.ScalingType. transposes: the codes lie as (contraction, free) and are
    transposed first. tensor_scale: the tensor's scale is its amax times this; None: there is none.
    """

    scaling: str
    codes: torch.dtype
    scale: torch.dtype
    transposes: bool = False
    tensor_scale: float | None = None


class Grouped(NamedTuple):
    """A kernel of scaled_grouped_mm: the kind of scales that it reads of both operands, and where it runs."""

    kind: str
    cards: Cards


class Products(NamedTuple):
    """The products of a recipe's weights in low precision: where each has a kernel, or why it has none; None: the spec
    wants it in high precision.

    activation, gradient: the recipes of the other operands, as (name, layout id). grouped: of weights of experts, for
    the products that have a kernel above, the kernel that multiplies groups of tokens, or why none does. by_columns: of
    such weights that are stored as `x @ w` reads them, where that differs.
    """

    activation: tuple[str, str]
    gradient: tuple[str, str]
    forward: Cards | str | None
    grad_input: Cards | str | None
    grad_weight: Cards | str | None
    grouped: Mapping[str, Grouped | str]
    by_columns: Mapping[str, Grouped | str] | None = None


@dataclass(frozen=True)
class GatherFacts:
    """What one rank contributes to one pass's all-gather, and the bytes that this costs."""

    planes: Mapping[str, Facts]
    serves: tuple[str, ...]
    world: int
    filling: int = 0  # bytes of padding up to the size of the other pass

    @property
    def bytes_per_rank(self) -> int:
        """Bytes that a rank contributes, including the padding of short shards and up to the other pass."""
        return sum(facts.nbytes for facts in self.planes.values()) + self.filling

    @property
    def nbytes(self) -> int:
        """Bytes that every rank holds after the gather."""
        return self.bytes_per_rank * self.world


@dataclass(frozen=True, eq=False, kw_only=True)
class Layout:
    """The facts of one recipe, frozen. `m` is the product of the leading dims of a weight, `k` its last dim.

    planes(m, k): the stored tensors, compact and m-major. buffers(m, k): the tensors that a GEMM reads, padded,
    repeated and transposed as the spec says. Both map a name to `Facts`.
    """

    name: str
    summary: str
    spec_sha256: str
    layout_id: str
    language: int = 1  # version of the spec language
    shard_rows: int = 1  # cuts between shards cost nothing at its multiples
    shard_reason: str
    column_multiple: int
    multiple_m: int = 1
    multiple_k: int = 1
    blocks: Mapping[str, str]
    bytes_per_element: float
    stored: Mapping[str, Plane]
    sources: Mapping[str, tuple[str, ...]]  # orientation -> the planes that its buffers are made from
    forward: tuple[str, ...]  # the planes that forward gathers
    backward: tuple[str, ...] = ()  # those that backward gathers, where they are others
    slots_differ: bool = False  # passes gather different numbers of bytes, even if cuts are aligned
    shares_amax: bool = False
    amax_columns: int | None = None  # columns that share one amax, over all rows; None: the whole weight does
    amax_of_matrices: bool = False  # each matrix of a stack has an amax of its own
    own_amax: tuple[str, ...] = ()  # orientations whose scales follow from their blocks alone, where others share one
    history: int = 0  # number of amaxes kept for delayed scaling; 0: the current amax decides the scale
    level: Callable[[torch.Tensor], torch.Tensor] | None = None  # makes what is stored of the amax; None: the amax is
    pick: str = ""  # which amax of the history decides the scale: max, most-recent
    as_stored: Mapping[str, str]  # buffer -> the plane that equals it, except that a buffer of one dim is flat
    swizzled: tuple[str, ...] = ()  # buffers that a GEMM reads in another order
    stochastic: bool = False  # elements are rounded by random bits, which follow from a seed
    not_weights: str = ""  # what the recipe is for, and why weights can't have it; "": they can
    reduce: str = ""  # the recipe by which ranks send gradients, where `exchange_gradients` is given none
    extremes: bool = True  # the scales of a block follow from the least and the greatest value of each of its columns
    zeros: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # planes whose codes of 0 are not: their bytes
    operands: Mapping[str, Operand | str]  # orientation -> how scaled_mm reads it, or why it can't
    products: Products | None = None  # None: the spec states none, and weights are dequantized
    files: Mapping[str, Binding] = field(default_factory=dict)  # how files of other programs hold the first source
    containers: Sequence[RecordBinding] = ()  # those that hold its records
    planes: Callable[[int, int], dict[str, Facts]]
    buffers: Callable[[int, int], dict[str, Facts]]

    @property
    def orientations(self) -> tuple[str, ...]:
        """Orientations of the recipe, rowwise first."""
        return tuple(self.sources)

    @property
    def passes_differ(self) -> bool:
        """True if backward gathers other planes than forward, for weights that are resharded in between."""
        return bool(self.backward)

    def __deepcopy__(self, memo: dict[int, Any]) -> Layout:
        """Itself: what copies a tensor attribute by attribute, as stagers of checkpoints do, copies no facts."""
        return self

    @cached_property
    def travels(self) -> Mapping[PassName, tuple[str, ...]]:
        """The planes that each pass gathers, in the order that they are sent in."""
        both = self.forward + self.backward
        return {"forward": self.forward, "backward": self.backward or self.forward, "both": both}

    @cached_property
    def serves(self) -> Mapping[PassName, tuple[str, ...]]:
        """The orientations whose planes each pass gathers."""
        return {
            which: tuple([one for one, needed in self.sources.items() if self.shared.union(names).issuperset(needed)])
            for which, names in self.travels.items()
        }

    @cached_property
    def shared(self) -> frozenset[str]:
        """Planes whose values cover all rows: all shards and parts of a weight hold equal copies of them."""
        return frozenset(name for name, plane in self.stored.items() if plane.rows_per_value is None)

    def shared_in(self, which: PassName) -> tuple[str, ...]:
        """The planes in `shared` that a pass needs."""
        return self._shared_in[which]

    @cached_property
    def _shared_in(self) -> Mapping[PassName, tuple[str, ...]]:
        needed = {
            which: {name for orientation in orientations for name in self.sources[orientation]}
            for which, orientations in self.serves.items()
        }
        return {which: tuple(n for n in self.stored if n in names & self.shared) for which, names in needed.items()}

    @cached_property
    def block_rows(self) -> int:
        """The number of rows that share entries of planes. Cuts at its multiples split no entry."""
        return lcm(*(plane.rows_per_value or 1 for plane in self.stored.values()))

    @cached_property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """The dtype of each plane."""
        return {name: facts.dtype for name, facts in self.planes(self.multiple_m, self.multiple_k).items()}

    @cached_property
    def shared_along_rows(self) -> frozenset[str]:
        """Planes whose values cover whole rows, and so are shared by all columns."""
        return frozenset(name for name, plane in self.stored.items() if plane.columns_per_value is None)

    @cached_property
    def shared_by_columns(self) -> frozenset[str]:
        """Planes whose values cover all rows of some columns: equal in shards of rows, different in shards of
        columns."""
        return self.shared - self.shared_along_rows

    def written(self, m: int, k: int, orientations: Collection[str]) -> dict[str, Facts]:
        """The planes that quantizing to orientations writes, in order: name -> shape and dtype. The amax is an
        input."""
        names = {name for orientation in orientations for name in self.sources[orientation]}
        return {name: facts for name, facts in self.planes(m, k).items() if name in names and name != "amax"}

    def fill_with_zeros(self, name: str, plane: torch.Tensor) -> None:
        """Writes the codes of 0 into a plane, or a part of one; into other planes, zero bytes."""
        pattern = self.zeros.get(name)
        if pattern is None or not plane.numel():
            plane.zero_()
            return
        run = torch.tensor(pattern, dtype=plane.dtype, device=plane.device)
        plane.copy_(run.repeat(plane.shape[-1] // len(pattern)).expand_as(plane))

    @cached_property
    def operand_dtypes(self) -> dict[str, torch.dtype]:
        """The dtypes in which scaled_mm reads buffers, by name, where it reads them as they lie."""
        found: dict[str, torch.dtype] = {}
        for name, operand in self.operands.items():
            if isinstance(operand, Operand) and not operand.transposes:
                found |= {f"{name}_data": operand.codes, f"{name}_scale": operand.scale}
        return found

    def takes_amax(self, orientations: Collection[str]) -> bool:
        """Whether quantizing to these orientations needs the amax that shards share."""
        return self.shares_amax and any(one not in self.own_amax for one in orientations)

    def amax_shape(self, k: int) -> tuple[int, ...]:
        """The shape of the amax that shards share: one for the weight, or one for each block of columns."""
        return (1,) if self.amax_columns is None else (1, cdiv(k, self.amax_columns))

    def amaxes_of(self, shape: Sequence[int]) -> int:
        """How many amaxes a weight of this shape has along its rows: one, or one for each matrix of a stack."""
        return prod(shape[:-2]) if self.amax_of_matrices else 1

    def stored_amax(self, amax: torch.Tensor) -> torch.Tensor:
        """What the `amax` plane holds of an amax: itself, or the level that the recipe's rule makes of it."""
        return amax if self.level is None else self.level(amax)

    def laid_out(self, m: int, k: int, orientations: Collection[str], swizzled: bool = False) -> dict[str, Facts]:
        """The buffers of orientations that don't equal a plane, in order: name -> shape and dtype. Swizzled ones are
        flat."""
        made = {}
        for name, facts in self.buffers(m, k).items():
            flat = swizzled and name in self.swizzled
            if name.split("_")[0] in orientations and (flat or name not in self.as_stored):
                made[name] = Facts((prod(facts.shape),), facts.dtype) if flat else facts
        return made

    def check_weights(self, name: str = "") -> None:
        """Raises ValueError for a recipe that is not for weights."""
        if self.not_weights:
            what = f"{name}: {self.name}" if name else self.name
            raise ValueError(f"{what} is {self.not_weights}")

    def check_swizzled(self, swizzled: bool) -> None:
        """Raises ValueError if scales are asked for in a GEMM's order and the spec states none."""
        if swizzled and not self.swizzled:
            raise ValueError(
                f"{self.name}: swizzled=True needs a spec with gemm: {{scale: {{swizzle: ...}}}}, and this one has none"
            )

    def matrix_of(self, planes: Mapping[str, torch.Tensor], matrix: tuple[int, int]) -> tuple[int, int]:
        """`matrix`; if that is symbolic and the planes' sizes are not, (m, k) from the first plane of codes."""
        if all(type(size) is int for size in matrix):
            return matrix
        codes = next(n for n, plane in self.stored.items() if plane.rows_per_value == 1 and n in planes)
        rows, columns = planes[codes].shape
        return (rows, round(columns * (self.stored[codes].columns_per_value or 1))) if type(columns) is int else matrix

    def check_shape(self, shape: tuple[int, ...], name: str = "weight") -> tuple[int, int]:
        """(m, k) of a weight's shape. Raises ValueError for a shape that the recipe does not take."""
        if len(shape) < 2:
            raise ValueError(f"{name}: {self.name} takes weights of 2 dims or more, not shape {tuple(shape)}")
        m, k = prod(shape[:-1]), shape[-1]
        if m % self.multiple_m or k % self.multiple_k:
            near = (up(m, self.multiple_m), up(k, self.multiple_k))
            sizes = {"rows": self.multiple_m, "columns": self.multiple_k}
            takes = " and ".join(f"{of} in multiples of {size}" for of, size in sizes.items() if size > 1)
            raise ValueError(
                f"{name}: {self.name} takes {takes}, not shape {tuple(shape)} ({m} rows, {k} columns); the next that "
                f"fits is {near}"
            )
        return m, k

    def gather(self, m: int, k: int, world: int, which: PassName = "forward") -> GatherFacts:
        """What each of `world` ranks contributes to a pass's all-gather: plane -> shape and dtype of the padded shard.

        If a cut falls inside a block, the ranks on both sides send the block's scale. Raises ValueError for a shape
        that the recipe does not take.
        """
        self.check_shape((m, k))
        cuts = Cuts(m, cdiv(m, world), world)
        sent = self.sent(which, cuts, k)
        slots = self.slots(which, cuts, k)
        filling = sum(slots) - sum(facts.nbytes for facts in sent.values()) if slots else 0
        return GatherFacts(sent, self.serves[which], world, filling)

    def sent(self, which: PassName, cuts: Cuts, k: int) -> Mapping[str, Facts]:
        """What each rank sends in a pass, of a matrix with k columns: plane name -> shape and dtype."""
        return _sent(self, which, cuts, k)

    def slots(self, which: PassName, cuts: Cuts, k: int) -> tuple[int, ...]:
        """The bytes of each slot that a pass's planes are padded to, if the passes' planes differ in bytes; else ()."""
        if which == "both" or not (self.slots_differ or (self.passes_differ and not cuts.aligned(self.block_rows))):
            return ()
        passes: tuple[PassName, ...] = ("forward", "backward")
        forward, backward = ([facts.nbytes for facts in self.sent(one, cuts, k).values()] for one in passes)
        return () if forward == backward else gathers.slots(forward, backward)


@lru_cache(maxsize=4096)
def _sent(layout: Layout, which: PassName, cuts: Cuts, k: int) -> Mapping[str, Facts]:
    whole = layout.planes(cuts.rows, k)
    rows = {name: sent_blocks(cuts, layout.stored[name].rows_per_value or 1) for name in layout.travels[which]}
    return {name: Facts((n, *whole[name].shape[1:]), whole[name].dtype) for name, n in rows.items()}


# ------------------------------------------------------------------------------------ buffers as operators return them
def distinct(layout: Layout, m: int, k: int, orientations: tuple[str, ...], swizzled: bool) -> Mapping[str, Facts]:
    """As _known_distinct, where sizes may be symbols, which can't be looked up."""
    known = type(m) is int and type(k) is int
    return (_known_distinct if known else _known_distinct.__wrapped__)(layout, m, k, orientations, swizzled)


@lru_cache(maxsize=4096)
def _known_distinct(layout: Layout, m: int, k: int, orientations: tuple[str, ...], swizzled: bool) -> dict[str, Facts]:
    """The buffers of orientations, each plane once: what an operator returns, whose results must not share memory."""
    laid_out = layout.laid_out(m, k, orientations, swizzled)
    first = first_of_planes(layout, orientations, laid_out)
    return {
        name: laid_out.get(name, facts)
        for name, facts in layout.buffers(m, k).items()
        if name in laid_out or name in first.values()
    }


def first_of_planes(layout: Layout, orientations: Collection[str], laid_out: Collection[str]) -> dict[str, str]:
    """Plane -> the first buffer of orientations that is this plane as it is."""
    first: dict[str, str] = {}
    for name, plane in layout.as_stored.items():
        if name not in laid_out and name.split("_")[0] in orientations:
            first.setdefault(plane, name)
    return first


def quantized_names(
    layout: Layout, m: int, k: int, orientations: tuple[str, ...], swizzled: bool, with_amax: bool
) -> list[str]:
    """What the operator that quantizes to buffers returns; the amax, if it is a buffer and the operator finds it."""
    names = list(_known_distinct(layout, m, k, orientations, swizzled))
    return [*names, "amax"] if with_amax and "amax" in layout.as_stored else names


@lru_cache(maxsize=256)
def laid_out_names(layout: Layout, orientations: tuple[str, ...], swizzled: bool) -> tuple[list[str], list[str]]:
    """The buffers that laying out gives, and the planes that it needs."""
    made = layout.laid_out(layout.multiple_m, layout.multiple_k, orientations, swizzled)
    return list(made), needed_planes(layout, orientations)


def needed_planes(layout: Layout, orientations: Sequence[str]) -> list[str]:
    """The planes that buffers of orientations are made of, in order."""
    needed = {name for orientation in orientations for name in layout.sources[orientation]}
    return [name for name in layout.stored if name in needed]
