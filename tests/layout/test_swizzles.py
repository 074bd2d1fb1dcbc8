"""Swizzles and words of a buffer's own: where codes lie, by plain integers; what follows for cuts, ids and products."""

from __future__ import annotations

import itertools

import pytest

from layoutc.layout.layout import Layout, resolve
from layoutc.plan.plan import Plan, derive
from layoutc.plan.products import operand
from layoutc.report.breaking import differences
from layoutc.report.proofs import prove
from layoutc.spec.checks.read import read_spec
from layoutc.spec.notation import NotationError, parse_buffer_swizzle

AWQ = (0, 2, 4, 6, 1, 3, 5, 7)  # which column is in the lowest four bits of a word, in the next four, ...
SPEC = """\
layoutc: 1
name: made_up
summary: made up by a test
formats:
  i4: {{integer: 4, offset: 8}}
shape: {{{shape}}}
element: {{format: i4, pack: {pack}}}
scale: {{format: f16, rule: scale-first}}
orientations:
  rowwise:
    block: {{m: 1, k: 32}}
    data: {{{data}}}
    scale: {{layout: m k/32}}
"""


def layout(data: str, shape: str = "m: 32, k: 64", pack: str = "low-first") -> Layout:
    spec, found = read_spec(SPEC.format(data=data, shape=shape, pack=pack), "made_up.yaml")
    assert spec is not None, found
    return resolve(spec)


def plan(data: str, shape: str = "m: 32, k: 64") -> Plan:
    return derive(layout(data, shape))


