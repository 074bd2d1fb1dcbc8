"""The text of reference.py: quantizing and dequantizing, the GEMM's order of scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from layoutc.emit import rule_text
from layoutc.emit.arithmetic_text import LONGEST, ArithmeticText, ConstantText, arithmetic_text, constants_of
from layoutc.layout.layout import Layout, Quantization, Record, Source, codes_per_group, stream_of
from layoutc.layout.records import count_of
from layoutc.plan.kernels import arithmetics_of, inputs_of, suffixes_of
from layoutc.plan.plan import Plan


@dataclass(frozen=True)
class SourceText:
    """Code that makes the planes of one source, and the condition under which it runs."""

    condition: str
    quantize: list[str]


@dataclass(frozen=True)
class SwizzleText:
    """A GEMM's order of scales: its pattern, and the call that makes it."""

    pattern: str
    order: str


@dataclass(frozen=True)
class ReferenceText:
    """Everything that the template of reference.py prints, except what all files of a recipe share."""

    arithmetics: list[ArithmeticText]
    decode_texts: list[str]
    constants: list[ConstantText]
    sources: list[SourceText]
    prologue: list[str]
    dequantize: list[str]
    amax_doc: str
    level: list[str]  # makes what is stored instead of the whole weight's amax; empty: the amax is stored
    stochastic: bool
    swizzle: SwizzleText | None
    records: list[str]


def reference_text(plan: Plan) -> ReferenceText:
    """The text of a recipe's reference.

    If orientations differ in more than their blocks, each has its own codecs and rule, named after it.
    """
    layout, suffixes = plan.layout, suffixes_of(plan.layout)
    own = {suffixes[source.name]: source.quantization for source in layout.sources}
    first = layout.sources[0]
    kinds = arithmetics_of(layout)
    return ReferenceText(
        arithmetics=[arithmetic_text(quantization, suffix) for suffix, quantization in kinds.items()],
        decode_texts=[_decode_text(q) for q in own.values()],
        constants=[
            *(constant for suffix, q in kinds.items() for constant in constants_of(q, suffix)),
            *map(_record_constant, layout.records),
        ],
        sources=[_source(source, layout, suffixes[source.name]) for source in layout.sources],
        prologue=_prologue(plan),
        dequantize=_dequantize(layout, suffixes),
        amax_doc=_amax_doc(plan),
        level=rule_text.assignments(first.quantization.definition.tensor, first.quantization, suffixes[first.name]),
        stochastic=layout.stochastic,
        swizzle=_swizzle(layout),
        records=[line for record in layout.records for line in _record(record)],
    )


def _record(record: Record) -> list[str]:
    """Lines that read an orientation's records and return its planes."""
    along = record.axis
    kinds = ", ".join(f"({count_of(plane, along, record.size)}, torch.{plane.dtype})" for plane in record.planes)
    names = [plane.kind for plane in record.planes]
    table = f"{record.orientation.upper()}_RECORD"
    lines = [f"{', '.join(names)} = num.from_records(record, {along} // {record.size}, {table}, [{kinds}])"]
    lines.append("return {")
    for plane in record.planes:
        value = plane.kind if record.axis == "k" else f"{plane.kind}.t().contiguous()"
        if plane.bits < 8:
            value = f"num.pack({value}, {plane.bits}, low_first={record.low_first})"
        lines.append(f'    "{plane.name}": {value},')
    return [f'if orientation == "{record.orientation}":', *(f"    {line}" for line in [*lines, "}"])]


def record_facts(record: Record) -> tuple[str, str, str, str]:
    """The name, shape as code, dtype and description of a buffer of records."""
    rows, along = ("m", "k") if record.axis == "k" else ("k", "m")
    count = f"{along} // {record.size}" + (f" * {record.nbytes}" if record.nbytes > 1 else "")
    return record.name, f"({rows}, {count})", "uint8", ", ".join(record.made_by)


def join_record(record: Record) -> str:
    """The torch expression that makes a buffer of records from planes."""
    values = []
    for plane in record.planes:
        text = f'planes["{plane.name}"]'
        text = f"num.unpack({text}, {plane.bits}, low_first={record.low_first})" if plane.bits < 8 else text
        values.append(text if record.axis == "k" else f"{text}.t()")
    count = f"{record.axis} // {record.size}"
    listed = f"{', '.join(values)}{',' * (len(values) == 1)}"
    return f"num.to_records(({listed}), {count}, {record.orientation.upper()}_RECORD)"


