"""The text of a kernel's arithmetic: codecs, the scale rule, candidates' errors, the GEMM's order of scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from layoutc.emit import rule_text
from layoutc.emit.code import Lines, converted
from layoutc.emit.size_text import Sizes
from layoutc.layout.layout import Layout, Level, Quantization
from layoutc.layout.swizzles import canonical
from layoutc.plan import conversions
from layoutc.plan.codebooks import codebooks_of, steps_of
from layoutc.plan.conversions import Codec
from layoutc.plan.kernels import Kernels, LayOutKernel, QuantizeKernel, arithmetics_of, inputs_of, level_suffix
from layoutc.plan.moves import SwizzleMove
from layoutc.spec.formats import Format
from layoutc.spec.notation import Swizzle
from layoutc.spec.rules import Step

_LEAST = 4  # a constant this large over a finite fp32 value is not subnormal


@dataclass(frozen=True)
class Function:
    """A small function of generated code: signature, docstring and body."""

    signature: str
    doc: str
    body: Lines

    @property
    def name(self) -> str:
        """The function's name."""
        return self.signature.partition("(")[0]


@dataclass(frozen=True)
class Alias:
    """Functions of the runtime under a recipe's names. unleveled: those without a conversion level argument."""

    line: str
    unleveled: frozenset[str] = frozenset()


def functions(kernels: Kernels) -> tuple[tuple[Alias, ...], tuple[Function, ...]]:
    """The functions that a recipe's tile functions call, in the order of use: the runtime's, and the recipe's own."""
    writes, result = isinstance(kernels.quantize, QuantizeKernel), list[Alias | Function]()
    for suffix, quantization in arithmetics_of(kernels.layout).items():
        served = [source for source in kernels.sources if source.suffix == suffix]  # empty for a level's suffix
        eights = bool(served) and all(source.nibbles is not None for source in served)
        steps = steps_of(quantization.element, codebooks_of(kernels.layout)) if served else None
        result += _codecs(quantization, suffix, eights and not quantization.definition.candidates, steps)
        result += [one for kind, level in quantization.own_levels.items() for one in _level(kind, level, suffix)]
        result += _over_scale(quantization, suffix)
        result.append(_scales(quantization, suffix))
        result += _block_error(quantization, suffix, any(source.units for source in served))
    own = [one for one in result if isinstance(one, Function)]
    own = [one for one in own if writes or one.signature.startswith(("decode", "over"))]
    moves = kernels.lay_out.moves if isinstance(kernels.lay_out, LayOutKernel) else ()
    origins = (_origin(move, kernels.layout) for move in moves if isinstance(move, SwizzleMove))
    aliases = tuple(one for one in result if isinstance(one, Alias))
    if kernels.layout.swizzle is not None and _is_of_128x4(kernels.layout.swizzle):
        aliases += (Alias(f"swizzled_index = lt.scales_of_128x4  # {kernels.layout.swizzle.pattern}"),)
    return aliases, (*own, *_gemm_place(kernels.layout), *origins)


def _codecs(quantization: Quantization, suffix: str, only_software: bool, steps: int | None) -> list[Alias | Function]:
    """Codecs of the element, the scale and the zero point.

    only_software: kernels call the element's encoder only if the card has no conversion. steps: see `_codec`.
    """
    prefix = rule_text.prefix_of(suffix)
    coded = {("", "ELEMENT"): (quantization.element, quantization.element_rounding)}
    if not (quantization.scale.is_f32 or quantization.scales):
        coded["_scale", "SCALE"] = quantization.scale, quantization.rounding
    if quantization.zero is not None and quantization.zeros is None:
        coded["_zero", "ZERO"] = quantization.zero, "nearest"
    codecs = list[Alias | Function]()
    for (what, kind), (fmt, rounding) in coded.items():
        own, names = f"{what}{suffix}", conversions.named(fmt, rounding)
        if names is not None:
            pair = (f"encode{own}", f"decode{own}")
            called = f"{', '.join(pair)} = lt.{names.encode}, lt.{names.decode}"
            unleveled = frozenset(name for name, takes in zip(pair, names.levels, strict=True) if not takes)
            codecs.append(Alias(f"{called}  # {rule_text.ROUNDED[rounding]}", unleveled))
            continue
        of_element = (False, None) if what else (only_software, steps)
        encode, decode = _codec(own, fmt, f"{prefix}{kind}", rounding, *of_element)
        codecs.append(encode)
        if (names := conversions.named(fmt, "nearest")) is not None:  # decoding does not depend on rounding
            unleveled = frozenset[str]() if names.levels[1] else frozenset([decode.name])
            codecs.append(Alias(f"{decode.name} = lt.{names.decode}", unleveled))
        else:
            codecs.append(decode)
    return codecs


