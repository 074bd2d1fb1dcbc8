"""Compiles every kernel of every recipe for a card that need not be there: python compile_kernels.py 90 -> JSON lines.

Names of recipes may follow (`all`, if none, are those that are shipped), RECIPE/KERNEL with `*` for those of its
kernels, `all/KERNEL` for those of each recipe, `amaxes` (of batches; in `all`), `updates` of AdamW or `updates/KERNEL`,
and `checks`: what compares a card's conversions with arithmetic.
Each line has the kernel's registers, bytes of stack, bits of its global accesses, the conversions it asks for, and
whether threads exchange bytes in the way that Triton gets wrong; of kernels that use a stack or that `--count` names
(RECIPE/KERNEL, or `all`), the machine code is read as well: spills, conversions, instructions for each element. A
process of its own, since the interpreter that other tests start can't be turned off again; `--serve` answers lists of
these arguments, a line each, and ends each answer with an empty line (tests/helpers/kernel_compiler.py).
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
import unshipped
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import layoutc.recipes
import layoutc.recipes.fp8_rowwise.kernels as fp8_rowwise
from layoutc.runtime.kernels import (
    amaxes,
    batches,
    conversion_checks,
    copies,
    launch,
    rank_chunks,
    rank_sums,
)
from layoutc.runtime.kernels.choices import Tile
from layoutc.runtime.operands import column_kernels, columns_of_groups, expert_rows
from layoutc.runtime.operands import kernels as of_rows
from layoutc.runtime.optim import launches, rules
from layoutc.runtime.optim.kernels import update_kernel
from layoutc.runtime.optim.states import FORMS
from layoutc.runtime.triton import batch, reductions
from layoutc.runtime.triton.kernels import (
    dequantize_kernel,
    lay_out_kernel,
    quantize_kernel,
    quantize_rows_kernel,
    sum_rows_kernel,
)

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
UNREADABLE = {103}  # newer than the disassembler in Triton's wheel, which is older than the assembler there
ALIGNED = [["tt.divisibility", 16]]
POINTERS = {torch.uint8: "*u8", torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
POINTERS |= {torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64"}  # buffers in words
EVERY = bool(os.environ.get("LAYOUTC_ALL_KERNELS"))  # from fp32, too, and batches of every recipe
BATCHES = {"mxfp8", "fp8_block", "fp8_current", "nvfp4", "fp8_square24"}  # a recipe of each kind of block
BATCHES_READ = {"mxfp8", "fp8_block", "nvfp4", "nf4", "q4_k"}  # of bytes and nibbles, codebooks, records
BY_ROWS = {"fp8_current"}  # by the largest of the amaxes of rows
IN_ROWS = {"grad_fp8", "grad_int4"}  # of gradients that ranks send


def variants(kernels: Any, layout: Any) -> Iterator[tuple[str, Any, list[bool], Tile, str]]:
    """(name, kernel, whether rowwise and columnwise sources are written or read, tile, dtype of input or output)."""
    for (size, *written), tile in kernels.quantize_sizes.items():
        if size != 2 and not EVERY:
            continue
        asked = [name in written for name in ("rowwise", "columnwise")]
        label = "+".join(written) if len(kernels.serves) > 1 else "all"
        dtype = "bf16" if size == 2 else "fp32"
        yield f"quantize {label} {dtype}", quantize_kernel, asked, tile, dtype
        # Of a batch, whose tiles and arithmetic are the same, inputs of one dtype.
        if kernels.batched and size == 2 and (EVERY or layout.name in BATCHES):
            yield f"quantize_batch {label} {dtype}", quantize_kernel, asked, tile, dtype
        if kernels.buffer_sizes is not None:
            tile = kernels.buffer_sizes.get((size, *written), tile)
            yield f"quantize_buffers {label} {dtype}", quantize_kernel, asked, tile, dtype
            if layout.name in BY_ROWS:
                yield f"quantize_buffers_by_rows {label} {dtype}", quantize_kernel, asked, tile, dtype
    if kernels.lay_out_tile is not None:
        tile = kernels.lay_out_size
        yield "lay_out", lay_out_kernel, [], tile, "bf16"
    tile = Tile(1, rank_sums.CODES_TILE, rank_sums.CODES_WARPS, rank_sums.CODES_PIECES)
    for label, kernel in (("quantize", quantize_rows_kernel), ("sum", sum_rows_kernel)):
        if layout.name in IN_ROWS:
            yield f"{label}_rows bf16", kernel, [True, False], tile, "bf16"
    for orientation, tile in kernels.dequantize_sizes.items():
        asked = [orientation in kernels.serves.get(name, ()) for name in ("rowwise", "columnwise")]
        for form in ("", "_batch", "_parts", "_batch_parts") if layout.name in BATCHES_READ else ("",):
            label = f"dequantize{form} {orientation} bf16"
            yield label, dequantize_kernel, asked, tile, "bf16"


MATRIX = {"x", "m", "k", "stride_m", "stride_k", "cover_k"}  # in place of a table


def parameters(name: str, kernels: Any, layout: Any) -> dict[str, str | None]:
    """What stands for each plane and buffer that is given (p0, b0, ...): its dtype; None of what is not given."""
    planes, buffers = layout.planes(1024, 1024), layout.buffers(1024, 1024)
    moves = name.startswith("lay_out")
    kept = set(layout.as_stored.values())
    given = {f"p{index}": plane for index, plane in enumerate(kernels.moved if moves else kernels._written)}
    if name.startswith("quantize_buffers"):
        given = {key: plane for key, plane in given.items() if plane in kept}
    if name.startswith("quantize_batch"):
        given = {}
    types = {key: POINTERS[planes[plane].dtype] for key, plane in given.items()}
    if moves or name.startswith("quantize_buffers"):
        made = {f"b{index}": buffer for index, buffer in enumerate(filter(None, kernels._made))}
        types |= {key: POINTERS[buffers[one].dtype] for key, one in made.items()}
    types |= {"codebooks": "*fp32"} if kernels.codebooks else {}
    types |= {"amax": "*bf16"} if "by_rows" in name else {}
    none = {"codebooks", *(f"{kind}{index}" for kind in "pb" for index in range(6))} - set(types)
    if name.startswith(("quantize_rows", "sum_rows")):
        none = {"rest", "none", "input_max", *(f"{kind}2" for kind in ("p", "gap", "stride"))}
        none |= {f"{kind}{number}" for kind in ("x", "end", "size") for number in range(9, 16)}
        types |= {f"x{number}": "*bf16" for number in range(9)}
        return types | {"out": "*fp32"} | dict.fromkeys(none)
    none |= MATRIX if name.startswith("quantize_batch") else set()
    none |= {"m", "k", "cover_k"} if name.startswith("dequantize_batch") else set()
    none |= set() if name.startswith("dequantize_parts") else {"part_rows", "part_bytes"}
    none |= set() if "batch" in name else {"table"}
    none |= set() if layout.shares_amax or (name.startswith("dequantize") and layout.history) else {"amax"}
    none |= set() if kernels.takes_input_max else {"input_max"}
    none |= set() if layout.stochastic else {"seed"}
    return types | dict.fromkeys(none)


def amax_variants() -> Iterator[tuple[str, Any, dict[str, Any], Tile, str]]:
    """(name, kernel, constants, tile, dtype) of the amaxes of a batch, of sums over ranks, and of copies."""
    kernel = batch.amax_batch_kernel
    for dtype in ("bf16", "fp32"):
        tile_m, tile_k, warps = amaxes.BATCH_TILE
        yield f"amax_batch {dtype}", kernel, {"BLOCK_K": tile_k, "WHOLE": True}, Tile(tile_m, tile_k, warps), dtype
        tile = Tile(*amaxes.column_tile(1))
        yield f"amax_batch columns {dtype}", kernel, {"BLOCK_K": 1, "WHOLE": False}, tile, dtype
    tile = Tile(*amaxes.column_tile(24))
    yield "amax_batch 24 columns bf16", kernel, {"BLOCK_K": 24, "WHOLE": False}, tile, "bf16"
    tile = Tile(1, rank_sums.TILE, rank_sums.WARPS)
    constants = {"TILE": rank_sums.TILE, "DIVIDE": False}
    yield "rank_sum bf16", reductions.rank_sum_kernel, constants, tile, "bf16"
    yield "rank_chunks bf16", batch.rank_chunks_kernel, {"TILE": rank_chunks.TILE}, tile, "bf16"
    tile = Tile(1, expert_rows.TILE, expert_rows.WARPS)
    constants = {"CHOSEN": 8, "WEIGHTED": True, "TILE": tile.columns}
    yield "sum_of_experts bf16", of_rows.sum_of_experts_kernel, constants, tile, "bf16"
    plain = dict.fromkeys(("data", "scale", "none", "input_max", "QUANTIZE"))
    quantized = dict.fromkeys(("none", "input_max")) | {"QUANTIZE": fp8_rowwise.KERNELS.quantize_tile}
    for name, planes, columns in (("", plain, 1024), (" quantized", quantized, 2048)):
        warps = expert_rows.warps_of(columns) if planes is quantized else expert_rows.WARPS
        tile = Tile(1, columns, warps)
        constants = {**planes, "TILE": columns}
        yield f"of_experts{name} bf16", of_rows.of_experts_kernel, constants | {"CHOSEN": 8}, tile, "bf16"
        out = {"out": None} if planes is quantized else {}
        yield f"gated{name} bf16", of_rows.gated_kernel, constants | out, tile, "bf16"
        out = {} if planes is quantized else {"out": None}
        yield f"gated_backward{name} bf16", of_rows.gated_backward_kernel, constants | out, tile, "bf16"
    tile = Tile(columns_of_groups.COLUMNS, columns_of_groups.TILE, columns_of_groups.WARPS)
    constants = {"GROUPS": 64, "EACH": 8, "TILE": tile.columns, "COLUMNS": tile.rows}
    yield "amax_of_columns bf16", column_kernels.amax_of_columns_kernel, constants, tile, "bf16"
    yield "quantize_columns bf16", column_kernels.quantize_columns_kernel, constants | quantized, tile, "bf16"
    for source in (tl.float32, tl.bfloat16, tl.int64):
        dtype = tl.int64 if source == tl.int64 else tl.bfloat16
        constants = {"TILE": copies.TILE, "SOURCE": source, "DTYPE": dtype}
        yield f"copy_in {source}", batch.copy_in_kernel, constants, Tile(1, copies.TILE, copies.WARPS), "bf16"
    tile = Tile(1, copies.TILE, copies.WARPS)
    for moving in (0, 2, copies.MOVING):  # tensors whose addresses are arguments
        constants = {"TILE": copies.TILE, "DTYPE": tl.int64}
        constants |= {f"moving{index + 1}": None for index in range(moving, copies.MOVING)}
        yield f"copy_out {moving}", batch.copy_out_kernel, constants, tile, "bf16"


def compiled(
    kernel: Any,
    fixed: dict[str, Any],
    tile: Tile,
    dtype: str,
    capability: int,
    given: dict[str, str | None] | None = None,
) -> Any:
    """A kernel as it is launched for a large contiguous weight of whole tiles, or for many of them.

    fixed: constants of its own. given: types of pointers, and None of what is not given.
    """
    level, given = launch.level_of(divmod(capability, 10)), given or {}
    constant = {
        "TILE_M": tile.rows,
        "TILE_K": tile.columns,
        "EVEN": True,
        "CVT_LEVEL": level,
        "stride_k": 1,
        "WORDS": True,
    }
    constant |= {"PIECES": tile.pieces, "SWIZZLED": True, "ROWS": batches.ROWS[-1], "ALIGNED": True}
    constant |= {"DTYPE": tl.bfloat16 if dtype == "bf16" else tl.float32}
    constant |= {"ROWS": 0, "ALIGNED": False, "DTYPE": None} if "table" in given else {}
    constant |= {**fixed, **{name: None for name, type_ in given.items() if type_ is None}}
    pointers = {
        "x": f"*{dtype}",
        "out": "*fp32" if "DIVIDE" in fixed else f"*{dtype}",
        "parts": f"*{dtype}",
        "sent": "*u8",
        "received": "*u8",
        "number": "fp32",
        "table": "*i64",
        "input_max": "fp32",
        "ranges": "*fp32",
        "seed": "*i64",
    }
    pointers |= dict.fromkeys(("y", "weights", "grad", "of_y", "of_weights", "both", "of_both"), f"*{dtype}")
    pointers |= {"rows": "*i64", "order": "*i64", "ends": "*i32", "data": "*u8", "scale": "*fp32"}
    pointers |= {f"grad{index}": f"*{dtype}" for index in range(rank_chunks.GRADS)}
    pointers |= {f"moving{index + 1}": "*i64" for index in range(copies.MOVING)}
    pointers |= {name: type_ for name, type_ in given.items() if type_ is not None}
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], Any] = {}
    for index, parameter in enumerate(kernel.params):
        name = parameter.name
        if name in constant:
            signature[name], constants[index,] = "constexpr", constant[name]
            continue
        is_size = name.rstrip("0123456789") in ("gap", "stride", "end", "size") or name in (
            "n",
            "m",
            "k",
            "stride_m",
            "cover_k",
            "numel",
            "ranks",
            "row",
            "part_rows",
            "part_bytes",
            "columns",
            "experts",
            "size",
        )
        signature[name] = "i32" if is_size else pointers.get(name, "*fp32" if given else "*i32")
        if name not in ("input_max", "number", "ranks"):
            attributes[index,] = ALIGNED
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {
        "num_warps": tile.warps,
        "maxnreg": tile.registers if capability == 90 else None,
        "enable_fp_fusion": False,
    }
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def constants_of(name: str, kernels: Any, asked: list[bool]) -> dict[str, Any]:
    """What a recipe's kernel is compiled for."""
    if name.startswith("lay_out"):
        return {"LAY_OUT": kernels.lay_out_tile}
    if name.startswith(("quantize_rows", "sum_rows")):
        tiles = {"QUANTIZE": kernels.quantize_tile, "DEQUANTIZE": kernels.dequantize_tile}
        return {**tiles, "TILE": rank_sums.CODES_TILE, "DIVIDE": False}
    sources = dict(zip(("ROWWISE", "COLUMNWISE"), asked, strict=True))
    if name.startswith("dequantize"):
        mask = (1 << len(kernels._written)) - 1 if "_parts" in name else 0
        return {"DEQUANTIZE": kernels.dequantize_tile, **sources, "PARTED": mask}
    masks = kernels._masks if "batch" in name else (0, 0)
    written = itertools.compress(("rowwise", "columnwise"), asked)
    cover = kernels.quantize_sizes[2 if name.endswith("bf16") else 4, *written].cover
    return {
        "QUANTIZE": kernels.quantize_tile,
        "AMAXES": 512 if "by_rows" in name else 0,
        **dict(zip(("ROWWISE_ROWS", "COLUMNWISE_ROWS", "RANGES"), spanning(kernels, asked), strict=True)),
        **sources,
        **dict(zip(("KINDS", "SCALARS", "COVER_M", "COVER_K"), (*masks, *cover), strict=True)),
    }


