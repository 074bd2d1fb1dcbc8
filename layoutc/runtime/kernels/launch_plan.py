"""Launch plans: prepared kernel launches that only need the addresses of tensors.

Computing tiles, grids, shapes and Triton's keys takes the host longer than the launch itself. A plan says what is
launched, and where each pointer comes from: tensors that a call gives, tensors that it makes from templates, or bound
ones, such as a table of addresses. Its key in `plans` says how long it is valid.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from layoutc.runtime.kernels import launch, plans
from layoutc.runtime.torch_private import current_card

if TYPE_CHECKING:  # it needs Triton, as kernels do
    from layoutc.runtime.kernels.direct import Compiled


class _Launch:
    """A launch with bound sizes, options, constants and fixed tensors."""

    __slots__ = ("_args", "_at", "_by", "_compiled", "_dtypes", "_launched", "_state", "_values", "card")

    def __init__(
        self,
        kernel: Any,
        grid: int,
        args: Sequence[Any],
        options: tuple[int, int | None],
        bound: Sequence[Tensor | None],
        last: Tensor | None,
    ) -> None:
        from layoutc.runtime.kernels import direct

        kept = {id(one) for one in bound}
        at = [index for index, arg in enumerate(args) if isinstance(arg, Tensor) and id(arg) not in kept]
        self._at = tuple(sorted(at, key=lambda index: args[index] is last))
        self._dtypes = [args[at].dtype for at in self._at]
        self._args = [None if at in self._at else arg for at, arg in enumerate(args)]
        self._by, self._launched = direct, (kernel, grid, options)
        self.card = next((arg.get_device() for arg in args if isinstance(arg, Tensor)), -1)  # -1: on a CPU
        self._values: list[Any] = [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in self._args]
        self._compiled: dict[int, Compiled] = {}  # by a mask of misaligned tensors
        self._state: tuple[Any, ...] | None = None

    @property
    def takes(self) -> int:
        """The number of tensors that a call gives."""
        return len(self._at)

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        """Launches on the current stream of the current card. tensors: its own first."""
        values, every = self._values.copy(), 0
        for at, tensor in zip(self._at, tensors, strict=False):
            values[at] = address = tensor.data_ptr()
            every |= address
        odd = sum(1 << bit for bit, at in enumerate(self._at) if values[at] & 15) if every & 15 else 0
        compiled, (kernel, grid, _) = self._compiled.get(odd), self._launched
        if compiled is None or self._by.state_of(kernel) != self._state:
            self._compile(tensors, odd)
        else:
            compiled(self.card, grid, values)

    def _compile(self, tensors: Sequence[Tensor], odd: int) -> None:
        """Launches with Triton's launcher and keeps the compiled kernel."""
        args = self._args.copy()
        for at, tensor, dtype in zip(self._at, tensors, self._dtypes, strict=False):
            args[at] = tensor if tensor.dtype == dtype else tensor.view(dtype)
        kernel, grid, options = self._launched
        found = self._by.run(kernel, grid, args, *options)
        if found is not None and (state := self._by.state_of(kernel)) is not None:
            if self._state != state:
                self._compiled.clear()
            self._state, self._compiled[odd] = state, found


class LaunchPlan:
    """Launches in sequence. Each takes a prefix of the call's tensors: given ones, then new ones.

    A call takes tensors on the same device, of the plan's dtypes or of others of the same size, which are read as the
    plan's. new: templates of the tensors that a call makes, by name. results: the positions among these of what it
    returns; None: all. reads: names of planes, in the order of a call.
    """

    __slots__ = ("_card", "_launches", "_templates", "new", "reads", "results", "takes")

    def __init__(
        self,
        launches: Sequence[_Launch],
        new: Mapping[Any, Tensor] | None = None,
        results: Sequence[int] | None = None,
        reads: Sequence[str] = (),
    ) -> None:
        self._launches, self.new, self.results, self.reads = launches, new or {}, results, reads
        self._templates = [*self.new.values()]
        self.takes = max([one.takes for one in launches], default=0) - len(self.new)  # how many tensors a call gives
        self._card = launches[0].card if launches else -1

    @classmethod
    def of(
        cls,
        kernel: Any,
        grid: int,
        args: Sequence[Any],
        warps: int,
        registers: int | None = None,
        *,
        bound: Sequence[Tensor | None] = (),
        last: Tensor | None = None,
    ) -> LaunchPlan:
        """One launch. args: the kernel's arguments in order, with example tensors and constants. bound: fixed tensors.
        last: the tensor that calls give after the others, which are in the kernel's order."""
        return cls([_Launch(kernel, grid, args, (warps, registers), bound, last)])

    @classmethod
    def joined(cls, plans: Iterable[LaunchPlan]) -> LaunchPlan:
        """The launches of all plans, none of which makes tensors."""
        every = list(plans)
        return every[0] if len(every) == 1 else cls([one for plan in every for one in plan._launches])

    def __call__(self, *given: Tensor) -> list[Tensor]:
        """Launches on the current stream of the tensors' card; returns the results."""
        if (card := self._card) >= 0 and current_card() != card:
            with torch.cuda.device(card):
                return self(*given)
        if len(given) != self.takes and self._launches:
            raise ValueError(f"a launch plan for {self.takes} tensors was given {len(given)}")
        made = list(map(torch.empty_like, self._templates))
        tensors = (*given, *made)
        for one in self._launches:
            one(tensors)
        return made if self.results is None else [made[at] for at in self.results]

    def into(self, *tensors: Tensor) -> None:
        """Launches into these tensors, instead of making new ones."""
        LaunchPlan(self._launches)(*tensors)

    def making(self, new: Mapping[Any, Tensor]) -> LaunchPlan:
        """This plan, making tensors like these, in the order of the launch."""
        templates = {name: launch.template(one.shape, one.dtype, one.device) for name, one in new.items()}
        return LaunchPlan(self._launches, templates, None, self.reads)

    def returning(self, results: Sequence[tuple[Any, torch.dtype | None, bool]]) -> LaunchPlan | None:
        """This plan, returning some of the tensors it makes; None if one of them is not new. results: names, with other
        dtypes of the same size, and whether they are flat."""
        new, positions, names = dict(self.new), list[int](), list(self.new)
        for name, dtype, is_flat in results:
            if name not in new:
                return None
            positions.append(names.index(name))
            shape = (new[name].numel(),) if is_flat else new[name].shape
            new[name] = launch.template(shape, dtype or new[name].dtype, new[name].device)
        in_order = positions == [*range(len(new))]
        return LaunchPlan(self._launches, new, None if in_order else positions, self.reads)

    def after(self, first: LaunchPlan) -> LaunchPlan:
        """This plan after the launches of `first`, which takes a prefix of its tensors."""
        return LaunchPlan([*first._launches, *self._launches], self.new, self.results, self.reads)

    def reading(self, names: Iterable[str]) -> LaunchPlan:
        """This plan, reading planes of these names."""
        return LaunchPlan(self._launches, self.new, self.results, tuple(names))

    def read_of(self, planes: Mapping[str, Tensor]) -> list[Tensor] | None:
        """The planes for a call; None, for the ordinary path, if one is missing, freed, strided, misaligned or away."""
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


def launched(kernel: Any, grid: int, args: Sequence[Any], warps: int) -> None:
    """Launches a kernel by the plan for these arguments: dtypes of tensors, values of all others."""
    like: Hashable = tuple([arg.dtype if isinstance(arg, Tensor) else arg for arg in args])
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    key = kernel.fn, grid, like, tensors[0].device
    plans.cache.of(key, lambda: LaunchPlan.of(kernel, grid, args, warps))(*tensors)
