"""What the templates print of the arithmetic: codecs, the scale rule, bodies of the references, the GEMM swizzle."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from layoutc.emit import rule_text
from layoutc.layout.layout import Block, Layout, Quantization, Source, codes_per_group
from layoutc.plan.plan import Plan
from layoutc.spec.formats import Format, thresholds
from layoutc.spec.rule_constants import CONSTANTS, constant

View = dict[str, Any]


def numerics_view(plan: Plan) -> View:
    """Codecs, the scale rule and the bodies of the references.

    Where orientations differ in more than their blocks, each has codecs and a rule of its own, named after it.
    """
    layout = plan.layout
    suffixes = suffixes_of(layout)
    used = frozenset().union(*(rule_text.uses(source.quantization) for source in layout.sources))
    prologue = ["m, k = x.shape"] if any(not s.scale.is_scalar for s in layout.sources) else []
    prologue += ["input_max = torch.finfo(x.dtype).max"] if "input_max" in used else []
    prologue += ["x = x.float().contiguous()"]
    shared = None
    amax_shape, what = "(1,)", "of the whole weight"
    if plan.amax_columns:
        each = "column" if plan.amax_columns == 1 else f"{plan.amax_columns} columns"
        amax_shape = "(1, k)" if plan.amax_columns == 1 else f"(1, k / {plan.amax_columns})"
        what = f"of each {each}, over all rows"
    if plan.shares_amax:
        expression = f"column_amax(x, {plan.amax_columns})" if plan.amax_columns else "tensor_amax(x)"
        shared = {
            "expression": expression,
            "kernel": f"launch.matrix_amax(x, {plan.amax_columns})",
            "doc": f"the amax {what}, {amax_shape} fp32",
        }
        prologue += ["if amax is None:", f"    amax = {expression}"]
    amax_doc = (
        f"amax: {amax_shape} fp32, the largest magnitude {what}; taken from x when not given."
        if plan.shares_amax
        else "amax must be None: no scale depends on anything outside its block."
    )
    quantize_doc = (
        f"amax: {amax_shape} fp32, where it is known; else that of x, the largest over `group` where one is given."
        if plan.shares_amax
        else "`amax` must be None, and `group` changes nothing: no scale depends on other shards."
    )
    if layout.history:
        amax_doc = "amax: (1,) fp32, the one that decides the scale; that of x when not given."
        quantize_doc += " The scale follows the history of `out`; the new amax is put in front of it."
    kinds = {suffixes[source.name]: source.quantization for source in layout.sources}
    return {
        "arithmetics": [_arithmetic(quantization, suffix) for suffix, quantization in kinds.items()],
        "decode_texts": [
            f"{'(element - zero)' if q.zero else 'element'} * ({q.definition.decode})" for q in kinds.values()
        ],
        "constants": [constant for suffix, q in kinds.items() for constant in constants_view(q, suffix)],
        "sources": [_source_view(source, layout, suffixes[source.name]) for source in layout.sources],
        "quantize": {"prologue": prologue},
        "dequantize": {"body": _dequantize(layout, suffixes)},
        "amax_doc": amax_doc,
        "quantize_doc": quantize_doc,
        "shared_amax": shared,
    }


def suffixes_of(layout: Layout) -> dict[str, str]:
    """What the functions of a source end with: nothing where all sources share them, else the source's name."""
    same = {replace(source.quantization, block=Block(None, None), low_first=True) for source in layout.sources}
    return {source.name: "" if len(same) == 1 else f"_{source.name}" for source in layout.sources}


def _arithmetic(quantization: Quantization, suffix: str) -> View:
    """Codecs and the scale rule of one quantization."""
    used, prefix = rule_text.uses(quantization), rule_text.prefix_of(suffix)
    rule, zero = quantization.definition, quantization.zero
    arguments = "lowest: Tensor, highest: Tensor" if "lowest" in used else "amax: Tensor"
    arguments += ", tensor_amax: Tensor" if "tensor_amax" in used else ""
    arguments += ", input_max: float" if "input_max" in used else ""
    arguments += f", {rule.candidate}: float" if rule.candidates else ""
    made = "(scale as stored, zero point as stored, multiplier of the elements)"
    return {
        "suffix": suffix,
        "element": _codec(quantization.element, f"{prefix}ELEMENT", "nearest"),
        "scale": {
            **_codec(quantization.scale, f"{prefix}SCALE", quantization.rounding),
            "coded": not quantization.scale.is_f32,
        },
        "zero": _codec(zero, f"{prefix}ZERO", "nearest") if zero else None,
        "rule": {
            "returns": ", ".join(["Tensor"] * (3 if zero else 2)),
            "results": "scale, zero, multiplier" if zero else "scale, multiplier",
            "made": made if zero else "(scale as stored, multiplier of the elements)",
            "from": "range" if "lowest" in used else "amax",
            "arguments": arguments,
            "summary": rule.summary[0].upper() + rule.summary[1:],
            "steps": rule_text.steps(quantization, suffix),
            "candidates": _candidates(quantization, suffix),
        },
    }


