"""Cuts: exact where they cross no block and no byte, refused elsewhere; pieces and base write to the same bytes."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_cases import BLOCKED, RECIPES, SHARED, each_recipe, is_plain, make, module, same_bits, snapshot, weight
from torch import Tensor

import layoutc
from layoutc.runtime.errors import LayoutError, UnsupportedOperator
from layoutc.runtime.storage.planes import ScatteredPlanes
from layoutc.runtime.weight.tensor import QuantizedTensor

Cut = Callable[[Tensor], Tensor]

MATRIX: dict[str, Cut] = {
    "slice_rows": lambda x: x[128:],
    "slice_rows_negative": lambda x: x[-128:],
    "slice_all": lambda x: x[:],
    "slice_past_the_end": lambda x: x[128:1000],
    "slice_columns": lambda x: x[:, 128:],
    "slice_both": lambda x: x[128:, :128],
    "narrow_rows": lambda x: x.narrow(0, 128, 128),
    "narrow_columns": lambda x: x.narrow(1, 128, 128),
    "chunk_rows": lambda x: x.chunk(2)[1],
    "chunk_columns": lambda x: x.chunk(2, dim=1)[1],
    "split_rows": lambda x: x.split(128)[1],
    "split_columns": lambda x: x.split(128, dim=-1)[1],
    "split_larger": lambda x: x.split(300)[0],
    "split_with_sizes": lambda x: x.split([128, 0, 128])[2],
    "split_with_sizes_columns": lambda x: x.split([128, 128], dim=1)[0],
    "rows_of_transposed": lambda x: x.t()[128:],
    "columns_of_transposed": lambda x: x.t()[:, 128:],
    "split_of_transposed": lambda x: x.t().split(128)[1],
    "piece_of_a_piece": lambda x: x[:, :128][128:],
    "flat_range": lambda x: x.view(-1)[128 * 256 :],
    "row_tail": lambda x: x[128:].flatten()[: 128 * 256].view(128, 256),
}
EXPERTS: dict[str, Cut] = {
    "select": lambda x: x[1],
    "select_negative": lambda x: x[-1],
    "slice_experts": lambda x: x[1:3],
    "narrow_experts": lambda x: x.narrow(0, 2, 2),
    "split_experts": lambda x: x.split(2)[1],
    "chunk_experts": lambda x: x.chunk(4)[3],
    "slice_columns": lambda x: x[..., 128:],
    "select_then_columns": lambda x: x[2][:, :128],
    "select_then_transpose": lambda x: x[2].t(),
    "transpose_then_select": lambda x: x.transpose(1, 2)[2],
    "transpose_then_columns": lambda x: x.transpose(1, 2)[:, 128:],
    "merge_then_rows": lambda x: x.flatten(0, 1)[128:256],
    "unbind": lambda x: x.unbind(0)[2],
    "iterate": lambda x: list(x)[3],
    "rows_of_one_expert": lambda x: x[1:2][:, :128],
}


def offset_in(base: QuantizedTensor, piece: QuantizedTensor) -> bool:
    """True when every plane of the piece lies in the storage of the base's plane."""
    planes = base.planes()
    return all(
        p.untyped_storage().data_ptr() == planes[n].untyped_storage().data_ptr() for n, p in piece.planes().items()
    )


@each_recipe
@pytest.mark.parametrize(("shape", "cuts"), [((256, 256), MATRIX), ((4, 128, 256), EXPERTS)], ids=["matrix", "experts"])
def test_an_aligned_cut_is_exact(recipe: str, shape: tuple[int, ...], cuts: dict[str, Cut]) -> None:
    """The piece has the class, the base's storages, and the values of the same cut of the dequantized tensor: of rows
    and of columns, of the weight and of its transpose. Leading dims are rows too; one expert of many is a view."""
    q = make(recipe, *shape)
    plain = q.dequantize()
    for name, cut in cuts.items():
        with layoutc.strict():
            piece, expected = cut(q), cut(plain)
        assert isinstance(piece, type(q)), name
        assert piece.shape == expected.shape, name
        assert same_bits(piece.dequantize(), expected), name
        assert offset_in(q, piece), name
        assert piece.buffers().keys() == q.buffers().keys(), name