def _codec(
    own: str, fmt: Format, prefix: str, rounding: str, only_software: bool = False, steps: int | None = None
) -> tuple[Function, Function]:
    """The functions that encode and decode a format. steps: where a long format's steps begin in the codebooks."""
    encoding, decoding = conversions.encoding(fmt, rounding), conversions.decoding(fmt)
    assert decoding is not None  # recipes with a format that kernels can't decode have no kernels
    if steps is not None:
        constants = {**encoding.software.constants, "AT": steps}
        encoding = Codec(replace(encoding.software, constants=constants, takes_codebooks=True))
    software = encoding.software
    taken = ", bits" if software.takes_bits else ", codebooks" if software.takes_codebooks else ""
    return (
        Function(
            f"encode{own}(x{taken}, CVT_LEVEL: tl.constexpr)",
            f"fp32 -> {fmt.name} codes; {rule_text.ROUNDED[rounding]}; saturating.",
            _body(Codec(encoding.software) if only_software else encoding, "x", prefix),
        ),
        Function(
            f"decode{own}(codes, CVT_LEVEL: tl.constexpr)",
            f"{fmt.name} codes -> fp32, exact.",
            _body(decoding, "codes", prefix),
        ),
    )


def _body(codec: Codec, value: str, prefix: str) -> Lines:
    software = f"return {converted(codec.software, value, prefix)}"
    if codec.hardware is None:
        return (software,)
    has_it = "CVT_LEVEL" if codec.level == 90 else f"CVT_LEVEL >= {codec.level}"
    return (f"if {has_it}:", f"    return {converted(codec.hardware, value, prefix)}", software)


def _over_scale(quantization: Quantization, suffix: str) -> list[Alias | Function]:
    """A function for 1 / a decoded scale without a division, if the rule needs it and scales have only an exponent."""
    program = quantization.definition.program(quantization.conditions)
    if (
        quantization.scales
        or not quantization.scale.is_exponent
        or not any("1 / from_scale" in expression for _, expression in program)
    ):
        return []
    if (names := conversions.named(quantization.scale, quantization.rounding)) is not None:
        return [Alias(f"over_scale{suffix} = lt.{names.over}")]
    conversion = conversions.Conversion("over_exponents", conversions.exponent_constants(quantization.scale))
    return [
        Function(
            f"over_scale{suffix}(codes)",
            "1 / a decoded scale, exact.",
            (f"return {converted(conversion, 'codes', '')}",),
        )
    ]


def _level(kind: str, level: Level, suffix: str) -> tuple[Function, Function]:
    """Functions that encode scales, or zero points, under their level, and decode them."""
    q, of = level.quantization, level_suffix(kind, suffix)
    block, by = f"{q.block.m}, {q.block.k}", rule_text.factor(q)
    stored = "codes, scale, offset" if level.centered else "codes, scale"
    encode = [
        f"scale, {by} = scales{of}(lt.block_amax(x, {block}, CVT_LEVEL), CVT_LEVEL)",
        f"blocks = lt.to_blocks(x, {block})",
        f"codes = encode{of}(lt.from_blocks({rule_text.scaled('blocks', q, dialect=rule_text.TRITON)}), CVT_LEVEL)",
        f"return {stored}",
    ]
    if level.centered:
        mean = f"offset = lt.block_mean(x, inside, {block})"
        encode = [mean, "x = tl.where(inside, x - lt.spread(offset, x), 0.0)", *encode]
    factor = rule_text.expression(q.definition.decode, q, {}, of, rule_text.TRITON)
    value = f"decode{of}(codes, CVT_LEVEL) * lt.spread({factor}, codes)"
    value += " + lt.spread(offset, codes)" if level.centered else ""
    what = {"scale": "Scales", "zero": "Zero points"}[kind]
    inside = ", inside" if level.centered else ""
    return (
        Function(
            f"encode_{kind}{suffix}(x{inside}, CVT_LEVEL: tl.constexpr)",
            f"{what} of blocks -> ({stored}), with one scale of each super-block.",
            tuple(encode),
        ),
        Function(
            f"decode_{kind}{suffix}(stored, CVT_LEVEL: tl.constexpr)",
            f"Inverse of encode_{kind}{suffix}: fp32.",
            (f"{stored} = stored", f"return {value}"),
        ),
    )


