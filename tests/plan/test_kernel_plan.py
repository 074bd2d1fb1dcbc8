"""The plan of kernels, without a template: where amaxes come from, what is fused and batched, moves, tiles, gaps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from numpy_models import RECIPES, layout_of, recipe_layout, variant
from places import SPECS, UNSHIPPED

from layoutc.layout.layout import Block, Layout
from layoutc.plan.conversions import decoding, encoding
from layoutc.plan.kernels import Kernels, NoKernels, QuantizeKernel, plan_kernels
from layoutc.plan.moves import CodeMove, ScaleMove
from layoutc.plan.units import Units, covered, sizes_of, steps, units_of


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


@pytest.mark.sample(12)
@pytest.mark.parametrize(
    "path", [*sorted(SPECS.glob("*.yaml")), *sorted(UNSHIPPED.rglob("*.yaml"))], ids=lambda one: one.stem
)
def test_a_thread_has_one_piece_of_a_row_where_codes_are_stored_in_bytes(path: Path) -> None:
    """Two would be mixed up by Triton's exchange of bytes within a warp; nf4 was, from fp32, on an H100."""
    kernels = plan_kernels(layout_of(path.read_text(encoding="utf-8"), path.stem))
    if isinstance(kernels, NoKernels) or isinstance(kernels.quantize, NoKernels):
        return
    for tiles in (kernels.quantize.tiles, kernels.quantize.buffer_tiles):
        for _, written, tile in tiles:
            sources = [one for one, is_written in zip(kernels.sources, written, strict=True) if is_written]
            if any(one.source.data.bits < 8 and one.nibbles is None for one in sources):
                assert tile.pieces == 1, (written, tile)


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
    assert kernels.quantize.batched


def test_whole_rows_and_tall_blocks_take_a_launch_each() -> None:
    kernels = planned("fp8_channel_bf16")
    assert kernels.quantize.batched
    assert {written for _, written, _ in kernels.quantize.tiles} == {(True, False), (False, True)}
    assert (True, True) in {written for _, written, _ in planned("fp8_rowwise").quantize.tiles}


def test_what_is_fused() -> None:
    assert planned("nvfp4").quantize.fused
    assert planned("mxfp8").sources[0].transposed_into is None  # its codes are read as they are stored
    assert planned("nvfp4").sources[0].transposed_into == "columnwise_data"
    assert not any(planned(name).quantize.fused for name in ("nvfp4_4over6", "int4_group32", "int8_rowwise"))


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


def unshipped(name: str) -> Kernels:
    """The plan of a recipe in tests/unshipped."""
    made = plan_kernels(layout_of((UNSHIPPED / f"{name}.yaml").read_text(encoding="utf-8"), name))
    assert isinstance(made, Kernels)
    return made


def test_blocks_that_are_no_powers_of_two_are_cut_into_units() -> None:
    assert units_of(Block(24, 96)) == Units((8, 32), (3, 3))
    assert units_of(Block(12, 128)) == Units((4, 128), (3, 1))
    assert units_of(Block(None, 100)) == Units((0, 4), (1, 25))
    assert units_of(Block(16, 1)) is None is units_of(Block(None, None))
    assert unshipped("fp8_square24").sources[0].units == Units((8, 8), (3, 3))
    assert [source.units for source in unshipped("int4_rows").sources] == [None, Units((4, 1), (5, 1))]


@pytest.mark.parametrize("path", sorted(UNSHIPPED.glob("*.yaml")), ids=lambda path: path.stem)
def test_tiles_cover_whole_blocks_of_all_sources_and_whole_words(path: Path) -> None:
    """Of as few rows and columns as sources need that are written; sizes of tiles are powers of two."""
    kernels = unshipped(path.stem)
    for size, written, tile in kernels.quantize.tiles:
        rows, columns = tile.covers or (tile.rows, tile.columns)
        assert tile.rows & (tile.rows - 1) == 0 == tile.columns & (tile.columns - 1)
        assert tile.rows // 2 < rows <= tile.rows, "half of a tile is not idle along an axis"
        assert tile.columns // 2 < columns <= tile.columns
        chosen = [source for source, is_written in zip(kernels.sources, written, strict=True) if is_written]
        for source in chosen:
            block = source.source.quantization.block
            assert rows % (block.m or 1) == 0 == columns % (block.k or 1), (size, written)
            assert columns * source.source.data.bits % 8 == 0
        assert (tile.covers is None) == all(source.units is None for source in chosen)
    assert not kernels.quantize.fused
    for orientation, tile in kernels.dequantize_tiles:
        units = next(source.units for source in kernels.sources if orientation in source.serves)
        assert units is None or all(
            not one or size % one == 0 for size, one in zip((tile.rows, tile.columns), units.sizes, strict=True)
        )


