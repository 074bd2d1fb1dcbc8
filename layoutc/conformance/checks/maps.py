"""Index maps: compares buffers with the layout's chains, and both with plain indexing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np
import torch

from layoutc.conformance.material import as_planes, expect, expect_same, expect_same_all, generator
from layoutc.conformance.model.codes import Array
from layoutc.conformance.model.placing import buffers, plane_values, swizzled_buffers
from layoutc.conformance.model.weights import Planes
from layoutc.conformance.registry import Failure, Skipped, check
from layoutc.conformance.subject import LARGEST, Subject
from layoutc.ints.sizes import up
from layoutc.layout.chain import Chain
from layoutc.layout.layout import Buffer, swizzle_chain

MOST = 40_000  # the most values of a buffer that are followed one by one


def matrices(subject: Subject) -> Iterator[tuple[int, int]]:
    """Small weights: the smallest, a ragged one, a wide one."""
    (um, uk), (bm, bk) = subject.units, (min(size, LARGEST) for size in subject.blocks)
    yield um, uk
    yield up(bm + 1, um), up(bk + 1, uk)
    yield up(3, um), up(2 * bk + 1, uk)
    if subject.thorough:
        yield up(2 * bm + 1, um), up(bk + 7, uk)


def random_planes(subject: Subject, m: int, k: int) -> Planes:
    """Planes of random bytes, or random numbers for fp32. No byte is zero, so that padding shows."""
    rng = generator(subject, "planes", m, k)
    planes = {}
    for plane in subject.layout.planes:
        shape = plane.shape(m, k)
        if plane.name == "amax":
            shape = (max(subject.layout.history, 1),)
        if plane.dtype == "float32":
            planes[plane.name] = rng.uniform(1, 2, shape).astype(np.float32)
        elif plane.bits == 16:
            planes[plane.name] = rng.integers(257, 2**16, shape).astype(np.uint16)
        else:
            planes[plane.name] = rng.integers(1, 1 << (plane.code_bits or 8), shape).astype(np.uint8)
    return planes


@check("shapes", "planes and buffers have the names, shapes, dtypes and bytes that LAYOUT states", compares="facts")
def shapes(subject: Subject) -> None:
    """Checks all test shapes."""
    for shape in subject.shapes():
        m, k = subject.matrix(shape)
        q = subject.package.quantize(torch.ones(shape))
        for what, tensors, facts in (
            ("planes", q.planes(), subject.facts.planes(m, k)),
            ("buffers", q.buffers(), subject.facts.buffers(m, k)),
        ):
            actual = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
            stated = {name: tuple(fact) for name, fact in facts.items()}
            expect(actual == stated, f"{what} are {actual}, but LAYOUT states {stated}", shape=shape)
            expect(list(actual) == list(stated), f"{what} are in another order than LAYOUT states", shape=shape)
            odd = [name for name, tensor in tensors.items() if not tensor.is_contiguous()]
            expect(not odd, f"not contiguous: {', '.join(odd)}", shape=shape)
        announced = {buffer.name: buffer.shape(m, k) for buffer in subject.layout.buffers}
        wrong = [n for n, s in announced.items() if tuple(subject.facts.buffers(m, k)[n].shape) != s]
        expect(not wrong, f"{', '.join(wrong)}: not the shape that the layout derives", shape=shape)


@check("index-maps", "each value of a buffer has its own bits, the inverse map finds it there, other bits are zero")
def index_maps(subject: Subject) -> None:
    """Walks chains value by value; generated buffers must equal what they write."""
    for m, k in matrices(subject):
        planes = random_planes(subject, m, k)
        made = _laid_out(subject, planes, m, k)
        for buffer in subject.layout.buffers:
            chain = buffer.chain(m, k)
            if prod(chain.start) > MOST:
                continue
            written = _walk(subject, buffer, chain, planes, (m, k))
            actual = made[buffer.name].flatten().view(torch.uint8)
            expect_same(subject, buffer.name, actual, written, (m, k), against="chain")


def _laid_out(subject: Subject, planes: Planes, m: int, k: int, swizzled: bool = False) -> dict[str, torch.Tensor]:
    tensors = as_planes(subject, planes)
    made: dict[str, torch.Tensor] = subject.tensor(tensors, (m, k), torch.float32).buffers(swizzled=swizzled)
    return made


def _walk(subject: Subject, buffer: Buffer, chain: Chain, planes: Planes, matrix: tuple[int, int]) -> Array:
    """The buffer's bytes as the chain writes them. Fails if two values collide, or the inverse disagrees."""
    where = {"shape": matrix, "plane": buffer.name, "seed": subject.seed}
    indices = list(itertools.product(*map(range, chain.start)))
    starts, owners = list[int](), list[int]()
    for number, index in enumerate(indices):
        positions = chain.positions(index)
        if not positions:
            raise Failure("a value is not stored", index=index, **where)
        for byte, bit in positions:
            if (back := chain.value_at(byte, bit)) != index:
                raise Failure(f"the inverse map finds {back} here", index=index, byte=byte, **where)
            starts.append(byte * 8 + bit)
            owners.append(number)
    spans = np.array(starts, int)[:, None] + np.arange(chain.bits)
    writers = np.bincount(spans.ravel(), minlength=chain.nbytes * 8)
    if len(shared := np.flatnonzero((writers > 1)[spans].any(axis=1))):
        start = starts[shared[-1]]
        raise Failure("two values share bits", index=indices[owners[shared[-1]]], byte=start // 8, **where)
    taken = writers > 0
    values = np.ascontiguousarray(plane_values(buffer, planes)).reshape(-1, 1)
    patterns = np.unpackbits(values.view(np.uint8), axis=1, bitorder="little")[:, : chain.bits]
    patterns = patterns if chain.low_first or chain.bits >= 8 else patterns[:, ::-1]
    bits = np.zeros(chain.nbytes * 8, np.uint8)
    bits[spans] = patterns[owners]
    for start in np.flatnonzero(~taken)[:: max(chain.bits, 1)]:
        byte, bit = divmod(int(start), 8)
        if chain.bits <= 8 and start % chain.bits == 0 and chain.value_at(byte, bit) is not None:
            raise Failure("the inverse map finds a value in padding", byte=byte, **where)
    order: Any = "little" if chain.low_first or chain.bits >= 8 else "big"
    return np.packbits(bits, bitorder=order)


@check("buffers", "by plain indexing, buffers hold the planes' values where the spec says, and zeros in padding")
def placed(subject: Subject) -> None:
    """Checks all test shapes, and that there are buffers only for orientations that the tensor has."""
    for shape in subject.shapes():
        m, k = subject.matrix(shape)
        planes = random_planes(subject, m, k)
        expected = buffers(subject.layout, planes, m, k)
        expect_same_all(subject, _laid_out(subject, planes, m, k), expected, (m, k))


@check("swizzle", "the GEMM order of scales and zero points is the pattern's permutation, and can be undone")
def swizzled(subject: Subject) -> None:
    """Compares the pattern with numpy's reshape and transpose, and with its chain."""
    swizzle = subject.layout.swizzle
    if swizzle is None:
        raise Skipped("the spec has no swizzle")
    sizes, reference = dict(swizzle.sizes), subject.reference
    for i, j in ((1, 1), (2, 3)):
        shape = (swizzle.tile(0) * i, swizzle.tile(1) * j)
        full = sizes | {swizzle.groups[0][0]: i, swizzle.groups[1][0]: j}
        names = [name for group in swizzle.groups for name in group]
        scale = generator(subject, "swizzle", i).integers(0, 256, shape).astype(np.uint8)
        expected = scale.reshape([full[n] for n in names]).transpose([names.index(n) for n in swizzle.order]).ravel()
        actual = reference.swizzle(torch.from_numpy(scale.copy()))
        expect_same(subject, "swizzled scale", actual, expected, shape=shape)
        expect_same(subject, "unswizzled scale", reference.unswizzle(actual, *shape), scale, shape=shape)
        chain = swizzle_chain(swizzle, shape)
        places = [chain.positions(index)[0][0] for index in itertools.product(*map(range, shape))]
        expect(sorted(places) == list(range(scale.size)), "the pattern is not a permutation", shape=shape)
        by_chain = np.empty(scale.size, np.uint8)
        by_chain[places] = scale.ravel()
        expect_same(subject, "swizzled scale", actual, by_chain, shape=shape, against="chain")
    m, k = subject.whole(3, 2)
    planes = random_planes(subject, m, k)
    made = _laid_out(subject, planes, m, k, swizzled=True)
    expect_same_all(subject, made, swizzled_buffers(subject.layout, planes, m, k), (m, k))
    flat = {buffer.name for buffer in subject.layout.buffers if len(buffer.shape(m, k)) == 1}  # also without the GEMM
    stated = {name for name, tensor in made.items() if tensor.dim() == 1 and name != "amax"} - flat
    expect(stated == set(subject.facts.swizzled), f"LAYOUT swizzles {subject.facts.swizzled}, buffers has {stated}")
