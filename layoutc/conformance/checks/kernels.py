"""Compares kernels with the reference, on a card, or in Triton's interpreter if TRITON_INTERPRET=1."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from layoutc.conformance.checks.codecs import scale_amaxes, with_amaxes
from layoutc.conformance.material import array, every_pair, expect_same, weight
from layoutc.conformance.model.codes import codes_of
from layoutc.conformance.model.placing import swizzled_buffers
from layoutc.conformance.registry import Skipped, check
from layoutc.conformance.subject import Subject
from layoutc.layout.layout import Source
from layoutc.runtime.weight.returned_buffers import by_reference

FEW = 10_000  # elements of a weight whose blocks are chosen one by one


@check("kernels", "kernels give the bytes of the reference: quantize, to planes and to buffers, dequantize, lay out")
def kernels(subject: Subject) -> None:
    """Quantizes all orientations together and each alone, including weights whose blocks would round differently with a
    slightly wrong scale. The slow interpreter gets two shapes, and only every pair of choices."""
    name = f"{subject.package.__name__}.kernels"
    if find_spec(name) is None:
        raise Skipped("the recipe has no kernels: it uses the reference on every device")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not _interpreting():
        raise Skipped("this machine has no GPU; TRITON_INTERPRET=1 runs them without one")
    kernels = importlib.import_module(name).KERNELS
    orientations = subject.layout.orientations
    choices: tuple[Sequence[Any], ...] = (
        subject.shapes() if device == "cuda" else subject.shapes()[::3],
        ("plain", "zeros", "huge", "tiny", "nan", "inf") if device == "cuda" else ("plain", "nan"),
        (torch.float32, torch.bfloat16),
        list(dict.fromkeys((orientations, *((one,) for one in orientations)))),
    )
    for shape, kind, dtype, asked in product(*choices) if device == "cuda" else every_pair(*choices):
        x = weight(subject, shape, kind, dtype).reshape(subject.matrix(shape))
        _compare(subject, kernels, x, device, asked, shape=shape, kind=kind, dtype=str(dtype))
    for source in subject.layout.sources:
        if source.scale.per_m is not None:
            asked = tuple(o for o, name in subject.layout.source_of if name == source.name)
            _compare(subject, kernels, _near_other_scales(subject, source), device, asked, kind="amaxes")


def _near_other_scales(subject: Subject, source: Source) -> Tensor:
    """Blocks whose amaxes are at and next to midpoints between scales. The first block has the amax at which a scale
    that is relative to the weight's amax equals the block's."""
    q = source.quantization
    amaxes = scale_amaxes(source)
    if not q.scale.is_f32:
        top = np.float32(float(codes_of(q.element).largest * codes_of(q.scale).largest))
        amaxes = np.concatenate([[top], amaxes[amaxes < top]]).astype(np.float32)
    return torch.from_numpy(with_amaxes(subject, source, amaxes, FEW))


def _interpreting() -> bool:
    if find_spec("triton") is None:
        return False
    return bool(importlib.import_module("triton").knobs.runtime.interpret)


def _compare(
    subject: Subject, kernels: Any, x: Tensor, device: str, orientations: tuple[str, ...], **details: Any
) -> None:
    (m, k), layout = x.shape, subject.layout
    amax = subject.tensor.shared_amax(x) if subject.facts.shares_amax else None
    moved = None if amax is None else amax.to(device)
    expected = subject.reference.quantize_reference(x, amax=amax, orientations=orientations, **subject.seeded)
    seed = {name: one.to(device) for name, one in subject.seeded.items()}
    if kernels.quantize_tile is not None:
        made = kernels.quantize(x.to(device), moved, orientations, **seed)
        for name, plane in expected.items():
            expect_same(subject, name, made[name].cpu(), plane, (m, k), **details)
    planes = expected
    if amax is not None and "amax" in subject.facts.stored:
        planes = {**expected, "amax": subject.facts.stored_amax(amax)}
    on_device = {name: plane.to(device) for name, plane in planes.items()}
    if not layout.history:
        laid_out = kernels.lay_out(on_device, m, k, orientations)
        at_once = laid_out
        if kernels.buffer_sizes is not None:
            at_once = kernels.quantize_buffers(x.to(device), moved, orientations, **seed)
        for name, buffer in by_reference(subject.facts, subject.reference, planes, (m, k), orientations).items():
            for buffers in (laid_out, at_once):
                expect_same(subject, name, buffers[name].cpu(), buffer, (m, k), **details)
        if subject.facts.swizzled:
            moved_on = kernels.lay_out(on_device, m, k, orientations, True)
            stored = {name: array(plane) for name, plane in planes.items()}
            for name, entries in swizzled_buffers(layout, stored, m, k).items():
                if name.partition("_")[0] not in orientations:
                    continue
                expect_same(subject, f"{name} for a GEMM", moved_on[name].cpu(), entries, (m, k), **details)
    for orientation in orientations:
        values = subject.reference.dequantize_reference(planes, m, k, orientation)
        out = kernels.dequantize(on_device, m, k, orientation, torch.float32)
        expect_same(subject, f"{orientation} values", out.cpu(), values, (m, k), **details)
