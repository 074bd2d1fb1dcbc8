"""Checks of records: they hold whole blocks, fill whole bytes, store each bit of each value once, and match the stated
type of a container."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, product
from math import gcd

from layoutc.diagnostics.diagnostic import Diagnostic, listed
from layoutc.runtime.bindings.gguf_types import NUMBERS, PLAIN, TYPES
from layoutc.spec.checks.formats import element_bits, sound_format
from layoutc.spec.checks.parts import AXES, Side, sides
from layoutc.spec.notation import NotationError
from layoutc.spec.records import Field, Part, parse_fields
from layoutc.spec.schema import Block, Spec
from layoutc.spec.source import Path, Source

_WIDEST = 32  # the most bits of a bundle's word
Values = dict[Part, tuple[int, int]]  # (values in a record, bits per value)


def containers_hold_records(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """A container's type holds the records of the rowwise orientation, and excludes `tensors` and `config`."""
    types: dict[tuple[str, int], str] = {}
    for name, binding in spec.files.items():
        where: Path = ("files", name, "record")
        if binding.record is None:
            continue
        if spec.orientations.rowwise.record is None:
            label = source.key(where)
            help = "add `record` to `orientations.rowwise`, or name tensors: `tensors: {data: ..., scale: ...}`"
            yield source.find("LC367", "the rowwise orientation has no records", label, help=help)
        if spec.tensor is not None:
            used = source.key(("tensor",), "the weight's amax, which is in no record")
            help = "delete `record`, and name tensors: `tensors: {data: ..., scale: ..., amax: ...}`"
            yield source.find("LC367", "records do not hold a whole weight", source.key(where), used, help=help)
        for key in ("tensors", "ignore", "parts", "fused", "config", "recognize", "plain"):
            if getattr(binding, key):
                label, used = source.key(("files", name, key)), source.key(where, "replaces all other keys")
                message = f"`{key}` can't be combined with `record`"
                yield source.find("LC367", message, label, used, help=f"delete `{key}`, or `record`")
        kind = (binding.record.container, binding.record.number)
        if kind in types:
            message = f"`{name}` and `{types[kind]}` are the same type of {kind[0]}"
            yield source.find("LC367", message, (*where, "number"), help=f"delete `{name}`")
        types.setdefault(kind, name)


