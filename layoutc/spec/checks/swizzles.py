"""Checks of swizzles and words: a GEMM's order of scales, and the stored order of buffers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from math import lcm

from layoutc.diagnostics.diagnostic import Diagnostic, listed
from layoutc.spec.checks.formats import sound_format
from layoutc.spec.checks.parts import AXES, Laid, Side, buffers, run_of, sides, stated_shape, sure_multiple, terms_of
from layoutc.spec.notation import NotationError, Swizzle, parse_buffer_swizzle, parse_swizzle
from layoutc.spec.schema import Buffer, GemmScale, Spec
from layoutc.spec.source import Path, Source


def swizzle_is_readable(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """A GEMM's pattern parses, is a bijection, and all its sizes are known."""
    scale = spec.gemm.scale if spec.gemm else None
    if scale is not None:
        help = "for instance, for tiles of 128x4: `{swizzle: (rt a b) (ct c) -> rt ct b a c, a: 4, b: 32, c: 4}`"
        why = "each name appears once on each side, and all but the first of a group have a size"
        parse = partial(parse_swizzle, scale.swizzle, scale.sizes)
        yield from _unreadable(source, ("gemm", "scale"), scale, parse, why, help)


def _unreadable(
    source: Source, where: Path, stated: GemmScale | Buffer, parse: Callable[[], Swizzle], why: str, help: str
) -> Iterator[Diagnostic]:
    """What is wrong with a pattern, if anything. Reports a size without a name in the pattern first, at its key."""
    pattern = stated.swizzle or ""
    inside = set(re.findall(r"\w+", pattern))
    if strangers := [name for name in stated.sizes if name not in inside]:
        message = f"swizzle: `{strangers[0]}` has a size, but is not in the pattern"
        names = f"delete it; the pattern names {listed(sorted(inside))}"
        yield source.find("LC330", message, source.key((*where, strangers[0])), help=names)
        return
    try:
        parse()
    except NotationError as error:
        label = source.value((*where, "swizzle"), within=(error.start, error.end))
        yield source.find("LC330", f"swizzle: {error}", label, why=why, help=help)