@each_recipe
def test_a_cut_of_quantized_is_the_quantized_cut(recipe: str) -> None:
    """The piece's buffers, padding included, are those of quantizing its rows under the same amax."""
    q, layout = make(recipe), module(recipe).LAYOUT
    rows = layout.shard_rows
    x = weight(256, 256)
    amax = {"amax": x.abs().amax().reshape(1)} if layout.shares_amax else {}
    expected = module(recipe).quantize(x[rows : 2 * rows], **amax)
    piece = q[rows : 2 * rows]
    for name, buffer in expected.buffers().items():
        assert same_bits(piece.buffers()[name].contiguous(), buffer.contiguous()), name


@each_recipe
@pytest.mark.parametrize("cut", ["slice_rows", "slice_columns", "split_rows", "rows_of_transposed", "flat_range"])
def test_a_quantized_piece_written_is_seen_by_the_base_alone_where_it_lies(recipe: str, cut: str) -> None:
    """Bytes of equal scales written through a piece change its part of the base and nothing else."""
    base = make(recipe)
    other = base.clone()
    with torch.no_grad():
        for name, plane in other.planes().items():
            if base.LAYOUT.stored[name].rows_per_value is not None:
                plane.copy_(plane.flip(0, 1))
    expected = base.dequantize()
    MATRIX[cut](expected).copy_(MATRIX[cut](other.dequantize()))
    MATRIX[cut](base).copy_(MATRIX[cut](other))
    assert same_bits(base.dequantize(), expected)


@each_recipe
def test_the_base_written_is_seen_by_pieces(recipe: str) -> None:
    """Pieces hold no bytes of their own."""
    base, other = make(recipe), make(recipe, seed=1)
    pieces = {name: cut(base) for name, cut in MATRIX.items()}
    base.copy_(other)
    for name, piece in pieces.items():
        assert same_bits(piece.dequantize(), MATRIX[name](other.dequantize())), name


@each_recipe
@pytest.mark.parametrize("write", ["copy_plain", "copy_quantized", "zero_", "add_", "out"])
def test_new_values_in_a_piece_leave_the_rest_of_the_base_as_it_was(recipe: str, write: str) -> None:
    """A piece does not overwrite what all rows share: the rest keeps its values, or the write is refused."""
    base = make(recipe)
    piece, before, bytes_before = base[:128], base.dequantize(), snapshot(base)
    writes: dict[str, Callable[[], object]] = {
        "copy_plain": lambda: piece.copy_(torch.full((128, 256), 1e-3)),
        "copy_quantized": lambda: piece.copy_(make(recipe, 128, 256, seed=3)),
        "zero_": lambda: piece.zero_(),
        "add_": lambda: piece.add_(1000.0),
        "out": lambda: module(recipe).quantize(torch.full((128, 256), 1e-3), out=piece),
    }
    refused, now = "", before
    try:
        writes[write]()
        now = base.dequantize()
    except LayoutError as error:
        refused = str(error)
    if refused:
        assert recipe in SHARED, "only a recipe whose blocks share something may refuse"
        assert recipe in refused
        assert all(same_bits(plane, bytes_before[name]) for name, plane in base.planes().items()), "nothing has changed"
    assert same_bits(now[128:], before[128:])


@each_recipe
def test_an_empty_slice_has_the_class_and_no_rows(recipe: str) -> None:
    """Short and empty shards are cut like that."""
    q = make(recipe)
    for piece in [q[0:0], q[256:], q[64:64], q[7:7], q[300:], q.narrow(0, 32, 0), q[10:3]]:
        assert type(piece) is type(q)
        assert piece.shape == (0, 256)
        assert piece.dequantize().shape == (0, 256)
        assert piece.numel() == 0
        assert piece[0:0].shape == (0, 256)
        assert piece.view(-1).shape == (0,)
    assert q[:, 0:0].shape == (256, 0)
    assert q[:, 0:0].dequantize().shape == (256, 0)
    assert make(recipe, 4, 128, 256)[2:2].dequantize().shape == (0, 128, 256)


