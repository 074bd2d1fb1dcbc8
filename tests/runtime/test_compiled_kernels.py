"""Every kernel of every recipe, compiled for Hopper and Blackwell without a card: spills, widths, instructions.

The instruction counts are guards: a change that makes a kernel longer than it was on the H200 that measured them
shows here first.
"""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import pytest
from kernel_compiler import EVERY, FUSED, QUANTIZING, SOME, compiled, some

pytest.importorskip("triton", reason="needs triton, whose wheel carries the assemblers")
pytestmark = pytest.mark.slow

# Instructions an element on sm_90 that a kernel may take, everything in it counted.
BUDGETS = {
    ("mxfp8", "quantize rowwise bf16"): 10,
    ("mxfp8", "quantize columnwise bf16"): 10,
    ("mxfp8", "quantize rowwise+columnwise bf16"): 13,
    ("fp8_block", "quantize all bf16"): 6,
    ("fp8_block_1d", "quantize rowwise bf16"): 9,
    ("fp8_block_1d", "quantize_buffers rowwise+columnwise bf16"): 19,
    ("fp8_current", "quantize all bf16"): 11,
    ("nvfp4", "quantize all bf16"): 28,  # half of it mends tiles that are not ordinary
    ("mxfp4", "quantize rowwise bf16"): 28,
    ("mxfp8", "quantize_batch rowwise bf16"): 11,
    ("fp8_block", "quantize_batch all bf16"): 6,
    ("fp8_current", "quantize_batch all bf16"): 12.1,  # 1 / scale is rcp.rn, which rounds as a division does
    ("nvfp4", "quantize_batch all bf16"): 28,
    ("fp8_block", "quantize_buffers all bf16"): 11,
    ("nvfp4", "quantize_buffers all bf16"): 28,
    ("mxfp8", "quantize_buffers rowwise+columnwise bf16"): 14,
    ("", "amax_batch bf16"): 8,
    ("", "amax_batch fp32"): 8,
    ("mxfp8", "dequantize rowwise bf16"): 8,
    ("nvfp4", "dequantize rowwise bf16"): 8,
    ("fp8_current", "lay_out"): 4,
    ("nvfp4", "lay_out"): 7,
}
# Instructions that spill registers, with the assembler of Triton 3.7; with that of 3.6, by which kernels were timed, no
# more. Tiles were chosen on an H200, where these few are worth the programs that run beside each other below a cap on
# registers. On sm_100, which has no cap, nothing has run.
SPILLS = {
    90: {
        ("mxint8", "quantize rowwise+columnwise fp32"): 2,
        ("nvfp4_4over6", "quantize all bf16"): 6,
        ("nvfp4_4over6", "quantize all fp32"): 8,
    },
    100: {
        ("fp8_block_1d", "quantize rowwise+columnwise fp32"): 22,
        ("int4_group32", "quantize rowwise+columnwise bf16"): 2,
        ("nvfp4_4over6", "quantize all fp32"): 15,
    },
}
# What Triton 3.8 makes longer on sm_90; no card has timed it.
TRITON_38 = find_spec("triton") is not None and tuple(map(int, version("triton").split(".")[:2])) >= (3, 8)
if TRITON_38:
    SPILLS[90] |= {
        ("mxfp8", "quantize_batch rowwise+columnwise bf16"): 18,
        ("nvfp4", "quantize_buffers all bf16"): 5,
    }
    BUDGETS |= {
        ("mxfp8", "quantize rowwise+columnwise bf16"): 17,
        ("mxfp8", "quantize_buffers rowwise+columnwise bf16"): 18,
    }


