"""The text of reference.py: codecs, the scale rule, quantizing and dequantizing, the GEMM's order of scales."""

from __future__ import annotations

from dataclasses import dataclass, replace

from layoutc.emit import rule_text, table_text
from layoutc.layout.layout import Layout, Quantization, Source, codes_per_group, stream_of
from layoutc.plan.kernels import inputs_of, suffixes_of
from layoutc.plan.plan import Plan
from layoutc.spec.formats import Format
from layoutc.spec.rule_constants import CONSTANTS, constant


@dataclass(frozen=True)
class CodecText:
    """How codes of a format are encoded and decoded; without either for f32."""

    name: str
    max: str
    rounding: str
    nan_text: str = ""
    encode: str = ""
    decode: str = ""
    bits: str = ""  # the parameter of random bits, where it is rounded by them

    @property
    def coded(self) -> bool:
        """True if values are stored as codes."""
        return bool(self.encode)


@dataclass(frozen=True)
class CandidatesText:
    """How a rule that tries several scales chooses one."""

    name: str
    tried: str
    error: list[str]
    arguments: str
    passed: str


@dataclass(frozen=True)
class RuleText:
    """A scale rule as a function."""

    returns: str
    results: str
    made: str
    measured: str
    arguments: str
    summary: str
    steps: list[str]
    candidates: CandidatesText | None


@dataclass(frozen=True)
class ArithmeticText:
    """Codecs and the scale rule of one quantization. `suffix`: of the names of its functions."""

    suffix: str
    element: CodecText
    scale: CodecText
    zero: CodecText | None
    rule: RuleText


@dataclass(frozen=True)
class ConstantText:
    """A constant: its name, its value as code, and a comment."""

    name: str
    value: str
    doc: str


@dataclass(frozen=True)
class SourceText:
    """How the planes of one source are made, and the condition for it."""

    condition: str
    quantize: list[str]


@dataclass(frozen=True)
class SwizzleText:
    """A GEMM's order of scales, as reshapes and permutations."""

    pattern: str
    split: str
    order: tuple[int, ...]
    ordered: str
    inverse: tuple[int, ...]
    body: list[str]
    kind: str
    what: str


@dataclass(frozen=True)
class ReferenceText:
    """Everything that the template of reference.py prints, besides what all files of a recipe share."""

    arithmetics: list[ArithmeticText]
    decode_texts: list[str]
    constants: list[ConstantText]
    sources: list[SourceText]
    prologue: list[str]
    dequantize: list[str]
    amax_doc: str
    level: list[str]  # what is stored in place of the amax of the whole; (): the amax
    stochastic: bool
    swizzle: SwizzleText | None


def reference_text(plan: Plan) -> ReferenceText:
    """The text of a recipe's reference.

    If orientations differ in more than their blocks, each has codecs and a rule of its own, named after it.
    """
    layout, suffixes = plan.layout, suffixes_of(plan.layout)
    kinds = {suffixes[source.name]: source.quantization for source in layout.sources}
    return ReferenceText(
        arithmetics=[_arithmetic(quantization, suffix) for suffix, quantization in kinds.items()],
        decode_texts=[_decode_text(q) for q in kinds.values()],
        constants=[constant for suffix, q in kinds.items() for constant in constants_of(q, suffix)],
        sources=[_source(source, layout, suffixes[source.name]) for source in layout.sources],
        prologue=_prologue(plan),
        dequantize=_dequantize(layout, suffixes),
        amax_doc=_amax_doc(plan),
        level=rule_text.level_steps(layout.sources[0].quantization, suffixes[layout.sources[0].name]),
        stochastic=layout.stochastic,
        swizzle=_swizzle(layout),
    )


def _decode_text(quantization: Quantization) -> str:
    """What a decoded value is, in the rule's words."""
    by = f"({quantization.definition.decode})"
    if quantization.zero is None:
        return f"element * {by}"
    return f"element * {by} + zero" if quantization.definition.zero_is_value else f"(element - zero) * {by}"


