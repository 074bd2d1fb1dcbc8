"""Saving and restoring state: flatten, pickle, deepcopy, torch.load, torch.distributed.checkpoint."""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
import warnings
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
from torch import nn

from layoutc.conformance.checks.dispatch import make, storages
from layoutc.conformance.material import expect, expect_same, expect_same_all, weight
from layoutc.conformance.registry import check
from layoutc.conformance.subject import Subject


def kinds(subject: Subject) -> Iterator[tuple[str, Any]]:
    """All kinds of tensors that can be saved: whole, leading dims, pieces, transposed, flat, one orientation."""
    m, k = subject.whole()
    base, r, c = make(subject, (m, k)), subject.plan.shard_rows, subject.plan.column_multiple
    yield "whole", base
    yield "of 3 dims", make(subject, (2, *subject.whole(1, 1)))
    yield "rows", base[r:]
    yield "columns", base[:, c:]
    yield "transposed", base.t()
    yield "flat", base.view(-1)
    yield "without rows", base[:0]
    yield "bf16", subject.quantize(weight(subject, (m, k), "nan", torch.bfloat16))
    name = subject.layout.orientations[-1]
    yield f"only {name}", subject.quantize(weight(subject, (m, k)), orientations=(name,))


def same(subject: Subject, what: str, actual: Any, expected: Any) -> None:
    """Fails unless class, shape, dtype, orientations and bytes are equal."""
    expect(type(actual) is type(expected), f"{what}: comes back as {type(actual).__name__}")
    for attribute in ("shape", "dtype", "orientations", "transposed"):
        one, other = getattr(actual, attribute), getattr(expected, attribute)
        expect(one == other, f"{what}: {attribute} is {one}, not {other}")
    one, other = actual.store.matrix, expected.store.matrix
    expect(one == other, f"{what}: matrix is {one}, not {other}")
    expect_same_all(subject, actual.planes(), expected.planes(), tensor=what)
    expect_same(subject, f"{what}: values", actual.dequantize().float(), expected.dequantize().float())


@check("pickle", "pickle, deepcopy and torch.load(weights_only=True) give back class and bytes, compact")
def pickled(subject: Subject) -> None:
    """Parameters must stay parameters."""
    for what, tensor in kinds(subject):
        file = io.BytesIO()
        torch.save({"weight": tensor, "parameter": nn.Parameter(tensor)}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        same(subject, f"torch.load, {what}", loaded["weight"], tensor)
        expect(isinstance(loaded["parameter"], nn.Parameter), f"{what}: a parameter comes back as a tensor")
        expect(loaded["parameter"].requires_grad, f"{what}: requires_grad is lost")
        same(subject, f"pickle, {what}", pickle.loads(pickle.dumps(tensor)), tensor)
        copied = copy.deepcopy(tensor)
        same(subject, f"deepcopy, {what}", copied, tensor)
        expect(not tensor.numel() or not storages(copied) & storages(tensor), f"deepcopy, {what}: shares bytes")
    part = dict(kinds(subject))["rows"]
    total = sum(plane.nbytes for plane in part.planes().values())
    size = len(pickle.dumps(part)) - len(pickle.dumps(part[:0]))
    expect(size <= total + 1024, f"a part of {total} bytes takes {size} bytes: the whole storage is saved")


@check("checkpoint", "torch.distributed.checkpoint saves and loads every byte, in one process")
def checkpoint(subject: Subject) -> None:
    """Loads into a model with other values."""
    dcp: Any = import_module("torch.distributed.checkpoint")

    shape = subject.whole()
    x = weight(subject, shape, "nan")
    saved: dict[str, Any] = {"weight": subject.quantize(x), "other": torch.arange(5)}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(saved, checkpoint_id=folder, no_dist=True)
        loaded: dict[str, Any] = {"weight": make(subject, shape, salt=1), "other": torch.zeros(5, dtype=torch.int64)}
        target = loaded["weight"]
        dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    expect(bool(torch.equal(loaded["other"], saved["other"])), "a plain tensor beside it is lost", shape=shape)
    same(subject, "loaded", loaded["weight"], saved["weight"])
    expect_same_all(subject, target.planes(), saved["weight"].planes(), subject.matrix(shape), what="the target itself")
