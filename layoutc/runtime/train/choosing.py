"""Which parameters of which modules a conversion takes: filters of modules, filters of parameters, ties."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import Tensor, nn

from layoutc.runtime.torch_private import is_fake, local_tensor

Filter = Callable[[nn.Module, str], bool]
ParamFilter = Callable[[str, nn.Parameter], bool] | Sequence[str]
DIMS = (2, 3)  # of a matrix, and of one for each expert


class Use(NamedTuple):
    """A parameter in a module: the module, the parameter's name there, and its fully qualified name."""

    module: nn.Module
    key: str
    name: str

    @property
    def param(self) -> nn.Parameter:
        """The module's current parameter of that name."""
        param: nn.Parameter = getattr(self.module, self.key)
        return param


def uses(roots: Sequence[nn.Module]) -> Iterator[Use]:
    """Every parameter of every module, once for each module that has it."""
    for root in roots:
        for fqn, module in root.named_modules():
            yield from _uses_of(module, fqn)


def _uses_of(module: nn.Module, fqn: str) -> Iterator[Use]:
    for key, _ in module.named_parameters(recurse=False, remove_duplicate=False):
        yield Use(module, key, f"{fqn}.{key}" if fqn else key)


def foreign_class(weight: Tensor) -> str:
    """Another package's tensor class with operators of its own, such as torchao's; "" for plain values."""
    local = local_tensor(weight)
    kind = type(local)
    if kind.__torch_dispatch__ is Tensor.__torch_dispatch__ or is_fake(local):
        return ""
    return f"{kind.__module__.partition('.')[0]}'s class {kind.__name__}"


def choose(
    roots: Sequence[nn.Module],
    filter_fn: Filter | None,
    param_filter: ParamFilter | None,
    among: set[nn.Module] | None = None,
) -> list[Use]:
    """The parameters that both filters choose; defaults as in `quantize_`. among: the only modules to look at.

    Raises ValueError for a pattern that no parameter of two or three dims has a name for, TypeError for one string.
    """
    if isinstance(param_filter, str):
        raise TypeError(f"param_filter takes a list of patterns or a function: write [{param_filter!r}]")
    every: list[Use] = []
    chosen: dict[tuple[int, str], Use] = {}
    for fqn, module in (pair for root in roots for pair in root.named_modules()):
        default = param_filter is not None or isinstance(module, nn.Linear)
        wanted = filter_fn(module, fqn) if filter_fn else default
        for use in _uses_of(module, fqn) if among is None or module in among else ():
            if use.key == "weight" if param_filter is None else use.param.dim() in DIMS:
                every.append(use)
                if wanted and _passes(param_filter, use):
                    chosen.setdefault((id(module), use.key), use)
    _check_patterns(param_filter, every)
    return list(chosen.values())


def _passes(param_filter: ParamFilter | None, use: Use) -> bool:
    if param_filter is None:
        return True
    if callable(param_filter):
        return bool(param_filter(use.name, use.param))
    return any(fnmatchcase(use.name, pattern) for pattern in param_filter)


def _check_patterns(param_filter: ParamFilter | None, every: Sequence[Use]) -> None:
    for pattern in () if param_filter is None or callable(param_filter) else param_filter:
        if not any(fnmatchcase(use.name, pattern) for use in every):
            shown = ", ".join(use.name for use in every[:4]) + (", ..." if len(every) > 4 else "")
            raise ValueError(
                f"param_filter: no parameter of 2 or 3 dims has a name like {pattern!r}; there are {len(every)}: "
                f"{shown}"
            )


def check_ties(
    roots: Sequence[nn.Module], chosen: Sequence[Use], recipe: str, filters: str, without: Callable[[str], str]
) -> None:
    """Raises ValueError for a chosen parameter that is shared with a module for which it is not chosen, where it must
    stay plain. filters: their names. without: an example that leaves a parameter out."""
    names = {use.param: use.name for use in chosen}
    places = {(id(use.module), use.key) for use in chosen}
    for use in uses(roots):
        if use.param in names and (id(use.module), use.key) not in places:
            name = names[use.param]
            raise ValueError(
                f"{name} is tied to {use.name}, which {filters} does not choose: quantizing it to {recipe} would "
                f"untie them, or dequantize it at each use. To leave it plain, pass {without(name)}"
            )