@pytest.mark.thorough
@pytest.mark.parametrize("capability", [90, 100])
def test_kernels_compile_without_spills(capability: int) -> None:
    """Of a recipe of each kind of code and block, those that read bf16 and have between them all of its code; on newer
    cards those that quantize, whose conversions are looked at as well. All of all with LAYOUTC_ALL_KERNELS=1."""
    is_old = capability == 90
    budgets = BUDGETS if is_old else BUDGETS_100
    counted = {recipe for recipe, _ in budgets if recipe}
    names = ["all" if EVERY else "amaxes"] if is_old or EVERY else []
    for recipe in sorted(counted | (OLDER | {*OTHER_SIZES} if is_old or EVERY else {*CONVERSIONS}) | {BY_CHANCE}):
        is_fused = recipe in LIKE_COUNTED and not EVERY
        names += some(recipe, QUANTIZING if not is_old else FUSED if is_fused else SOME)
    names += ["int8_block/lay_out"] if is_old and not EVERY else []
    names += [f"{recipe}/{kernel}" for recipe, kernel in {**budgets, **BUDGETS_BY_CHANCE} if recipe and not EVERY]
    names += [] if is_old else ["checks"]
    found = compiled(capability, *names, count={**budgets, **BUDGETS_BY_CHANCE})
    assert [(one["recipe"], one["kernel"]) for one in found if one["mixes_bytes"]] == []
    if is_old or EVERY:
        check_other_sizes([one for one in found if one["recipe"] in OTHER_SIZES])
    check_by_chance([one for one in found if one["recipe"] == BY_CHANCE])
    found = [one for one in found if one["recipe"] not in {*OTHER_SIZES, BY_CHANCE}]
    if capability >= 100:
        check_conversions(found, CONVERSIONS)
        found = [one for one in found if one["recipe"] != "checks"]
    kernels = {(one["recipe"], one["kernel"]): one for one in found}
    assert len(kernels) == len(found) > (200 if EVERY else 45 if is_old else 10)
    spills = {name: one["spills"] for name, one in kernels.items() if one["stack"]}
    assert {name: count for name, count in spills.items() if count > SPILLS[capability].get(name, 0)} == {}
    narrow = [
        name
        for name, one in kernels.items()
        if not name[1].startswith("lay_out")
        and not {"ld 256", "ld 128", "ld 64"} & set(one["accesses"])
        and not {"st 128", "st 64"} & set(one["accesses"])
    ]
    assert not narrow, "neither reads nor writes 8 bytes at a time"
    for (recipe, name), one in kernels.items():
        if "_batch" in name and recipe:  # addresses from a table are as good as a launch's own
            lost = set(kernels[recipe, name.replace("_batch", "")]["accesses"]) - set(one["accesses"])
            assert not lost, (recipe, name)
    for recipe in ("fp8_block", "fp8_current", "nvfp4", "int8_block") if is_old or EVERY else ():
        assert {"st 128", "st 64"} & set(kernels[recipe, "lay_out"]["accesses"]), recipe
    copies = [name for name in kernels if name[1].startswith(("copy_", "rank_chunks"))]
    assert len(copies) == (7 if is_old or EVERY else 0)
    for name in copies:
        assert {"ld 128", "st 128"} <= set(kernels[name]["accesses"]), name
    for name in BUDGETS if is_old or EVERY else ():
        assert "ld 128" in kernels[name]["accesses"] or name[1].startswith(("dequantize", "lay_out")), name
    taken = {name: kernels[name]["per_element"] for name in budgets}
    assert {name: count for name, count in taken.items() if count > budgets[name]} == {}


OTHER_SIZES = ("fp4_4over6_64", "fp4_group48", "fp8_square24")


def check_other_sizes(found: list[dict[str, Any]]) -> None:
    """Square ones, those of codes that are packed, and candidates of which more is held than one run of elements."""
    assert {one["recipe"] for one in found} == set(OTHER_SIZES)
    assert [(one["recipe"], one["kernel"]) for one in found if one["stack"]] == []
    for one in found:
        if one["kernel"].startswith("quantize"):
            assert {"ld 128", "ld 64"} & set(one["accesses"]), (one["recipe"], one["kernel"])


BY_CHANCE = "nvfp4_gradient"  # random bits and transforms
# Instructions an element on sm_90 and sm_100, whose conversions serve scales alone.
BUDGETS_BY_CHANCE = {
    ("nvfp4_gradient", "quantize rowwise bf16"): 49 if TRITON_38 else 48,
    ("nvfp4_gradient", "quantize columnwise bf16"): 60,
    ("nvfp4_gradient", "quantize_buffers rowwise+columnwise bf16"): 118,
}


def check_by_chance(found: list[dict[str, Any]]) -> None:
    """No card's conversion takes these bits, so elements are rounded by integer arithmetic on every card."""
    spills = {one["kernel"]: one["spills"] for one in found if one["stack"]}
    most = {"quantize rowwise+columnwise bf16": 2}  # with Triton 3.6 on sm_90, none with 3.7
    assert {name: count for name, count in spills.items() if count > most.get(name, 0)} == {}
    assert {conversion for one in found for conversion in one["asked"]} == {"e4m3x2"}  # of scales
    taken = {(one["recipe"], one["kernel"]): one.get("per_element", 0) for one in found}
    assert {name: taken[name] for name in BUDGETS_BY_CHANCE if taken[name] > BUDGETS_BY_CHANCE[name]} == {}


