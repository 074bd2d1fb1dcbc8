"""Checks of what a spec does to values besides scaling: stochastic rounding and transforms; also of recipes for other
tensors than weights."""

from __future__ import annotations

from collections.abc import Iterator

from layoutc.diagnostics.diagnostic import Diagnostic, listed
from layoutc.spec.checks.parts import AXES, sides
from layoutc.spec.schema import Spec
from layoutc.spec.source import Path, Source

_ROWS: Path = ("orientations", "rowwise")
_SIZES = (2, 4, 8, 16, 32)  # of Hadamard matrices
# What recipes for state or for gradients on the wire can't state, and why.
_REFUSED: tuple[tuple[Path, str], ...] = (
    (("gemm",), "no product reads it"),
    (("reduce",), "ranks send gradients of weights"),
    (("files",), "other checkpoint formats hold weights"),
    (("tensor",), "each rank quantizes its own rows, so no scale may depend on those of others"),
    (("scale", "history"), "a step reads the state of the previous step only"),
    (("scale", "super"), "one launch reads gradients and writes codes, with the scales of their blocks"),
    (("scale", "zero"), "values of 0 are codes of 0"),
    (("orientations", "columnwise"), "no product reads it, so it has one orientation"),
    ((*_ROWS, "quantize"), "it has one orientation: write `element` and `scale` once"),
    ((*_ROWS, "transform"), "no other operand undoes it"),
    ((*_ROWS, "record"), "no product reads it"),
)


def candidates_round_to_nearest(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """A rule that tries several scales compares rounding errors, so it can't round stochastically."""
    for side in sides(spec):
        if side.element.round == "stochastic" and side.rule is not None and side.rule.candidates:
            message = f"{side.scale.rule} takes the scale with the least error, which random bits would decide"
            used = source.value((*side.scale_at, "rule"), "tries several scales for each block")
            help = "delete `round`, or write another rule"
            yield source.find("LC344", message, (*side.element_at, "round"), used, help=help)


def transforms_are_sound(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """A Hadamard matrix's size is a supported power of two, and `signs` has at most one bit per row."""
    for side in sides(spec):
        transform, where = side.orientation.transform, (*side.where, "transform")
        if transform is None:
            continue
        size = transform.hadamard
        if size not in _SIZES:
            near = min(_SIZES, key=lambda one: abs(one - size))
            message = f"there is no Hadamard matrix of {size} here: sizes are {listed(map(str, _SIZES))}"
            yield source.find("LC345", message, (*where, "hadamard"), help=f"write `hadamard: {near}`")
        elif transform.signs >> size:
            message = f"`signs` has a bit for each of {size} steps, but this has {transform.signs.bit_length()}"
            used = source.value((*where, "hadamard"), f"{size} steps")
            most = f"0x{(1 << size) - 1:X}"
            yield source.find("LC345", message, (*where, "signs"), used, help=f"at most {most}")


def transforms_fit_blocks(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """Each transformed group lies within one block and within the matrix, so that no cut splits it."""
    for side in sides(spec):
        transform = side.orientation.transform
        if transform is None or transform.hadamard not in _SIZES:
            continue
        size, axis = transform.hadamard, side.along
        label = source.key((*side.where, "transform"), f"mixes {size} steps along {axis}")
        for each in AXES:
            block, place = getattr(side.orientation.block, each), (*side.where, "block", each)
            if block == "all":
                message = f"a block of transformed values can't cover all of {each}"
                why = "a separate pass finds the amax of such a block, over untransformed values"
                yield source.find("LC346", message, place, label, why=why, help="write a number")
            elif each == axis and block % size:
                message = f"the blocks of {side.name} split the groups that its transform mixes"
                used = source.value(place, f"blocks of {block} along {axis}")
                help = f"write `{axis}: {-(-block // size) * size}`"
                help += f", or `hadamard: {block}`" if block in _SIZES else ""
                yield source.find("LC346", message, used, label, help=help)
        multiple = getattr(spec.shape, axis)
        if multiple % size:
            stated = axis in spec.shape.model_fields_set
            at = source.value(("shape", axis)) if stated else label
            message = f"the transform of {side.name} mixes {size} steps along {axis}, but a matrix may have fewer"
            one = f"{axis}: {-(-multiple // size) * size}"
            given = "shape" in spec.model_fields_set
            help = f"write `{one}`" if stated else f"add `{one}` to `shape`" if given else f"add `shape: {{{one}}}`"
            yield source.find("LC346", message, at, label, help=help)


def transforms_have_one_scale(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """A rule that tries several scales measures errors of untransformed values."""
    for side in sides(spec):
        if side.orientation.transform is not None and side.rule is not None and side.rule.candidates:
            message = f"{side.scale.rule} measures errors of untransformed values, but {side.name} transforms them"
            used = source.value((*side.scale_at, "rule"), "tries several scales for each block")
            label, help = source.key((*side.where, "transform")), "delete `transform`, or write another rule"
            yield source.find("LC346", message, label, used, help=help)


def state_is_plain(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """State and gradients on the wire have one-row blocks, whose scales depend only on their values. State rounds to
    nearest and has no transform, which no operand would undo."""
    if spec.use == "weight":
        return
    is_state = spec.use == "state"
    what = "state" if is_state else "gradients on the wire"
    use = source.value(("use",))
    for where, why in _REFUSED:
        if where in source.keys and (is_state or where[-1] != "transform"):
            message = f"a recipe of {what} has no `{where[-1]}`"
            yield source.find("LC338", message, source.key(where), use, why=why, help=f"delete `{where[-1]}`")
    if is_state and spec.element.round != "nearest":
        message = "elements of state are rounded to nearest"
        yield source.find("LC338", message, ("element", "round"), use, help="delete `round`")
    if spec.orientations.rowwise.block.m != 1 or spec.orientations.rowwise.block.k == "all":
        message = f"blocks of {what} must lie in one row and have a fixed size"
        why = "ranks hold whole rows, so no cut splits such a block, and kernels process whole blocks"
        yield source.find("LC338", message, (*_ROWS, "block"), use, why=why, help="write `block: {m: 1, k: 256}`")


def roots_are_of_state(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """A square root keeps no sign, so weights can't have it."""
    if spec.element.root and spec.use != "state":
        message = "the square root of a weight keeps no sign"
        help = "delete `root`, or add `use: state` for second moments"
        yield source.find("LC338", message, ("element", "root"), help=help)


CHECKS = (
    candidates_round_to_nearest,
    transforms_are_sound,
    transforms_fit_blocks,
    transforms_have_one_scale,
    state_is_plain,
    roots_are_of_state,
)
