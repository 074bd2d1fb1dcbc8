"""Compiles every kernel of every recipe for a card that need not be there: python compile_kernels.py 90 -> JSON lines.

Names of recipes may follow (`all`, if none), `amaxes` (of groups; in `all`), and `checks`: what compares a card's
conversions with arithmetic.
Each line has the kernel's registers, bytes of stack, bits of its global accesses and the conversions it asks for; of
kernels that use a stack or that `--count` names (RECIPE/KERNEL, or `all`), the machine code is read as well: spills,
conversions, instructions for each element. That takes as long as compiling. A process of its own, since the
interpreter that other tests start can't be turned off again.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import layoutc.recipes
from layoutc.runtime.kernels import conversion_checks, launch
from layoutc.runtime.quantize import batches
from layoutc.runtime.triton import batch

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
Tile = tuple[int, int, int, int, int | None]  # rows, columns, pieces of 16 bytes in a thread, warps, registers
UNREADABLE = {103}  # newer than the disassembler in Triton's wheel, which is older than the assembler there
ALIGNED = [["tt.divisibility", 16]]
EVERY = bool(os.environ.get("LAYOUTC_ALL_KERNELS"))  # from fp32, too, and groups of every recipe
GROUPS = {"mxfp8", "fp8_block", "fp8_current", "nvfp4"}  # a recipe of each kind of block
GROUPS_LAID_OUT = {"fp8_current", "nvfp4"}  # of bytes and of nibbles; the rest differ in scales alone


def variants(kernels: Any, layout: Any) -> Iterator[tuple[str, Any, list[bool], Tile, str]]:
    """(name, kernel, flags of its sources, tile, dtype of the input or output)."""
    for (size, *flags), tile in kernels.TILES.items():
        if size != 2 and not EVERY:
            continue
        label = "+".join(itertools.compress(layout.orientations, flags)) if len(flags) > 1 else "all"
        dtype = "bf16" if size == 2 else "fp32"
        yield f"quantize {label} {dtype}", kernels.quantize_kernel, list(flags), tile, dtype
        # Of a group, whose tiles and arithmetic are the same, inputs of one dtype.
        if hasattr(kernels, "quantize_group_kernel") and size == 2 and (EVERY or layout.name in GROUPS):
            yield f"quantize_group {label} {dtype}", kernels.quantize_group_kernel, list(flags), tile, dtype
        if hasattr(kernels, "BUFFER_TILES"):
            tile = kernels.BUFFER_TILES[size, *flags]
            yield f"quantize_buffers {label} {dtype}", kernels.quantize_kernel, list(flags), tile, dtype
    if hasattr(kernels, "LAY_OUT_TILE"):
        tile = (*kernels.LAY_OUT_TILE[:2], 1, kernels.LAY_OUT_TILE[2], None)
        yield "lay_out", kernels.lay_out_kernel, [], tile, "bf16"
        if layout.name in GROUPS_LAID_OUT:
            yield "lay_out_group", kernels.lay_out_kernel, [], tile, "bf16"
    for orientation, tile in kernels.DEQUANTIZE_TILES.items():
        flags = [orientation == name for name in layout.orientations]
        yield f"dequantize {orientation} bf16", kernels.dequantize_kernel, flags, (*tile[:2], 1, tile[2], None), "bf16"


def absent(name: str, layout: Any) -> set[str]:
    """Parameters that are None: buffers where planes are written, and planes that are no buffers where those are."""
    if name == "lay_out":
        return {"table"}
    if name.startswith("quantize_buffers"):
        return {plane for plane in layout.stored if plane not in layout.as_stored.values() and plane != "amax"}
    return {f"to_{buffer}" for buffer in layout.buffers(1024, 1024)} if name.startswith("quantize") else set()


def amax_variants() -> Iterator[tuple[str, dict[str, Any], Tile, str]]:
    """(name, constants, tile, dtype) of the amaxes of a group."""
    for dtype in ("bf16", "fp32"):
        tile_m, tile_k, warps = batches.AMAX_TILE
        yield f"amax_group {dtype}", {"BLOCK_K": tile_k, "WHOLE": True}, (tile_m, tile_k, 1, warps, None), dtype
        tile_m, tile_k, warps = launch.column_tile(1)
        yield f"amax_group columns {dtype}", {"BLOCK_K": 1, "WHOLE": False}, (tile_m, tile_k, 1, warps, None), dtype


def compiled(
    kernel: Any,
    layout: Any,
    flags: list[bool],
    tile: Tile,
    dtype: str,
    capability: int,
    none: Collection[str] = (),
    **constants_: Any,
) -> Any:
    """The kernel as it is launched for a large contiguous weight of whole tiles, or for many of them.

    none: parameters that are None.
    """
    facts = layout.planes(1024, 1024) if layout else {}
    level = launch.level_of(divmod(capability, 10))
    fixed = {"TILE_M": tile[0], "TILE_K": tile[1], "EVEN": True, "HARDWARE": level, "stride_k": 1, "WORDS": True}
    fixed |= {"PIECES": tile[2], "SWIZZLED": True}
    fixed |= {"DTYPE": tl.bfloat16 if dtype == "bf16" else tl.float32, "ROWS": batches.ROWS[-1], "ALIGNED": True}
    fixed |= {"ROWS": 0, "ALIGNED": False} if "table" in none else {}
    fixed |= constants_
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], Any] = {}
    for index, parameter in enumerate(kernel.params):
        name = parameter.name
        if name in fixed or name.isupper():
            signature[name] = "constexpr"
            constants[(index,)] = fixed[name] if name in fixed else flags.pop(0)
            continue
        if name == "input_max":
            signature[name] = "fp32"
            continue
        laid_out = layout.buffers(1024, 1024) if layout else {}
        stored = {**facts, **{f"to_{buffer}": fact for buffer, fact in laid_out.items()}}
        if name in none:
            signature[name] = "constexpr"
            constants[(index,)] = None
            continue
        is_code = name in stored and stored[name].dtype == torch.uint8
        pointer = f"*{dtype}" if name in ("x", "out") else "*u8" if is_code else "*fp32" if layout else "*i32"
        pointer = "*i64" if name == "table" else pointer
        is_size = name in ("m", "k", "stride_m") or name.startswith("cover_") or name.endswith(("_m", "_k"))
        signature[name] = "i32" if is_size else pointer
        attributes[(index,)] = ALIGNED
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": tile[3], "maxnreg": tile[4] if capability == 90 else None, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def compiled_check(convert: Any, expect: Any, capability: int) -> Any:
    """What compares a card's conversion with arithmetic, as it is launched."""
    constants = {
        "CONVERT": convert,
        "EXPECT": expect,
        "ROWS": conversion_checks.TILE[0],
        "COLUMNS": conversion_checks.TILE[1],
    }
    signature = {"x": "*fp32", "one": "*fp32", "counts": "*i32", **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(
        fn=conversion_checks.count_kernel,
        signature=signature,
        constexprs={(index,): value for index, value in enumerate(constants.values(), 3)},
        attrs={(index,): ALIGNED for index in range(3)},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": False})


def figures(kernel: Any, tile: Tile, count: bool) -> dict[str, Any]:
    """What the code for the card shows; the machine's own where it spills or is to be counted, and can be read."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _read("-res-usage", file.name)
        stack = int(re.findall(r"STACK:(\d+)", usage)[-1])
        reads = (count or stack > 0) and kernel.metadata.target.arch not in UNREADABLE
        code = _read("-sass", file.name) if reads else ""
    accesses = re.findall(r"\b(ld|st)\.global\S*?(?:\.v(\d))?\.b(\d+)\b", kernel.asm["ptx"])
    found = {
        "registers": int(re.findall(r"REG:(\d+)", usage)[-1]),
        "stack": stack,
        "accesses": sorted({f"{way} {int(many or 1) * int(bits)}" for way, many, bits in accesses}),
        "asked": sorted(set(re.findall(r"cvt\.r\w\.satfinite\.(\w+)\.f32", kernel.asm["ptx"]))),
    }
    if not code:
        return found
    operations = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", code)
    real = [one for one in operations if not one.startswith("NOP")]
    return found | {
        "spills": sum(one.startswith(("LDL", "STL")) for one in real),
        "per_element": round(len(real) * tile[3] * 32 / (tile[0] * tile[1]), 2),
        "converts": sorted({one for one in real if one.startswith("F2FP")}),
    }


def _read(option: str, name: str) -> str:
    command = [TOOLS / "cuobjdump", option, name]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> None:
    """Prints one JSON object for each kernel."""
    parser = argparse.ArgumentParser()
    parser.add_argument("capability", type=int)
    parser.add_argument("names", nargs="*", default=["all"])
    parser.add_argument("--count", nargs="*", default=[])
    options = parser.parse_args()
    capability, named, counted = options.capability, set(options.names), set(options.count)

    def tell(recipe: str, name: str, kernel: Any, tile: Tile) -> None:
        found = figures(kernel, tile, bool({f"{recipe}/{name}", "all"} & counted))
        print(json.dumps({"recipe": recipe, "kernel": name, "tile": tile, **found}), flush=True)

    folder = Path(layoutc.recipes.__file__).parent
    if {"all", "amaxes"} & named:
        for name, constants, tile, dtype in amax_variants():
            kernel = batch.amax_group_kernel
            tell("", name, compiled(kernel, None, [], tile, dtype, capability, **constants), tile)
    level = launch.level_of(divmod(capability, 10))
    for name, convert, expect in conversion_checks.COMPARISONS[level] if "checks" in named else ():
        tell("checks", name, compiled_check(convert, expect, capability), (*conversion_checks.TILE, 1, 4, None))
    every = sorted(path.parent.name for path in folder.glob("*/kernels.py"))
    for recipe in every if "all" in named else sorted(named - {"amaxes", "checks"}):
        kernels = importlib.import_module(f"layoutc.recipes.{recipe}.kernels")
        layout = importlib.import_module(f"layoutc.recipes.{recipe}.layout").LAYOUT
        for name, kernel, flags, tile, dtype in variants(kernels, layout):
            tell(recipe, name, compiled(kernel, layout, flags, tile, dtype, capability, absent(name, layout)), tile)


if __name__ == "__main__":
    main()
