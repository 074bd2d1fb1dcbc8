"""Compares quantize and dequantize with the independent model, byte for byte."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from layoutc.conformance.material import (
    DTYPES,
    KINDS,
    array,
    as_fp32,
    expect,
    expect_refused,
    expect_same,
    expect_same_all,
    generator,
    input_max,
    weight,
)
from layoutc.conformance.model.codes import F32, Array
from layoutc.conformance.model.placing import buffers
from layoutc.conformance.model.ties import near_ties
from layoutc.conformance.model.weights import Planes
from layoutc.conformance.registry import Skipped, check
from layoutc.conformance.subject import Subject


def cases(subject: Subject) -> Iterator[tuple[tuple[int, ...], str, torch.dtype]]:
    """All shapes with all kinds of weights in fp32, and all kinds in the other dtypes at one ragged shape."""
    shapes = subject.shapes()
    for shape in shapes:
        for kind in KINDS:
            yield shape, kind, torch.float32
    for dtype in DTYPES[1:]:
        for kind in KINDS:
            for shape in shapes if subject.thorough else shapes[2:3] or shapes[:1]:
                yield shape, kind, dtype


@check("quantize", "planes and buffers equal the independent model's, for zeros, huge, tiny, NaN, inf, and all dtypes")
def quantize(subject: Subject) -> None:
    """Checks the generated quantize, which users call, and the reference: planes, then buffers."""
    for shape, kind, dtype in cases(subject):
        x, (m, k) = weight(subject, shape, kind, dtype), subject.matrix(shape)
        details: dict[str, Any] = {"shape": shape, "kind": kind, "dtype": str(dtype)}
        expected = subject.model.quantize(as_fp32(x), input_max(dtype))
        of_each = subject.model.quantize(as_fp32(x), input_max(dtype), matrices=subject.facts.amaxes_of(shape))
        made = subject.quantize(x)
        expect_same_all(subject, made.planes(), of_each, (m, k), **details)
        reference = subject.reference.quantize_reference(x.reshape(m, k), **subject.seeded)
        expect_same_all(subject, {n: expected[n] for n in reference}, reference, (m, k), **details)
        planes = {name: array(plane) for name, plane in made.planes().items()}  # rules do not define NaN's payload
        expect_same_all(subject, made.buffers(), buffers(subject.layout, planes, m, k), (m, k), **details)
    for source in subject.layout.sources:
        if source.quantization.definition.candidates:
            m, k = subject.whole(2, 2)
            for values in near_ties(subject.model, source, m, k, generator(subject, "ties", m, k)):
                made = subject.quantize(torch.from_numpy(values))
                expect_same_all(subject, made.planes(), subject.model.quantize(values), (m, k), kind="near ties")


@check("dequantize", "every orientation has the values that the model reads from the same planes")
def dequantize(subject: Subject) -> None:
    """Checks the tensor's dequantize, in its full shape, and each orientation's reference."""
    for shape, kind, dtype in cases(subject):
        x, (m, k) = weight(subject, shape, kind, dtype), subject.matrix(shape)
        made = subject.quantize(x)
        planes: Planes = {name: array(plane) for name, plane in made.planes().items()}
        details: dict[str, Any] = {"shape": shape, "kind": kind, "dtype": str(dtype)}
        for orientation in subject.layout.orientations:
            expected = subject.model.values(planes, orientation, m, k)
            actual = subject.reference.dequantize_reference(made.planes(), m, k, orientation)
            expect_same(subject, f"{orientation} values", actual, expected, **details)
            if orientation == subject.layout.orientations[0]:
                whole = made.dequantize()
                same = tuple(whole.shape) == shape and whole.dtype == dtype and type(whole) is Tensor
                expect(same, f"dequantize gives {type(whole).__name__} {tuple(whole.shape)} {whole.dtype}", **details)
                values = torch.from_numpy(expected).reshape(shape).to(dtype).float()
                expect_same(subject, "values", whole.float(), values, **details)


@check("one-orientation", "a tensor with one orientation stores only its planes, with the same bytes")
def one_orientation(subject: Subject) -> None:
    """Also checks that unknown orientations are refused."""
    shape = subject.shapes()[1]
    x = weight(subject, shape)
    whole = subject.quantize(x)
    for orientation in subject.layout.orientations:
        made = subject.quantize(x, orientations=(orientation,))
        stated = set(subject.facts.sources[orientation])
        expect(set(made.planes()) == stated, f"{orientation}: stores {', '.join(made.planes())}", shape=shape)
        expect(orientation in made.orientations, f"the tensor does not hold {orientation}", shape=shape)
        for name, plane in made.planes().items():
            expect_same(subject, name, plane, whole.planes()[name], shape=shape)
    expect_refused(ValueError, lambda: subject.quantize(x, orientations=("sideways",)), "unknown orientation")


@check("nan", "a NaN in the weight is a NaN after dequantize, at least at its element", compares="facts")
def nan(subject: Subject) -> None:
    """Places NaNs at corners and random positions, in all dtypes, among infinities and zeros."""
    for shape in subject.shapes():
        m, k = subject.matrix(shape)
        rng = generator(subject, "nan", shape)
        places = [(0, 0), (m - 1, k - 1), (int(rng.integers(m)), int(rng.integers(k)))]
        for number, (i, j) in enumerate(places):
            for kind in ("plain", "zeros", "inf"):
                x = weight(subject, shape, kind, DTYPES[number % len(DTYPES)])
                x.view(m, k)[i, j] = float("nan")
                made = subject.quantize(x)
                for orientation in subject.layout.orientations:
                    value = subject.reference.dequantize_reference(made.planes(), m, k, orientation)[i, j]
                    message = f"a NaN became {float(value)!r} in {orientation}"
                    expect(bool(value.isnan()), message, shape=shape, index=(i, j), seed=subject.seed, kind=kind)


@check("refused", "unsupported shapes, dtypes and arguments are refused, with the recipe's name", compares="facts")
def refused(subject: Subject) -> None:
    """Refusals come before any computation."""
    name, quantize_ = subject.name, subject.package.quantize
    m, k = subject.whole(1, 1)
    um, uk = subject.units
    for rows, columns, bad in ((um + 1, k, um > 1), (m, uk + 1, uk > 1)):
        if bad:
            shape = (rows, columns)
            message = expect_refused(ValueError, lambda shape=shape: quantize_(torch.ones(shape)), f"shape {shape}")
            expect(name in message, f"the refusal of shape {shape} does not name the recipe: {message}")
    expect_refused(TypeError, lambda: quantize_(torch.ones(m, k, dtype=torch.int64)), "an int64 weight")
    if not subject.facts.shares_amax:
        expect_refused(ValueError, lambda: quantize_(torch.ones(m, k), amax=torch.ones(1)), "amax, which is not shared")
    seeds: tuple[Any, ...] = (
        (torch.ones(2, dtype=torch.int64), torch.ones(1), 2**63) if subject.layout.stochastic else (1,)
    )
    for seed in seeds:
        expect_refused(ValueError, lambda seed=seed: quantize_(torch.ones(m, k), seed=seed), f"seed {seed}")


@check(
    "random-bits", "any seed gives the model's bytes, as a number or a tensor; without one, torch's generator draws it"
)
def random_bits(subject: Subject) -> None:
    """Tries positive and negative seeds, small and large ones."""
    if not subject.layout.stochastic:
        raise Skipped("elements are rounded to nearest")
    shape = subject.shapes()[1]
    x, matrix = weight(subject, shape), subject.matrix(shape)
    torch.manual_seed(subject.seed)
    made, following = subject.package.quantize(x), torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64)
    torch.manual_seed(subject.seed)
    drawn = int(torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64))
    expect_same_all(subject, made.planes(), replace(subject.model, seed=drawn).quantize(as_fp32(x)), matrix)
    for seed in (1, -(2**40) - 7, int(following)):
        expected = replace(subject.model, seed=seed).quantize(as_fp32(x))
        for given in (seed, torch.tensor([seed])):
            made = subject.package.quantize(x, seed=given)
            expect_same_all(subject, made.planes(), expected, matrix, of_seed=seed)


@check("out", "quantizing into a tensor replaces every plane in place, scales included; its views see it")
def out(subject: Subject) -> None:
    """Quantizes two weights into the same object in turn."""
    for shape in subject.shapes()[1:3]:
        first, second = weight(subject, shape), weight(subject, shape, "coarse", salt=1) * 64
        made = subject.quantize(first)
        flat, addresses = made.view(-1), {n: p.data_ptr() for n, p in made.planes().items()}
        before = made.planes()["amax"].clone() if subject.layout.history else None
        result = subject.quantize(second, out=made)
        expect(result is made, "quantize(out=) returns another object", shape=shape)
        expect({n: p.data_ptr() for n, p in made.planes().items()} == addresses, "planes have moved", shape=shape)
        x = as_fp32(second)
        expected = subject.model.quantize(x, amax=_deciding(subject, x, before))
        if before is not None:
            expected["amax"] = _shifted(x, array(before))
        expect_same_all(subject, made.planes(), expected, subject.matrix(shape), shape=shape)
        expect_same(subject, "values of a view", flat.dequantize(), made.dequantize().flatten(), shape=shape)


def _deciding(subject: Subject, x: Array, before: Tensor | None) -> Array | None:
    """The amax that a history picks; None without one."""
    if before is None:
        return None
    earlier = array(before)
    picked = earlier.max() if subject.layout.pick == "max" else earlier[0]
    return np.array([np.max(np.abs(x)) if picked == 0 else picked], F32)


def _shifted(x: Array, before: Array) -> Array:
    return np.concatenate([[np.max(np.abs(x))], before[:-1]]).astype(F32)


@check("history", "delayed scaling takes its amax from as many earlier steps as the spec keeps")
def history(subject: Subject) -> None:
    """Quantizes growing and shrinking weights, for more steps than a short history keeps."""
    length = subject.layout.history
    if not length:
        raise Skipped("the current amax decides the scale")
    shape = subject.shapes()[0]
    made, stored = None, np.zeros(length, F32)
    for step in range(min(length + 3, 12)):
        x = weight(subject, shape, salt=step) * 2.0 ** ((step * 5) % 7 - 3)
        values = as_fp32(x)
        expected = subject.model.quantize(values, amax=_deciding(subject, values, torch.from_numpy(stored)))
        stored = _shifted(values, stored)
        expected["amax"] = stored
        made = subject.quantize(x, out=made)
        expect_same_all(subject, made.planes(), expected, subject.matrix(shape), shape=shape, step=step)
