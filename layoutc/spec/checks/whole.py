"""Checks of a spec as a whole: names, layout strings, blocks, padding, packing, swizzle.

Each check is a small generator that reads the spec and yields findings. It never raises, prints or changes anything,
and skips parts that another check rejects. numbers.py and rules.py check formats and scale rules.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Iterator
from math import lcm
from pathlib import PurePath

from layoutc.diagnostics.diagnostic import Diagnostic, Label, Span
from layoutc.spec.checks import files as file_checks
from layoutc.spec.checks import levels as level_checks
from layoutc.spec.checks import numbers as number_checks
from layoutc.spec.checks import products as product_checks
from layoutc.spec.checks import records as record_checks
from layoutc.spec.checks import swizzles as swizzle_checks
from layoutc.spec.checks import values as value_checks
from layoutc.spec.checks.parts import AXES, axis_span, buffers, size_of, stated_shape, terms_of
from layoutc.spec.notation import Axis, NotationError, parse_layout
from layoutc.spec.schema import Buffer, Orientation, Spec
from layoutc.spec.source import Source

_WHAT = {"scale": "scale", "zero": "zero point"}
Check = Callable[[Spec, Source], Iterator[Diagnostic]]


def check(spec: Spec, source: Source) -> list[Diagnostic]:
    """All findings about a spec whose keys and types are right."""
    checks = (*CHECKS, *product_checks.CHECKS, *number_checks.CROSS_CHECKS, *value_checks.CHECKS, *file_checks.CHECKS)
    checks += (*level_checks.CROSS_CHECKS, *record_checks.CHECKS)
    diagnostics = [item for one in checks for item in one(spec, source)]
    for scoped_spec, scoped_source in number_checks.scopes(spec, source):
        scoped = (*number_checks.CHECKS, *level_checks.CHECKS)
        diagnostics += [item for one in scoped for item in one(scoped_spec, scoped_source)]
    return diagnostics


def name_is_usable(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """The name becomes a Python package and a class, and must match the file's."""
    where, stem = ("name",), PurePath(source.path).stem
    if not re.fullmatch(r"[a-z][a-z0-9_]*", spec.name):
        help = "lower-case letters, digits and underscores, a letter first: `mxfp8_v2`"
        yield source.find("LC302", f"`{spec.name}` can't name a Python package", where, help=help)
    elif keyword.iskeyword(spec.name) or spec.name == "layoutc":
        label = source.value(where, "is the compiler's own" if spec.name == "layoutc" else "is a Python keyword")
        help = f"for instance `{spec.name}_weights`"
        yield source.find("LC302", f"`{spec.name}` can't name a recipe", label, help=help)
    elif stem != spec.name and stem not in ("-", "<stdin>"):
        message = f"recipe `{spec.name}` lives in a file named `{PurePath(source.path).name}`"
        why = f"the generated package is named after the recipe: generated/{spec.name}/"
        help = f"rename the file to {spec.name}.yaml, or the recipe to `{stem}`"
        yield source.find("LC301", message, source.value(where, f"expected `{stem}`"), why=why, help=help)