def _prologue(plan: Plan) -> list[str]:
    """The first lines of quantize_reference."""
    sized = plan.layout.stochastic or any(not s.scale.is_scalar for s in plan.layout.sources)
    lines = ["m, k = x.shape"] if sized else []
    lines += ["if seed is None:", "    seed = draw_seed(x)"] if plan.layout.stochastic else []
    reads_input_max = any(inputs_of(source.quantization).input_max for source in plan.layout.sources)
    lines += ["input_max = torch.finfo(x.dtype).max"] if reads_input_max else []
    lines += ["x = x.float().contiguous()"]
    if plan.shares_amax:
        amax = f"num.column_amax(x, {plan.amax_columns})" if plan.amax_columns else "num.tensor_amax(x)"
        lines += ["if amax is None:", f"    amax = {amax}"]
    return lines


def _amax_doc(plan: Plan) -> str:
    if not plan.shares_amax:
        return "amax must be None: no scale depends on anything outside its block."
    if plan.layout.history:
        return "amax: (1,) fp32, the one that the scale follows from; default: that of x."
    shape, what = "(1,)", f"of the whole {plan.noun}"
    if plan.amax_columns:
        each = "column" if plan.amax_columns == 1 else f"{plan.amax_columns} columns"
        shape = "(1, k)" if plan.amax_columns == 1 else f"(1, k / {plan.amax_columns})"
        what = f"of each {each}, over all rows"
    return f"amax: {shape} fp32, the largest magnitude {what}; default: that of x."


def _arithmetic(quantization: Quantization, suffix: str) -> ArithmeticText:
    """Codecs and the scale rule of one quantization."""
    prefix, zero = rule_text.prefix_of(suffix), quantization.zero
    return ArithmeticText(
        suffix,
        element=_codec(quantization.element, f"{prefix}ELEMENT", quantization.element_rounding),
        scale=_codec(quantization.scale, f"{prefix}SCALE", quantization.rounding),
        zero=_codec(zero, f"{prefix}ZERO", "nearest") if zero else None,
        rule=_rule(quantization, suffix),
    )


def _rule(quantization: Quantization, suffix: str) -> RuleText:
    rule, zero = quantization.definition, quantization.zero
    made = ["scale as stored", *(["zero point as stored"] if zero else [])]
    made.append(f"{rule_text.factor(quantization)} of the elements")
    return RuleText(
        returns=", ".join(["Tensor"] * (3 if zero else 2)),
        results=rule_text.results(quantization),
        made=f"({', '.join(made)})",
        measured="range" if inputs_of(quantization).block_range else "amax",
        arguments=", ".join(one.typed for one in rule_text.scale_arguments(quantization)),
        summary=rule.summary[0].upper() + rule.summary[1:],
        steps=_steps(quantization, suffix),
        candidates=_candidates(quantization, suffix),
    )


def _steps(quantization: Quantization, suffix: str) -> list[str]:
    """The rule's steps; those that make the stored level of an amax are a function of their own."""
    lines, levels = rule_text.steps(quantization, suffix), len(quantization.definition.tensor)
    return ["tensor_level = level_of(tensor_amax)", *lines[levels:]] if levels else lines


def _candidates(quantization: Quantization, suffix: str) -> CandidatesText | None:
    rule = quantization.definition
    if not rule.candidates:
        return None
    shared = rule_text.shared_arguments(quantization)
    return CandidatesText(
        name=rule.candidate or "",
        tried=", ".join(rule_text.candidates(quantization, suffix)),
        error=rule_text.error_steps(quantization, suffix),
        arguments="".join(f", {one.typed}" for one in shared),
        passed="".join(f", {one.name}" for one in shared),
    )