def _scales(quantization: Quantization, suffix: str) -> Function:
    arguments = ", ".join(one.name for one in rule_text.scale_arguments(quantization))
    arguments += ", inside" if quantization.scales and quantization.scales.centered else ""
    measured = "lowest and highest" if inputs_of(quantization).block_range else "amax"
    results, steps = rule_text.results(quantization), _scale_steps(quantization, suffix)
    same = steps == rule_text.steps(quantization, suffix, rule_text.TRITON)
    how = "by the reference's operations in the same order" if same else "with the values of the reference's operations"
    return Function(
        f"scales{suffix}({arguments}, CVT_LEVEL: tl.constexpr)",
        f"{measured} -> ({results}), {how}.",
        (*steps, f"return {results}"),
    )


def _scale_steps(quantization: Quantization, suffix: str) -> list[str]:
    """The rule's active steps as assignments, in order, with the same values as the steps as written.

    Avoids divisions whose result is a power of two: a division costs a thread more than all other steps of a rule.
    """
    remaining = list(quantization.definition.active_steps(quantization.conditions))
    powers: set[str] = set()
    lines: list[str] = []
    while remaining:
        step = remaining.pop(0)
        if _begins_power_of_two(step, remaining, quantization):
            constants = rule_text.constant_names(quantization, suffix)
            overflow = constants["overflow"].replace("F32_MAX", rule_text.TRITON.f32_max)
            lines.append(f"{step.name} = lt.floor_power_of_two_over({constants['element_max']}, amax, {overflow})")
            powers.add(step.name)
            del remaining[:2]
            continue
        value = rule_text.expression(step.expression, quantization, {}, suffix, rule_text.TRITON, powers)
        lines.append(f"{step.name} = {value}")
        if not step.expression.endswith(f", 1, {step.name})"):  # `where(..., 1, power)` is one
            powers.discard(step.name)
    return lines


def _begins_power_of_two(step: Step, following: Sequence[Step], quantization: Quantization) -> bool:
    """Whether a step divides by the amax, and the next ones replace overflow and round down to a power of two.

    The step after them must replace results of an amax that is not finite, for which the kernels' function is invalid.
    """
    name = step.name
    written = (
        f"where(isinf({name}), overflow, {name})",
        f"floor_power_of_two({name})",
        f"where((amax == 0) | isinf(amax) | isnan(amax), 1, {name})",
    )
    follow = tuple(one.expression for one in following[:3]) == written and {one.name for one in following[:3]} == {name}
    return follow and step.expression == "element_max / amax" and quantization.element.max >= _LEAST


def _block_error(quantization: Quantization, suffix: str, in_units: bool) -> list[Function]:
    """in_units: some source's blocks are cut into units, which are joined before summing."""
    if not quantization.definition.candidates:
        return []
    arguments = ["blocks", "scale", "multiplier", *(one.name for one in rule_text.shared_arguments(quantization))]
    block, whole = (", BLOCK: tl.constexpr", "lt.whole_blocks(error, BLOCK)") if in_units else ("", "error")
    encoded = f"encode{suffix}(blocks * multiplier[:, None, :, None], CVT_LEVEL)"
    return [
        Function(
            f"block_error{suffix}({', '.join(arguments)}, CONTRACTS_K: tl.constexpr, CVT_LEVEL: tl.constexpr{block})",
            "The sum of the errors of each block's elements under a candidate: (m blocks, k blocks).",
            (
                "x = blocks",
                f"element = decode{suffix}({encoded}, CVT_LEVEL)",
                "scale = scale[:, None, :, None]",
                *rule_text.error_steps(quantization, suffix, rule_text.TRITON),
                f"return lt.block_sum({whole}, CONTRACTS_K)",
            ),
        )
    ]


