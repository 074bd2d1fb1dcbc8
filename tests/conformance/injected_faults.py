"""Faults put into what `layoutc test` runs on, and the checks that must notice each."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from layoutc.conformance.subject import Edit


def edit(file: str, pattern: str, replacement: str) -> Edit:
    """Replaces the first match in a generated file; the fault must be there to be found."""

    def apply(package: Path) -> None:
        path = package / file
        text, count = re.subn(pattern, replacement, path.read_text(encoding="utf-8"), count=1)
        assert count == 1, f"{file} has no {pattern}"
        path.write_text(text, encoding="utf-8")

    return apply


EXCHANGED = "../tests/unshipped/exchanged"  # beside the shipped specs
METHODS = r"    _cut = .*\n"  # of a generated class: others may follow
SEND = r"        return all_gather\.send\(self, mesh\)\n"
SENT = "        sent, note = all_gather.send(self, mesh)\n"
ATEN = "__import__('torch').ops.aten"  # which generated files do not import
TABLE = r"    LAYOUT, REFERENCE = LAYOUT, reference\n"
OWN = r"\g<0>    HANDLERS = Recipe.HANDLERS | "  # of the class
# name: recipe, file, what is replaced, by what, the checks of which each must catch it
MUTANTS: dict[str, tuple[str, str, str, str, tuple[str, ...]]] = {
    "a tie goes to the odd code": ("mxfp6_e2m3", "reference.py", r"\b0\.1875,", "0.18750001490116119,", ("encode",)),
    "a threshold is one code late": ("mxfp6_e2m3", "reference.py", r"\b6\.75,", "6.9,", ("encode", "quantize")),
    "a code means another number": ("mxfp6_e2m3", "reference.py", r"-3\.0,", "-2.5,", ("decode",)),
    "nibbles swapped in the plane": (
        "nvfp4",
        "reference.py",
        r"(encode\(scaled\), 4, low_first=)True",
        r"\1False",
        ("encode", "quantize"),
    ),
    "nibbles swapped in a buffer": (
        "nvfp4",
        "reference.py",
        r"(\.t\(\), 4, low_first=)True",
        r"\1False",
        ("index-maps", "buffers"),
    ),
    "a scale rounds up too late": (
        "mxfp8",
        "reference.py",
        r"codecs\.UP_TO_E8M0",
        "lambda x: codecs.UP_TO_E8M0[0](x / (1 + 2**-20)), codecs.UP_TO_E8M0[1]",
        ("scales",),
    ),
    "a constant is off": (
        "nvfp4",
        "reference.py",
        r"INVERSE_ELEMENT_MAX = [\d.]+",
        "INVERSE_ELEMENT_MAX = 0.17",
        ("scales", "quantize"),
    ),
    "NaN becomes a number": (
        "fp8_block",
        "reference.py",
        r"nan=0x7F",
        "nan=0x7E",
        ("nan", "all-bf16"),
    ),
    "dequantize forgets the scale": (
        "fp8_block",
        "reference.py",
        r" \* num\.per_element\(factor, 128, 128, m, k\)",
        "",
        ("decode", "dequantize"),
    ),
    "both orientations have the same random bits": (
        "nvfp4_gradient",
        "reference.py",
        r"random_bits\(seed, m, k, 1\)",
        "random_bits(seed, m, k, 0)",
        ("encode", "quantize", "random-bits"),
    ),
    "elements are rounded to nearest": (
        "nvfp4_gradient",
        "reference.py",
        r"random_bits\(seed, m, k, 0\)",
        "random_bits(seed, m, k, 0) * 0 + 2**31",
        ("encode", "quantize", "all-bf16"),
    ),
    "a seed is not used": (
        "nvfp4_gradient",
        "tensor.py",
        r"quantize, quantize_buffers = (.*)\n",
        r"""quantize_, quantize_buffers = \1


def quantize(x, *, seed=None, **options):
    return quantize_(x, seed=None if seed is None else abs(int(seed)), **options)
