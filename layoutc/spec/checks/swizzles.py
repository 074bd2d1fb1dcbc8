"""Checks of swizzles and words: a GEMM's order of scales, and the order in which a buffer is stored."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import lcm

from layoutc.diagnostics.diagnostic import Diagnostic, listed
from layoutc.spec.checks.formats import sound_format
from layoutc.spec.checks.parts import (
    AXES,
    buffer_bits,
    buffer_multiples,
    buffers,
    orientations,
    run_of,
    stated_shape,
    sure_multiple,
    terms_of,
)
from layoutc.spec.notation import NotationError, Swizzle, parse_buffer_swizzle, parse_swizzle
from layoutc.spec.schema import Buffer, Scale, Spec, quantized_as
from layoutc.spec.source import Path, Source


def swizzle_is_readable(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """The pattern parses, is a bijection, and all its sizes are known."""
    if spec.gemm is None or spec.gemm.scale is None:
        return
    scale = spec.gemm.scale
    pattern = scale.swizzle
    message, within = None, (0, len(pattern))
    inner = set(re.findall(r"\w+", pattern))
    for name in scale.sizes:
        if name not in inner:
            label = source.key(("gemm", "scale", name))
            help = f"delete it; the pattern names {listed(sorted(inner))}"
            yield source.find("LC330", f"swizzle: `{name}` has a size, but is not in the pattern", label, help=help)
            return
    if unbalanced := _unbalanced(pattern):
        message, within = "a parenthesis without its partner", unbalanced
    else:
        try:
            parse_swizzle(pattern, scale.sizes)
        except NotationError as error:
            message, within = str(error), (error.start, error.end)
    if message:
        label = source.value(("gemm", "scale", "swizzle"), within=within)
        help = "for instance, for tiles of 128x4: `{swizzle: (rt a b) (ct c) -> rt ct b a c, a: 4, b: 32, c: 4}`"
        why = "each name appears once on either side, and all but the first of a group have a size"
        yield source.find("LC330", f"swizzle: {message}", label, why=why, help=help)


def swizzle_fits_scales(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """The scale buffers that are swizzled have two dims and are padded to whole tiles."""
    swizzle = _swizzle(spec)
    if swizzle is None:
        return
    pattern = source.value(("gemm", "scale", "swizzle"))
    for name, orientation in orientations(spec):
        where: Path = ("orientations", name, "scale")
        terms = terms_of(orientation.scale)
        if terms is None:
            continue
        if len(terms) != 2:
            label = source.value((*where, "layout"), f"{len(terms)} dims" if terms else "a single scale")
            message = f"the swizzle takes two dims, but the {name} scale has {('none', 'one')[len(terms)]}"
            yield source.find(
                "LC331", message, pattern, label, help="delete `gemm.scale`, or cut both axes into blocks"
            )
            continue
        pads = orientation.scale.pad or (1, 1)
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
        order = f", in the order of `layout: {orientation.scale.layout}`" if all(fits_reversed) else ""
        one = (*where, "pad", wrong[0]) if len(wrong) == 1 else (*where, "pad")
        path = one if orientation.scale.pad else (*where, "layout")
        needs = " and ".join(f"{tiles[terms[dim].axis]} along {terms[dim].axis}" for dim in wrong)
        yield source.find(
            "LC332",
            f"the {name} scale must be padded to multiples of {needs}",
            source.value(path, "padded to " + " x ".join(map(str, pads)) if orientation.scale.pad else "not padded"),
            source.value(
                ("gemm", "scale", "swizzle"), "moves tiles of " + " x ".join(str(tiles[t.axis]) for t in terms)
            ),
            help=f"write `pad: [{', '.join(map(str, wanted))}]`{order}",
        )


def buffer_swizzles_are_readable(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """The pattern of a buffer parses, is a bijection over its dims, and all its sizes are known."""
    for where, buffer in buffers(spec):
        named = terms_of(buffer)
        if buffer.swizzle is None or named is None:
            continue
        pattern, path = buffer.swizzle, (*where, "swizzle")
        if not named:
            label, scalar = source.value(path), source.value((*where, "layout"), "a single scale")
            help = "delete `swizzle`: there is one value, and no order"
            yield source.find("LC331", "a scalar takes no swizzle", label, scalar, help=help)
            continue
        inside = set(re.findall(r"\w+", pattern))
        strangers = [name for name in buffer.sizes if name not in inside]
        if strangers:
            message = f"swizzle: `{strangers[0]}` has a size, but is not in the pattern"
            help = f"delete it; the pattern names {listed(sorted(inside))}"
            yield source.find("LC330", message, source.key((*where, strangers[0])), help=help)
            continue
        unbalanced = _unbalanced(pattern)
        message, within = "a parenthesis without its partner", unbalanced or (0, 0)
        if not unbalanced:
            try:
                parse_buffer_swizzle(pattern, buffer.sizes, len(named))
                continue
            except NotationError as error:
                message, within = str(error), (error.start, error.end)
        why = "each name appears once on either side, and all but one of a group have a size, or an order of entries"
        yield source.find(
            "LC330", f"swizzle: {message}", source.value(path, within=within), why=why, help=_for_instance(buffer)
        )


def _for_instance(buffer: Buffer) -> str:
    """A swizzle that can be typed in place of a wrong one, over as many dims."""
    dims = [term.axis for term in terms_of(buffer) or ()]
    last = dims[-1]
    others = "".join(f"{axis} " for axis in dims[:-1])
    return f"for instance, in runs of 8: `swizzle: {others}({last}o a b) -> {others}({last}o b a), a: 4, b: 2`"


def buffers_are_whole_tiles(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """Every size that a buffer can have splits as its swizzle says, and fills whole bytes or words."""
    for where, buffer in buffers(spec):
        named, bits = terms_of(buffer), buffer_bits(spec, where)
        name = f"{where[1]} {where[2]}"
        fills = f"words of {buffer.words} bits" if buffer.words else "bytes"
        key = "swizzle" if buffer.swizzle else "words" if buffer.words else "layout"
        last = source.value((*where, key), f"moves whole tiles, into {fills}" if key != "layout" else "packed")
        try:
            needed = buffer_multiples(spec, where, buffer)
        except ValueError as error:
            message = f"{error} of {bits} bits, which do not fill {fills}"
            help = "let the last dim, after the arrow, take more codes, or the name without a size"
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
        yield source.find(
            "LC332",
            f"the {name} must come in multiples of {' and '.join(entries)}",
            source.value((*where, "pad") if padded else (*where, "layout"), "may have other sizes"),
            last,
            help=f"write {', and '.join(fix)}",
        )


def words_hold_codes(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """Words are filled with codes of up to 8 bits, the first one lowest."""
    for where, buffer in buffers(spec):
        bits = buffer_bits(spec, where)
        if buffer.words is None or bits is None:
            continue
        path: Path = (*where, "words")
        if bits > 8 or not terms_of(buffer):
            what = f"values of {bits} bits" if bits > 8 else "a single scale"
            message = f"words are made of codes of up to 8 bits, not of {what}"
            yield source.find("LC334", message, source.value(path), help="delete `words`")
            continue
        orientation = getattr(spec.orientations, str(where[1]))
        element, _ = quantized_as(spec, orientation)
        if bits < 8 and element.pack == "high-first":
            own: Path = ("orientations", where[1], "quantize") if orientation.quantize.element else ()
            used = source.value((*own, "element", "pack"), "the first code takes the high bits")
            message = "the first code of a word is its lowest"
            help = "write `pack: low-first`; a `swizzle` with a list says another order"
            yield source.find("LC334", message, used, source.value(path), help=help)


def zero_points_are_there(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """A buffer of zero points is stated only where there are some."""
    for name, orientation in orientations(spec):
        _, scale = quantized_as(spec, orientation)
        if orientation.zero is not None and scale.zero is None:
            own: Path = ("orientations", name, "quantize") if orientation.quantize.scale else ()
            label = source.key(("orientations", name, "zero"))
            used = source.value((*own, "scale", "rule"), "makes no zero points")
            yield source.find("LC336", f"{name} lays out zero points, and has none", label, used, help="delete `zero`")


def narrow_zero_points_fill_bytes(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """Zero points of fewer than 8 bits that lie as scales do are packed along the innermost axis."""
    for name, orientation in orientations(spec):
        where: Path = ("orientations", name, "zero")
        _, scale = quantized_as(spec, orientation)
        own: Path = ("orientations", name, "quantize") if orientation.quantize.scale else ()
        used = source.value(("orientations", name, "scale", "layout"), "zero points lie as scales do")
        if spec.gemm and spec.gemm.scale:
            yield from _narrow_are_not_swizzled(spec, source, scale, own)
            continue
        bits = buffer_bits(spec, where) if scale.zero else None
        if bits is None or bits >= 8:
            continue
        zero = source.value((*own, "scale", "zero"))
        terms, buffer = terms_of(orientation.scale), orientation.scale
        if orientation.zero is not None or terms is None:
            continue
        if not terms:
            message = f"a single zero point of {bits} bits fills no byte"
            yield source.find("LC315", message, zero, used, help="write `zero: int8`")
            continue
        try:
            needed = buffer_multiples(spec, where, buffer)
        except ValueError:
            needed = None
        pads = buffer.pad if len(buffer.pad) == len(terms) else (1,) * len(terms)
        sure = [sure_multiple(spec, term, pad) for term, pad in zip(terms, pads, strict=True)]
        if needed is None or any(one % multiple for one, multiple in zip(sure, needed, strict=True)):
            message = f"zero points of {bits} bits, which lie as scales do, do not fill bytes"
            lie = f"zero: {{layout: {buffer.layout}, pad: {_pads(bits, len(terms))}}}"
            help = f"write `zero: int8`, or say how they lie, beside the orientation's `scale`: `{lie}`"
            yield source.find("LC315", message, zero, used, help=help)


def _narrow_are_not_swizzled(spec: Spec, source: Source, scale: Scale, own: Path) -> Iterator[Diagnostic]:
    """A GEMM's order is of whole values."""
    for key, what, name in (("zero", "zero points", scale.zero), ("format", "scales", scale.format)):
        fmt = sound_format(spec, name) if name else None
        if fmt is None or fmt.bits >= 8 or (key == "format" and scale.super is None):
            continue
        message = f"{what} of {fmt.bits} bits are packed, and `gemm.scale` orders whole values"
        label, stated = source.value(("gemm", "scale", "swizzle")), source.value((*own, "scale", key))
        yield source.find("LC335", message, label, stated, help=f"delete `gemm.scale`, or write `{key}: int8`")