def _record_constant(record: Record) -> ConstantText:
    """A record's table: one line per bundle of slices, or per slice of a long bundle."""
    place = {plane: number for number, plane in enumerate(record.planes)}
    lines = []
    for bundle in record.bundles:
        slices = [f"({place[p.plane]}, {p.start}, {p.stop}, {p.low}, {p.bits})" for p in bundle]
        what = [f"{p.plane.kind} {p.start}:{p.stop} bits {p.low}:{p.low + p.bits}" for p in bundle]
        line = f"    ({', '.join(slices)}{',' * (len(bundle) == 1)}),  # {' | '.join(what)}\n"
        if len(line) > LONGEST + 1:
            each = (f"        {one},  # {says}\n" for one, says in zip(slices, what, strict=True))
            line = f"    (\n{''.join(each)}    ),\n"
        lines.append(line)
    kinds = ", ".join(plane.kind for plane in record.planes)
    heading = f"    # (number of the plane, first entry, end, lowest bit, bits), of {kinds}\n"
    return ConstantText(f"{record.orientation.upper()}_RECORD", f"(\n{heading}{''.join(lines)})", "")


def _decode_text(quantization: Quantization) -> str:
    """The decoded value, as the rule defines it."""
    by = f"({quantization.definition.decode})"
    if quantization.zero is None:
        return f"(element * {by})^2" if quantization.root else f"element * {by}"
    match quantization.definition.zero_is:
        case "value":
            return f"element * {by} + zero"
        case "minimum":
            return f"element * {by} - zero"
    return f"(element - zero) * {by}"


def _prologue(plan: Plan) -> list[str]:
    """The first lines of quantize_reference."""
    sized = plan.layout.stochastic or any(not s.scale.is_scalar for s in plan.layout.sources)
    lines = ["m, k = x.shape"] if sized else []
    lines += ["if seed is None:", "    seed = draw_seed(x)"] if plan.layout.stochastic else []
    reads_input_max = any(inputs_of(source.quantization).input_max for source in plan.layout.sources)
    lines += ["input_max = min(torch.finfo(x.dtype).max, num.F32_MAX)"] if reads_input_max else []
    roots = any(source.quantization.root for source in plan.layout.sources)
    # On CPUs, torch's fp32 sqrt is one step off for some numbers. + 0: a zero has no sign.
    root = "x = (x.double().clamp(min=0).sqrt().float() + 0.0).contiguous()  # a root to nearest even, of 0 below 0"
    lines += [root if roots else "x = x.float().contiguous()"]
    if plan.shares_amax:
        amax = f"num.column_amax(x, {plan.amax_columns})" if plan.amax_columns else "num.tensor_amax(x)"
        lines += ["if amax is None:", f"    amax = {amax}"]
    return lines


def _amax_doc(plan: Plan) -> str:
    if not plan.shares_amax:
        return "amax must be None: no scale depends on anything outside its block."
    if plan.layout.history:
        return "amax: (1,) fp32, from which the scale is computed; default: that of x."
    shape, what = "(1,)", f"of the whole {plan.noun}"
    if plan.layout.amax_of_matrices:
        shape, what = "(m, 1)", "of its matrix for each row, or (1,), for all"
    if plan.amax_columns:
        each = "column" if plan.amax_columns == 1 else f"{plan.amax_columns} columns"
        shape = "(1, k)" if plan.amax_columns == 1 else f"(1, k / {plan.amax_columns})"
        what = f"of each {each}, over all rows"
    return f"amax: {shape} fp32, the largest magnitude {what}; default: that of x."


