"""Layout facts as generated code states them: what a weight stores, what a GEMM reads, and what gathers send."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, lru_cache
from math import lcm, prod
from typing import Any, Literal, NamedTuple

import torch

from layoutc.ints import gathers
from layoutc.ints.cuts import Cuts, sent_blocks
from layoutc.ints.sizes import cdiv, up
from layoutc.runtime.bindings.facts import Binding, RecordBinding

PassName = Literal["forward", "backward", "both"]
Group = tuple[int, str, int]  # weights that share an amax: the conversion that made the group, its name and size


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

    `columns_per_value` is 2 for a plane that packs two codes per byte. entries: the size of a plane that covers all.
    """

    rows_per_value: int | None
    columns_per_value: float | None
    dtype: torch.dtype
    entries: int = 1

    def shape(self, m: int, k: int, multiple_m: int, multiple_k: int) -> tuple[int, ...]:
        """Its shape for an (m, k) matrix, whose sizes are multiples of `multiple_m` and `multiple_k`."""
        if self.rows_per_value is None and self.columns_per_value is None:
            return (self.entries,)
        return _count(m, self.rows_per_value, multiple_m), _count(k, self.columns_per_value, multiple_k)


def _count(size: int, per: float | None, multiple: int) -> int:
    """The number of entries along an axis. Rounds up only where that can matter: symbolic sizes can't be rounded."""
    if per is None or per == 1:
        return 1 if per is None else size
    if type(per) is float:  # such as 4 / 3: four 6-bit codes fill 3 bytes
        codes, nbytes = Fraction(per).limit_denominator(8).as_integer_ratio()
        return size // codes * nbytes
    whole = int(per)
    return cdiv(size, whole) if multiple % whole else size // whole


class Cards(NamedTuple):
    """Where a product has a kernel: compute capabilities from `least` to below `below`; and whether CPUs have it."""

    least: tuple[int, int]
    below: tuple[int, int] | None = None
    cpu: bool = False


class Operand(NamedTuple):
    """How torch's scaled_mm reads an orientation.

    scaling: a name of torch.nn.functional.ScalingType. transposes: codes are stored as (contraction, free) and are
    transposed first. tensor_scale: the tensor's scale is its amax times this; None: it has no scale.
    """

    scaling: str
    codes: torch.dtype
    scale: torch.dtype
    transposes: bool = False
    tensor_scale: float | None = None


class Grouped(NamedTuple):
    """A kernel of scaled_grouped_mm: the kind of scales that it reads for both operands, and where it runs."""

    kind: str
    cards: Cards


class Products(NamedTuple):
    """The low-precision products of a recipe's weights: where each has a kernel, or why not; None: in high precision.

    activation, gradient: the recipes of the other operands, as (name, layout id). grouped: for expert weights, per
    product with a kernel above, the kernel that multiplies groups of tokens, or why there is none. by_columns: the same
    for expert weights that are stored as `x @ w` reads them, if it differs.
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
    """What one rank contributes to one pass's all-gather, and its size in bytes."""

    planes: Mapping[str, Facts]
    serves: tuple[str, ...]
    world: int
    filling: int = 0  # bytes of padding up to the size of the other pass

    @property
    def bytes_per_rank(self) -> int:
        """Bytes that a rank contributes, including padding of short shards and up to the other pass's size."""
        return sum(facts.nbytes for facts in self.planes.values()) + self.filling

    @property
    def nbytes(self) -> int:
        """Bytes that every rank holds after the gather."""
        return self.bytes_per_rank * self.world