# Instructions an element on sm_90: of gradients that are quantized for ranks, by two ways, of which a program takes one
# (one gradient, which nearly all have, or parts of several), and of what two ranks sent.
BUDGETS_IN_ROWS = {
    ("grad_fp8", "quantize_rows bf16"): 124,
    ("grad_fp8", "sum_rows bf16"): 14,
    ("grad_int4", "quantize_rows bf16"): 131,
    ("grad_int4", "sum_rows bf16"): 54,
}


@pytest.mark.thorough
def test_gradients_that_ranks_send_compile_without_spills() -> None:
    found = compiled(90, *(f"{recipe}/{kernel}" for recipe, kernel in BUDGETS_IN_ROWS), count=BUDGETS_IN_ROWS)
    assert [one["kernel"] for one in found if one["mixes_bytes"] or one["stack"]] == []
    taken = {(one["recipe"], one["kernel"]): one["per_element"] for one in found}
    assert {name: taken[name] for name in BUDGETS_IN_ROWS if taken[name] > BUDGETS_IN_ROWS[name]} == {}
    for one in found:
        wide = {"ld 128", "st 64"} if one["kernel"].startswith("quantize") else {"st 128"}
        assert wide & set(one["accesses"]), (one["recipe"], one["kernel"], one["accesses"])


@pytest.mark.parametrize(
    ("rowwise", "columnwise", "reason"),
    [
        ("m: 1, k: 4096", "m: 128, k: 1", "blocks of all sources, which would take 128 x 4096"),
        ("m: 1, k: 512", "m: 1, k: 512", "a scale covers 512"),
        ("m: 24, k: 24", "m: 1, k: 400", "blocks of all sources take 32 x 2048 lanes"),
        ("m: 160, k: 80", "m: 16, k: 16", "160 x 80 in 256 x 128 lanes"),
        ("m: 256, k: 128", "m: 16, k: 16", "up to 16384 elements"),
    ],
)
def test_blocks_that_no_program_holds_have_no_kernels_and_say_why(rowwise: str, columnwise: str, reason: str) -> None:
    """Before Triton would refuse them on a card."""
    from layoutc.build.pipeline import plan_for
    from layoutc.emit.emit import emit
    from layoutc.plan.kernels import gap
    from layoutc.spec.checks.read import read_spec

    sizes = [dict(part.split(": ") for part in block.split(", ")) for block in (rowwise, columnwise)]
    scales = [" ".join(axis if size[axis] == "1" else f"{axis}/{size[axis]}" for axis in "mk") for size in sizes]
    text = (
        "layoutc: 1\nname: large\nsummary: large blocks\nelement: {format: e4m3}\n"
        "scale: {format: f32, rule: amax-over-max}\norientations:\n"
        f"  rowwise:\n    block: {{{rowwise}}}\n    data: {{layout: m k}}\n"
        f"    scale: {{layout: {scales[0]}, pad: [1, 4]}}\n"
        f"  columnwise:\n    block: {{{columnwise}}}\n    data: {{layout: k m}}\n    scale: {{layout: {scales[1]}}}\n"
    )
    spec, found = read_spec(text, "large.yaml")
    assert spec is not None, found
    plan = plan_for(spec)
    assert reason in str(gap(plan.layout))
    assert "kernels.py" not in emit(plan, "0" * 64)


# Instructions an element on sm_100, where conversions to 4 and 6 bits and to e8m0 are the card's.
BUDGETS_100 = {
    ("nvfp4", "quantize all bf16"): 9,
    ("nvfp4_1d", "quantize rowwise bf16"): 9,
    ("mxfp4", "quantize rowwise bf16"): 7,
    ("mxfp4", "quantize columnwise bf16"): 7,
    ("mxfp8", "quantize rowwise bf16"): 9,
    ("mxfp6_e2m3", "quantize rowwise bf16"): 28,  # most of it puts four codes into three bytes
    ("mxfp6_e3m2", "quantize rowwise bf16"): 28,
}
# What PTX and the machine call those conversions; code for sm_103 is compiled, but nothing here can read it.
INSTRUCTIONS = {
    "e2m1x2": "F2FP.SATFINITE.E2M1.F32.PACK_AB_MERGE_C",
    "e2m3x2": "F2FP.SATFINITE.E2M3.F32.PACK_AB_MERGE_C",
    "e3m2x2": "F2FP.SATFINITE.E3M2.F32.PACK_AB_MERGE_C",
    "e4m3x2": "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C",
    "ue8m0x2": "F2FP.SATFINITE.E8.F32.PACK_AB_MERGE_C.RP",
}