def summary_is_one_line(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """The summary is one line, since docstrings and headers contain it."""
    if not spec.summary.isprintable() or not spec.summary.strip() or any(char in spec.summary for char in '"\\'):
        message, help = "the summary can't be part of generated code", "write one plain line; single quotes are fine"
        why = "it is printed into docstrings: one line, without double quotes and backslashes"
        yield source.find("LC303", message, ("summary",), why=why, help=help)


def summary_is_whole(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """YAML ends plain text at ` #`, but a `#` at the start of a word was probably meant as text."""
    span = source.values[("summary",)]
    line = source.text.split("\n")[span.end_line - 1]
    rest = re.match(r"\s+(#\S.*)", line[span.end_column - 1 :])
    if rest and line[span.column - 1] not in "'\"":
        start = span.end_column + rest.start(1)
        label = Label(Span(span.end_line, start, span.end_line, start + len(rest[1].rstrip())), "is a comment to YAML")
        text = (spec.summary + rest[0]).rstrip().replace("'", "''")
        help = f"quote it: `summary: '{text}'`; or write `# ` where a comment is meant"
        yield source.find("LC303", "the summary is cut at `#`", label, help=help)


def layouts_are_readable(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """Each layout string parses."""
    for laid in buffers(spec):
        buffer = laid.buffer
        try:
            parse_layout(buffer.layout)
        except NotationError as error:
            label = source.value((*laid.where, "layout"), within=(error.start, error.end))
            help = "axes, outermost first: `m k`, `k m`, `m k/32`, or `scalar`"
            spaced = " ".join(re.findall(r"[mk](?:/\d+)?", buffer.layout))
            if re.fullmatch(r"(?:[mk](?:/\d+)?[\s,x*]*)+", buffer.layout) and terms_of(Buffer(layout=spaced)):
                help = f"write `layout: {spaced}`: axes with spaces between, outermost first"
            yield source.find("LC310", f"layout: {error}", label, help=help)


def data_has_both_axes(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """Data has one code per element: both axes, without divisors."""
    for laid in buffers(spec):
        where, terms = (*laid.where, "layout"), laid.terms
        if laid.kind != "data" or terms is None:
            continue
        missing = [axis for axis in AXES if axis not in {term.axis for term in terms}]
        if missing:
            label = source.value(where, f"names no {' and no '.join(missing)}")
            yield source.find("LC311", "a data layout names both axes", label, help="write `m k` or `k m`")
        for term in terms:
            if term.divisor != 1:
                within = axis_span(laid.buffer, term.axis)
                label = source.value(where, f"one code for {term.divisor} elements", within=within)
                help = "write `m k` or `k m`; a divisor belongs in the scale's layout"
                yield source.find("LC311", "a data layout has one code for each element", label, help=help)


def scale_names_its_axes(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """A buffer of scales or zero points has a dim for each axis that is cut into blocks, and no dim for other
    axes."""
    for laid in buffers(spec):
        terms, what, path = laid.terms, _WHAT.get(laid.kind), (*laid.where, "layout")
        if terms is None or what is None:
            continue
        named = {term.axis for term in terms}
        help = f"write `layout: {_scale_layout(laid.side.orientation)}`"
        for axis in AXES:
            size = size_of(laid.side.orientation.block, axis)
            blocks = f"blocks of {size}" if size else f"one block along {axis}"
            block = source.value((*laid.side.where, "block", axis), blocks)
            if size and axis not in named:
                message = f"the {what}'s layout leaves out {axis}, which is cut into blocks"
                yield source.find("LC312", message, source.value(path, f"no {axis} here"), block, help=help)
            elif not size and axis in named:
                message = f"the {what}'s layout names {axis}, along which all elements share a {what}"
                yield source.find(
                    "LC312", message, source.value(path, within=axis_span(laid.buffer, axis)), block, help=help
                )


def scale_granularity_divides_block(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """`k/16` stores a scale once per 16 columns, which must divide a block."""
    for laid in buffers(spec):
        what = _WHAT.get(laid.kind)
        for term in (laid.terms or ()) if what else ():
            size = size_of(laid.side.orientation.block, term.axis)
            if size is None or size % term.divisor == 0:
                continue
            within, once = axis_span(laid.buffer, term.axis), f"stored once for {term.divisor}"
            label = source.value((*laid.where, "layout"), once, within=within)
            block = source.value((*laid.side.where, "block", term.axis), f"a {what} covers {size}")
            message = f"a block of {size} along {term.axis} can't be stored once for every {term.divisor}"
            why = f"the stored granularity must divide the block, so that each stored {what} belongs to one block"
            help = f"write `{term.axis}/{size}`, or a smaller divisor of {size}; a smaller one repeats the {what}"
            yield source.find("LC313", message, label, block, why=why, help=help)


def pads_fit_dims(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """`pad` has one multiple per dim of the buffer."""
    kinds = (
        ("a single scale", "a scalar takes no `pad`", "delete `pad`"),
        ("1 dim", "`pad` needs 1 multiple", "write `pad: [1]` or more"),
        ("2 dims", "`pad` needs 2 multiples, one for each dim", "write `pad: [1, 1]` or more"),
    )
    for laid in buffers(spec):
        terms, pad = laid.terms, laid.buffer.pad
        if terms is None or not pad or len(pad) == len(terms):
            continue
        what, message, help = kinds[len(terms)]
        label, layout = (
            source.value((*laid.where, "pad"), f"{len(pad)} given"),
            source.value((*laid.where, "layout"), what),
        )
        yield source.find("LC314", message, label, layout, help=help)


def codes_fill_bytes(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """Rows of sub-byte codes end at byte boundaries: in planes, in buffers, and with padding."""
    seen = set()
    stored: dict[int, Label] = {}
    help = f"write {stated_shape(spec)} at the top level"
    for laid in buffers(spec):
        bits, terms, buffer, where = laid.bits, laid.terms, laid.buffer, laid.where
        if laid.kind != "data" or bits is None or bits == 8 or not terms:
            continue
        group, axis = lcm(bits, 8) // bits, terms[-1].axis
        stored[bits] = source.value((*laid.side.element_at, "format"), "stored in planes that are packed along k")
        if buffer.swizzle or buffer.words:
            continue  # other checks report it
        seen.add((axis, bits))
        text = f"packed along {axis}, its innermost axis"
        packed = source.value((*where, "layout"), text, within=axis_span(buffer, axis))
        yield from _half_byte(spec, source, axis, bits, packed, help)
        pad = buffer.pad
        if len(pad) == len(terms) and pad[-1] % group:
            label = source.value((*where, "pad", len(terms) - 1), f"{pad[-1]} codes of {bits} bits")
            message = f"padding {axis} to {pad[-1]} cuts a byte of {bits}-bit codes"
            multiple = f"write {lcm(pad[-1], group)}, or another multiple of {group}"
            yield source.find("LC316", message, label, packed, help=multiple)
    for bits, label in stored.items():
        if ("k", bits) not in seen:
            yield from _half_byte(spec, source, "k", bits, label, help)


def _half_byte(spec: Spec, source: Source, axis: Axis, bits: int, packed: Label, help: str) -> Iterator[Diagnostic]:
    """The weight's size along an axis is a multiple of the number of codes that fill whole bytes."""
    group, multiple = lcm(bits, 8) // bits, int(getattr(spec.shape, axis))
    if multiple % group == 0:
        return
    size = f"{axis} may be any multiple of {multiple}" if multiple > 1 else f"{axis} may be any size"
    shape = source.value(("shape", axis), size) if "shape" in source.data else source.key(("element",), size)
    message = f"{bits}-bit codes fill whole bytes only in groups of {group}, but {size}"
    yield source.find("LC315", message, packed, shape, help=help)


CHECKS: tuple[Check, ...] = (
    name_is_usable,
    summary_is_one_line,
    summary_is_whole,
    layouts_are_readable,
    data_has_both_axes,
    scale_names_its_axes,
    scale_granularity_divides_block,
    pads_fit_dims,
    codes_fill_bytes,
    *swizzle_checks.CHECKS,
)


def _scale_layout(orientation: Orientation) -> str:
    """The layout that stores each scale of an orientation once, in its data's order."""
    order = [term.axis for term in terms_of(orientation.data) or ()] or list(AXES)
    sizes = {axis: size_of(orientation.block, axis) for axis in order}
    words = [axis if size == 1 else f"{axis}/{size}" for axis, size in sizes.items() if size]
    return " ".join(words) or "scalar"