def _candidates(quantization: Quantization, suffix: str) -> View | None:
    """How the scales of a rule that tries several are chosen."""
    rule = quantization.definition
    if not rule.candidates:
        return None
    shared = ", tensor_amax" if rule.needs_tensor_amax else ""
    return {
        "name": rule.candidate,
        "tried": ", ".join(rule_text.candidates(quantization, suffix)),
        "error": rule_text.error_steps(quantization, suffix),
        "arguments": ", tensor_amax: Tensor" if shared else "",
        "passed": shared,
    }


def _codec(fmt: Format, prefix: str, rounding: str) -> View:
    """How codes of a format are made and read: through torch's dtype, or through tables of thresholds and values."""
    largest = f"{fmt.max:.17g}"
    view: View = {
        "name": fmt.name,
        "max": largest,
        "rounding": f"rounded {rounding}" + (", ties to even" if rounding == "nearest" else ""),
    }
    if fmt.is_f32:
        return view
    # A format without NaN saturates: the largest magnitude, positive, is as far from a silent number as it has.
    view["nan_text"] = f"0x{nan_code(fmt):02x}"
    if fmt.integer:
        view["encode"] = f"to_integer_codes(x, {fmt.integer}, {fmt.lowest}, {fmt.fraction}, {prefix}_NAN)"
        view["decode"] = f"from_integer_codes(codes, {fmt.integer}, {fmt.fraction})"
        return view
    if fmt.torch and rounding == "nearest":
        view["encode"] = f"cast_to_codes(x, torch.{fmt.torch}, {prefix}_MAX, {prefix}_NAN)"
        view["decode"] = f"cast_from_codes(codes, torch.{fmt.torch})"
        return view
    sign_bit = fmt.exponent + fmt.mantissa if fmt.sign else None
    view["encode"] = f"to_codes(x, {prefix}_STEPS, {sign_bit}, {prefix}_NAN)"
    view["decode"] = f"from_codes(codes, {prefix}_VALUES)"
    return view


def nan_code(fmt: Format) -> int:
    """What NaN is encoded as: the format's first NaN, or the largest magnitude where it has none."""
    return fmt.nan[0] if fmt.nan else len(fmt.magnitudes) - 1


def constants_view(quantization: Quantization, suffix: str) -> list[View]:
    """The constants of one quantization's codecs and rule: name, value as text, and what it is."""
    element, scale = quantization.element, quantization.scale
    used, prefix = rule_text.uses(quantization), rule_text.prefix_of(suffix)
    found: list[View] = []

    def add(name: str, value: str, doc: str = "") -> None:
        found.append({"name": prefix + name, "value": value, "doc": doc})

    kinds = [(element, "ELEMENT", "nearest"), (scale, "SCALE", quantization.rounding)]
    kinds += [(quantization.zero, "ZERO", "nearest")] if quantization.zero else []
    for fmt, kind, rounding in kinds:
        if fmt.is_f32:
            continue
        native = fmt.torch is not None and rounding == "nearest"
        if native or f"{kind}_MAX" in used:
            add(f"{kind}_MAX", repr(fmt.max))
        doc = "" if fmt.nan else "the format has no NaN: the largest magnitude"
        add(f"{kind}_NAN", f"0x{nan_code(fmt):02X}", doc)
        if not native and not fmt.integer:
            add(f"{kind}_STEPS", _table(thresholds(fmt, rounding)), "|x| at or above: the next code")
            add(f"{kind}_VALUES", _table(fmt.value(code) for code in range(2**fmt.bits)), "by code")
    for name in CONSTANTS:
        if name.upper() in used:
            value, doc = constant(name, element, scale, dict(quantization.parameters))
            add(name.upper(), repr(value), doc)
    return found


def _table(values: Iterable[float]) -> str:
    """A tuple of fp32 values as text: a formula where one gives exactly these values, else the values themselves."""
    items = list(values)
    if len(items) > 32:
        for formula in _formulas(items):
            if list(map(repr, eval(formula, {"float": float, "range": range}))) == list(map(repr, items)):
                return formula
    special = {"nan": 'float("nan")', "inf": 'float("inf")', "-inf": '-float("inf")'}
    text = ", ".join(special.get(repr(value), repr(value)) for value in items) + ","
    if len(items) <= 8:
        return f"({text})"
    lines = textwrap.wrap(text, 112, break_long_words=False, break_on_hyphens=False)
    return "(\n" + "".join(f"    {line}\n" for line in lines) + ")"


def _formulas(items: list[float]) -> Iterator[str]:
    """Formulas for tables of powers of two: values, and thresholds rounding down, up and to nearest."""
    first = round(math.log2(items[1]))
    exponents = f"range({first}, {first + len(items) - 1})"
    yield f'({items[0]!r}, *(2.0**e for e in range({first}, {first + len(items) - 2})), float("nan"))'
    yield f"({items[0]!r}, *(2.0**e for e in {exponents}))"
    yield f"({items[0]!r}, *(2.0**e * (1 + 2**-23) for e in {exponents}))"
    first = math.floor(math.log2(items[1]))
    exponents = f"range({first}, {first + len(items) - 1})"
    for odd in (0, 1):
        yield f"({items[0]!r}, *(2.0**e * (1.5 + (e % 2 == {odd}) * 2**-23) for e in {exponents}))"


