"""Swizzles as steps of chains: a buffer's order, and the order in which a GEMM reads padded scales."""

from __future__ import annotations

from layoutc.layout.chain import Chain, Join, Permute, Reorder, Shape, Split
from layoutc.spec.notation import Swizzle

SwizzleStep = Split | Reorder | Permute | Join


def swizzle_steps(swizzle: Swizzle, transposed: bool = False) -> tuple[SwizzleStep, ...]:
    """The steps from a padded array to the swizzled array. transposed: the two dims are swapped first."""
    sizes, names = dict(swizzle.sizes), list[str]()
    steps: list[SwizzleStep] = [Permute((1, 0))] if transposed else []
    for group in swizzle.groups:
        rest = next(place for place, name in enumerate(group) if name not in sizes)
        steps.append(Split(len(names), tuple(sizes[name] for name in group if name in sizes), rest))
        names += group
    steps += [Reorder(names.index(name), order) for name, order in swizzle.picks]
    steps.append(Permute(tuple(names.index(name) for name in swizzle.order)))
    return (*steps, Join(swizzle.joined)) if swizzle.joined else tuple(steps)


def swizzle_chain(swizzle: Swizzle, shape: Shape) -> Chain:
    """The chain of a GEMM's swizzle on a padded (free, contraction) array of `shape`."""
    return Chain(shape, swizzle_steps(swizzle), 8)


def canonical(swizzle: Swizzle) -> list[object]:
    """A swizzle without names: sizes of parts (0: the rest), their order, dims, orders of entries."""
    names = [name for group in swizzle.groups for name in group]
    sizes, picks = dict(swizzle.sizes), dict(swizzle.picks)
    return [
        [[sizes.get(name, 0) for name in group] for group in swizzle.groups],
        [names.index(name) for name in swizzle.order],
        list(swizzle.joined),
        [[names.index(name), list(picks[name])] for name in names if name in picks],
    ]


def renamed(swizzle: Swizzle) -> Swizzle:
    """The same swizzle with canonical names: a, b, c, ... in the order of its groups."""
    names = [name for group in swizzle.groups for name in group]
    new = {name: chr(ord("a") + at) if at < 26 else f"n{at}" for at, name in enumerate(names)}
    return Swizzle(
        tuple(tuple(new[name] for name in group) for group in swizzle.groups),
        tuple(new[name] for name in swizzle.order),
        tuple(sorted((new[name], size) for name, size in swizzle.sizes)),
        swizzle.joined,
        tuple(sorted((new[name], order) for name, order in swizzle.picks)),
    )
