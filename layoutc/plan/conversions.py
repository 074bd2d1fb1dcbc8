"""How a kernel encodes and decodes a format: the function, its constants, and when the card's conversion is used.

Functions are those of `layoutc.runtime.triton`; constants are their parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from layoutc.spec.formats import Format, codebook_order


@dataclass(frozen=True)
class Dtype:
    """A Triton dtype, by its name in triton.language."""

    name: str


@dataclass(frozen=True)
class NanCode:
    """The code of NaN, which generated code writes in hexadecimal."""

    value: int


@dataclass(frozen=True)
class Table:
    """A table of a format, which generated code has as a named constant. Holds its name without the format's."""

    name: str


Constant = int | float | bool | str | Dtype | NanCode | Table


@dataclass(frozen=True)
class Conversion:
    """A function and the constants that it is called with."""

    function: str
    constants: Mapping[str, Constant]
    takes_hardware: bool = False
    takes_bits: bool = False  # 32 random bits for each value
    takes_codebooks: bool = False  # a pointer to codebooks in memory


@dataclass(frozen=True)
class Codec:
    """How one format is encoded or decoded.

    software: in integer or fp32 arithmetic, on every card. hardware: by the card's conversion, on cards of at least
    `level` (from launch.hardware: 90 for fp8, 100 also for smaller formats); None if no card converts.
    """

    software: Conversion
    hardware: Conversion | None = None
    level: int = 0


@dataclass(frozen=True)
class Named:
    """The runtime's functions that are named after a format; they choose between software and hardware themselves.

    levels: whether encoder and decoder take the conversion level, by which they choose. over: 1 / decoded, for formats
    of only exponents. codec: encoder and decoder in torch, for formats that torch lacks.
    """

    encode: str
    decode: str
    levels: tuple[bool, bool] = (False, False)
    over: str = ""
    codec: str = ""


# Formats that cards cast to, by torch dtype: Triton's dtype, and the card's code for NaN.
_CASTS = {"float8_e4m3fn": (Dtype("float8e4nv"), 0x7F), "float8_e5m2": (Dtype("float8e5"), 0x7F)}
E2M1 = Format("", exponent=2, mantissa=1, bias=1)
_E8M0 = Format("", sign=0, exponent=8, bias=127, subnormals=False, nan=(0xFF,))
# Conversions of cards with compute capability 10, by format and rounding.
_INSTRUCTIONS = {
    (E2M1, "nearest"): "convert_to_e2m1",
    (Format("", exponent=2, mantissa=3, bias=1), "nearest"): "convert_to_e2m3",
    (Format("", exponent=3, mantissa=2, bias=3), "nearest"): "convert_to_e3m2",
    (_E8M0, "up"): "convert_up_to_e8m0",
}
_NAMED = {
    (E2M1, "nearest"): Named("to_e2m1", "from_e2m1", (True, True), codec="E2M1"),
    (_E8M0, "up"): Named("up_to_e8m0", "from_e8m0", (True, False), "over_e8m0", codec="UP_TO_E8M0"),
    (_E8M0, "nearest"): Named("to_e8m0", "from_e8m0", over="over_e8m0", codec="E8M0"),
    (Format("", integer=4, offset=0), "nearest"): Named("to_uint4", "from_uint4"),
    (Format("", integer=4, offset=8), "nearest"): Named("to_int4_offset", "from_int4_offset"),
    (Format("", integer=6, offset=0), "nearest"): Named("to_uint6", "from_uint6"),
    (Format("", integer=8, symmetric=True), "nearest"): Named("to_int8", "from_int8"),
}
_NAMED_BY_TORCH = {
    "float8_e4m3fn": Named("to_e4m3", "from_e4m3", (True, True)),
    "float8_e5m2": Named("to_e5m2", "from_e5m2", (True, True)),
    "bfloat16": Named("to_bf16", "from_bf16"),
    "float16": Named("to_f16", "from_f16"),
}
_NONE: Mapping[str, Constant] = MappingProxyType({})
LARGEST_HELD = 16  # the most values of an element codebook that programs hold; longer ones are looked up in memory
SMALL_CODEBOOK = 4  # up to this many values, dequantized by comparisons, not from shared memory; not timed on any card


def named(fmt: Format, rounding: str) -> Named | None:
    """The runtime's functions that are named after a format, if any."""
    return _NAMED.get((fmt, rounding)) or (_NAMED_BY_TORCH.get(fmt.torch or "") if rounding == "nearest" else None)