""",
        ("random-bits",),
    ),
    "a sign of the transform is another": (
        "nvfp4_activation",
        "reference.py",
        r"num\.hadamard\(x, 0, 16, 0xD7E8",
        "num.hadamard(x, 0, 16, 0xD7E9",
        ("quantize", "encode"),
    ),
    "the inverse transform is forgotten": (
        "nvfp4_activation",
        "reference.py",
        r"return num\.unhadamard\(values.*",
        "return values",
        ("dequantize", "decode"),
    ),
    "what values grow by is forgotten": (
        "nvfp4_activation",
        "reference.py",
        r"amax \* 4\.0",
        "amax",
        ("quantize", "scales"),
    ),
    "padding is not zero": (
        "mxfp8",
        "reference.py",
        r'pad_to\((planes\["rowwise_scale"\][^\n]*)\)\n',
        r"pad_to(\1).clamp(min=1)" + "\n",
        ("index-maps", "buffers"),
    ),
    "padding to another multiple": (
        "nvfp4",
        "reference.py",
        r"up\(m, 128\), up\(k // 16, 4\)",
        "up(m, 128), up(k // 16, 8)",
        ("shapes", "buffers"),
    ),
    "a repeat is one too long": ("nvfp4", "reference.py", r", 0, 16, m\)", ", 0, 17, m)", ("index-maps", "buffers")),
    "a buffer is not transposed": (
        "fp8_block",
        "reference.py",
        r'planes\["rowwise_data"\]\.t\(\)\.contiguous\(\)',
        'planes["rowwise_data"].reshape(k, m).contiguous()',
        ("index-maps", "buffers"),
    ),
    "the swizzle swaps two sizes": (
        "mxfp8",
        "reference.py",
        r"\(0, 3, 2, 1, 4\)",
        "(0, 3, 1, 2, 4)",
        ("swizzle",),
    ),
    "codes of a word are in another order": (
        "awq",
        "reference.py",
        r"\[0, 1, 3, 2\], \[1, 3\]",
        "[0, 1, 2, 3], [1, 3]",
        ("index-maps", "buffers"),
    ),
    "words are of half the bits": (
        "gptq",
        "reference.py",
        r"torch\.int32",
        "torch.int16",
        ("shapes", "buffers"),
    ),
    "zero points are not less 1": (
        "gptq",
        "reference.py",
        r"offset=-1\)",
        "offset=0)",
        ("decode", "quantize"),
    ),
    "a bias is taken away": (
        f"{EXCHANGED}/q4_1",
        "reference.py",
        r" \+ num\.per_element\(zero",
        " - num.per_element(zero",
        ("decode", "dequantize"),
    ),
    "products read one orientation": (
        "mxfp8",
        "tensor.py",
        METHODS,
        r"\g<0>"
        + """
    @classmethod
    def matrix_values(cls, planes, m, k, orientation, dtype):
        return super().matrix_values(planes, m, k, "rowwise", dtype)
""",
        ("products", "layer"),
    ),
    "the activation is not quantized": (
        "nvfp4",
        "layout.py",
        r"forward=Cards\(.*\),",
        "forward=None,",
        ("low-precision",),
    ),
    "the tensor's scale is forgotten": (
        "nvfp4",
        "reference.py",
        r' \* planes\["amax"\]',
        "",
        ("low-precision", "dequantize"),
    ),
    "the amax of shards is another": (
        "nvfp4",
        "tensor.py",
        METHODS,
        r"\g<0>"
        + """
    @classmethod
    def shared_amax(cls, x):
        return super().shared_amax(x) * 2
""",
        ("quantize",),
    ),
    "a refresh keeps the old scale": (
        "mxfp8",
        "tensor.py",
        r"        return (all_gather\.receive\(.*)\n",
        '        kept = {} if out is None else {n: p for n, p in out.planes().items() if "scale" in n}\n'
        r"        made = \1"
        + "\n        if out is not None:\n            out.store.planes.update(kept)\n        return made\n",
        ("gather-again",),
    ),
    "the gather cuts the wrong rows": (
        "fp8_block",
        "tensor.py",
        r"(all_gather\.receive\(self, )all_gather_outputs,",
        r"\1(all_gather_outputs[0].flip(0), *all_gather_outputs[1:]),",
        ("gather",),
    ),
    "forward sends its codes in reverse": (
        "mxfp8",
        "tensor.py",
        SEND,
        SENT + '        return (sent[0].flip(0) if note.route.which == "forward" else sent[0], *sent[1:]), note\n',
        ("gather",),
    ),
    "backward sends its codes in reverse": (
        "mxfp8",
        "tensor.py",
        SEND,
        SENT + '        return (sent[0].flip(0) if note.route.which == "backward" else sent[0], *sent[1:]), note\n',
        ("gather",),
    ),
    "short shards are not filled up": (
        "fp8_block",
        "tensor.py",
        SEND,
        SENT + '        return (self._planes["rowwise_data"], *sent[1:]), note\n',
        ("gather-sizes",),
    ),
    "a scale has fewer rows": (
        "nvfp4",
        "layout.py",
        r'("rowwise_scale": Plane\()16',
        r"\g<1>8",
        ("refused-views", "cut-blocks"),
    ),
    "columns may be cut anywhere": (
        "mxfp8",
        "layout.py",
        r"column_multiple=32",
        "column_multiple=1",
        ("refused-views",),
    ),
    "LAYOUT announces another shape": (
        "mxfp8",
        "layout.py",
        r'("columnwise_scale": Facts\(\(up\(m // 32, )4',
        r"\g<1>8",
        ("shapes",),
    ),
    "a cut starts at the wrong scale": (
        "nvfp4",
        "dispatch.py",
        r"r0 // 16\b",
        "r0 // 32",
        ("views", "writes"),
    ),
    "cat joins pieces in reverse": (
        "fp8_block",
        "tensor.py",
        TABLE,
        rf"{OWN}{{{ATEN}.cat.default: lambda func, args, kwargs: "
        r"Recipe.HANDLERS[func](func, (args[0][::-1], *args[1:]), kwargs)}\n",
        ("cat",),
    ),
    "a clone is an alias": (
        "fp8_current",
        "tensor.py",
        TABLE,
        rf"{OWN}{{{ATEN}.clone.default: Recipe.HANDLERS[{ATEN}.alias.default]}}\n",
        ("copies",),
    ),
    "the history picks another amax": (
        "fp8_delayed",
        "layout.py",
        r'pick="max"',
        'pick="most-recent"',
        ("history",),
    ),
    "a loaded tensor is not checked": (
        "mxfp8",
        "tensor.py",
        METHODS,
        r"\g<0>"
        + """
    def __reduce_ex__(self, protocol):
        return type(self), (self._planes, tuple(self.shape), self.dtype)