def spanning(kernels: Any, asked: list[bool]) -> tuple[int, int, int]:
    """Rows of blocks that span all columns, of both sources; and a bit for each whose scales depend on ranges."""
    names = ("rowwise", "columnwise")
    rowwise, columnwise = (kernels.row_blocks.get(n, 0) if flag else 0 for n, flag in zip(names, asked, strict=True))
    return rowwise, columnwise, sum(1 << bit for bit, name in enumerate(names) if name in kernels.row_ranges)


def update_variants(capability: int, patterns: list[str]) -> Iterator[tuple[str, Any, Tile]]:
    """(name, kernel, tile) of what updates large weights of fp8_block, or of a recipe that another launch quantizes:
    "amax", if by one amax of the whole weight."""
    forms = [
        ("fp32", "fp32", "mxfp4"),
        ("fp32", "fp32", "fp8_block"),
        ("8bit", "fp32", "fp8_block"),
        ("4bit", "fp32", "fp8_block"),
    ]
    forms += [
        ("fp8", "bf16", "fp8_block"),
        ("8bit", "bf16", None),
        ("fp32", "fp32", None),
        ("8bit", "f24", "fp8_block"),
        *[(state, masters, "amax") for state in ("fp32", "8bit") for masters in ("fp32", "bf16")],
        ("4bit", "f24", "amax"),
    ]
    for state, masters, target in forms:
        name = f"{state} {masters} {target}"
        if not any(fnmatchcase(name, pattern) for pattern in patterns):
            continue
        measures = target == "amax"
        recipes = [*FORMS.get(state, (None, None)), None if measures else target]
        modules = [one and importlib.import_module(f"layoutc.recipes.{one}") for one in recipes]
        kernels = [one and importlib.import_module(f"{one.__name__}.kernels").KERNELS for one in modules]
        *moments, weight = (one and one.Tensor for one in modules)
        orientations = weight.LAYOUT.orientations if weight else ()
        master = torch.float32 if masters == "fp32" else torch.bfloat16
        form = launches.Form(
            master, tuple(moments), weight, tuple(orientations), torch.float32, masters == "f24", measures
        )
        plan, table = launches._tiles(form), (batches.ROWS[0], True, True)
        level = launch.level_of(divmod(capability, 10))
        constants = launches.constants_of(rules.ADAMW, form, kernels, plan, table, level)
        types: list[str | None] = ["*i64", "*i64", "*fp32", "*i32", "*i64", "*fp32", "*i64" if measures else None]
        types += ["*fp32" if one and one.codebooks else None for one in kernels[:2]]
        types.append("fp32" if kernels[2] and kernels[2].takes_input_max else None)
        given = dict(enumerate([*types, *constants]))
        source = ASTSource(
            fn=update_kernel,
            signature={one.name: types[one.num] or "constexpr" for one in update_kernel.params[: len(types)]}
            | {one.name: "constexpr" for one in update_kernel.params[len(types) :]},
            constexprs={(at,): one for at, one in given.items() if at >= len(types) or one is None},
            attrs={(at,): ALIGNED for at, one in enumerate(types) if one and one.startswith("*")},
        )
        options = {"num_warps": plan.warps, "maxnreg": plan.registers, "enable_fp_fusion": False}
        kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        yield name, kernel, Tile(plan.span_m, plan.span_k, plan.warps)


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