def swizzle_fits_scales(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """Swizzled scale buffers have two dims and are padded to whole tiles."""
    swizzle = _swizzle(spec)
    if swizzle is None:
        return
    pattern = source.value(("gemm", "scale", "swizzle"))
    for laid in buffers(spec):
        name, terms, buffer, where = laid.side.name, laid.terms, laid.buffer, laid.where
        if laid.kind != "scale" or terms is None:
            continue
        if len(terms) != 2:
            label = source.value((*where, "layout"), f"{len(terms)} dims" if terms else "a single scale")
            message = f"the swizzle takes two dims, but the {name} scale has {('none', 'one')[len(terms)]}"
            help = "delete `gemm.scale`, or cut both axes into blocks"
            yield source.find("LC331", message, pattern, label, help=help)
            continue
        pads = buffer.pad or (1, 1)
        if len(pads) != 2:
            continue
        axes = AXES if name == "rowwise" else AXES[::-1]  # (free, contraction)
        tiles = {axis: swizzle.tile(dim) for dim, axis in enumerate(axes)}
        wrong = [dim for dim, term in enumerate(terms) if pads[dim] % tiles[term.axis]]
        if not wrong:
            continue
        wanted = [lcm(pad, tiles[term.axis]) for pad, term in zip(pads, terms, strict=True)]
        fits_reversed = [pad % tiles[term.axis] == 0 for pad, term in zip(pads[::-1], terms, strict=True)]
        wanted = list(pads[::-1]) if all(fits_reversed) else wanted  # the right multiples, in the wrong order
        order = f", in the order of `layout: {buffer.layout}`" if all(fits_reversed) else ""
        one = (*where, "pad", wrong[0]) if len(wrong) == 1 else (*where, "pad")
        label = source.value((*where, "layout"), "not padded")
        if buffer.pad:
            label = source.value(one, "padded to " + " x ".join(map(str, pads)))
        moves = "moves tiles of " + " x ".join(str(tiles[term.axis]) for term in terms)
        needs = " and ".join(f"{tiles[terms[dim].axis]} along {terms[dim].axis}" for dim in wrong)
        message = f"the {name} scale must be padded to multiples of {needs}"
        help = f"write `pad: [{', '.join(map(str, wanted))}]`{order}"
        yield source.find("LC332", message, label, source.value(("gemm", "scale", "swizzle"), moves), help=help)


def buffer_swizzles_are_readable(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """A buffer's pattern parses, is a bijection over its dims, and all its sizes are known."""
    why = "each name appears once on each side, and all but one of a group have a size, or an order of entries"
    for laid in buffers(spec):
        buffer, named = laid.buffer, laid.terms
        if buffer.swizzle is not None and named:
            parse = partial(parse_buffer_swizzle, buffer.swizzle, buffer.sizes, len(named))
            yield from _unreadable(source, laid.where, buffer, parse, why, _for_instance(buffer))
        elif buffer.swizzle is not None and named is not None:
            scalar, help = (
                source.value((*laid.where, "layout"), "a single scale"),
                "delete `swizzle`: a single value has no order",
            )
            yield source.find("LC331", "a scalar takes no swizzle", (*laid.where, "swizzle"), scalar, help=help)


def _for_instance(buffer: Buffer) -> str:
    """A swizzle to type instead of a wrong one, over the same number of dims."""
    dims = [term.axis for term in terms_of(buffer) or ()]
    last = dims[-1]
    others = "".join(f"{axis} " for axis in dims[:-1])
    return f"for instance, in runs of 8: `swizzle: {others}({last}o a b) -> {others}({last}o b a), a: 4, b: 2`"


def buffers_are_whole_tiles(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """Every possible size of a buffer splits as its swizzle says and fills whole bytes or words."""
    for laid in buffers(spec):
        named, bits, buffer, where = laid.terms, laid.bits, laid.buffer, laid.where
        fills = f"words of {buffer.words} bits" if buffer.words else "bytes"
        key = "swizzle" if buffer.swizzle else "words" if buffer.words else "layout"
        last = source.value((*where, key), f"moves whole tiles, into {fills}" if key != "layout" else "packed")
        try:
            needed = laid.multiples
        except ValueError as error:
            message = f"{error} of {bits} bits, which do not fill {fills}"
            help = "give the last dim after the arrow more codes, or the name without a size"
            yield source.find("LC330", f"swizzle: {message}", last, help=help)
            continue
        pads = buffer.pad or (1,) * len(named or ())
        if needed is None or named is None or len(pads) != len(named):
            continue
        sure = [sure_multiple(spec, term, pad) for term, pad in zip(named, pads, strict=True)]
        wrong = [dim for dim, multiple in enumerate(needed) if sure[dim] % multiple]
        if not wrong:
            continue
        entries = [f"{needed[dim]} along {named[dim].axis}" for dim in wrong]
        wanted = [lcm(pad, multiple) if pad > 1 else 1 for pad, multiple in zip(pads, needed, strict=True)]
        padded = any(pads[dim] > 1 for dim in wrong)
        fix = [f"`pad: [{', '.join(map(str, wanted))}]`"] if padded else []
        fix += [f"{stated_shape(spec)} at the top level"] if any(pads[dim] == 1 for dim in wrong) else []
        message = f"the {laid.side.name} {laid.kind} must come in multiples of {' and '.join(entries)}"
        label = source.value((*where, "pad" if padded else "layout"), "may have other sizes")
        yield source.find("LC332", message, label, last, help=f"write {', and '.join(fix)}")


def words_hold_codes(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """Words hold codes of up to 8 bits, the first one in the lowest bits."""
    for laid in buffers(spec):
        bits, path = laid.bits, (*laid.where, "words")
        if laid.buffer.words is None or bits is None:
            continue
        if bits > 8 or not laid.terms:
            what = f"values of {bits} bits" if bits > 8 else "a single scale"
            message = f"words hold codes of up to 8 bits, not {what}"
            yield source.find("LC334", message, path, help="delete `words`")
        elif bits < 8 and laid.side.element.pack == "high-first":
            used = source.value((*laid.side.element_at, "pack"), "the first code takes the high bits")
            help = "write `pack: low-first`; a `swizzle` with a list gives another order"
            yield source.find("LC334", "a word has its first code in the low bits", used, path, help=help)


def zero_points_are_there(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """A buffer of zero points is stated only if there are some."""
    for side in sides(spec):
        if side.orientation.zero is not None and side.scale.zero is None:
            label, used = (
                source.key((*side.where, "zero")),
                source.value((*side.scale_at, "rule"), "makes no zero points"),
            )
            message = f"{side.name} has no zero points to lay out"
            yield source.find("LC336", message, label, used, help="delete `zero`")


def narrow_zero_points_fill_bytes(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """Zero points of fewer than 8 bits in the order of scales are packed along the innermost axis."""
    for side in sides(spec):
        if spec.gemm and spec.gemm.scale:
            yield from _narrow_are_not_swizzled(spec, source, side)
            continue
        laid = Laid(spec, side, "zero", side.orientation.scale)
        bits, terms, buffer = laid.bits, laid.terms, laid.buffer
        if bits is None or bits >= 8 or side.orientation.zero is not None or terms is None:
            continue
        zero, used = (
            (*side.scale_at, "zero"),
            source.value((*side.where, "scale", "layout"), "zero points have the layout of scales"),
        )
        if not terms:
            message = f"a single {bits}-bit zero point does not fill a byte"
            yield source.find("LC315", message, zero, used, help="write `zero: int8`")
            continue
        try:
            needed = laid.multiples
        except ValueError:
            needed = None
        pads = buffer.pad if len(buffer.pad) == len(terms) else (1,) * len(terms)
        sure = [sure_multiple(spec, term, pad) for term, pad in zip(terms, pads, strict=True)]
        if needed is None or any(one % multiple for one, multiple in zip(sure, needed, strict=True)):
            message = f"{bits}-bit zero points in the layout of scales do not fill bytes"
            lie = f"zero: {{layout: {buffer.layout}, pad: {_pads(bits, len(terms))}}}"
            help = f"write `zero: int8`, or give them a layout next to the orientation's `scale`: `{lie}`"
            yield source.find("LC315", message, zero, used, help=help)


def _narrow_are_not_swizzled(spec: Spec, source: Source, side: Side) -> Iterator[Diagnostic]:
    """A GEMM's order moves whole values, so narrow ones can't be swizzled."""
    for key, what, name in (("zero", "zero points", side.scale.zero), ("format", "scales", side.scale.format)):
        fmt = sound_format(spec, name) if name else None
        if fmt is None or fmt.bits >= 8 or (key == "format" and side.scale.super is None):
            continue
        message = f"{fmt.bits}-bit {what} are packed, but `gemm.scale` orders whole values"
        help = f"delete `gemm.scale`, or write `{key}: int8`"
        yield source.find("LC335", message, ("gemm", "scale", "swizzle"), (*side.scale_at, key), help=help)


def _pads(bits: int, dims: int) -> str:
    """The padding to type so that the last dim fills bytes."""
    return f"[{', '.join(map(str, [*[1] * (dims - 1), run_of(bits, None)]))}]"


def scales_are_ordered_once(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """No scales or zero points are ordered both by a buffer's swizzle or words and by `gemm.scale`."""
    for laid in buffers(spec) if spec.gemm and spec.gemm.scale else ():
        key = "swizzle" if laid.buffer.swizzle else "words" if laid.buffer.words else ""
        if laid.kind == "data" or not (key or laid.kind == "zero"):
            continue
        label, message = source.value((*laid.where, key)), f"the {laid.side.name} {laid.kind} has its own order"
        message += ", which `gemm.scale` would change"
        if not key:
            label, key = source.key(laid.where), "zero"
            message = f"`gemm.scale` orders zero points as scales, but {laid.side.name} gives them another layout"
        help = f"delete `gemm.scale`, or this `{key}`"
        yield source.find("LC335", message, label, ("gemm", "scale", "swizzle"), help=help)


CHECKS = (
    swizzle_is_readable,
    swizzle_fits_scales,
    buffer_swizzles_are_readable,
    buffers_are_whole_tiles,
    words_hold_codes,
    zero_points_are_there,
    narrow_zero_points_fill_bytes,
    scales_are_ordered_once,
)


def _swizzle(spec: Spec) -> Swizzle | None:
    """The GEMM's swizzle; None without one, or if it is unreadable, which swizzle_is_readable reports."""
    scale = spec.gemm.scale if spec.gemm else None
    try:
        return parse_swizzle(scale.swizzle, scale.sizes) if scale else None
    except NotationError:
        return None