def _codec(fmt: Format, prefix: str, rounding: str) -> CodecText:
    """How codes of a format are encoded and decoded: by torch's dtype, or by tables of thresholds and values."""
    text = CodecText(fmt.name, f"{fmt.max:.17g}", rule_text.ROUNDED[rounding])
    if fmt.is_f32:
        return text
    sign_bit = fmt.exponent + fmt.mantissa if fmt.sign else None
    offset = "" if fmt.offset is None else f", offset={fmt.offset}"
    if fmt.values:
        encode = f"num.to_codebook(x, {prefix}_STEPS, {prefix}_CODES, {prefix}_NAN)"
        decode = f"num.from_codes(codes, {prefix}_VALUES)"
    elif fmt.is_wide:
        encode = f"num.to_half(x, torch.{fmt.torch}, {prefix}_MAX, {prefix}_NAN)"
        decode = "codes.float()"
    elif fmt.integer:
        encode = f"num.to_integer_codes(x, {fmt.integer}, {fmt.lowest}, {fmt.fraction}, {prefix}_NAN{offset})"
        decode = f"num.from_integer_codes(codes, {fmt.integer}, {fmt.fraction}{offset})"
    elif fmt.torch and rounding == "nearest":
        encode = f"num.cast_to_codes(x, torch.{fmt.torch}, {prefix}_MAX, {prefix}_NAN)"
        decode = f"num.cast_from_codes(codes, torch.{fmt.torch})"
    else:
        encode = f"num.to_codes(x, {prefix}_STEPS, {sign_bit}, {prefix}_NAN)"
        decode = f"num.from_codes(codes, {prefix}_VALUES)"
    if rounding == "stochastic":
        decode = f"num.cast_from_codes(codes, torch.{fmt.torch})" if fmt.torch and not fmt.integer else decode
        form = f"{prefix}_MAGNITUDES, {sign_bit}" if not fmt.integer else f"{fmt.integer}, {fmt.lowest}, {fmt.fraction}"
        encode = f"num.to_{'integer_' if fmt.integer else ''}codes_by_chance(x, bits, {form}, {prefix}_NAN{offset})"
        text = replace(text, bits=", bits: Tensor")
    # A format without NaN gets its largest magnitude, positive, instead: no other code is more conspicuous.
    return replace(text, nan_text=f"0x{fmt.nan_code:02x}", encode=encode, decode=decode)


def constants_of(quantization: Quantization, suffix: str) -> list[ConstantText]:
    """The constants of one quantization's codecs and rule."""
    element, scale = quantization.element, quantization.scale
    used, prefix = rule_text.uses(quantization), rule_text.prefix_of(suffix)
    constants: list[ConstantText] = []

    def add(name: str, value: str, doc: str = "") -> None:
        constants.append(ConstantText(prefix + name, value, doc))

    kinds = [(element, "ELEMENT", quantization.element_rounding), (scale, "SCALE", quantization.rounding)]
    kinds += [(quantization.zero, "ZERO", "nearest")] if quantization.zero else []
    for fmt, kind, rounding in kinds:
        if fmt.is_f32:
            continue
        native = fmt.torch is not None and rounding == "nearest"
        by_chance = rounding == "stochastic"
        if native or f"{kind}_MAX" in used:
            add(f"{kind}_MAX", repr(fmt.max))
        if fmt.values:
            add(f"{kind}_STEPS", table_text.codebook_steps(fmt), "thresholds: from here on, x gets the next value")
            add(f"{kind}_CODES", table_text.codebook_codes(fmt), "by ascending value")
            add(f"{kind}_VALUES", table_text.values(fmt), "the value of each code")
        doc = "" if fmt.nan or fmt.is_wide else "the format has no NaN: the largest magnitude"
        add(f"{kind}_NAN", f"0x{fmt.nan_code:02X}", doc)
        if fmt.values:
            continue
        if by_chance and not fmt.integer:
            add(f"{kind}_MAGNITUDES", table_text.magnitudes(fmt), "without a sign, ascending")
            if not fmt.torch:
                add(f"{kind}_VALUES", table_text.values(fmt), "the value of each code")
        elif not native and not fmt.integer:
            add(f"{kind}_STEPS", table_text.steps(fmt, rounding), "thresholds: from here on, |x| gets the next code")
            add(f"{kind}_VALUES", table_text.values(fmt), "the value of each code")
    for name in CONSTANTS:
        if name.upper() in used:
            value, doc = constant(name, element, scale, dict(quantization.parameters))
            add(name.upper(), repr(value), doc)
    return constants


