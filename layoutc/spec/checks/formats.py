"""Checks of a spec's formats: the ones it defines, and the ones that elements and scales use."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator
from functools import cache

from layoutc.diagnostics.diagnostic import Diagnostic, did_you_mean, listed, quoted
from layoutc.spec import formats
from layoutc.spec.formats import BUILTIN, Format
from layoutc.spec.schema import FormatDef, Spec, Use
from layoutc.spec.source import Path, Source

SHORT = 16  # the most values of a codebook with a second 0, like formats with a sign; only the first 0 is written


def own_formats_are_sound(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """A spec's own formats have usable names, at most 8 bits, and values that fp32 can tell apart."""
    for name, definition in spec.formats.items():
        where: Path = ("formats", name)
        if name in BUILTIN:
            message = f"`{name}` is a built-in format and can't be defined again"
            yield source.find("LC306", message, source.key(where), help=f"rename it, for instance `my_{name}`")
        elif not re.fullmatch(r"[a-z][a-z0-9_]{0,19}", name):
            help = "lower-case letters, digits and underscores, a letter first, at most 20"
            yield source.find("LC305", f"{quoted(name)} can't name a format", source.key(where), help=help)
        elif problem := _unsound(name, definition):
            key, message, help = problem
            label = source.value((*where, key))
            yield source.find("LC305", f"format `{name}` {message}", source.key(where), label, help=help)
        elif definition.torch is not None and definition.torch not in _torch_names(_own(name, definition)):
            wanted = {fmt.torch: fmt.name for fmt in BUILTIN.values() if fmt.torch and not fmt.is_wide}
            is_known = definition.torch in wanted
            label = source.value((*where, "torch"), "" if is_known else did_you_mean(definition.torch, wanted))
            why = "a dtype whose codes have other values would change numbers silently"
            help = f"delete `torch`; it may name {listed(wanted)}, for a format with the same bits"
            message = f"format `{name}` is not torch's {quoted(definition.torch)}"
            yield source.find("LC305", message, source.key(where), label, why=why, help=help)
        elif name not in _used_formats(spec):
            help = "use it in `element` or `scale`, or delete it"
            yield source.find("LC350", f"format `{name}` is defined and not used", source.key(where), help=help)


