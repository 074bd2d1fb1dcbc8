"""Independent fp32 models of the recipes' arithmetic in numpy and ml_dtypes, and small helpers that unit tests share.

The models follow the arithmetic of Transformer Engine's recipes, not layoutc's rules, and round elements with ml_dtypes
rather than torch. Three choices are layoutc's own: NaN always reaches the scale, NaN codes carry no sign, and what is
past the largest element saturates.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import torch
import yaml
from numpy.typing import NDArray
from places import ROOT
from torch import Tensor

from layoutc.layout.layout import Chain, Layout, resolve
from layoutc.runtime.weight.returned_buffers import by_reference
from layoutc.spec.checks.read import read_spec

Array = NDArray[Any]
SPECS = ROOT / "specs"
RECIPES = ("fp8_block", "fp8_current", "fp8_delayed", "mxfp8", "nvfp4")
F32 = np.float32
FLT_MAX = np.finfo(np.float32).max


# -------------------------------------------------------------------------------------------------------------- helpers
def recipe(name: str) -> ModuleType:
    """The generated package of a recipe."""
    return importlib.import_module(f"layoutc.recipes.{name}")


def reference(name: str) -> ModuleType:
    """The generated reference module of a recipe."""
    return importlib.import_module(f"layoutc.recipes.{name}.reference")


def laid_out(
    name: str, planes: Mapping[str, Tensor], shape: tuple[int, int], orientations: tuple[str, ...]
) -> dict[str, Tensor]:
    """The buffers of a recipe as its reference makes them of planes."""
    facts = importlib.import_module(f"layoutc.recipes.{name}.layout").LAYOUT
    return by_reference(facts, reference(name), planes, shape, orientations)


def layout_of(text: str, name: str) -> Layout:
    """The layout of a spec text, which must have no findings."""
    spec, found = read_spec(text, f"{name}.yaml")
    assert spec is not None, [str(item) for item in found]
    return resolve(spec)


def recipe_layout(name: str) -> Layout:
    """The layout of a recipe in specs/."""
    return layout_of((SPECS / f"{name}.yaml").read_text(encoding="utf-8"), name)


def variant(name: str, edit: Callable[[dict[str, Any]], None]) -> Layout:
    """The layout of a recipe in specs/ after an edit of its parsed YAML, without its bindings."""
    data = yaml.safe_load((SPECS / f"{name}.yaml").read_text(encoding="utf-8"))
    data.pop("files", None)
    edit(data)
    return layout_of(yaml.safe_dump(data, sort_keys=False, width=200), data["name"])


def all_bf16() -> Array:
    """All 65,536 bf16 bit patterns as fp32."""
    return (np.arange(2**16, dtype=np.uint32) << 16).view(F32)


def same_values(a: Array, b: Array) -> bool:
    """Equal fp32 bits, where all NaNs count as one."""
    nan = np.isnan(a)
    return bool(np.array_equal(nan, np.isnan(b)) and np.array_equal(a[~nan].view(np.uint32), b[~nan].view(np.uint32)))


def as_fp32(x: torch.Tensor) -> Array:
    """A tensor's values as fp32, exactly."""
    return x.float().numpy()


def write(codes: Array, chain: Chain) -> Array:
    """The bytes of a buffer: each value of the start array written, bit by bit, at the chain's positions."""
    order: Any = "little" if chain.low_first else "big"
    bits = np.zeros(chain.nbytes * 8, np.uint8)
    flat = np.ascontiguousarray(codes).reshape(-1, 1)
    values = np.unpackbits(flat.view(np.uint8), axis=1, bitorder="little")[:, : chain.bits]
    if not chain.low_first and chain.bits < 8:
        values = values[:, ::-1]
    for index, value in zip(itertools.product(*map(range, chain.start)), values, strict=True):
        for byte, bit in chain.positions(index):
            bits[byte * 8 + bit :][: chain.bits] = value
    return np.packbits(bits, bitorder=order if chain.bits < 8 else "little")