""",
        ("pickle",),
    ),
    "one orientation stores both": (
        "mxfp8",
        "tensor.py",
        METHODS,
        r"\g<0>"
        + """
    @classmethod
    def quantize_matrix(cls, x, amax, orientations, out=None, seed=None):
        return super().quantize_matrix(x, amax, LAYOUT.orientations, out, seed)
""",
        ("one-orientation",),
    ),
    "bytes are not copied": (
        "nvfp4",
        "tensor.py",
        TABLE,
        rf"{OWN}{{{ATEN}.copy_.default: lambda func, args, kwargs: args[0] "
        r"if type(args[0]) is type(args[1]) else Recipe.HANDLERS[func](func, args, kwargs)}\n",
        ("checkpoint", "copies", "writes"),
    ),
    "quantizing into a tensor keeps its scale": (
        "mxfp8",
        "tensor.py",
        r"quantize, quantize_buffers = (.*)\n",
        r"""quantize_, quantize_buffers = \1


def quantize(x, *, out=None, **options):
    kept = None if out is None else out.rowwise_scale.clone()
    made = quantize_(x, out=out, **options)
    if kept is not None:
        out.rowwise_scale.copy_(kept)
    return made
""",
        ("out",),
    ),
    "the first expert stands for all": (
        "nvfp4",
        "tensor.py",
        TABLE,
        rf"{OWN}{{{ATEN}.select.int: lambda func, args, kwargs: "
        r"Recipe.HANDLERS[func](func, (*args[:2], 0), kwargs)}\n",
        ("experts",),
    ),
    "zeros_like has the values": (
        "fp8_current",
        "tensor.py",
        TABLE,
        rf"{OWN}{{{ATEN}.zeros_like.default: lambda func, args, kwargs: args[0].dequantize()}}\n",
        ("new-tensors",),
    ),
    "a kernel has another format": (
        "fp8_current",
        "kernels.py",
        r"lt\.to_e4m3",
        "lt.to_e5m2",
        ("kernels",),
    ),
    "a kernel's constant is off": (
        "nvfp4",
        "kernels.py",
        r"INVERSE_ELEMENT_MAX = tl\.constexpr\([\d.]+\)",
        "INVERSE_ELEMENT_MAX = tl.constexpr(0.17)",
        ("kernels",),
    ),
    "a shape that fits no block is taken": (
        "mxfp8",
        "layout.py",
        r"multiple_m=32",
        "multiple_m=1",
        ("refused",),
    ),
}

# Faults of what generated code stands on, and of the suite's own model: what is replaced, by what makes it of the
# original, a recipe, the checks of which each must catch it.
PATCHES: dict[str, tuple[str, Callable[[Any], Any], str, tuple[str, ...]]] = {
    "a step is taken twice": (
        "layoutc.MasterWeights.step",
        lambda step: lambda self: [step(self), step(self)][0],
        "mxfp8",
        ("master-weights",),
    ),
    "products in low precision read one orientation": (
        "layoutc.runtime.weight.tensor.QuantizedTensor.values_of",
        lambda dequantize: lambda self, orientation, dtype: dequantize(self, "rowwise", dtype),
        "mxfp8",
        ("low-precision", "layer"),
    ),
    "the model rounds ties up": (
        "layoutc.conformance.model.codes.Codes.encode",
        lambda encode: lambda self, x, how: encode(self, np.nextafter(x, np.float32(np.inf)), how),
        "mxfp8",
        ("rounding",),
    ),
}

# Faults that processes must find, as MUTANTS.
IN_PROCESSES: dict[str, tuple[str, ...]] = {
    "forward sends its codes in reverse": ("fsdp2",),
    "backward sends its codes in reverse": ("fsdp2",),
    "bytes are not copied": ("reshard", "fsdp2-checkpoint"),
}