@dataclass(frozen=True, eq=False, kw_only=True)
class Layout:
    """The facts of one recipe, frozen. `m` is the product of the leading dims of a weight, `k` its last dim.

    made(m, k): the buffers that no plane equals in shape and dtype: name -> `Facts`. own_planes(m, k): the planes of a
    layout whose sizes don't follow from `stored`.
    """

    name: str
    summary: str
    spec_sha256: str
    layout_id: str
    language: int = 1  # version of the spec language
    shard_rows: int = 1  # cuts between shards at its multiples cost nothing
    shard_reason: str
    column_multiple: int
    multiple_m: int = 1
    multiple_k: int = 1
    blocks: Mapping[str, str]
    bytes_per_element: float
    stored: Mapping[str, Plane]
    sources: Mapping[str, tuple[str, ...]]  # orientation -> the planes that its buffers are made from
    forward: tuple[str, ...]  # the planes that forward gathers
    backward: tuple[str, ...] = ()  # the planes that backward gathers, if they differ
    slots_differ: bool = False  # passes gather different numbers of bytes, even if cuts are aligned
    shares_amax: bool = False
    amax_columns: int | None = None  # columns that share one amax, over all rows; None: the whole weight does
    amax_of_matrices: bool = False  # each matrix of a stack has its own amax
    own_amax: tuple[str, ...] = ()  # orientations whose scales depend only on their blocks, while others share an amax
    history: int = 0  # number of amaxes kept for delayed scaling; 0: the current amax decides the scale
    level: Callable[[torch.Tensor], torch.Tensor] | None = None  # amax -> what is stored of it; None: the amax itself
    pick: str = ""  # which amax of the history decides the scale: max, most-recent
    as_stored: Mapping[str, str]  # buffer -> the plane that equals it, except that a 1-D buffer is flat
    swizzled: tuple[str, ...] = ()  # buffers that a GEMM reads in another order
    stochastic: bool = False  # elements are rounded by random bits, which follow from a seed
    not_weights: str = ""  # what the recipe is for, and why weights can't use it; "": they can
    reduce: str = ""  # the recipe with which ranks send gradients if `exchange_gradients` gets none
    extremes: bool = True  # a block's scales depend only on the least and the greatest value of each of its columns
    zeros: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # planes whose code of 0 is not 0 -> its bytes
    operands: Mapping[str, Operand | str]  # orientation -> how scaled_mm reads it, or why it can't
    products: Products | None = None  # None: the spec states none, and weights are dequantized
    files: Mapping[str, Binding] = field(default_factory=dict)  # how other checkpoint formats hold the first source
    containers: Sequence[RecordBinding] = ()  # container formats that hold its records
    made: Callable[[int, int], dict[str, Facts]] = lambda m, k: {}
    own_planes: Callable[[int, int], dict[str, Facts]] | None = None

    @property
    def orientations(self) -> tuple[str, ...]:
        """Orientations of the recipe, rowwise first."""
        return tuple(self.sources)

    def planes(self, m: int, k: int) -> Mapping[str, Facts]:
        """The stored tensors, compact and m-major: name -> shape and dtype."""
        known = type(m) is int and type(k) is int  # symbols can't be looked up
        return _known_planes(self, m, k) if known else _known_planes.__wrapped__(self, m, k)

    def buffers(self, m: int, k: int) -> dict[str, Facts]:
        """The tensors that a GEMM reads, padded, repeated and transposed as the spec says: name -> shape and dtype."""
        stored, made = self.planes(m, k), self.made(m, k)
        return {n: made[n] if n in made else stored[self.as_stored[n]] for n in self._buffer_names}

    @cached_property
    def _buffer_names(self) -> tuple[str, ...]:
        """Buffers by orientation, then in the order of planes, then of `made`; the amax comes last."""
        places = {name: place for place, name in enumerate((*self.orientations, "amax"))}
        kinds = {name.partition("_")[2]: place for place, name in reversed([*enumerate(self.stored)])}
        names = {**self.as_stored, **self.made(self.multiple_m, self.multiple_k)}

        def place(name: str) -> tuple[int, int]:
            orientation, _, kind = name.partition("_")
            return places[orientation], kinds.get(kind, len(kinds))

        return tuple(sorted(names, key=place))

    @property
    def passes_differ(self) -> bool:
        """True if backward gathers other planes than forward, when weights are resharded in between."""
        return bool(self.backward)

    def __deepcopy__(self, memo: dict[int, Any]) -> Layout:
        """Returns itself: code that copies a tensor's attributes, such as checkpoint stagers, then copies no facts."""
        return self

    @cached_property
    def travels(self) -> Mapping[PassName, tuple[str, ...]]:
        """The planes that each pass gathers, in sending order."""
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

    @cached_property
    def shared_in(self) -> Mapping[PassName, tuple[str, ...]]:
        """The planes in `shared` that each pass needs."""
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
        """Planes whose values cover whole rows, so all columns share them."""
        return frozenset(name for name, plane in self.stored.items() if plane.columns_per_value is None)

    @cached_property
    def shared_by_columns(self) -> frozenset[str]:
        """Planes whose values cover all rows of some columns: equal in shards of rows, not of columns."""
        return self.shared - self.shared_along_rows

    def written(self, m: int, k: int, orientations: Collection[str]) -> dict[str, Facts]:
        """The planes that quantizing to orientations writes, by name; not the amax, an input."""
        names = {name for orientation in orientations for name in self.sources[orientation]}
        return {name: facts for name, facts in self.planes(m, k).items() if name in names and name != "amax"}

    def fill_with_zeros(self, name: str, plane: torch.Tensor) -> None:
        """Fills a plane, or a part of one, with codes of 0; planes other than codes, with zero bytes."""
        pattern = self.zeros.get(name)
        if pattern is None or not plane.numel():
            plane.zero_()
            return
        run = torch.tensor(pattern, dtype=plane.dtype, device=plane.device)
        plane.copy_(run.repeat(plane.shape[-1] // len(pattern)).expand_as(plane))

    @cached_property
    def operand_dtypes(self) -> dict[str, torch.dtype]:
        """The dtypes in which scaled_mm reads buffers, by name, for orientations that it reads without transposing."""
        found: dict[str, torch.dtype] = {}
        for name, operand in self.operands.items():
            if isinstance(operand, Operand) and not operand.transposes:
                found |= {f"{name}_data": operand.codes, f"{name}_scale": operand.scale}
        return found

    def takes_amax(self, orientations: Collection[str]) -> bool:
        """Whether quantizing to these orientations needs the amax that shards share."""
        return self.shares_amax and any(one not in self.own_amax for one in orientations)

    def amax_shape(self, k: int) -> tuple[int, ...]:
        """The shape of the amax that shards share: one for the weight, or one per block of columns."""
        return (1,) if self.amax_columns is None else (1, cdiv(k, self.amax_columns))

    def amaxes_of(self, shape: Sequence[int]) -> int:
        """How many amaxes a weight of this shape has along its rows: one, or one per matrix of a stack."""
        return prod(shape[:-2]) if self.amax_of_matrices else 1

    def stored_amax(self, amax: torch.Tensor) -> torch.Tensor:
        """What the `amax` plane stores for an amax: the amax, or the level that the recipe's rule computes from it."""
        return amax if self.level is None else self.level(amax)

    def laid_out(self, m: int, k: int, orientations: Collection[str], swizzled: bool = False) -> dict[str, Facts]:
        """The buffers of orientations that no plane equals, by name, in order. Swizzled ones are flat."""
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
        """Raises ValueError if a caller wants swizzled scales and the spec states no swizzle."""
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
        """(m, k) of a weight's shape. Raises ValueError for a shape that the recipe does not support."""
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
        that the recipe does not support.
        """
        self.check_shape((m, k))
        cuts = Cuts(m, cdiv(m, world), world)
        sent = self.sent(which, cuts, k)
        slots = self.slots(which, cuts, k)
        filling = sum(slots) - sum(facts.nbytes for facts in sent.values()) if slots else 0
        return GatherFacts(sent, self.serves[which], world, filling)

    def sent(self, which: PassName, cuts: Cuts, k: int) -> Mapping[str, Facts]:
        """What each rank sends in a pass for a matrix with k columns: plane name -> shape and dtype."""
        return _sent(self, which, cuts, k)

    def slots(self, which: PassName, cuts: Cuts, k: int) -> tuple[int, ...]:
        """The bytes of each slot that a pass's planes are padded to, if the passes' planes differ in bytes; else ()."""
        if which == "both" or not (self.slots_differ or (self.passes_differ and not cuts.aligned(self.block_rows))):
            return ()
        passes: tuple[PassName, ...] = ("forward", "backward")
        forward, backward = ([facts.nbytes for facts in self.sent(one, cuts, k).values()] for one in passes)
        return () if forward == backward else gathers.slots(forward, backward)


@lru_cache(maxsize=4096)
def _known_planes(layout: Layout, m: int, k: int) -> Mapping[str, Facts]:
    if layout.own_planes is not None:
        return layout.own_planes(m, k)
    of = m, k, layout.multiple_m, layout.multiple_k
    return {name: Facts(plane.shape(*of), plane.dtype) for name, plane in layout.stored.items()}


@lru_cache(maxsize=4096)
def _sent(layout: Layout, which: PassName, cuts: Cuts, k: int) -> Mapping[str, Facts]:
    whole = layout.planes(cuts.rows, k)
    rows = {name: sent_blocks(cuts, layout.stored[name].rows_per_value or 1) for name in layout.travels[which]}
    return {name: Facts((n, *whole[name].shape[1:]), whole[name].dtype) for name, n in rows.items()}