# ---------------------------------------------------------------------------------------------------------------- casts
def cast(x: Array, dtype: Any, largest: float, nan: int) -> Array:
    """fp32 -> codes of an ml_dtypes type, nearest even. ml_dtypes overflows to NaN or inf, so x is clamped before."""
    with np.errstate(invalid="ignore"):
        codes = np.clip(x, F32(-largest), F32(largest)).astype(dtype).view(np.uint8)
    return np.where(np.isnan(x), np.uint8(nan), codes)


def e4m3(x: Array) -> Array:
    """fp32 -> e4m3 codes, saturating; NaN is 0x7F."""
    return cast(x, ml_dtypes.float8_e4m3fn, 448, 0x7F)


def e2m1(x: Array) -> Array:
    """fp32 -> e2m1 codes, saturating; NaN, which e2m1 lacks, is +6."""
    return cast(x, ml_dtypes.float4_e2m1fn, 6, 0x07)


def from_e4m3(codes: Array) -> Array:
    """e4m3 codes -> fp32."""
    return codes.view(ml_dtypes.float8_e4m3fn).astype(F32)


def from_e2m1(codes: Array) -> Array:
    """e2m1 codes -> fp32."""
    return codes.view(ml_dtypes.float4_e2m1fn).astype(F32)


def e8m0_up(x: Array) -> Array:
    """Non-negative fp32 -> e8m0 codes, to the next power of two at or above, by bit fields."""
    bits = x.astype(F32).view(np.uint32)
    exponent, mantissa = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    above = np.where(exponent == 0, mantissa > 0x400000, mantissa != 0) & (exponent < 0xFE)
    code = np.where(np.isinf(x), 0xFE, exponent + above)
    return np.where(np.isnan(x), 0xFF, code).astype(np.uint8)


def e8m0_multiplier(codes: Array) -> Array:
    """What elements are multiplied by under an e8m0 scale: 2 ** (127 - code)."""
    return np.where(codes == 0xFF, F32(np.nan), np.ldexp(F32(1), 127 - codes.astype(np.int32))).astype(F32)


def from_e8m0(codes: Array) -> Array:
    """e8m0 codes -> fp32: 2 ** (code - 127), so code 0 is not zero."""
    return np.where(codes == 0xFF, F32(np.nan), np.ldexp(F32(1), codes.astype(np.int32) - 127)).astype(F32)


def pack_codes(codes: Array, bits: int, low_first: bool) -> Array:
    """Codes -> bytes along the last dim, as one stream of bits that starts at the low or the high end of each byte."""
    order: Any = "little" if low_first else "big"
    stream = np.unpackbits(codes[..., None], axis=-1, bitorder="little")[..., :bits]
    stream = stream if low_first else stream[..., ::-1]
    return np.packbits(stream.reshape(*codes.shape[:-1], -1), axis=-1, bitorder=order)