STACKS_100 = {("nvfp4", "quantize all fp32")}  # 8 bytes with Triton 3.7, none with 3.6
# Codes across bytes, a choice of scales, zero points, integers: where arithmetic converts.
OLDER = {"mxfp6_e2m3", "nvfp4_4over6", "int4_group32", "int8_block"}
LIKE_COUNTED = {"fp8_block_1d", "int8_block", "mxfp4", "nvfp4_gradient"}  # what is not fused is that of others
CONVERSIONS = {
    "mxfp4": {"e2m1x2", "ue8m0x2"},
    "mxfp6_e2m3": {"e2m3x2", "ue8m0x2"},
    "mxfp6_e3m2": {"e3m2x2", "ue8m0x2"},
    "mxfp8": {"e4m3x2", "ue8m0x2"},
    "nvfp4": {"e2m1x2", "e4m3x2"},
    "nvfp4_1d": {"e2m1x2", "e4m3x2"},
}


def check_conversions(found: list[dict[str, Any]], expected: dict[str, set[str]]) -> None:
    """Newer cards convert by themselves, and in no other way: elements of 4 bits don't go through a format of 8."""
    compared = [(one["kernel"], one["asked"]) for one in found if one["recipe"] == "checks"]
    given = ("e2m1x2", "e2m1x2", "e2m1x2", "e2m3x2", "e3m2x2", "ue8m0x2")
    assert compared == [(name, [name]) for name in given]
    quantizing = [one for one in found if one["kernel"].startswith("quantize") and one["recipe"] in expected]
    assert {one["recipe"] for one in quantizing} == set(expected)
    for one in quantizing:
        recipe, name = one["recipe"], one["kernel"]
        assert set(one["asked"]) == expected[recipe], (recipe, name)
        assert one["stack"] == 0 or (recipe, name) in STACKS_100, (recipe, name)
        if "converts" in one:  # the machine's code was read
            converts = {code for code in one["converts"] if "SATFINITE" in code}
            assert converts == {INSTRUCTIONS[conversion] for conversion in expected[recipe]}, (recipe, name)


@pytest.mark.thorough
def test_the_newest_cards_convert_by_themselves() -> None:
    """Their instructions are those of sm_100, for which everything is compiled."""
    expected = {name: CONVERSIONS[name] for name in ("mxfp4", "nvfp4")}
    kernels = [one for recipe in expected for one in some(recipe, QUANTIZING)]
    check_conversions(compiled(103, "checks", *kernels), expected)


# Meetings of a program's threads: tiles that move through shared memory have many, and took twice the time. And bytes
# of stack, of programs whose registers are capped, which were fastest so.
BARRIERS = {
    "fp32 fp32 mxfp4": (22, 0),
    "fp32 fp32 fp8_block": (6, 0),
    "8bit fp32 fp8_block": (10, 104),
    "4bit fp32 fp8_block": (10, 128),
    "fp8 bf16 fp8_block": (8, 120),
    "8bit bf16 None": (4, 136),
    "fp32 fp32 None": (0, 0),
    "8bit f24 fp8_block": (8, 48),
    "fp32 fp32 amax": (8, 0),
    "8bit fp32 amax": (10, 0),
    "fp32 bf16 amax": (8, 0),
    "8bit bf16 amax": (8, 8),
    "4bit f24 amax": (8, 56),
}


@pytest.mark.thorough
@pytest.mark.parametrize("capability", [90, 100])
def test_updates_of_optimizers_compile(capability: int) -> None:
    """With few spills, with 16 bytes at a time, and with look-ups that stay in the threads that ask for them. For newer
    cards a weight whose conversions are theirs, masters in two parts, and the most look-ups, beside an amax."""
    names = set(BARRIERS) if capability == 90 else {"fp32 fp32 mxfp4", "8bit f24 fp8_block", "4bit f24 amax"}
    found = {one["kernel"]: one for one in compiled(capability, *(f"updates/{name}" for name in names))}
    assert set(found) == names
    assert not any(one["mixes_bytes"] for one in found.values())
    assert all("st 128" in one["accesses"] for one in found.values())
    taken = {name: (one["barriers"], one["stack"]) for name, one in found.items()}
    assert {
        name: one for name, one in taken.items() if any(a > b for a, b in zip(one, BARRIERS[name], strict=True))
    } == {}