def _pads(bits: int, dims: int) -> str:
    """Padding that fills bytes along the last dim, as it is typed."""
    return f"[{', '.join(map(str, [*[1] * (dims - 1), run_of(bits, None)]))}]"


def scales_are_ordered_once(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """What a GEMM reads swizzled is not swizzled before, nor in words."""
    if spec.gemm is None or spec.gemm.scale is None:
        return
    for where, buffer in buffers(spec):
        key = "swizzle" if buffer.swizzle else "words" if buffer.words else ""
        key = "zero" if where[2] == "zero" and not key else key
        if key == "zero":
            message = f"`gemm.scale` orders zero points as scales, and {where[1]} lays them out by themselves"
            used = source.value(("gemm", "scale", "swizzle"))
            help = "delete `gemm.scale`, or this `zero`"
            yield source.find("LC335", message, source.key(where), used, help=help)
        elif key and where[2] != "data":
            message = f"the {where[1]} {where[2]} has an order of its own, and `gemm.scale` orders it again"
            used = source.value(("gemm", "scale", "swizzle"))
            help = f"delete `gemm.scale`, or this `{key}`"
            yield source.find("LC335", message, source.value((*where, key)), used, help=help)


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
    """The swizzle; None if there is none, or if it can't be read, which swizzle_is_readable reports."""
    scale = spec.gemm.scale if spec.gemm else None
    if scale is None or _unbalanced(scale.swizzle):
        return None
    try:
        return parse_swizzle(scale.swizzle, scale.sizes)
    except NotationError:
        return None


def _unbalanced(pattern: str) -> tuple[int, int] | None:
    """The first parenthesis without a partner, or inside another pair; else None."""
    opened: int | None = None
    for offset, char in enumerate(pattern):
        if char == "(":
            if opened is not None:
                return opened, opened + 1
            opened = offset
        elif char == ")":
            if opened is None:
                return offset, offset + 1
            opened = None
    return None if opened is None else (opened, opened + 1)