@pytest.mark.parametrize("recipe", BLOCKED)
def test_a_cut_inside_a_block_of_rows_reads_exactly_and_shares_the_bytes(recipe: str) -> None:
    """The piece's planes cover the blocks that it has rows of."""
    q, multiple = make(recipe), module(recipe).LAYOUT.block_rows
    half = multiple // 2
    cuts: list[Cut] = [
        lambda x: x[half:],
        lambda x: x[: multiple + half],
        lambda x: x.narrow(0, multiple, half),
        lambda x: x[3:4],
        lambda x: x[5],
        lambda x: x.split([half, 256 - half])[0],
        lambda x: x.t()[:, half:],
        lambda x: x.view(-1)[half * 256 :],
        lambda x: x[1:][half:][1 : multiple + 2],
        lambda x: x[3 : multiple + 9].clone()[2:],
    ]
    for cut in cuts:
        piece, plain = cut(q), cut(q.dequantize())
        assert type(piece) is type(q)
        assert same_bits(piece.dequantize(), plain)
        assert same_bits(pickle.loads(pickle.dumps(piece)).dequantize(), plain)
        assert torch.equal(piece, piece.clone())


@pytest.mark.parametrize("recipe", BLOCKED)
def test_a_part_of_a_block_is_not_written(recipe: str) -> None:
    """Its scale is that of the rest of the block too. The same scale may be written again.

    Quantized bytes with another scale wait for the rest of the block, and the weight can't be read meanwhile.
    """
    q, half = make(recipe), module(recipe).LAYOUT.block_rows // 2
    before, whole, other = snapshot(q), q.clone(), module(recipe).quantize(8.0 * torch.randn(256, 256))
    cuts: list[Cut] = [lambda x: x[half:], lambda x: x[: 3 * half], lambda x: x[1:2]]
    for cut in cuts:
        piece = cut(q)
        with pytest.raises(UnsupportedOperator, match="quantize the whole weight"):
            piece.copy_(torch.zeros(piece.shape))
        with pytest.raises(UnsupportedOperator, match="quantize the whole weight"):
            piece.zero_()
        with pytest.raises(LayoutError, match="cut inside a block"):
            piece.buffers()
        piece.copy_(cut(other))
        for read in (q.dequantize, piece.dequantize, q.clone, lambda: pickle.dumps(q)):
            with pytest.raises(LayoutError, match="whose scales also cover rows"):
                read()
        q.copy_(whole)
        piece.copy_(piece.clone())
        assert all(same_bits(plane, before[name]) for name, plane in q.planes().items())


