"""Launch plans: kernel launches that were worked out before, which calls give the addresses of tensors alone.

Working out tiles, grids, shapes and Triton's keys takes the host more time than a launch itself. A plan says what is
launched, and where each pointer is read from: tensors that a call gives, new ones that a call makes by templates, or
what is bound, such as a table of addresses. How long it is good for is what `plans` keeps it under.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layoutc.runtime.kernels import direct, launch
from layoutc.runtime.kernels.buffers import Entry
from layoutc.runtime.kernels.direct import Arguments, Compiled
from layoutc.runtime.torch_private import current_card

Dtypes = Mapping[str, torch.dtype]
_AS_MADE: Dtypes = MappingProxyType({})
_NO_TENSORS: Mapping[str, Tensor] = MappingProxyType({})


class _Launch:
    """A launch whose sizes, options and constants are bound, and those of its tensors that stay."""

    __slots__ = ("_args", "_arguments", "_at", "_compiled", "_dtypes", "_grid", "_kernel", "_state", "_values", "card")

    def __init__(self, kernel: Any, arguments: Arguments, bound: Sequence[Tensor | None], last: Tensor | None) -> None:
        args, kept = arguments.args, {id(one) for one in bound}
        at = [index for index, arg in enumerate(args) if isinstance(arg, Tensor) and id(arg) not in kept]
        self._at = tuple(sorted(at, key=lambda index: args[index] is last))
        self._dtypes = [args[at].dtype for at in self._at]
        self._args = [None if at in self._at else arg for at, arg in enumerate(args)]
        self._kernel, self._arguments, self.card = kernel, arguments._replace(args=()), direct.card_of(args)
        self._grid, every = arguments.grid[0], (*self._args, *arguments.constants)
        self._values = [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in every]
        self._compiled: dict[int, Compiled] = {}  # by a bit for each tensor that is not aligned
        self._state: tuple[Any, ...] | None = None

    @property
    def takes(self) -> int:
        """How many tensors a call gives."""
        return len(self._at)

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        """Launches on the current stream of the current card. tensors: its own first."""
        values, every = self._values.copy(), 0
        for at, tensor in zip(self._at, tensors, strict=False):
            values[at] = address = tensor.data_ptr()
            every |= address
        odd = sum(1 << bit for bit, at in enumerate(self._at) if values[at] & 15) if every & 15 else 0
        compiled = self._compiled.get(odd)
        if compiled is None or direct.state_of(self._kernel) != self._state:
            self._compile(tensors, odd)
        else:
            compiled(self.card, self._grid, values)

    def _compile(self, tensors: Sequence[Tensor], odd: int) -> None:
        """Launches by `direct.run`, and keeps what that has compiled."""
        args = self._args.copy()
        for at, tensor, dtype in zip(self._at, tensors, self._dtypes, strict=False):
            args[at] = tensor if tensor.dtype == dtype else tensor.view(dtype)
        found = direct.run(self._kernel, *self._arguments._replace(args=tuple(args)))
        if found is not None and (state := direct.state_of(self._kernel)) is not None:
            if self._state != state:
                self._compiled.clear()
            self._state, self._compiled[odd] = state, found


class Buffer(NamedTuple):
    """A buffer by name: a result of a plan, by its position, or one of the planes that the caller has."""

    name: str
    position: int | None
    plane: str
    is_flat: bool


class LaunchPlan:
    """Launches, one after the other. Each takes the first of a call's tensors: those that are given, then new ones.

    A call takes tensors on the same device, of the dtypes that the plan was made with, or of others of the same size,
    which are read as if they had those. new: templates of what a call makes. results: the positions among these of what
    it returns. buffers: what they are to those who ask by name. reads: names of planes, in the order of a call.
    """

    __slots__ = ("_card", "_in_order", "_launches", "buffers", "new", "reads", "results", "takes")

    def __init__(
        self,
        launches: Sequence[_Launch],
        new: Sequence[Tensor] = (),
        results: Sequence[int] = (),
        buffers: Sequence[Buffer] = (),
        reads: Sequence[str] = (),
    ) -> None:
        self._launches, self.new, self.results, self.buffers, self.reads = launches, new, results, buffers, reads
        self.takes = max([one.takes for one in launches], default=0) - len(new)  # how many tensors a call gives
        self._card = launches[0].card if launches else -1
        self._in_order = [*results] == [*range(len(new))]

    @classmethod
    def of(
        cls, kernel: Any, arguments: Arguments, bound: Sequence[Tensor | None] = (), last: Tensor | None = None
    ) -> LaunchPlan:
        """One launch. arguments: as for `direct.run`, with example tensors. bound: those that stay. last: the one that
        calls give after the others, which are in the kernel's order."""
        return cls([_Launch(kernel, arguments, bound, last)])

    @classmethod
    def joined(cls, plans: Iterable[LaunchPlan]) -> LaunchPlan:
        """The launches of all plans, which make nothing."""
        every = list(plans)
        return every[0] if len(every) == 1 else cls([one for plan in every for one in plan._launches])

    def __call__(self, *given: Tensor) -> list[Tensor]:
        """Launches on the current stream of the tensors' card; returns the results."""
        if (card := self._card) >= 0 and current_card() != card:
            with torch.cuda.device(card):
                return self(*given)
        if len(given) != self.takes and self._launches:
            raise ValueError(f"a launch plan for {self.takes} tensors was given {len(given)}")
        made = list(map(torch.empty_like, self.new))
        tensors = (*given, *made)
        for one in self._launches:
            one(tensors)
        return made if self._in_order else [made[at] for at in self.results]

    def into(self, *tensors: Tensor) -> None:
        """The same, with tensors in the place of those that a call makes."""
        LaunchPlan(self._launches)(*tensors)

    # ------------------------------------------------------------------------------------------------- what it makes
    def making(
        self,
        planes: Mapping[str, Tensor],
        made: Mapping[str, Tensor] = _NO_TENSORS,
        entries: Sequence[Entry] = (),
        swizzled: bool = False,
        dtypes: Dtypes = _AS_MADE,
    ) -> LaunchPlan:
        """The same, which makes planes, and then buffers: examples of both, in the order of the launch.

        entries: the buffers that it gives by name. dtypes: those that some of them are given in, where they are other
        ones of the same size.
        """
        examples = [*planes.values(), *made.values()]
        of_planes = {name: at for at, name in enumerate(planes)}
        of_made = {name: at for at, name in enumerate(made, len(planes))}
        buffers = [
            Buffer(
                one.name,
                of_made[one.name] if one.plane is None else of_planes.get(one.plane),
                one.plane or "",
                one.is_flat or (one.is_swizzled and swizzled),
            )
            for one in entries
        ]
        new = []
        for at, tensor in enumerate(examples):
            given = {dtypes.get(one.name, tensor.dtype) for one in buffers if one.position == at}
            dtype = given.pop() if len(given) == 1 else tensor.dtype
            new.append(launch.template(tensor.shape, dtype, tensor.device))
        return LaunchPlan(self._launches, new, range(len(new)), buffers, self.reads)

    def named(self, given: Sequence[Tensor], planes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The buffers by name. planes: those that serve as they are."""
        made, found = self(*given), {}
        for name, position, plane, is_flat in self.buffers:
            buffer = planes[plane] if position is None else made[position]
            found[name] = buffer.flatten() if is_flat else buffer
        return found

    def returning(self, names: Sequence[str], dtypes: Dtypes = _AS_MADE) -> LaunchPlan | None:
        """What returns these buffers, as an operator does; None if one of them is not new. dtypes: as for `making`."""
        of_name = {one.name: one for one in self.buffers}
        buffers, new = [of_name[name] for name in names], list(self.new)
        positions = [one.position for one in buffers if one.position is not None]
        if len(positions) < len(buffers):
            return None
        for one, at in zip(buffers, positions, strict=True):
            shape = (new[at].numel(),) if one.is_flat else new[at].shape
            new[at] = launch.template(shape, dtypes.get(one.name, new[at].dtype), new[at].device)
        return LaunchPlan(self._launches, new, positions, (), self.reads)

    def after(self, first: LaunchPlan) -> LaunchPlan:
        """The same after the launches of another plan, which takes the first of its tensors."""
        return LaunchPlan([*first._launches, *self._launches], self.new, self.results, self.buffers, self.reads)

    # ------------------------------------------------------------------------------------------------ what it is given
    def reading(self, names: Iterable[str]) -> LaunchPlan:
        """The same, which is given planes of these names."""
        return LaunchPlan(self._launches, self.new, self.results, self.buffers, tuple(names))

    def read_of(self, planes: Mapping[str, Tensor]) -> list[Tensor] | None:
        """The planes that it is given; None if anything is not as kernels read it: the ordinary way finds out what.

        That is: planes that are missing, freed, strided, misaligned or on another device.
        """
        found = []
        for name in self.reads:
            plane = planes.get(name)
            if plane is None or not plane.is_contiguous() or plane.get_device() != self._card:
                return None
            address = plane.data_ptr()
            if address == 0 or address & 3:
                return None
            found.append(plane)
        return found