def figures(kernel: Any) -> dict[str, Any]:
    """What the code for the card shows before the machine's own is read."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _said("cuobjdump", "-res-usage", file.name)
    accesses = re.findall(r"\b(ld|st)\.global\S*?(?:\.v(\d))?\.b(\d+)\b", kernel.asm["ptx"])
    return {
        "registers": int(re.findall(r"REG:(\d+)", usage)[-1]),
        "stack": int(re.findall(r"STACK:(\d+)", usage)[-1]),
        "accesses": sorted({f"{way} {int(many or 1) * int(bits)}" for way, many, bits in accesses}),
        "barriers": len(re.findall(r"\bbar(?:rier)?\.sync", kernel.asm["ptx"])),
        "asked": sorted(set(re.findall(r"cvt\.r\w\.satfinite\.(\w+)\.f32", kernel.asm["ptx"]))),
        # As Triton 3.6 and 3.7 exchange bytes that lie in a thread in another order, which comes out mixed up.
        # Behind a plus is an address.
        "mixes_bytes": bool(re.search(rf"(?<!\+)\b({0x3120}|{0x7564})\b", kernel.asm["ptx"])),
    }


def counts(code: str, tile: Tile) -> dict[str, Any]:
    """What the machine's own code shows."""
    operations = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", code)
    real = [one for one in operations if not one.startswith("NOP")]
    return {
        "spills": sum(one.startswith(("LDL", "STL")) for one in real),
        "per_element": round(len(real) * tile.warps * 32 / (tile.rows * tile.columns), 2),
        "converts": sorted({one for one in real if one.startswith("F2FP")}),
    }