@pytest.mark.parametrize(
    ("step", "most", "size", "cover"),
    [
        ((24, 24), 8192, (32, 256), (24, 240)),
        ((1, 96), 8192, (8, 1024), (8, 960)),
        ((48, 48), 4096, (64, 64), (48, 48)),
        ((20, 8), 8192, (64, 128), (60, 128)),
        ((12, 128), 8192, (64, 128), (60, 128)),
        ((5000, 1), 4096, (8192, 1), (5000, 1)),
    ],
)
def test_tiles_waste_few_lanes(step: tuple[int, int], most: int, size: tuple[int, int], cover: tuple[int, int]) -> None:
    assert sizes_of(step, most) == size
    assert covered(size, step) == cover


def test_a_tile_holds_whole_words_where_any_source_has_units() -> None:
    """Also where blocks of another source have none; where none has, tiles are powers of two, which hold words."""
    text = (
        "layoutc: 1\nname: mixed\nsummary: blocks with units and without\nshape: {m: 8, k: 8}\n"
        "element: {format: e2m1, pack: low-first}\nscale: {format: e8m0, rule: power-of-two, round: up}\n"
        "orientations:\n"
        "  rowwise:\n    block: {m: 1, k: 2}\n    data: {layout: m k}\n    scale: {layout: m k/2}\n"
        "  columnwise:\n    block: {m: 24, k: 1}\n    data: {layout: k m}\n    scale: {layout: k m/24}\n"
    )
    sources = layout_of(text, "mixed").sources
    assert [units_of(source.quantization.block) is None for source in sources] == [True, False]
    assert steps(sources) == (24, 8)
    assert steps(sources[:1]) == (1, 2)


SUPER_ROWS = """
layoutc: 1
name: super_rows
summary: super-blocks of eight rows beside blocks of five
element: {format: e4m3}
scale: {format: e4m3, rule: scale-first, super: {format: bf16, rule: scale-first, block: {m: 8, k: 2}}}
orientations:
  rowwise: {block: {m: 4, k: 2}, data: {layout: m k}, scale: {layout: m/4 k/2}}
  columnwise:
    block: {m: 5, k: 1}
    data: {layout: k m}
    scale: {layout: k m/5}
    quantize: {scale: {format: f32, rule: amax-over-max, nan-scale: true}}
shape: {m: 40, k: 8}
"""


def test_a_tile_holds_whole_super_blocks_where_any_source_has_units() -> None:
    """Tiles of 60 rows cut every other super-block in two."""
    sources = layout_of(SUPER_ROWS, "super_rows").sources
    assert steps(sources) == (40, 2)
    assert steps(sources[1:]) == (5, 1)


def test_ranges_of_whole_rows_come_from_a_pass_before_the_launch() -> None:
    source = unshipped("int4_rows").sources[0]
    assert (source.amax_from, source.inputs.block_range) == ("rows", True)


def test_a_reason_stands_in_place_of_kernels() -> None:
    made = plan_kernels(with_blocks("fp8_block", 160, 80))
    assert made == NoKernels("a program holds up to 16384 elements, and rowwise has 160 x 80 in 256 x 128 lanes")


TALL = """
layoutc: 1
name: tall
summary: columnwise blocks of 128 rows, whose scales are stored for every two
element: {format: e2m1, pack: low-first}
scale: {format: e8m0, rule: power-of-two, round: nearest}
orientations:
  rowwise: {block: {m: 4, k: 8}, data: {layout: m k}, scale: {layout: k/4 m, pad: [7, 16]}}
  columnwise: {block: {m: 128, k: 16}, data: {layout: k m}, scale: {layout: k m/2, pad: [7, 7]}}
shape: {m: 128, k: 128}
"""


def test_a_tile_of_transposed_codes_of_four_bits_holds_tall_blocks() -> None:
    """They had tiles of 64 rows, and of 32."""
    kernels = plan_kernels(layout_of(TALL, "tall"))
    assert isinstance(kernels, Kernels)
    assert isinstance(kernels.quantize, QuantizeKernel)
    tall = [tile for _, (_, columnwise), tile in kernels.quantize.buffer_tiles if columnwise]
    assert tall
    assert all(tile.rows % 128 == 0 for tile in tall)


EIGHT_BUFFERS = """
layoutc: 1
name: eight
summary: a scale and an offset for scales, in both orientations, none in the weight's order
element: {format: e4m3}
scale:
  format: dynamic8
  rule: scale-first
  unrounded: true
  super: {format: f32, rule: scale-first, offset: mean, block: {m: 20, k: 1}}
orientations:
  rowwise: {block: {m: 5, k: 1}, data: {layout: k m}, scale: {layout: m/5 k, pad: [1, 16]}}
  columnwise: {block: {m: 5, k: 1}, data: {layout: k m, pad: [5, 16]}, scale: {layout: m/5 k, pad: [1, 16]}}
"""


def test_more_buffers_than_a_launch_takes_are_laid_out_by_the_reference() -> None:
    """The launch had two arguments too many."""
    kernels = plan_kernels(layout_of(EIGHT_BUFFERS, "eight"))
    assert isinstance(kernels, Kernels)
    assert isinstance(kernels.lay_out, NoKernels)
    assert kernels.lay_out.reason == "a launch makes up to 6 buffers, and the recipe has 8 that are no planes"