@pytest.mark.parametrize("recipe", BLOCKED)
def test_a_piece_takes_the_place_of_all_that_wait_below_it(recipe: str) -> None:
    """Two pieces of another weight that were copied into it before leave no trace."""
    q, half = make(recipe), module(recipe).LAYOUT.block_rows // 2
    earlier, later = (module(recipe).quantize(scale * weight(256, 256, seed=3)) for scale in (8.0, 0.125))
    for cut in (slice(0, half // 2), slice(half // 2, half)):
        q[cut].copy_(earlier[cut].clone())
    q[:half].copy_(later[:half].clone())
    with pytest.raises(LayoutError, match="whose scales also cover rows"):
        q.dequantize()
    q[half:].copy_(later[half:].clone())
    assert torch.equal(q, later)


@each_recipe
def test_plain_values_are_not_copied_into_a_transpose(recipe: str) -> None:
    q = make(recipe)
    before = snapshot(q)
    with pytest.raises(UnsupportedOperator, match=r"copy_.* is transposed; copy into the weight itself"):
        q.t().copy_(torch.zeros(256, 256))
    assert all(same_bits(plane, before[name]) for name, plane in q.planes().items())


@pytest.mark.parametrize("recipe", BLOCKED)
def test_a_cut_inside_a_block_of_columns_is_refused_with_operator_shape_and_multiple(recipe: str) -> None:
    """A wrong tensor never comes of it, nor of a cut inside a byte."""
    q, multiple = make(recipe), module(recipe).LAYOUT.column_multiple
    pattern = rf"(?s)aten\.\w+.*columns.*\(256, 256\).*{recipe}.*multiples of {multiple} columns"
    cuts: list[Cut] = [
        lambda x: x[:, 1:],
        lambda x: x[:, : multiple + multiple // 2],
        lambda x: x.narrow(1, multiple // 2, multiple),
        lambda x: x.split([3, 253], dim=1)[0],
        lambda x: x.split(multiple // 2, dim=1)[0],
        lambda x: x.t()[multiple // 2 :],
    ]
    for cut in cuts:
        with pytest.raises(UnsupportedOperator, match=pattern):
            cut(q)


@each_recipe
def test_steps_and_scattered_rows_are_refused(recipe: str) -> None:
    """No view of bytes has them."""
    q, experts = make(recipe), make(recipe, 4, 128, 256)
    with pytest.raises(UnsupportedOperator, match=r"slice.*\(256, 256\).*step 2"):
        q[::2]
    with pytest.raises(UnsupportedOperator, match=r"slice.*step 2"):
        q[:, ::2]
    if recipe in BLOCKED:
        with pytest.raises(UnsupportedOperator, match=r"1 of each 128 rows.*for a plain copy, call \.dequantize\(\)"):
            experts[:, 0]
    for cut in (lambda: q[:, 0], lambda: q.t()[0], lambda: q[0, :4]):
        with pytest.raises(UnsupportedOperator, match=r"(select|slice).*for a plain copy, call \.dequantize\(\)"):
            cut()


@each_recipe
def test_rows_of_each_expert_are_read_and_take_bytes_in_whole_blocks(recipe: str) -> None:
    """Scales that all rows share wait for the last of them."""
    block = module(recipe).LAYOUT.block_rows
    source, target = make(recipe, 3, 2 * block, 256), make(recipe, 3, 2 * block, 256)
    with torch.no_grad():
        target.copy_(100 * torch.randn(target.shape, generator=torch.Generator().manual_seed(9)))
        assert same_bits(source[:, block:].dequantize(), source.dequantize()[:, block:])
        target[:, block:].copy_(source[:, block:])
        if recipe in SHARED:
            with pytest.raises(LayoutError, match="whose scales also cover"):
                target.dequantize()
        target[:, :block].copy_(source[:, :block].clone())
        assert torch.equal(target, source)
        if block > 1:
            for cut in (lambda x: x[:, : block - 1], lambda x: x[:, block // 2 :], lambda x: x.narrow(1, 1, block)):
                with pytest.raises(UnsupportedOperator, match=f"where the cuts fall, must be multiples of {block}"):
                    cut(source)


@each_recipe
def test_one_column_of_experts_is_exact_or_refused(recipe: str) -> None:
    """It is a view where a column is a block of its own."""
    experts = make(recipe, 4, 128, 256)
    if recipe in BLOCKED:
        with pytest.raises(UnsupportedOperator, match="select"):
            experts[..., 3]
    else:
        assert same_bits(experts[..., 3].dequantize(), experts.dequantize()[..., 3])


@each_recipe
def test_indices_out_of_range_are_refused_as_torch_refuses_them(recipe: str) -> None:
    """An IndexError; a RuntimeError for sizes that do not add up."""
    q = make(recipe, 4, 128, 256)
    for index in (4, -5):
        with pytest.raises(IndexError):
            q[index]
    with pytest.raises(RuntimeError):
        q.split([2, 3])
    with pytest.raises(RuntimeError):
        q.narrow(0, 3, 2)
    with pytest.raises((IndexError, RuntimeError)):
        q.narrow(5, 0, 1)


@pytest.mark.parametrize("recipe", ["fp8_block"])
@pytest.mark.parametrize("shape", [(300, 200), (129, 1), (1, 129), (127, 127)])
def test_ragged_tails_are_cut_with_their_short_block(recipe: str, shape: tuple[int, int]) -> None:
    """The last block may be short, and goes with the last piece."""
    q = make(recipe, *shape)
    plain = q.dequantize()
    for dim in (0, 1):
        for piece, expected in zip(q.split(128, dim=dim), plain.split(128, dim=dim), strict=True):
            assert same_bits(piece.dequantize(), expected)
    assert same_bits(q[127:].dequantize(), plain[127:])
    assert same_bits(q[: shape[0] - 1].dequantize(), plain[: shape[0] - 1])


STEPS = st.one_of(
    st.tuples(st.just("rows"), st.integers(0, 8), st.integers(0, 8)),
    st.tuples(st.just("columns"), st.integers(0, 4), st.integers(0, 4)),
    st.tuples(st.just("odd"), st.integers(0, 140), st.integers(0, 140)),
    st.tuples(st.just("select"), st.integers(-4, 3), st.just(0)),
    st.tuples(st.just("view"), st.sampled_from([1, 2, 3, 4, 8]), st.just(0)),
    st.tuples(st.just("flat"), st.just(0), st.just(0)),
    st.tuples(st.just("merge"), st.just(0), st.just(0)),
    st.tuples(st.just("transpose"), st.just(0), st.just(0)),
    st.tuples(st.just("unsqueeze"), st.integers(-3, 2), st.just(0)),
    st.tuples(st.just("squeeze"), st.just(0), st.just(0)),
    st.tuples(st.just("chunk"), st.integers(1, 5), st.integers(0, 4)),
    st.tuples(st.just("inner"), st.integers(0, 4), st.integers(0, 4)),
)


def apply(x: Tensor, step: tuple[str, int, int], unit: int) -> Tensor:
    """One step of a chain of views, in terms that any shape understands."""
    kind, a, b = step
    calls: dict[str, Cut] = {
        "rows": lambda x: x[a * unit : b * unit],
        "columns": lambda x: x[..., a * unit : b * unit],
        "odd": lambda x: x[a:b],
        "select": lambda x: x[a],
        "view": lambda x: x.view(a, -1, *x.shape[1:]),
        "flat": lambda x: x.view(-1),
        "merge": lambda x: x.flatten(0, 1),
        "transpose": lambda x: x.transpose(-1, -2),
        "unsqueeze": lambda x: x.unsqueeze(a),
        "squeeze": lambda x: x.squeeze(),
        "chunk": lambda x: x.chunk(a)[b % a],
        "inner": lambda x: x.narrow(1, a, b),
    }
    return calls[kind](x)


@pytest.mark.sample(2)
@pytest.mark.parametrize("recipe", RECIPES)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(shape=st.sampled_from([(256, 128), (4, 128, 128), (2, 2, 64, 128)]), steps=st.lists(STEPS, max_size=6))
def test_any_accepted_chain_of_views_commutes_with_dequantize(
    recipe: str, shape: tuple[int, ...], steps: list[tuple[str, int, int]]
) -> None:
    """What is not refused is exact, aliases the base, and is accepted for plain tensors too."""
    q = make(recipe, *shape)
    before = snapshot(q)
    unit = module(recipe).LAYOUT.shard_rows
    view, plain = q, q.dequantize()
    with layoutc.strict():
        for step in steps:
            try:
                view = apply(view, step, unit)
            except (RuntimeError, IndexError, ValueError):
                break
            if plain.dim() == 1 and step[0] == "transpose":
                break
            try:
                plain = apply(plain, step, unit)
            except RuntimeError:  # the quantized piece is compact to the outside, whatever its planes' strides
                plain = apply(plain.contiguous(), step, unit)
            assert type(view) is type(q)
            assert view.shape == plain.shape
            assert same_bits(view.dequantize(), plain)
            assert offset_in(q, view) or isinstance(view.store.planes, ScatteredPlanes)  # rows that no strides reach
    assert all(same_bits(plane, before[name]) for name, plane in q.planes().items())


@pytest.mark.parametrize("recipe", SHARED)
def test_a_part_that_was_waited_for_is_still_a_part(recipe: str) -> None:
    """What it shares with the rest of the weight covers more than it: no plain values, and no other amax."""
    tensor = make(recipe)
    before, part = snapshot(tensor), tensor[:128]
    waited = torch.ops._c10d_functional.wait_tensor(part)
    assert same_bits(waited.dequantize(), part.dequantize())
    for write in (lambda: waited.copy_(torch.ones(waited.shape)), lambda: waited.mul_(3)):
        with pytest.raises(UnsupportedOperator, match="is a part of a weight whose scale covers more than the part"):
            write()
    assert all(torch.equal(plane, tensor.planes()[plane_name]) for plane_name, plane in before.items())


@each_recipe
def test_rows_of_each_entry_are_joined_as_bytes(recipe: str) -> None:
    """On a dim between, where they are whole blocks: the inverse of a cut there."""
    whole = make(recipe, 3, 256, 128)
    with layoutc.strict():
        joined = torch.cat([piece.clone() for piece in whole.split(128, 1)], 1)
    assert type(joined) is type(whole)
    assert joined.shape == whole.shape
    assert all(same_bits(plane, joined.planes()[name]) for name, plane in whole.planes().items())


HEADS: dict[str, Callable[[Tensor, int, int], list[Tensor]]] = {  # of (kv heads, query heads + 2, rows, k)
    "slices": lambda w, queries, rows: [w[:, :queries], w[:, queries], w[:, queries + 1]],
    "select": lambda w, queries, rows: [w[:, :queries], w.select(1, -2), w.select(1, queries + 1)],
    "split": lambda w, queries, rows: list(w.split([queries, 1, 1], 1)),
    "unbind": lambda w, queries, rows: list(w.unbind(1)),
}


@each_recipe
@pytest.mark.parametrize("how", HEADS)
def test_heads_of_a_fused_weight_are_cut_out_and_joined_as_bytes(recipe: str, how: str) -> None:
    """Query, key and value heads in turn, as grouped attention stores them: what is cut out lies in several places."""
    rows, queries = max(16, module(recipe).LAYOUT.block_rows), 2
    whole = make(recipe, 3 * (queries + 2) * rows, 256)
    with layoutc.strict():
        heads = HEADS[how](whole.view(3, queries + 2, rows, 256), queries, rows)
        expected = HEADS[how](whole.dequantize().view(3, queries + 2, rows, 256), queries, rows)
        for head, values in zip(heads, expected, strict=True):
            assert head.shape == values.shape
            assert same_bits(head.reshape(-1, 256).dequantize(), values.reshape(-1, 256))
            assert same_bits(head.reshape(-1, 256).contiguous().dequantize(), values.reshape(-1, 256))
        joined = torch.cat([head.clone().view(3, -1, rows, 256) for head in heads], 1).reshape(-1, 256)
    assert type(joined) is type(whole)
    assert all(same_bits(plane, joined.planes()[name]) for name, plane in whole.planes().items())


@pytest.mark.parametrize("recipe", BLOCKED)
def test_rows_of_entries_that_share_a_block_are_joined_as_values(recipe: str) -> None:
    """On a dim between, where a block covers rows of two entries: no copy of its scale fits what is joined."""
    whole = make(recipe, 2, module(recipe).LAYOUT.block_rows // 2, 128)
    joined = torch.cat([whole, whole], 1)
    assert is_plain(joined)
    assert same_bits(joined, torch.cat([whole.dequantize()] * 2, 1))


@each_recipe
def test_weights_travel_neither_transposed_nor_flattened(recipe: str) -> None:
    """A rank that receives planes takes them for rows, so this is said before anything is sent; square ones too."""
    functional = torch.ops._c10d_functional
    for tensor in (make(recipe).t(), make(recipe, 256, 128).t(), make(recipe).view(-1)):
        for send in (lambda t: functional.all_gather_into_tensor(t, 2, ""), lambda t: functional.broadcast(t, 0, "")):
            with pytest.raises(LayoutError, match=r"must be sent as rows of .* columns, not transposed or flattened"):
                send(tensor)


OF_STACKS: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "view_as_matrix": lambda w: [w.view(-1, 64)],
    "view_of_other_matrices": lambda w: [w.view(2, 64, 64)],
    "view_of_halves": lambda w: [w.view(8, 16, 64)],
    "flatten": lambda w: [w.flatten(0, 1)],
    "unflatten": lambda w: [w.unflatten(1, (2, 16))],
    "unsqueeze": lambda w: [w.unsqueeze(2)],
    "flat": lambda w: [w.view(-1)],
    "chunk": lambda w: list(w.chunk(2)),
    "split": lambda w: list(w.flatten(0, 1).split(64)),
    "select_and_slice": lambda w: [w[0], w[1:].view(-1, 64)],
    "slices_of_slices": lambda w: [w[1:][1:].reshape(-1, 64), w.view(-1, 64)[:64]],
}


def stack_of_sizes(use: Callable[[Tensor, Tensor], object]) -> dict[str, Tensor]:
    """All planes of a stack of matrices, each of a size of its own, after something was written into it."""
    torch.manual_seed(0)
    values = torch.randn(4, 32, 64) * torch.tensor([1.0, 8.0, 64.0, 512.0])[:, None, None]
    q = module("nvfp4_modelopt_experts").quantize(torch.zeros(4, 32, 64))
    with torch.no_grad():
        use(q, values)
    return snapshot(q)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", OF_STACKS)
def test_what_is_written_through_a_view_of_a_stack_keeps_an_amax_for_each_matrix(name: str) -> None:
    """By copy_, by in-place arithmetic, by foreach, and by compiled graphs, into views made inside and outside."""
    cut = OF_STACKS[name]
    expected = stack_of_sizes(lambda q, x: q.copy_(x))
    whole = stack_of_sizes(lambda q, x: q.copy_(x / 2).mul_(2))

    def copied(q: Tensor, x: Tensor) -> None:
        with torch.no_grad():
            for into, values in zip(cut(q), cut(x), strict=True):
                into.copy_(values)

    def doubled(q: Tensor, x: Tensor) -> None:
        q.copy_(x / 2)
        for part in cut(q):
            part.mul_(2)

    def outside(q: Tensor, x: Tensor) -> None:
        compiled = torch.compile(torch.Tensor.copy_, backend="aot_eager", fullgraph=True)
        for into, values in zip(cut(q), cut(x), strict=True):
            compiled(into, values)

    def at_once(q: Tensor, x: Tensor) -> None:
        torch._foreach_copy_(cut(q), cut(x))

    for use in (copied, doubled, at_once, torch.compile(copied, backend="aot_eager", fullgraph=True), outside):
        torch._dynamo.reset()
        found = stack_of_sizes(use)
        assert all(torch.equal(found[key], one) for key, one in (whole if use is doubled else expected).items()), use


def test_rows_of_a_stack_are_those_of_one_matrix_or_of_whole_ones() -> None:
    """Half of a matrix has an amax of its own, as files have one for gate and one for up; what ends inside a matrix is
    refused before anything is written."""
    halves = stack_of_sizes(lambda q, x: [q[i, rows].copy_(x[i, rows]) for i in range(4) for rows in HALVES])
    apart = stack_of_sizes(lambda q, x: q.copy_(x))
    assert not torch.equal(halves["rowwise_level"], apart["rowwise_level"])

    def across(q: Tensor, x: Tensor) -> None:
        before = snapshot(q)  # type: ignore[arg-type]
        with pytest.raises(UnsupportedOperator, match=r"48 rows of a stack .* each matrix of 32 rows, .*write whole"):
            q.view(-1, 64)[:48].copy_(x.view(-1, 64)[:48])
        assert all(torch.equal(one, before[name]) for name, one in snapshot(q).items())  # type: ignore[arg-type]

    stack_of_sizes(across)


HALVES = (slice(0, 16), slice(16, 32))
