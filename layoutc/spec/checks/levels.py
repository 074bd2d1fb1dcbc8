"""Checks of super-blocks: what they hold, and how their scales are made and stored.

A super-block quantizes scales like a recipe quantizes elements, so its rule and formats have the same requirements.
"""

from __future__ import annotations

from collections.abc import Iterator

from layoutc.diagnostics.diagnostic import Diagnostic, did_you_mean, listed, quoted
from layoutc.spec.checks.formats import holds_scales, least_of, level_format, sound_format
from layoutc.spec.checks.parts import AXES, axis_span, sides, terms_of
from layoutc.spec.checks.rules import beyond_fp32, hides_nan, misfit
from layoutc.spec.formats import BUILTIN
from layoutc.spec.rules import RULES, Rule, names
from layoutc.spec.schema import Spec, Super
from layoutc.spec.source import Path, Source

_SUPER: Path = ("scale", "super")


def level_formats_fit(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """Scales in super-blocks have up to 8 bits; the scale that they share has a NaN."""
    level = spec.scale.super
    if level is None:
        return
    fmt, shared = sound_format(spec, spec.scale.format), sound_format(spec, level.format)
    used = source.key(_SUPER, "scales these scales")
    if fmt is not None and not level_format(fmt):
        message = f"scales of a super-block have at most 8 bits, but {fmt.name} has {fmt.bits}"
        narrow = listed(name for name, one in BUILTIN.items() if level_format(one) and not one.integer)
        help = f"delete `super`, or write `format: int8`, {narrow}, or one of your own under `formats`"
        yield source.find("LC347", message, ("scale", "format"), used, help=help)
    if fmt is not None and spec.scale.round != "nearest":
        label = source.value(("scale", "round"), "is not nearest")
        message = "scales of a super-block are rounded to nearest"
        yield source.find("LC347", message, label, used, help="delete `round`; `super` may have one")
    where: Path = (*_SUPER, "format")
    scales = [name for name, one in BUILTIN.items() if holds_scales(one)]
    if level.format not in BUILTIN and level.format not in spec.formats:
        label = source.value(where, did_you_mean(level.format, scales))
        help = f"one of: {listed(scales)}; or define it under `formats`"
        yield source.find("LC304", f"{quoted(level.format)} is not a known format", label, help=help)
    elif shared is not None and not holds_scales(shared):
        message = f"{shared.name} can't be the format of a super-block's scale: it needs 8 bits or more, and a NaN"
        why = "a NaN in the weight must survive in the scale of its super-block"
        yield source.find("LC347", message, where, why=why, help=f"one of: {listed(scales)}")
    elif shared is not None and shared.is_wide and level.round != "nearest":
        label = source.value((*_SUPER, "round"), "is not nearest")
        message = f"{shared.name} scales are rounded to nearest, ties to even"
        yield source.find("LC326", message, label, where, help="delete `round`")


def level_rules_fit(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """The super-block's rule, like that of the elements, reads only its own amax, and its numbers exist."""
    level = spec.scale.super
    if level is None:
        return
    outer, used = RULES.get(spec.scale.rule), source.key(_SUPER, "scales these scales")
    if outer is not None and (problem := _reads_more(outer)):
        label = source.value(("scale", "rule"), problem)
        # Rules that encode elements with the stored scale, so that any way to store it works.
        own = (one for one in RULES.values() if not _reads_more(one))
        plain = listed(one.name for one in own if "from_scale" in one.element_step(one.defaults).expression)
        message = f"scales of {outer.name} can't have a super-block"
        yield source.find("LC347", message, label, used, help=f"delete `super`, or write one of the rules {plain}")
    rule, where = RULES.get(level.rule), (*_SUPER, "rule")
    fitting = [name for name, one in RULES.items() if not (_reads_more(one) or one.makes_zero)]
    if rule is None or rule.name not in fitting:
        label = source.value(where, did_you_mean(level.rule, fitting) if rule is None else _reads_more(rule))
        message = f"{quoted(level.rule)} is not a rule for scales of scales"
        yield source.find("LC347", message, label, help=f"one of: {listed(fitting)}")
        return
    yield from _arithmetic_fits(spec, source, level, rule)


def _arithmetic_fits(spec: Spec, source: Source, level: Super, rule: Rule) -> Iterator[Diagnostic]:
    """The rule's requirements, with scales in place of elements."""
    shared = sound_format(spec, level.format)
    zero = sound_format(spec, spec.scale.zero) if spec.scale.zero else None
    scale, used = sound_format(spec, spec.scale.format), source.value((*_SUPER, "rule"))
    for fmt, path in (
        (scale, ("scale", "format")),
        (None if zero is None or zero.is_wide else zero, ("scale", "zero")),
    ):
        if fmt is None or shared is None or not level_format(fmt) or not holds_scales(shared):
            continue
        reads = frozenset().union(*(names(step.expression) for step in rule.active_steps(level.parameters)))
        if "element_half_range" in reads and least_of(fmt) >= 0:
            message = f"{fmt.name} begins at {least_of(fmt):g}, and {rule.name} maps the amax to half its range"
            where = source.value(path, "has nothing below 0")
            yield source.find("LC347", message, used, where, help="add `of-max: true` to `super`")
        elif problem := misfit(rule, shared, fmt, level.parameters):
            message, why, help = problem
            yield source.find("LC327", message, (*_SUPER, "format"), used, why=why, help=help)
        elif constant := beyond_fp32(rule, fmt, shared, level.parameters):
            message = f"a constant of {rule.name} is beyond fp32"
            where = source.value(path, f"computes with {constant.replace('_', ' ')}")
            yield source.find("LC343", message, used, where, help="give the format a bias nearer to the middle")
    if hides_nan(rule, level.parameters):
        switch = next((key for key in rule.parameters if not hides_nan(rule, level.parameters | {key: True})), None)
        message = f"{rule.name} would hide a NaN of a block's scale"
        yield source.find("LC328", message, used, help=f"add `{switch}: true` to `super`" if switch else "another rule")
    if level.offset and scale is not None and level_format(scale) and least_of(scale) >= 0:
        message = f"scales minus their mean may be negative, but {scale.name} begins at {least_of(scale):g}"
        help = "delete `offset`, or write a format with a sign, such as `format: int8`"
        yield source.find("LC347", message, (*_SUPER, "offset"), ("scale", "format"), help=help)
    outer = RULES.get(spec.scale.rule)
    if zero is not None and outer is not None and outer.zero_is == "value" and not zero.is_wide and least_of(zero) >= 0:
        other = next(name for name, one in RULES.items() if one.zero_is == "minimum")
        message = f"{outer.name} stores negative values of element 0, but {zero.name} begins at 0"
        yield source.find("LC347", message, ("scale", "zero"), ("scale", "rule"), help=f"write `rule: {other}`")


def _reads_more(rule: Rule) -> str:
    """Why a rule's scales can't be in super-blocks, and the rule can't make super-block scales; "" if they can."""
    if rule.needs_tensor_amax:
        return "reads the amax of the whole weight"
    return "tries several scales for each block" if rule.candidates else ""


def super_blocks_hold_blocks(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """A super-block consists of whole blocks and has a fixed number of rows, so no scale depends on other shards."""
    for side in sides(spec):
        if side.scale.super is None:
            continue
        for axis in AXES:
            covers, size = getattr(side.scale.super.block, axis), getattr(side.orientation.block, axis)
            label = source.value((*side.scale_at, "super", "block", axis))
            block = source.value((*side.where, "block", axis), f"blocks of {size}")
            if axis == "m" and "all" in (covers, size):
                what = "a super-block" if covers == "all" else "a block"
                message = f"the scales of {what} over all rows would depend on other shards' rows"
                at, other = (label, block) if covers == "all" else (block, label)
                yield source.find("LC348", message, at, other, help="write a number of rows, for instance `m: 1`")
            elif covers != "all" and (size == "all" or covers % size):
                message = f"a super-block of {covers} along {axis} does not hold whole blocks"
                fix = "`k: all`" if size == "all" else f"`{axis}: {-(-covers // size) * size}`"
                yield source.find("LC348", message, label, block, help=f"write {fix}")


def super_buffers_fit(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """A buffer of super-block scales is stated only if there are some, with the axes that are cut into super-blocks."""
    for side in sides(spec):
        buffer, level, path = side.orientation.super, side.scale.super, (*side.where, "super", "layout")
        if buffer is None:
            continue
        if level is None:
            message = f"{side.name} has no scales of scales to lay out"
            yield source.find("LC336", message, source.key(path[:-1]), help="delete this `super`")
            continue
        terms = terms_of(buffer)
        sizes = {axis: getattr(level.block, axis) for axis in AXES}
        order = [term.axis for term in terms_of(side.orientation.data) or ()]
        words = [axis if sizes[axis] == 1 else f"{axis}/{sizes[axis]}" for axis in order if sizes[axis] != "all"]
        help = f"write `layout: {' '.join(words)}`"
        for axis in AXES if terms is not None else ():
            divisor = next((term.divisor for term in terms or () if term.axis == axis), None)
            size, label = sizes[axis], source.value(path, within=axis_span(buffer, axis))
            if size == "all" and divisor is not None:
                message = f"the layout names {axis}, along which all scales share a scale"
                yield source.find("LC312", message, label, help=help)
            elif size != "all" and divisor is None:
                message = f"the layout leaves out {axis}, which is cut into super-blocks"
                yield source.find("LC312", message, source.value(path, f"no {axis} here"), help=help)
            elif size != "all" and divisor is not None and size % divisor:
                message = f"a super-block of {size} along {axis} can't be stored once for every {divisor}"
                yield source.find("LC313", message, label, help=help)


def levels_stand_alone(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """Amax histories and other checkpoint formats don't support super-blocks."""
    for side in sides(spec):
        if side.scale.super is None:
            continue
        label = source.key((*side.scale_at, "super"), "scales these scales")
        if spec.scale.history is not None:
            message = "an amax history can't be combined with super-blocks"
            at = source.key(("scale", "history"))
            yield source.find("LC325", message, at, label, help="delete `history`, or `super`")
        if side.name == "rowwise" and any(binding.record is None for binding in spec.files.values()):
            message = "`files` can bind tensors to data, scales and zero points only"
            yield source.find("LC347", message, source.key(("files",)), label, help="delete `files`")


def amaxes_of_matrices_lie_in_rows(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """A matrix's amax is stored with each of its rows, so it needs a level, and blocks of one row."""
    if spec.tensor is None or spec.tensor.per == "weight":
        return
    used, message = source.value(("tensor", "per"), "for each row"), "an amax per matrix can't be stored for each row"
    rule = RULES.get(spec.scale.rule)
    if rule is not None and rule.needs_tensor_amax and not rule.tensor:
        levels = listed(n for n, one in RULES.items() if one.tensor)
        why = f"{rule.name} stores the amax itself, which all orientations share"
        yield source.find("LC339", message, ("scale", "rule"), used, why=why, help=f"write one of the rules {levels}")
    if spec.orientations.rowwise.block.m != 1:
        why, at = "a block's rows may belong to two matrices", ("orientations", "rowwise", "block", "m")
        yield source.find("LC339", message, at, used, why=why, help="write `m: 1`")
    if spec.orientations.columnwise is not None:
        label, why = source.key(("orientations", "columnwise")), "a column crosses all matrices"
        yield source.find("LC339", message, label, used, why=why, help="delete `columnwise`")


CROSS_CHECKS = (super_blocks_hold_blocks, super_buffers_fit, levels_stand_alone, amaxes_of_matrices_lie_in_rows)
CHECKS = (level_formats_fit, level_rules_fit)