def _source(source: Source, layout: Layout, suffix: str) -> SourceText:
    """How the planes of one source are made."""
    block, data, scale = source.quantization.block, source.data.name, source.scale.name
    inputs = inputs_of(source.quantization)
    transform = source.quantization.transform
    grown = f" * {transform.headroom}" if transform else ""
    extra = (f", amax{grown}" if inputs.tensor_amax else "") + (", input_max" if inputs.input_max else "")
    zero = source.zero.name if source.zero else None
    results = rule_text.results(source.quantization)
    shift = f"decode_zero{suffix}(zero)[:, None, :, None]" if zero else ""
    values = rule_text.shifted("blocks", source.quantization, shift)
    bits = ", bits" if source.quantization.stochastic else ""
    codes = f"encode{suffix}(num.from_blocks({values}, m, k){bits})"
    if source.scale.is_scalar:
        lines = [f"{results} = scales{suffix}(amax{extra})"]
        codes = f"encode{suffix}({rule_text.scaled('x', source.quantization, in_blocks=False)}{bits})"
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
    if codes_per_group(source.data.bits) > 1:
        codes = f"num.pack({codes}, {source.data.bits}, low_first={source.quantization.low_first})"
    served = [orientation for orientation, name in layout.source_of if name == source.name]
    condition = " or ".join(f'"{orientation}" in orientations' for orientation in served)
    lines += [f'planes["{data}"] = {codes}', f'planes["{scale}"] = scale']
    return SourceText(condition, [*lines, *([f'planes["{zero}"] = zero'] if zero else [])])


def _dequantize(layout: Layout, suffixes: dict[str, str]) -> list[str]:
    lines: list[str] = []
    for source in layout.sources:
        served = [orientation for orientation, name in layout.source_of if name == source.name]
        block, quantization, suffix = source.quantization.block, source.quantization, suffixes[source.name]
        codes = f'planes["{source.data.name}"]'
        if codes_per_group(source.data.bits) > 1:
            codes = f"num.unpack({codes}, {source.data.bits}, low_first={quantization.low_first})"
        factor = rule_text.decode(quantization, f'planes["{source.scale.name}"]', suffix)
        spread = f"{block.m}, {block.k}, m, k"
        body = [f"factor = {factor}", f"return decode{suffix}({codes}) * num.per_element(factor, {spread})"]
        if source.zero:
            zero, element = f"num.per_element(zero, {spread})", f"decode{suffix}({codes})"
            value = f"element * num.per_element(factor, {spread})"
            adds = quantization.definition.zero_is_value
            body[1:] = [
                f'zero = decode_zero{suffix}(planes["{source.zero.name}"])',
                f"element = {element}" if adds else f"element = {element} - {zero}",
                f"return {value} + {zero}" if adds else f"return {value}",
            ]
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
    tiles = [swizzle.tile(0), swizzle.tile(1)]
    open_sizes = {swizzle.groups[0][0]: f"rows // {tiles[0]}", swizzle.groups[1][0]: f"columns // {tiles[1]}"}
    size = {name: str(sizes[name]) if name in sizes else open_sizes[name] for name in names}
    order = tuple(names.index(name) for name in swizzle.order)
    inverse = tuple(swizzle.order.index(name) for name in names)
    transposed = [b.orientation for b in layout.buffers if b.kind == "scale" and b.axes[:1] != (_free(b.orientation),)]
    zeros = any(buffer.kind == "zero" for buffer in layout.buffers)
    scale = 'buffers[f"{orientation}_{kind}"]' if zeros else 'buffers[f"{orientation}_scale"]'
    body = [f"return swizzle({scale})"]
    if transposed:  # the buffer has the contraction axis first
        tests = " or ".join(f'orientation == "{name}"' for name in transposed)
        body = [f"scale = {scale}", f"return swizzle(scale.t() if {tests} else scale)"]
    return SwizzleText(
        pattern=swizzle.pattern,
        split=", ".join(size[name] for name in names),
        order=order,
        ordered=", ".join(size[name] for name in swizzle.order),
        inverse=inverse,
        body=body,
        kind=', kind: str = "scale"' if zeros else "",
        what="scale, or zero point," if zeros else "scale",
    )


def _contracted(orientation: str) -> str:
    """The axis that a product with this operand sums over."""
    return "k" if orientation == "rowwise" else "m"


def _free(orientation: str) -> str:
    """The axis that a product with this operand keeps."""
    return "m" if orientation == "rowwise" else "k"