def test_the_order_of_awq() -> None:
    """Words of 32 bits along m, of every column k; column i of a word is in the four bits that AWQ gives it."""
    buffer = layout("layout: k m, swizzle: k (g a b) -> k (g b a), a: 4, b: 2, words: 32").buffers[0]
    m, k = 32, 64
    assert (buffer.shape(m, k), buffer.dtype) == ((k, m // 8), "int32")
    chain = buffer.chain(m, k)
    for i, j in itertools.product(range(m), range(k)):
        word, place = j * (m // 8) + i // 8, AWQ.index(i % 8)
        assert chain.positions((i, j)) == ((word * 4 + place // 2, place % 2 * 4),)
        assert chain.value_at(word * 4 + place // 2, place % 2 * 4) == (i, j)


def test_words_along_the_rows_of_gptq() -> None:
    """qweight (k / 8, m): eight codes of one row of the weight in a word, lowest first."""
    buffer = layout("layout: k m, swizzle: (g w) m -> g (m w), w: 8, words: 32").buffers[0]
    m, k = 32, 64
    assert (buffer.shape(m, k), buffer.dtype) == ((k // 8, m), "int32")
    chain = buffer.chain(m, k)
    for i, j in itertools.product(range(m), range(k)):
        assert chain.positions((i, j)) == (((j // 8 * m + i) * 4 + j % 8 // 2, j % 2 * 4),)


def test_distant_codes_in_one_byte() -> None:
    """GGUF's codes i and i + 16 of 32, and HQQ's halves of the weight, of which the first is in the high bits."""
    of_block = layout("layout: m k, swizzle: m (b h i) -> m (b i h), h: 2, i: 16").buffers[0].chain(4, 64)
    assert of_block.positions((3, 32 + 5)) == ((3 * 32 + 16 + 5, 0),)
    assert of_block.positions((3, 32 + 21)) == ((3 * 32 + 16 + 5, 4),)
    halves = layout("layout: m k, swizzle: (h r) k -> r (k h), h: 2", pack="high-first").buffers[0]
    assert halves.shape(32, 64) == (16, 64)
    assert halves.chain(32, 64).positions((7, 9)) == ((7 * 64 + 9, 0),)
    assert halves.chain(32, 64).positions((16 + 7, 9)) == ((7 * 64 + 9, 4),)


def test_a_list_says_any_order() -> None:
    """What a pattern can say has the same bytes; the other end first, which none can say."""
    by_pattern = layout("layout: k m, swizzle: k (g a b) -> k (g b a), a: 4, b: 2").buffers[0].chain(16, 4)
    by_list = layout(f"layout: k m, swizzle: k (g w) -> k (g w), w: {list(AWQ)}").buffers[0].chain(16, 4)
    assert by_pattern.steps != by_list.steps
    for index in itertools.product(range(16), range(4)):
        assert by_pattern.positions(index) == by_list.positions(index)
    last_first = layout("layout: m k, swizzle: m (g w) -> m (g w), w: [7, 6, 5, 4, 3, 2, 1, 0]").buffers[0].chain(1, 16)
    word = int.from_bytes(bytes(last_first.positions((0, code))[0][0] for code in range(8)), "big")
    assert word == 0x0303020201010000


def test_where_cuts_cost_nothing_follows_from_tiles() -> None:
    """Rows that share a tile or a word stay together, unless padding makes tiles whole; columns do as in planes."""
    awq = plan("layout: k m, swizzle: k (g a b) -> k (g b a), a: 4, b: 2")
    assert (awq.shard_rows, awq.shard_reason) == (8, "8 rows share tiles of rowwise_data")
    assert plan("layout: k m, words: 64").shard_rows == 16
    assert plan("layout: m k, words: 64").shard_rows == 1
    assert plan("layout: m k, swizzle: (g a) k -> g (k a), a: 16").shard_rows == 16
    assert plan("layout: m k, pad: [16, 1], swizzle: (g a) k -> g (k a), a: 16").shard_rows == 1
    for one in (awq, plan("layout: m k, swizzle: (h r) k -> r (k h), h: 2")):
        assert [proof.statement for proof in prove(one) if not proof.holds] == []
        assert [plane.column_multiple for plane in one.layout.planes] == [2, 32]


def test_ids_know_what_a_swizzle_does_and_not_its_names() -> None:
    ids = {
        data: plan(data).layout_id
        for data in (
            "layout: k m",
            "layout: k m, words: 32",
            "layout: k m, swizzle: k (g a b) -> k (g b a), a: 4, b: 2",
            "layout: k m, swizzle: k (g a b) -> k g (b a), a: 4, b: 2",
            "layout: k m, swizzle: k (g a b) -> k (g b a), a: 2, b: 4",
            f"layout: k m, swizzle: k (g w) -> k (g w), w: {list(AWQ)}",
        )
    }
    assert len(set(ids.values())) == len(ids)
    renamed = plan("layout: k m, swizzle: kk (x y z) -> kk (x z y), y: 4, z: 2")
    before = plan("layout: k m, swizzle: k (g a b) -> k (g b a), a: 4, b: 2")
    assert renamed.layout_id == before.layout_id
    assert differences(renamed.layout, before.layout) == ()
    changed = differences(plan("layout: k m").layout, before.layout)
    assert [one.fact for one in changed] == ["rowwise_data.swizzle"]


def test_products_read_no_swizzled_codes() -> None:
    swizzled = layout("layout: m k, swizzle: m (b h i) -> m (b i h), h: 2, i: 16")
    assert operand(swizzled, "rowwise").startswith("scaled_mm has no dtype")
    text = SPEC.replace("i4, pack: {pack}", "e4m3").replace(
        "format: f16, rule: scale-first", "format: e8m0, rule: power-of-two"
    )
    spec, found = read_spec(
        text.format(data="layout: m k, swizzle: (a b) k -> a k b, b: 4", shape="m: 32, k: 32"), "made_up.yaml"
    )
    assert spec is not None, found
    assert operand(resolve(spec), "rowwise") == "its codes are swizzled (a b) k -> a k b"


@pytest.mark.parametrize(
    ("pattern", "sizes", "message"),
    [
        ("m k", {}, "no `->`"),
        ("m (a b) -> m (a b", {"b": 2}, "an unmatched parenthesis"),
        ("m (a b) -> m a b c", {"b": 2}, "`c` does not appear before"),
        ("m (a b) -> m (a b a)", {"b": 2}, "`a` appears twice after"),
        ("m (a m) -> m a", {"a": 2}, "`m` appears twice before"),
        ("m (a b) -> m a b", {"b": (0, 2)}, "`b` must list 0 to 1, each once"),
        ("m (a b) -> m a b", {"b": tuple(range(17))}, "at most 15"),
        ("m (a b) -> m a b", {"b": ()}, "at most 15"),
    ],
)
def test_what_is_no_bijection_is_refused(pattern: str, sizes: dict[str, int | tuple[int, ...]], message: str) -> None:
    with pytest.raises(NotationError, match=message):
        parse_buffer_swizzle(pattern, sizes, 2)


ZEROS = """\
layoutc: 1
name: made_up
summary: made up by a test
formats:
  u4: {integer: 4, offset: 0}
shape: {m: 8, k: 64}
element: {format: u4}
scale: {format: f16, rule: RULE, zero: ZERO}
orientations:
  rowwise:
    block: {m: 1, k: 32}
    data: {layout: m k}
    scale: {layout: k/32 m}
"""


def zeros(rule: str = "min-max", zero: str = "u4", more: str = "") -> Plan:
    spec, found = read_spec(ZEROS.replace("RULE", rule).replace("ZERO", zero) + more, "made_up.yaml")
    assert spec is not None, found
    return derive(resolve(spec))


def test_narrow_zero_points_have_a_byte_in_planes_and_are_packed_in_buffers() -> None:
    """Two rows of one column of blocks in a byte, eight in a word; cuts keep them together."""
    plan = zeros()
    plane, buffer = plan.layout.planes[2], plan.layout.buffers[2]
    assert (plane.shape(16, 128), plane.dtype, plane.nbytes(16, 128), plane.column_multiple) == (
        (16, 4),
        "uint8",
        64,
        32,
    )
    assert (buffer.shape(16, 128), buffer.is_plane) == ((4, 8), False)
    assert buffer.chain(16, 128).positions((5, 3)) == ((3 * 8 + 2, 4),)
    assert buffer.made_by == ("transposed", "packed along m")
    assert (plan.shard_rows, plan.shard_reason) == (2, "2 rows share bytes of rowwise_zero")
    words = zeros(more="    zero: {layout: k/32 m, words: 32}\n")
    assert words.layout.buffers[2].shape(16, 128) == (4, 2)
    assert (words.shard_rows, words.shard_reason) == (8, "8 rows share words of 32 bits of rowwise_zero")
    for one in (plan, words):
        assert [proof.statement for proof in prove(one) if not proof.holds] == []


def test_zero_points_of_16_bits_lie_as_scales_do() -> None:
    plan = zeros(zero="bf16")
    plane, buffer = plan.layout.planes[2], plan.layout.buffers[2]
    assert (plane.dtype, plane.nbytes(16, 128), buffer.shape(16, 128)) == ("bfloat16", 128, (4, 16))
    assert float(plan.forward.bytes_per_element) == 0.5 + 4 / 32


def test_ids_tell_zero_points_from_biases() -> None:
    ids = [zeros(*one).layout_id for one in (("min-max",), ("min-max", "f16"), ("scale-and-bias", "f16"))]
    assert len({*ids, zeros(more="    zero: {layout: k/32 m, words: 32}\n").layout_id}) == 4