def element_format_holds_elements(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """Elements have up to 8 bits, a sign and a zero. Packing is stated only if codes are packed."""
    fmt, label = sound_format(spec, spec.element.format), source.value(("element", "format"))
    if fmt is None:
        return
    fitting = (name for name, one in BUILTIN.items() if not no_element(one, spec.use))
    help = f"built-in formats for elements: {listed(fitting)}"
    if reason := no_element(fmt, spec.use):
        yield source.find("LC307", f"{fmt.name} can't be an element format: {reason}", label, help=help)
    elif fmt.values and spec.element.round == "stochastic":
        label = source.value(("element", "round"), "rounds between magnitudes")
        width = source.value(("element", "format"), "is a codebook")
        yield source.find("LC307", "elements of a codebook are rounded to nearest", label, width, help="delete `round`")
    elif fmt.bits == 8 and "pack" in spec.element.model_fields_set:
        label = source.value(("element", "pack"), "has no effect")
        width = source.value(("element", "format"), "fills a byte")
        yield source.find("LC351", "8-bit codes are not packed", label, width, help="delete `pack`")


def scale_format_holds_scales(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """A scale fills whole bytes and has a NaN: with narrow elements, a NaN survives only there."""
    fmt, label = sound_format(spec, spec.scale.format), source.value(("scale", "format"))
    if fmt is None or fmt.is_wide or spec.scale.super is not None:
        return  # levels.py checks scales in super-blocks
    help = f"built-in formats for scales: {listed(name for name, one in BUILTIN.items() if holds_scales(one))}"
    if fmt.values:
        message = f"{fmt.name} can't be a scale format: it is a codebook"
        yield source.find("LC308", message, label, help=f"write `format: f32`; {help}; or add `super`")
    elif fmt.bits != 8:
        message = f"{fmt.name} can't be a scale format: it has {fmt.bits} bits, and a scale fills a byte"
        yield source.find("LC308", message, label, help=help)
    elif not fmt.nan:
        message = f"{fmt.name} can't be a scale format: it has no NaN"
        why = "a block that holds a NaN gets a NaN scale; without one it would turn into numbers"
        yield source.find("LC308", message, label, why=why, help=help)


def element_bits(spec: Spec, name: str) -> int | None:
    """Bits of a format's element; None if the format is rejected."""
    fmt = sound_format(spec, name)
    return None if fmt is None or no_element(fmt, spec.use) else fmt.bits


def _unsound_codebook(definition: FormatDef) -> tuple[str, str, str] | None:
    """Like _unsound, for a list of values."""
    others = [key for key in definition.model_fields_set - {"values", "ties"} if getattr(definition, key) is not None]
    if others:
        key = sorted(others)[0]
        return key, f"is a codebook, which has no `{key}`", f"delete `{key}`, or `values`"
    stated = [float(value) for value in definition.values or ()]
    numbers = [value for value in stated if value == value]
    if any(abs(value) > 2.0**126 or 0 < abs(value) < 2.0**-120 for value in numbers):
        return "values", "has values or midpoints that fp32 can't hold", "keep magnitudes between 2^-120 and 2^126"
    rounded = [formats.f32(value) for value in numbers]
    zeros = 2 if len(stated) <= SHORT else 1
    if any(rounded.count(value) > (1 if value else zeros) for value in rounded):
        twice = next(value for value in rounded if rounded.count(value) > (1 if value else zeros))
        return "values", f"has {twice:g} twice", "list each value once; leave out codes that are not used at the end"
    if max(rounded, default=0) <= 0:
        return ("values", "has no positive number", "list one; weights need a negative one, too")
    return None


def _own(name: str, definition: FormatDef) -> Format:
    return formats.make(name, definition.model_dump())


def sound_format(spec: Spec, name: str) -> Format | None:
    """A sound format by name; None if it is unknown or rejected."""
    if name in BUILTIN:
        return BUILTIN[name]
    definition = spec.formats.get(name)
    return None if definition is None or _unsound(name, definition) else _own(name, definition)


@cache  # checks ask for each format many times
def _unsound(name: str, definition: FormatDef) -> tuple[str, str, str] | None:
    """(key, what is wrong, help) for a format that can't be encoded; else None."""
    fmt = _own(name, definition)
    floating = ("sign", "exponent", "mantissa", "bias")
    if definition.values is not None:
        return _unsound_codebook(definition)
    if definition.ties is not None:
        return "ties", "can't state `ties`: formats other than codebooks round to nearest even", "delete `ties`"
    stated = [key for key in (*floating, "inf", "nan", "torch") if key in definition.model_fields_set]
    if definition.integer is not None:
        if stated:
            return stated[0], f"is an integer, which has no `{stated[0]}`", "delete one of the two"
        return _unsound_offset(fmt)
    if definition.offset is not None:
        return "offset", "has an `offset`, which integers have", "delete it, or write `integer`"
    if missing := [key for key in floating if getattr(definition, key) is None]:
        key = stated[0] if stated else next(iter(definition.model_fields_set), "sign")
        return key, f"lacks {listed(missing)}", "state sign, exponent, mantissa and bias, or `integer`"
    codes = 2 ** (fmt.exponent + fmt.mantissa)
    special = sorted({*definition.inf, *definition.nan} - ({codes} if fmt.sign and fmt.nan_is_minus_zero else set()))
    if fmt.bits > 8:
        return "exponent", f"has {fmt.bits} bits", "sign + exponent + mantissa must be at most 8 bits"
    if special and special[-1] >= codes:
        key = "nan" if special[-1] in definition.nan else "inf"
        help = f"codes without their sign bit go from 0 to 0x{codes - 1:02x}"
        help += f"; `nan: [0x{codes:02x}]` alone makes -0 the NaN" if fmt.sign and key == "nan" else ""
        return key, f"has no code 0x{special[-1]:02x}", help
    if both := set(definition.inf) & set(definition.nan):
        return "nan", f"takes code 0x{min(both):02x} for both inf and NaN", "list each code once"
    if special != list(range(codes - len(special), codes)):
        return (
            "nan" if definition.nan else "inf",
            "has numbers above its inf or NaN",
            "inf and NaN take the highest codes",
        )
    if codes - len(special) < 2:
        return "exponent", "has fewer than two numbers", "give it more bits or fewer NaN codes"
    try:
        exact = all(formats.f32(value) == value for value in fmt.magnitudes)
        for rounding in ("nearest", "up", "down"):
            formats.thresholds(fmt, rounding)
    except (ValueError, OverflowError, struct.error):
        exact = False
    if not exact:
        return "bias", "has values or midpoints that fp32 can't hold", "choose a bias nearer to the middle"
    return None


def _unsound_offset(fmt: Format) -> tuple[str, str, str] | None:
    """Like _unsound, for an integer."""
    if fmt.offset is None:
        return None
    most = (1 << fmt.integer) - 2
    if fmt.offset > most:
        return "offset", "has no number above 0", f"write {most} or less; {1 << (fmt.integer - 1)} has as many below 0"
    if fmt.symmetric and fmt.offset < fmt.highest:
        return "symmetric", "already has an opposite for its lowest number", "delete `symmetric`"
    return None


def _torch_names(fmt: Format) -> set[str]:
    """The torch dtypes whose codes have the same values as this format's."""
    return {builtin.torch for builtin in BUILTIN.values() if builtin == fmt and builtin.torch}


def no_element(fmt: Format, use: Use = "weight") -> str:
    """Why a format can't hold elements; "" if it can. use: the spec's; optimizer state may lack a sign."""
    if fmt.bits > 8:
        return f"it has {fmt.bits} bits, an element at most 8"
    if not fmt.sign and not (fmt.values and use == "state"):
        return "it has no sign" + (", which only `use: state` allows" if fmt.values else "")
    if fmt.integer and fmt.lowest > 0:
        return "it has no zero"
    return "" if fmt.subnormals else "it has no zero"


def level_format(fmt: Format) -> bool:
    """True for formats that scales or zero points in super-blocks can have."""
    return fmt.bits <= 8


def least_of(fmt: Format) -> float:
    """The smallest number of a format with up to 8 bits."""
    return min(value for code in range(2**fmt.bits) if math.isfinite(value := fmt.value(code)))


def holds_scales(fmt: Format) -> bool:
    return fmt.is_wide or (not fmt.integer and not fmt.values and (fmt.bits == 8 and bool(fmt.nan)))


def _used_formats(spec: Spec) -> set[str]:
    """The names of all formats that elements and scales use."""
    used = {spec.element.format, spec.scale.format}
    for orientation in (spec.orientations.rowwise, spec.orientations.columnwise):
        if orientation is not None:
            used |= {part.format for part in (orientation.quantize.element, orientation.quantize.scale) if part}
            scales = [scale for scale in (spec.scale, orientation.quantize.scale) if scale]
            used |= {scale.zero for scale in scales if scale.zero}
            used |= {scale.super.format for scale in scales if scale.super}
    return used