def pack_nibbles(codes: Array) -> Array:
    """Codes of 4 bits -> bytes along the last dim, the even element in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Array) -> Array:
    """Inverse of pack_nibbles."""
    return np.stack([packed & 0xF, packed >> 4], -1).reshape(*packed.shape[:-1], -1)


# --------------------------------------------------------------------------------------------------------------- blocks
def block_amax(x: Array, bm: int, bk: int) -> Array:
    """Largest magnitude of each block, partial ones included; NaN propagates."""
    rows = np.maximum.reduceat(np.abs(x), np.arange(0, x.shape[0], bm), axis=0)
    return np.maximum.reduceat(rows, np.arange(0, x.shape[1], bk), axis=1)


def spread(values: Array, bm: int, bk: int, shape: tuple[int, ...]) -> Array:
    """Block values -> one for each element of `shape`, by indexing."""
    return values[np.arange(shape[0])[:, None] // bm, np.arange(shape[1])[None, :] // bk]


def fp8_multiplier(amax: Array, overflow: float, power_of_two: bool) -> Array:
    """The encode scale of FP8 from an amax, by the five ordered rules (epsilon is 0)."""
    ordinary = np.isfinite(amax) & (amax != 0)
    scale = F32(448) / np.where(ordinary, amax, F32(1))
    scale = np.where(np.isinf(scale), F32(overflow), scale)
    if power_of_two:
        scale = np.ldexp(F32(0.5), np.frexp(scale)[1]).astype(F32)
    return np.where(ordinary, scale, F32(1)).astype(F32)


# -------------------------------------------------------------------------------------------------------------- recipes
@dataclass(frozen=True)
class Model:
    """quantize: (x, largest finite value of the input's dtype) -> planes; dequantize: (planes, orientation) -> fp32."""

    quantize: Callable[[Array, float], dict[str, Array]]
    dequantize: Callable[[dict[str, Array], str], Array]


def _mxfp8(x: Array, _: float) -> dict[str, Array]:
    planes = {}
    for name, bm, bk in (("rowwise", 1, 32), ("columnwise", 32, 1)):
        scale = e8m0_up(block_amax(x, bm, bk) * (F32(1) / F32(448)))
        planes[f"{name}_data"] = e4m3(x * spread(e8m0_multiplier(scale), bm, bk, x.shape))
        planes[f"{name}_scale"] = scale
    return planes


def _mxfp8_back(planes: dict[str, Array], orientation: str) -> Array:
    data, scale = planes[f"{orientation}_data"], planes[f"{orientation}_scale"]
    bm, bk = (1, 32) if orientation == "rowwise" else (32, 1)
    return from_e4m3(data) * spread(from_e8m0(scale), bm, bk, data.shape)


def global_scale(amax: Array) -> Array:
    """NVFP4's S_enc."""
    scale = np.minimum(F32(448 * 6) / amax, FLT_MAX)
    return np.where((amax == 0) | (scale == 0), F32(1), scale)


def nvfp4_scales(amax: Array, tensor_amax: Array) -> tuple[Array, Array]:
    """NVFP4's stored block scale codes, and the multiplier of the elements."""
    s_enc = global_scale(tensor_amax)
    scale = e4m3(np.minimum(amax * (s_enc * (F32(1) / F32(6))), FLT_MAX))
    return scale, np.minimum(F32(1) / (from_e4m3(scale) * (F32(1) / s_enc)), FLT_MAX)


def _nvfp4(x: Array, _: float) -> dict[str, Array]:
    tensor_amax = np.max(np.abs(x)).reshape(1)
    scale, multiplier = nvfp4_scales(block_amax(x, 16, 16), tensor_amax)
    codes = e2m1(x * spread(multiplier, 16, 16, x.shape))
    return {"rowwise_data": pack_nibbles(codes), "rowwise_scale": scale, "amax": tensor_amax}


def _nvfp4_back(planes: dict[str, Array], _: str) -> Array:
    codes = unpack_nibbles(planes["rowwise_data"])
    factor = from_e4m3(planes["rowwise_scale"]) * planes["amax"] * (F32(1) / F32(6 * 448))
    return from_e2m1(codes) * spread(factor, 16, 16, codes.shape)


def _fp8_block(x: Array, input_max: float) -> dict[str, Array]:
    multiplier = fp8_multiplier(block_amax(x, 128, 128), input_max, power_of_two=True)
    data = e4m3(x * spread(multiplier, 128, 128, x.shape))
    return {"rowwise_data": data, "rowwise_scale": F32(1) / multiplier}


def _fp8_block_back(planes: dict[str, Array], _: str) -> Array:
    data = planes["rowwise_data"]
    return from_e4m3(data) * spread(planes["rowwise_scale"], 128, 128, data.shape)


def _fp8_tensor(x: Array, _: float) -> dict[str, Array]:
    multiplier = fp8_multiplier(np.max(np.abs(x)).reshape(1), float(FLT_MAX), power_of_two=False)
    return {"rowwise_data": e4m3(x * multiplier), "rowwise_scale": F32(1) / multiplier}


def _fp8_tensor_back(planes: dict[str, Array], _: str) -> Array:
    return from_e4m3(planes["rowwise_data"]) * planes["rowwise_scale"]


MODELS = {
    "mxfp8": Model(_mxfp8, _mxfp8_back),
    "nvfp4": Model(_nvfp4, _nvfp4_back),
    "fp8_block": Model(_fp8_block, _fp8_block_back),
    "fp8_current": Model(_fp8_tensor, _fp8_tensor_back),
    "fp8_delayed": Model(_fp8_tensor, _fp8_tensor_back),
}