def _origin(move: SwizzleMove, layout: Layout) -> Function:
    """The function that finds the value at a swizzled buffer's position: the inverse of the buffer's chain."""
    buffer, plane, sizes = move.buffer, move.buffer.plane, Sizes(layout)
    swizzle = buffer.swizzle or _in_order(len(buffer.dims))
    counts = [sizes.padded(dim).replace("cdiv(", "tl.cdiv(").replace("up(", "lt.round_up(") for dim in buffer.dims]
    stated, tiles = dict(swizzle.sizes), [swizzle.tile(d) for d in range(len(counts))]
    sides = [count if count.isidentifier() else f"count_{d}" for d, count in enumerate(counts)]
    extent = {
        name: str(stated[name]) if name in stated else f"({sides[d]} // {tiles[d]})" if tiles[d] > 1 else sides[d]
        for d, group in enumerate(swizzle.groups)
        for name in group
    }
    at = {name: f"at_{name}" for group in swizzle.groups for name in group}
    at |= {group[0]: f"{dim.axis}_at" for group, dim in zip(swizzle.groups, buffer.dims, strict=True) if not group[1:]}
    lines: list[str] = []
    for name in reversed(swizzle.order[1:]):
        lines += [f"{at[name]} = at % {extent[name]}", f"at = at // {extent[name]}"]
    lines.append(f"{at[swizzle.order[0]]} = at")
    for name, order in swizzle.picks:
        lines.append(f"# {name}: {' '.join(map(str, order))}")
        lines.append(f"{at[name]} = (tl.full((), {_nibbles(order)}, tl.int64) >> (4 * {at[name]})) & 15")
    inside, entry = [], {"m": "", "k": ""}
    for d, (group, dim) in enumerate(zip(swizzle.groups, buffer.dims, strict=True)):
        first, *others = group
        value = at[first]
        for name in others:
            value = f"{_atom(value)} * {extent[name]} + {at[name]}"
        lines += [f"{dim.axis}_at = {value}"] if others else []
        inside.append(f"({dim.axis}_at < {sizes.count(dim.axis, dim.per).replace('cdiv(', 'tl.cdiv(')})")
        times = buffer.repeats[d]
        entry[dim.axis] = f"{dim.axis}_at // {times}" if times > 1 else f"{dim.axis}_at"
    columns = sizes.count("k", plane.per_k).replace("cdiv(", "tl.cdiv(")
    row = entry["m"] and (entry["m"] if columns == "1" else f"{_atom(entry['m'])} * {_atom(columns)}")
    index = " + ".join(part for part in (row, entry["k"]) if part)
    how = swizzle.pattern if buffer.swizzle else "in words"
    read = " ".join((*lines, *inside))
    lines = [f"count_{d} = {count}" for d, count in enumerate(counts) if f"count_{d}" in read] + lines
    return Function(
        f"origin_of_{buffer.name}(at, m, k)",
        f"A position in {buffer.name} -> its value's index in {plane.name}, and if it has one: {how}.",
        (*lines, f"return {index}, {' & '.join(inside)}"),
    )


def _atom(text: str) -> str:
    """An expression, in parentheses if a product needs them."""
    return f"({text})" if " " in text and not text.endswith(")") else text


def _in_order(dims: int) -> Swizzle:
    """The identity swizzle of `dims` dims."""
    names = tuple("ab"[:dims])
    return Swizzle(tuple((name,) for name in names), names, ())


def _nibbles(order: tuple[int, ...]) -> int:
    """Packs entries of up to 15 into an int64, the first one lowest."""
    table = sum(entry << (4 * place) for place, entry in enumerate(order))
    return table - (1 << 64) if table >> 63 else table


def _gemm_place(layout: Layout) -> list[Function]:
    """The function swizzled_index: positions along the swizzle's axes, and their flat index."""
    swizzle = layout.swizzle
    if swizzle is None or _is_of_128x4(swizzle):
        return []
    sizes, lines, counts = dict(swizzle.sizes), list[str](), dict[str, str]()
    for axis, group in zip(("free", "contracted"), swizzle.groups, strict=True):
        below = 1
        for name in reversed(group):
            size = sizes.get(name)
            at = f"{axis} // {below}" if below > 1 else axis
            lines.append(f"at_{name} = {at} % {size}" if size else f"at_{name} = {at}")
            counts[name] = str(size) if size else f"({axis}_count // {below})"
            below *= size or 1
    first, *rest = swizzle.order
    place = f"at_{first}"
    for index, name in enumerate(rest):
        place = f"{f'({place})' if index else place} * {counts[name]} + at_{name}"
    return [
        Function(
            "swizzled_index(free, contracted, free_count, contracted_count)",
            f"The flat index at which a GEMM reads the scale of (free, contracted): {swizzle.pattern}.",
            (*lines, f"return {place}"),
        )
    ]


def _is_of_128x4(swizzle: Swizzle) -> bool:
    """True for the order that cards with compute capability 10 read, for which the runtime has a function."""
    return canonical(swizzle) == [[[0, 4, 32], [0, 4]], [0, 3, 2, 1, 4], [], []]