def _source(source: Source, layout: Layout, suffix: str) -> SourceText:
    """Code that makes the planes of one source."""
    block, data = source.quantization.block, source.data.name
    inputs = inputs_of(source.quantization)
    transform = source.quantization.transform
    grown = f" * {transform.headroom}" if transform else ""
    extra = (f", amax{grown}" if inputs.tensor_amax else "") + (", input_max" if inputs.input_max else "")
    zero = source.zero.name if source.zero else None
    results = rule_text.results(source.quantization)
    shift = f"decode_{source.quantization.zeros_as}{suffix}(zero)[:, None, :, None]" if zero else ""
    scaled = f"num.from_blocks({rule_text.shifted('blocks', source.quantization, shift)}, m, k)"
    bits = ", bits" if source.quantization.stochastic else ""
    if source.scale.is_scalar:
        lines = [f"{results} = scales{suffix}(amax{extra})"]
        scaled = rule_text.scaled("x", source.quantization, in_blocks=False)
    else:
        amax = "amax" if source.scale.per_m is None else "num.block_amax(blocks)"
        amax = "*num.block_range(blocks)" if inputs.block_range else amax
        chosen = f"scales{suffix}({amax}{extra})"
        if source.quantization.definition.candidates:
            chosen = f'best_scales{suffix}(blocks{extra}, "{_contracted(source.name)}")'
        values = f"num.hadamard(x, {rule_text.transform_arguments(transform)})" if transform else "x"
        lines = [f"blocks = num.to_blocks({values}, {block.m}, {block.k})", f"{results} = {chosen}"]
    if bits:
        lines.append(f"bits = random_bits(seed, m, k, {stream_of(source)})")
    codes = f"encode{suffix}({scaled}{bits})"
    if codes_per_group(source.data.bits) > 1:
        lines.append(f"scaled = {scaled}")
        codes = f"num.pack(encode{suffix}(scaled{bits}), {source.data.bits}, low_first={source.quantization.low_first})"
    served = [orientation for orientation, name in layout.source_of if name == source.name]
    condition = " or ".join(f'"{orientation}" in orientations' for orientation in served)
    lines += [f'planes["{data}"] = {codes}', f"{_entries(source, 'scale')} = scale"]
    if source.level is not None:
        lines.append(f'planes["{source.level.name}"] = level_of(amax).reshape(-1, 1).expand(m, 1).contiguous()')
    return SourceText(condition, [*lines, *([f"{_entries(source, 'zero')} = zero"] if zero else [])])


def _entries(source: Source, kind: Literal["scale", "zero"]) -> str:
    """The planes of scales or zero points: one, or a tuple with the planes of their level."""
    return ", ".join(f'planes["{plane.name}"]' for plane in source.stored_for(kind))


def _dequantize(layout: Layout, suffixes: dict[str, str]) -> list[str]:
    lines: list[str] = []
    for source in layout.sources:
        served = [orientation for orientation, name in layout.source_of if name == source.name]
        block, quantization, suffix = source.quantization.block, source.quantization, suffixes[source.name]
        codes = f'planes["{source.data.name}"]'
        if codes_per_group(source.data.bits) > 1:
            codes = f"num.unpack({codes}, {source.data.bits}, low_first={quantization.low_first})"
        held = _entries(source, "scale")
        level = source.level.name if source.level else "amax"
        factor = rule_text.decode(quantization, f"({held})" if quantization.scales else held, suffix, level)
        spread = f"{block.m}, {block.k}, m, k"
        body = [f"factor = {factor}", f"return decode{suffix}({codes}) * num.per_element(factor, {spread})"]
        if source.zero:
            zero, element = f"num.per_element(zero, {spread})", f"decode{suffix}({codes})"
            value = f"element * num.per_element(factor, {spread})"
            sign = {"value": "+", "minimum": "-"}.get(quantization.definition.zero_is)
            held = _entries(source, "zero")
            body[1:] = [
                f"zero = decode_{quantization.zeros_as}{suffix}({f'({held})' if quantization.zeros else held})",
                f"element = {element}" if sign else f"element = {element} - {zero}",
                f"return {value} {sign} {zero}" if sign else f"return {value}",
            ]
        if quantization.root:
            body[-1] = f"return ({body[-1].removeprefix('return ')}).square()"
        if transform := quantization.transform:
            body[-1] = body[-1].replace("return ", "values = ", 1)
            body.append(f"return num.unhadamard(values, {rule_text.transform_arguments(transform)})")
        if len(layout.sources) == 1:
            return body
        test = f'orientation == "{served[0]}"' if len(served) == 1 else f"orientation in {tuple(served)}"
        lines += [f"if {test}:", *(f"    {line}" for line in body)]
    return [*lines, 'raise ValueError(f"no orientation {orientation}")']


def _swizzle(layout: Layout) -> SwizzleText | None:
    swizzle = layout.swizzle
    if swizzle is None:
        return None
    sizes = dict(swizzle.sizes)
    names = [name for group in swizzle.groups for name in group]
    parts = tuple(tuple(sizes.get(name, 0) for name in group) for group in swizzle.groups)
    order = tuple(names.index(name) for name in swizzle.order)
    # True if the buffer has the contraction axis first.
    free = {"rowwise": "m", "columnwise": "k"}  # the axis that a product keeps
    turned = {b.orientation: 0 for b in layout.buffers if b.kind == "scale" and b.axes[:1] != (free[b.orientation],)}
    return SwizzleText(swizzle.pattern, f"gemm_order({parts}, {order}{f', {tuple(turned)}' if turned else ''})")


def _contracted(orientation: str) -> str:
    """The axis that a product with this operand sums over."""
    return "k" if orientation == "rowwise" else "m"
