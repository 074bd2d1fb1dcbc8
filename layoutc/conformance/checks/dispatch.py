"""Operators on quantized tensors: exact on bytes if the plan says so, otherwise refused or counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import layoutc
from layoutc.conformance import as_fsdp2
from layoutc.conformance.material import expect, expect_refused, expect_same, expect_same_all, weight
from layoutc.conformance.registry import check
from layoutc.conformance.subject import Subject
from layoutc.runtime.errors import LayoutError, UnsupportedOperator
from layoutc.runtime.weight.tensor import QuantizedTensor

Cut = Callable[[Any], Any]


def make(subject: Subject, shape: tuple[int, ...], salt: int = 0, kind: str = "plain") -> Any:
    """A quantized weight."""
    return subject.quantize(weight(subject, shape, kind, salt=salt))


def storages(tensor: QuantizedTensor) -> set[int]:
    """The addresses of its planes' storages."""
    return {plane.untyped_storage().data_ptr() for plane in tensor.planes().values()}


def views(subject: Subject, m: int, k: int) -> Iterator[tuple[str, Cut]]:
    """Views of an (m, k) matrix that must be exact: cuts at the multiples that the plan derives."""
    r, c = subject.plan.shard_rows, subject.plan.column_multiple
    yield "detach", lambda x: x.detach()
    yield "view(-1)", lambda x: x.view(-1)
    yield "view of two leading dims", lambda x: x.view(2, m // 2, k)
    yield "transpose", lambda x: x.t()
    yield "transpose twice", lambda x: x.t().t()
    yield "unsqueeze", lambda x: x.unsqueeze(0)
    yield f"rows from {r}", lambda x: x[r:]
    yield f"rows to {r}", lambda x: x[:r]
    yield f"columns from {c}", lambda x: x[:, c:]
    yield f"columns to {c}", lambda x: x[:, :c]
    yield "rows and columns", lambda x: x[r:, c:]
    yield "narrow", lambda x: x.narrow(0, m - r, r)
    yield "split", lambda x: x.split(r)[1]
    yield "split columns", lambda x: x.split(c, dim=1)[1]
    yield "rows of the transpose", lambda x: x.t()[c:]
    yield "columns of the transpose", lambda x: x.t()[:, r:]
    yield "flat rows", lambda x: x.view(-1)[r * k :]
    yield "no rows", lambda x: x[:0]


@check("views", "views and cuts at the derived multiples have the base's values and share its bytes")
def exact_views(subject: Subject) -> None:
    """Views must not copy or dequantize."""
    m, k = subject.whole()
    for salt, kind in enumerate(("plain", "coarse")):
        base = make(subject, (m, k), salt, kind)
        plain = base.dequantize()
        for what, cut in views(subject, m, k):
            with layoutc.strict():
                piece = cut(base)
            expected = cut(plain)
            expect(type(piece) is subject.tensor, f"{what}: gives {type(piece).__name__}", shape=(m, k))
            expect(piece.shape == expected.shape, f"{what}: shape {tuple(piece.shape)}", shape=(m, k))
            expect_same(subject, f"{what}: values", piece.dequantize(), expected, shape=(m, k))
            if piece.numel():
                expect(storages(piece) <= storages(base), f"{what}: does not share the base's bytes", shape=(m, k))


@check("experts", "leading dims are rows: one of many is a view, and pieces of it are exact")
def experts(subject: Subject) -> None:
    """Checks a 3-D weight."""
    m, k = subject.whole(1, 2)
    base = make(subject, (3, m, k))
    plain, c = base.dequantize(), subject.plan.column_multiple
    cuts: dict[str, Cut] = {
        "select": lambda x: x[1],
        "slice": lambda x: x[1:],
        "unbind": lambda x: x.unbind(0)[2],
        "columns": lambda x: x[..., c:],
        "merge": lambda x: x.flatten(0, 1),
        "transpose of one": lambda x: x[2].t(),
        "transpose": lambda x: x.transpose(1, 2),
    }
    for what, cut in cuts.items():
        with layoutc.strict():
            piece = cut(base)
        expect_same(subject, f"{what}: values", piece.dequantize(), cut(plain), shape=(3, m, k))
        expect(storages(piece) <= storages(base), f"{what}: does not share the base's bytes", shape=(3, m, k))


def _inside(row: int) -> dict[str, Cut]:
    """Cuts between rows, by description."""
    return {"rows from": lambda x: x[row:], "rows to": lambda x: x[:row], "transposed from": lambda x: x.t()[:, row:]}


@check(
    "refused-views",
    "cuts inside blocks of columns or bytes, steps and scattered rows are refused, never wrong",
    compares="facts",
)
def refused_views(subject: Subject) -> None:
    """Cuts at offsets that are not multiples. Cuts between rows must still read exactly."""
    m, k = subject.whole()
    base = make(subject, (m, k))
    r, c = subject.plan.shard_rows, subject.plan.column_multiple
    plain = base.dequantize()
    for i in sorted({1, r // 2, r - 1, r + 1} - {0}) if r > 1 else ():
        for what, cut in _inside(i).items():
            piece = cut(base)
            expect_same(subject, f"{what} {i} of blocks of {r}: values", piece.dequantize(), cut(plain), shape=(m, k))
            if subject.facts.block_rows > 1 and piece.store.halo.tied:
                expect_refused(UnsupportedOperator, lambda piece=piece: piece.copy_(torch.zeros(piece.shape)), what)
    for j in {1, c // 2, c - 1, c + 1} - {0} if c > 1 else ():
        expect_refused(UnsupportedOperator, lambda j=j: base[:, j:], f"columns from {j} of groups of {c}")
        expect_refused(UnsupportedOperator, lambda j=j: base[:, :j], f"columns to {j} of groups of {c}")
    expect_refused(UnsupportedOperator, lambda: base[::2], "a step of 2")
    expect_refused(UnsupportedOperator, lambda: base.as_strided((m, k), (1, m)), "other strides")


@check("writes", "a write through a view changes the base there and nowhere else, or is refused")
def writes(subject: Subject) -> None:
    """Writes bytes and plain values, through rows, columns and the transpose."""
    m, k = subject.whole()
    cuts = dict(views(subject, m, k))
    chosen = [what for what in cuts if "from" in what or what in ("view(-1)", "rows and columns", "narrow")]
    for what in chosen:
        base = make(subject, (m, k))
        other = base.clone()
        with torch.no_grad():
            for name, plane in other.planes().items():
                if subject.facts.stored[name].rows_per_value is not None:
                    plane.copy_(plane.flip(0, 1))
        _writes(subject, what, base, cuts[what], cuts[what](other), cuts[what](other.dequantize()))
        base = make(subject, (m, k))
        _writes(subject, f"{what}, plain", base, cuts[what], torch.zeros_like(cuts[what](base.dequantize())), None)


def _writes(subject: Subject, what: str, base: Any, cut: Cut, source: Any, values: Tensor | None) -> None:
    """Copies `source`, whose values are `values`, into a cut of the base. The rest of the base must keep its values.

    If scales reach beyond the cut, the write, or reads until the rest is written, may be refused; no byte changes then.
    """
    # Some plane may have one value for all rows or for all columns.
    expected, reaches = base.dequantize(), any(None in (one.per_m, one.per_k) for one in subject.layout.planes)
    before = {name: plane.clone() for name, plane in base.planes().items()}
    outside = torch.ones_like(expected, dtype=torch.bool)
    cut(outside).fill_(False)
    try:
        with layoutc.strict():
            cut(base).copy_(source)
        now = base.dequantize()
    except LayoutError as error:
        expect(reaches, f"{what}: refused, though no scale reaches beyond a cut: {error}")
        for name, plane in base.planes().items():
            expect_same(subject, f"{what}: {name} after a refusal", plane, before[name], shape=tuple(base.shape))
        return
    if values is not None:
        cut(expected).copy_(values)
    else:
        expected = torch.where(outside, expected, now)
    expect_same(subject, f"{what}: the base after a write", now, expected, shape=tuple(base.shape))


@check(
    "copies", "copy_ copies bytes within the recipe, quantizes plain values, dequantizes into plain; clones are compact"
)
def copies(subject: Subject) -> None:
    """Checks copies and clones, without implicit dequantizes."""
    shape = m, k = subject.whole()
    x = weight(subject, shape, "coarse", salt=3)
    source, target = make(subject, shape, 1), make(subject, shape)
    with layoutc.strict():
        expect(target.copy_(source) is target, "copy_ returns another object", shape=shape)
        expect_same_all(subject, target.planes(), source.planes(), (m, k), shape=shape)
        expect(not storages(target) & storages(source), "copy_ shares bytes with its source", shape=shape)
        torch.manual_seed(subject.seed)  # for stochastic rounding
        target.copy_(x)  # unrelated to the old values, so the amax history restarts
        torch.manual_seed(subject.seed)
        expect_same_all(subject, target.planes(), subject.package.quantize(x).planes(), (m, k), shape=shape)
        for dtype in (torch.float32, torch.bfloat16):
            plain = torch.empty(shape, dtype=dtype).copy_(target)
            expect_same(subject, "values", plain.float(), target.dequantize(dtype).float(), shape=shape)
        r = subject.plan.shard_rows
        for piece in (target, target[r:], target.t(), target.view(-1)):
            copy = piece.clone()
            expect_same(subject, "a clone's values", copy.dequantize(), piece.dequantize(), shape=shape)
            expect(not storages(copy) & storages(target), "a clone shares bytes", shape=shape)
            sizes = {n: p.untyped_storage().nbytes() - p.nbytes for n, p in copy.planes().items()}
            expect(not any(sizes.values()), f"a clone holds more than its planes: {sizes}", shape=shape)
        expect(torch.equal(target, target.clone()), "a clone is not equal to its source", shape=shape)
        expect(not torch.equal(target, source), "different weights are equal", shape=shape)


@check("cat", "pieces that end on block boundaries are joined byte for byte")
def joined(subject: Subject) -> None:
    """Splits, then concatenates on dim 0."""
    m, k = subject.whole(3, 1)
    whole = make(subject, (m, k))
    with layoutc.strict():
        for size in (subject.plan.shard_rows, subject.rows, 2 * subject.rows):
            back: Any = torch.cat(whole.split(size))
            expect(type(back) is subject.tensor, f"cat gives {type(back).__name__}", shape=(m, k))
            expect_same_all(subject, back.planes(), whole.planes(), (m, k), pieces_of=size)


@check("new-tensors", "FSDP2's new_zeros is exact zeros, empty_like has the class, a user's new tensors are plain")
def new_tensors(subject: Subject) -> None:
    """Calls them as FSDP2, checkpoints and optimizers do."""
    m, k = shape = subject.whole()
    base = make(subject, shape)
    for size in (shape, (2 * m, k), (m * k,), (0, k)):
        like = base.view(-1) if len(size) == 1 else base
        new = as_fsdp2.called(like, "new_zeros", size)
        expect(type(new) is subject.tensor, f"new_zeros gives {type(new).__name__}", shape=size)
        expect_same(subject, "zeros", _zeros(subject, new), torch.zeros(size), shape=size)
        empty = as_fsdp2.called(like, "new_empty", size)
        expect(type(empty) is subject.tensor, "new_empty loses the class", shape=size)
        of_users = (like.new_zeros(size), like.new_empty(size))
        expect({type(one) for one in of_users} == {Tensor}, "a user's new tensor is not plain", shape=size)
    for empty in (torch.empty_like(base), torch.empty_like(base, device="meta")):
        expect(type(empty) is subject.tensor and empty.shape == base.shape, "empty_like loses the class", shape=shape)
    stated = {name: tuple(facts) for name, facts in subject.facts.planes(m, k).items()}
    made: Any = torch.empty_like(base)
    stored = {name: (tuple(p.shape), p.dtype) for name, p in made.planes().items()}
    expect(stored == stated, f"empty_like stores {stored}, not {stated}", shape=shape)
    with layoutc.strict():
        plain = torch.zeros_like(base)
    expect(type(plain) is Tensor and not plain.any(), "zeros_like is not a plain tensor of zeros", shape=shape)
    zeroed = base.clone().zero_()
    expect_same(subject, "zeros", _zeros(subject, zeroed), torch.zeros(shape), shape=shape)


def _zeros(subject: Subject, zeros: Any) -> Tensor:
    """The tensor's values. Zeros lose their sign if transforms, zero points or codebooks may set it."""
    values: Tensor = zeros.dequantize()
    used = [source.quantization for source in subject.layout.sources]
    signed = subject.layout.transforms or any(q.zero or (q.element.values and 0 not in q.element.values) for q in used)
    return values + 0.0 if signed else values