def machine_codes(cubins: list[bytes], capability: int) -> list[str]:
    """The code of kernels, a line for each instruction, by one process, which takes a third of a second to start."""
    texts = [_text(cubin) for cubin in cubins]
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(b"".join(texts))
        file.flush()
        listed = _said("nvdisasm", "--binary", f"SM{capability}a", file.name)
    lines = iter(re.findall(r"^\s*/\*[0-9a-f]{4,}\*/.*$", listed, re.MULTILINE))
    codes = ["\n".join(itertools.islice(lines, len(text) // 16)) for text in texts]  # 16 bytes an instruction
    assert not list(lines)
    return codes


def _text(cubin: bytes) -> bytes:
    """The instructions of the one function in an ELF file of 64 bits."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<3H", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + size * index) for index in range(count)]
    start = sections[names][4]
    found = [cubin[one[4] : one[4] + one[5]] for one in sections if cubin.startswith(b".text.", start + one[0])]
    assert len(found) == 1
    return found[0]


def _said(tool: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout


def main() -> None:
    """Prints one JSON object for each kernel."""
    if sys.argv[1:] != ["--serve"]:
        answer(sys.argv[1:])
        return
    for line in sys.stdin:
        answer(json.loads(line))
        print(flush=True)


def answer(arguments: list[str]) -> None:
    """Compiles what is asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("capability", type=int)
    parser.add_argument("names", nargs="*", default=["all"])
    parser.add_argument("--count", nargs="*", default=[])
    options = parser.parse_args(arguments)
    capability, counted = options.capability, set(options.count)
    asked: dict[str, list[str]] = {}
    for recipe, _, pattern in (name.partition("/") for name in options.names):
        asked.setdefault(recipe, []).append(pattern or "*")

    found: list[dict[str, Any]] = []
    to_count: list[tuple[dict[str, Any], bytes]] = []

    def tell(recipe: str, name: str, kernel: Any, tile: Tile) -> None:
        found.append({"recipe": recipe, "kernel": name, "tile": tile, **figures(kernel)})
        asked_for = bool({f"{recipe}/{name}", "all"} & counted)
        if (asked_for or found[-1]["stack"]) and capability not in UNREADABLE:
            to_count.append((found[-1], kernel.asm["cubin"]))

    for name, kernel, constants, tile, dtype in amax_variants() if {"all", "amaxes"} & asked.keys() else ():
        tell("", name, compiled(kernel, constants, tile, dtype, capability), tile)
    for name, kernel, tile in update_variants(capability, asked.get("updates", [])):
        tell("updates", name, kernel, tile)
    for name, convert, expect in conversion_checks.COMPARISONS if "checks" in asked and capability >= 100 else ():
        tell("checks", name, compiled_check(convert, expect, capability), Tile(*conversion_checks.TILE, 4))
    if "all" in asked:
        folder = Path(layoutc.recipes.__file__).parent
        for path in folder.glob("*/kernels.py"):
            asked[path.parent.name] = asked.get(path.parent.name, []) + asked["all"]
    for recipe in sorted(asked.keys() - {"all", "amaxes", "updates", "checks"}):
        unshipped.add_if_known(recipe)
        kernels = importlib.import_module(f"layoutc.recipes.{recipe}.kernels").KERNELS
        layout = importlib.import_module(f"layoutc.recipes.{recipe}.layout").LAYOUT
        for name, kernel, written, tile, dtype in variants(kernels, layout):
            if any(fnmatchcase(name, pattern) for pattern in asked[recipe]):
                fixed, given = constants_of(name, kernels, written), parameters(name, kernels, layout)
                tell(recipe, name, compiled(kernel, fixed, tile, dtype, capability, given), tile)
    codes = machine_codes([cubin for _, cubin in to_count], capability) if to_count else []
    for (one, _), code in zip(to_count, codes, strict=True):
        one |= counts(code, one["tile"])
    for one in found:
        print(json.dumps(one), flush=True)


if __name__ == "__main__":
    main()