def encoding(fmt: Format, rounding: str) -> Codec:
    """How fp32 values become codes of a format, saturating.

    rounding: "nearest" (ties to even), "up", "down", or "stochastic" (formats with subnormals, and integers).
    """
    nan = NanCode(fmt.nan_code)
    if fmt.values:
        tables: dict[str, Constant] = {"STEPS": Table("STEPS"), "CODES": Table("CODES")}
        return Codec(Conversion("to_codebook", {**tables, "COUNT": len(codebook_order(fmt)), "NAN": nan}))
    last = fmt.last
    sign_bit = fmt.exponent + fmt.mantissa if fmt.sign else -1
    if rounding == "stochastic":
        return Codec(_by_chance(fmt, sign_bit, last))
    if fmt.integer:
        return Codec(Conversion("to_integer_codes", _integer(fmt)))
    hardware, level = None, 0
    if fmt.torch in _CASTS and rounding == "nearest":
        dtype, canonical = _CASTS[fmt.torch]
        hardware, level = Conversion("cast_to_codes", {"DTYPE": dtype, "NAN": nan, "CANONICAL": canonical}), 90
    elif (fmt, rounding) in _INSTRUCTIONS:
        hardware, level = Conversion(_INSTRUCTIONS[fmt, rounding], _NONE), 100
    form: dict[str, Constant]
    if is_small(fmt) and not fmt.is_wide and rounding == "nearest":
        form = {"MANTISSA": fmt.mantissa, "BIAS": fmt.bias, "SIGN_BIT": sign_bit, "MAX": fmt.max}
        software = Conversion("to_small_codes", {**form, "LAST": last, "NAN": nan}, takes_hardware=True)
    elif fmt.is_exponent:
        software = Conversion("to_exponents", {"BIAS": fmt.bias, "LAST": last, "NAN": nan, "ROUNDING": rounding})
    else:
        form = {"MANTISSA": fmt.mantissa, "BIAS": fmt.bias, "SUBNORMALS": fmt.subnormals, "SIGN_BIT": sign_bit}
        software = Conversion("to_codes", {**form, "LAST": last, "NAN": nan, "ROUNDING": rounding})
    return Codec(software, hardware, level)


def _by_chance(fmt: Format, sign_bit: int, last: int) -> Conversion:
    """How random bits round fp32 values to codes of an element's format. No card's conversion accepts these bits."""
    if fmt.integer:
        return Conversion("to_integer_codes_by_chance", _integer(fmt), takes_bits=True)
    form: dict[str, Constant] = {"MANTISSA": fmt.mantissa, "BIAS": fmt.bias, "SIGN_BIT": sign_bit, "LAST": last}
    form["NAN"] = NanCode(fmt.nan_code)
    return Conversion("to_codes_by_chance", form, takes_bits=True)


def is_held(fmt: Format) -> bool:
    """True for a codebook that programs hold in shared memory to dequantize elements."""
    return bool(fmt.values) and SMALL_CODEBOOK < 1 << fmt.bits <= LARGEST_HELD


def is_long(fmt: Format) -> bool:
    """True for a codebook too long for programs to hold: elements are looked up in memory."""
    return bool(fmt.values) and 1 << fmt.bits > LARGEST_HELD


def decoding(fmt: Format) -> Codec | None:
    """How codes of a format become exact fp32 values; None if no function decodes the format."""
    if fmt.values:
        tables: dict[str, Constant] = {"VALUES": Table("VALUES"), "COUNT": 1 << fmt.bits, "HELD": is_held(fmt)}
        return Codec(Conversion("from_codebook", tables))
    if fmt.integer:
        constants: dict[str, Constant] = {"BITS": fmt.integer, "FRACTION": fmt.fraction, **_offset(fmt)}
        return Codec(Conversion("from_integer_codes", constants))
    if not fmt.subnormals:
        if not fmt.is_exponent:
            return None
        return Codec(Conversion("from_exponents", exponent_constants(fmt)))
    inf_from = fmt.last + 1
    nan_from = inf_from + (1 if fmt.is_wide else len(fmt.inf))
    minus_zero: dict[str, Constant] = {"MINUS_ZERO": False} if fmt.nan_is_minus_zero else {}
    if fmt.is_wide:
        form: dict[str, Constant] = {"MANTISSA": fmt.mantissa, "BIAS": fmt.bias, "SIGN_BIT": 15}
        return Codec(Conversion("from_codes", {**form, "INF_FROM": inf_from, "NAN_FROM": nan_from}))
    if abs(127 - fmt.bias) > 126 or list(fmt.inf) != list(range(inf_from, nan_from)):
        return None
    hardware = Conversion("cast_from_codes", {"DTYPE": _CASTS[fmt.torch][0]}) if fmt.torch in _CASTS else None
    form = {"MANTISSA": fmt.mantissa, "BIAS": fmt.bias, "SIGN_BIT": fmt.exponent + fmt.mantissa}
    software = Conversion("from_codes", {**form, "INF_FROM": inf_from, "NAN_FROM": nan_from, **minus_zero})
    return Codec(software, hardware, 90 if hardware else 0)


def _integer(fmt: Format) -> dict[str, Constant]:
    """The constants of functions that encode an integer."""
    form: dict[str, Constant] = {"BITS": fmt.integer, "LOWEST": fmt.lowest, "FRACTION": fmt.fraction}
    return form | {"NAN": NanCode(fmt.nan_code), **_offset(fmt)}


def _offset(fmt: Format) -> dict[str, Constant]:
    """The constant of an integer that is not stored in two's complement."""
    return {} if fmt.offset is None else {"OFFSET": fmt.offset}


def exponent_constants(fmt: Format) -> Mapping[str, Constant]:
    """The constants of functions that decode a format with only exponents."""
    return {"BIAS": fmt.bias, "NAN_FROM": len(fmt.magnitudes)}


def is_small(fmt: Format) -> bool:
    """True for a signed format with subnormals and a mantissa that `to_small_codes` can round to.

    It adds 1.5 * 2^(23 - mantissa bits) times a value's binade, which must stay within fp32's range.
    """
    lowest = 1 - fmt.bias
    return bool(fmt.sign and fmt.subnormals and fmt.mantissa and fmt.max < 2.0**60 and lowest > -60)
