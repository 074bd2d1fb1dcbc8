"""The plan of kernels, without a template: where amaxes come from, what is fused and batched, moves, tiles, gaps."""

from __future__ import annotations

from typing import Any

import pytest
from numpy_models import RECIPES, recipe_layout, variant

from layoutc.layout.layout import Layout
from layoutc.plan.conversions import decoding, encoding
from layoutc.plan.kernels import Kernels, NoKernels, plan_kernels
from layoutc.plan.moves import CodeMove, ScaleMove


def planned(name: str) -> Kernels:
    made = plan_kernels(recipe_layout(name))
    assert isinstance(made, Kernels)
    return made


def with_blocks(name: str, m: int, k: int) -> Layout:
    """A shipped recipe's layout with blocks of another size."""

    def edit(spec: dict[str, Any]) -> None:
        for orientation in spec["orientations"].values():
            orientation["block"] = {"m": m, "k": k}
            scale = orientation["scale"]
            scale["layout"] = " ".join(f"{term[0]}/{m if term[0] == 'm' else k}" for term in scale["layout"].split())

    return variant(name, edit)


@pytest.mark.parametrize("name", RECIPES)
def test_every_shipped_recipe_has_kernels_whose_tiles_hold_whole_blocks(name: str) -> None:
    kernels = planned(name)
    blocks = {source.source.name: source.source.quantization.block for source in kernels.sources}
    for tiles in (kernels.quantize.tiles, kernels.quantize.buffer_tiles):
        for _, written, tile in tiles:
            for source, is_written in zip(kernels.sources, written, strict=True):
                block = blocks[source.source.name]
                if is_written and block.m and block.k:
                    assert tile.rows % block.m == 0 == tile.columns % block.k, (name, written, tile)
            assert tile.rows & (tile.rows - 1) == 0 == tile.columns & (tile.columns - 1)
            assert tile.reason
    assert [orientation for orientation, _ in kernels.dequantize_tiles] == list(kernels.layout.orientations)
    assert bool(kernels.quantize.buffer_tiles) == kernels.quantize.fused


@pytest.mark.parametrize(
    ("name", "froms"),
    [
        ("fp8_current", ["tensor"]),
        ("mxfp8", ["block", "block"]),
        ("fp8_rowwise", ["rows", "columns"]),
        ("nvfp4", ["block"]),
    ],
)
def test_where_amaxes_come_from(name: str, froms: list[str]) -> None:
    kernels = planned(name)
    assert [source.amax_from for source in kernels.sources] == froms
    assert kernels.quantize.batched == ("rows" not in froms)


def test_what_is_fused_and_why_not() -> None:
    assert planned("nvfp4").quantize.fused
    assert planned("mxfp8").sources[0].transposed_into is None  # its codes are read as they are stored
    assert planned("nvfp4").sources[0].transposed_into == "columnwise_data"
    assert "tries several scales" in str(planned("nvfp4_4over6").quantize.not_fused)
    assert "zero points" in str(planned("int4_group32").quantize.not_fused)
    assert "spans a whole axis" in str(planned("int8_rowwise").quantize.not_fused)


def test_moves_say_what_each_buffer_is_made_of() -> None:
    lay_out = planned("nvfp4").lay_out
    assert lay_out is not None
    rowwise, codes, columnwise = lay_out.moves
    assert isinstance(codes, CodeMove)
    assert (codes.transposed, codes.in_words, lay_out.word) == (True, True, 8)
    assert isinstance(rowwise, ScaleMove)
    assert (rowwise.block_m, rowwise.per_m, rowwise.pad_m, rowwise.pad_k, rowwise.transposed) == (16, 1, 128, 4, False)
    assert isinstance(columnwise, ScaleMove)
    assert (columnwise.per_k, columnwise.pad_m, columnwise.pad_k, columnwise.transposed) == (1, 4, 128, True)
    assert columnwise.swizzled
    assert lay_out.planes == ("rowwise_scale", "rowwise_data")
    assert lay_out.padding == (((1, 128), (16, 4)), ((1, 128), (16, 4)))
    assert planned("mxfp8_2d").lay_out is not None


def test_codes_of_four_bits_go_eight_at_a_time_where_a_card_converts() -> None:
    found = {name: planned(name).sources[0].nibbles for name in ("nvfp4", "mxfp4", "int4_group32", "mxfp8")}
    assert found["int4_group32"] is None is found["mxfp8"]
    assert found["nvfp4"] is not None is not found["mxfp4"]
    assert (found["nvfp4"].is_bounded, found["mxfp4"].is_bounded) == (False, True)
    assert found["nvfp4"].card_converts is found["mxfp4"].card_converts is True


@pytest.mark.parametrize("name", RECIPES)
def test_each_format_is_made_and_read(name: str) -> None:
    for source in planned(name).sources:
        q = source.source.quantization
        for fmt, rounding in ((q.element, "nearest"), (q.scale, q.rounding), (q.zero, "nearest")):
            if fmt is None or fmt.is_f32:
                continue
            made, read = encoding(fmt, rounding), decoding(fmt)
            assert read is not None
            assert {made.level, read.level} <= {0, 90, 100}
            assert (made.hardware is None) == (made.level == 0)


def test_a_reason_stands_in_place_of_kernels() -> None:
    layout = with_blocks("fp8_block", 96, 128)
    made = plan_kernels(layout)
    assert made == NoKernels("a program holds blocks of powers of two, and rowwise has 96 x 128")