def _source_view(source: Source, layout: Layout, suffix: str) -> View:
    """How the planes of one source are made."""
    block, data, scale = source.quantization.block, source.data.name, source.scale.name
    used = rule_text.uses(source.quantization)
    extra = (", amax" if "tensor_amax" in used else "") + (", input_max" if "input_max" in used else "")
    zero = source.zero.name if source.zero else None
    results = "scale, zero, multiplier" if zero else "scale, multiplier"
    values = "blocks * multiplier[:, None, :, None]"
    values += f" + decode_zero{suffix}(zero)[:, None, :, None]" if zero else ""
    codes = f"encode{suffix}(from_blocks({values}, m, k))"
    if source.scale.is_scalar:
        lines = [f"scale, multiplier = scales{suffix}(amax{extra})"]
        codes = f"encode{suffix}(x * multiplier)"
    else:
        amax = "amax" if source.scale.per_m is None else "block_amax(blocks)"
        amax = "*block_range(blocks)" if "lowest" in used else amax
        chosen = f"scales{suffix}({amax}{extra})"
        if source.quantization.definition.candidates:
            chosen = f'best_scales{suffix}(blocks{extra}, "{_contracted(source.name)}")'
        lines = [f"blocks = to_blocks(x, {block.m}, {block.k})", f"{results} = {chosen}"]
    if codes_per_group(source.data.bits) > 1:
        codes = f"pack({codes}, {source.data.bits}, low_first={source.quantization.low_first})"
    served = [orientation for orientation, name in layout.source_of if name == source.name]
    condition = " or ".join(f'"{orientation}" in orientations' for orientation in served)
    lines += [f'planes["{data}"] = {codes}', f'planes["{scale}"] = scale']
    return {"condition": condition, "quantize": [*lines, *([f'planes["{zero}"] = zero'] if zero else [])]}


def _dequantize(layout: Layout, suffixes: dict[str, str]) -> list[str]:
    lines: list[str] = []
    for source in layout.sources:
        served = [orientation for orientation, name in layout.source_of if name == source.name]
        block, quantization, suffix = source.quantization.block, source.quantization, suffixes[source.name]
        codes = f'planes["{source.data.name}"]'
        if codes_per_group(source.data.bits) > 1:
            codes = f"unpack({codes}, {source.data.bits}, low_first={quantization.low_first})"
        factor = rule_text.decode(quantization, f'planes["{source.scale.name}"]', suffix)
        spread = f"{block.m}, {block.k}, m, k"
        body = [f"factor = {factor}", f"return decode{suffix}({codes}) * per_element(factor, {spread})"]
        if source.zero:
            body[1:] = [
                f'zero = decode_zero{suffix}(planes["{source.zero.name}"])',
                f"return (decode{suffix}({codes}) - per_element(zero, {spread})) * per_element(factor, {spread})",
            ]
        if len(layout.sources) == 1:
            return body
        test = f'orientation == "{served[0]}"' if len(served) == 1 else f"orientation in {tuple(served)}"
        lines += [f"if {test}:", *(f"    {line}" for line in body)]
    return [*lines, 'raise ValueError(f"no orientation {orientation}")']


def swizzle_view(layout: Layout) -> View | None:
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
    pattern = " ".join(f"({' '.join(group)})" for group in swizzle.groups) + f" -> {' '.join(swizzle.order)}"
    turned = [b.orientation for b in layout.buffers if b.kind == "scale" and b.axes[:1] != (_free(b.orientation),)]
    zeros = any(buffer.kind == "zero" for buffer in layout.buffers)
    scale = 'buffers[f"{orientation}_{kind}"]' if zeros else 'buffers[f"{orientation}_scale"]'
    body = [f"return swizzle({scale})"]
    if turned:  # the buffer has the contraction axis first
        tests = " or ".join(f'orientation == "{name}"' for name in turned)
        body = [f"scale = {scale}", f"return swizzle(scale.t() if {tests} else scale)"]
    return {
        "pattern": pattern,
        "split": ", ".join(size[name] for name in names),
        "order": order,
        "ordered": ", ".join(size[name] for name in swizzle.order),
        "inverse": inverse,
        "body": body,
        "zeros": zeros,
        "kind": ', kind: str = "scale"' if zeros else "",
        "what": "scale, or zero point," if zeros else "scale",
        "free_text": "m for rowwise, k for columnwise",
    }


def _contracted(orientation: str) -> str:
    """The axis that a product with this operand sums over."""
    return "k" if orientation == "rowwise" else "m"


def _free(orientation: str) -> str:
    """The axis that a product with this operand keeps."""
    return "m" if orientation == "rowwise" else "k"