def records_hold_blocks(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """A record is a run of whole blocks and super-blocks along the contracted axis, one step wide on the other axis."""
    for side in sides(spec):
        if side.orientation.record is None:
            continue
        along, other = side.along, "m" if side.along == "k" else "k"
        blocks: list[tuple[Block, Path, str]] = [(side.orientation.block, (*side.where, "block"), "block")]
        if side.scale.super is not None:
            blocks.append((side.scale.super.block, (*side.scale_at, "super", "block"), "super-block"))
        whole, size = True, side.orientation.record.size
        used = source.value((*side.where, "record", "size"), f"records of {size} elements along {along}")
        for block, path, what in blocks:
            across, covers = getattr(block, other), getattr(block, along)
            if across != 1:
                message = f"a record has one step along {other}, but a {what} has {across}"
                yield source.find("LC349", message, (*path, other), used, help=f"write `{other}: 1`")
            if covers == "all" or size % covers:
                whole = False
                message = f"a record of {size} does not hold whole {what}s"
                label = source.value((*path, along), f"{what}s of {covers}")
                fix = f"write `{along}: {size}`" if covers == "all" else f"write `size: {-(-size // covers) * covers}`"
                yield source.find("LC349", message, used, label, help=fix)
        if whole and getattr(spec.shape, along) % size:
            multiple = getattr(spec.shape, along)
            message = f"{along} comes in multiples of {multiple}, but records hold {size}"
            stated = {axis: getattr(spec.shape, axis) for axis in AXES} | {along: -(-multiple // size) * size}
            shape = ", ".join(f"{axis}: {count}" for axis, count in stated.items() if count > 1)
            help = f"write `shape: {{{shape}}}` at the top level"
            yield source.find("LC349", message, used, help=help)


def record_fields_are_whole(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """A record's fields are readable, fill bytes, and hold each bit of each value once."""
    for side in sides(spec):
        values, record = _values(spec, side), side.orientation.record
        if record is None or values is None:
            continue
        stored: dict[tuple[Part, int, int], int] = {}
        sound = True
        for number, text in enumerate(record.fields):
            where: Path = (*side.where, "record", "fields", number)
            try:
                bundle = parse_fields(text)
            except NotationError as error:
                label = source.value(where, within=(error.start, error.end))
                help = f"for instance `scale`, or `data 0:16 | data 16:32`; of {listed(values)}"
                yield source.find("LC349", f"record: {error}", label, help=help)
                sound = False
                continue
            if (problem := _bundle_problem(bundle, values)) is not None:
                message, help = problem
                yield source.find("LC349", f"record: {message}", where, help=help)
                sound = False
                continue
            for field in bundle:
                start, stop, low, high = field.of(*values[field.part])
                for entry, bit in product(range(start, stop), range(low, high)):
                    twice = stored.setdefault((field.part, entry, bit), number) != number
                    if twice and sound:
                        message = f"record: bit {bit} of {field.part} {entry} is stored twice"
                        first = source.value((*where[:-1], stored[field.part, entry, bit]), "here as well")
                        help = "store each bit in one field"
                        yield source.find("LC349", message, where, first, help=help)
                        sound = False
        every = ((part, entry, bit) for part, sizes in values.items() for entry, bit in product(*map(range, sizes)))
        missing = [one for one in every if one not in stored]
        if sound and missing:
            part, entry, bit = missing[0]
            label = source.key((*side.where, "record", "fields"))
            message = f"record: bit {bit} of {part} {entry} is not stored"
            yield source.find("LC349", message, label, help=f"add `{_rest(missing, part)}` to `fields`")


def records_are_of_types(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """A container has a type with the stated name and number, whose records have the size of the recipe's."""
    record, values = spec.orientations.rowwise.record, _values(spec, next(sides(spec)))
    if record is None or values is None or spec.tensor is not None:
        return
    size, nbytes = record.size, sum(count * bits for count, bits in values.values()) // 8
    fit = {number: one.name for number, one in TYPES.items() if one[1:] == (size, nbytes) and one.name not in PLAIN}
    for name, binding in spec.files.items():
        if (stated := binding.record) is None or fit.get(stated.number) == stated.type:
            continue
        where: Path = ("files", name, "record")
        label = source.value((*where, "type" if stated.type not in NUMBERS else "number"))
        number = NUMBERS.get(stated.type, stated.number)
        if stated.type not in NUMBERS:
            message = f"{stated.container} has no type of that name"
        elif number != stated.number:
            message = f"{stated.type} is type {number} of {stated.container}"
        else:
            _, elements, theirs = TYPES[number]
            label = source.value((*where, "type"), f"{theirs} bytes for {elements} elements")
            message = f"the recipe's records are not those of {stated.type}"
        used = source.value(("orientations", "rowwise", "record", "size"), f"{nbytes} bytes for {size} elements")
        types = " or ".join(f"`type: {one}, number: {key}`" for key, one in fit.items())
        help = f"write {types}" if types else f"no type of {stated.container} has such records: delete `{name}`"
        yield source.find("LC369", message, label, used, help=help)


def _bundle_problem(bundle: tuple[Field, ...], values: Values) -> tuple[str, str] | None:
    """(what is wrong with a bundle, a fix); None if it is sound."""
    counts, width = set[int](), 0
    for field in bundle:
        if field.part not in values:
            return f"the recipe has no {field.part}", f"one of: {listed(values)}"
        count, bits = values[field.part]
        start, stop, low, high = field.of(count, bits)
        if stop > count or high > bits:
            what = f"entries 0:{count}" if stop > count else f"bits 0:{bits}"
            return f"{field.part} has {what} in a record", f"keep within {what}"
        counts.add(stop - start)
        width += high - low
    if len(counts) > 1:
        return "fields joined by `|` have different numbers of entries", "give them equal numbers of entries"
    if width > _WIDEST or (width > 8 and width % 8):
        help = f"fields joined by `|` may have up to 8 bits in total, or 16, 24 or {_WIDEST}"
        return f"fields joined by `|` have {width} bits in total", help
    count = next(iter(counts))
    if count * width % 8:
        help = f"fields of {width} bits come in multiples of {8 // gcd(8, width)} entries"
        return (
            f"{count} times {width} bits do not fill whole bytes",
            f"{help}; or join more fields by `|`, up to 8 bits",
        )
    return None


def _rest(missing: list[tuple[Part, int, int]], part: Part) -> str:
    """A field to add for a part's missing bits: the first run of entries that lack the same bits."""
    of = [(entry, bit) for one, entry, bit in missing if one == part]
    bits_of = {entry: tuple(bit for _, bit in group) for entry, group in groupby(of, key=lambda pair: pair[0])}
    first = next(iter(bits_of))
    stop = first
    while bits_of.get(stop) == bits_of[first]:
        stop += 1
    bits = bits_of[first]
    return f"{part} {first}:{stop} bits {bits[0]}:{bits[-1] + 1}"


def _values(spec: Spec, side: Side) -> Values | None:
    """How many values of each part a record has, and their bits; None if another check rejects them."""
    record, scale = side.orientation.record, side.scale
    if record is None:
        return None
    size, own = getattr(side.orientation.block, side.along), element_bits(spec, side.element.format)
    fmt = sound_format(spec, scale.format)
    if size == "all" or record.size % size or own is None or fmt is None:
        return None
    values: Values = {"data": (record.size, own), "scale": (record.size // size, fmt.bits)}
    zero = sound_format(spec, scale.zero) if scale.zero else None
    if zero is not None:
        values["zero"] = (record.size // size, zero.bits)
    if scale.super is not None:
        covers, shared = getattr(scale.super.block, side.along), sound_format(spec, scale.super.format)
        if covers == "all" or record.size % covers or shared is None:
            return None
        values["super"] = (record.size // covers, shared.bits)
        if scale.super.offset:
            values["offset"] = (record.size // covers, 32)
        if zero is not None and not zero.is_wide:
            values["super_zero"] = (record.size // covers, shared.bits)
    return values


CHECKS = (containers_hold_records, records_hold_blocks, record_fields_are_whole, records_are_of_types)
