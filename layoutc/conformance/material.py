"""Test weights, and byte comparisons that report the first difference."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import combinations, product
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from layoutc.conformance.model.codes import F32, Array
from layoutc.conformance.model.placing import logical
from layoutc.conformance.registry import TALLY, Failure
from layoutc.conformance.subject import Subject

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KINDS = ("plain", "zeros", "huge", "tiny", "nan", "inf", "coarse")


def generator(subject: Subject, *what: object) -> np.random.Generator:
    """Random numbers that depend only on the subject's seed and on what they are for."""
    return random_for(subject.seed, *what)


def random_for(seed: int, *what: object) -> np.random.Generator:
    """Random numbers that depend only on the seed and on what they are for."""
    return np.random.default_rng([seed, zlib.crc32(repr(what).encode())])


def weight(
    subject: Subject, shape: tuple[int, ...], kind: str = "plain", dtype: torch.dtype = torch.float32, salt: int = 0
) -> Tensor:
    """A weight whose blocks have different scales; `kind` says what is special about it."""
    return torch.from_numpy(_values(subject.seed, shape, kind, salt).copy()).reshape(shape).to(dtype)


@lru_cache(maxsize=64)
def _values(seed: int, shape: tuple[int, ...], kind: str, salt: int) -> Array:
    """The fp32 values of a weight as a matrix. Cached, since checks reuse them."""
    rng = random_for(seed, shape, kind, salt)
    m, k = prod(shape[:-1]), shape[-1]
    x = rng.standard_normal((m, k)) * np.exp2(rng.integers(-4, 5, (m, 1))) * np.exp2(rng.integers(-3, 4, (1, k)))
    if kind == "zeros":
        x[: (m + 1) // 2, : (k + 1) // 2] = 0
        x[m // 2 :, k // 2 :] *= -0.0
    elif kind == "huge":
        x = np.clip(x * 1e38, -3.3e38, 3.3e38)
        x.flat[0] = 3.4e38
    elif kind == "tiny":
        x *= np.exp2(rng.integers(-149, -120, (m, 1)).astype(float))
    elif kind == "coarse":
        x = np.round(x * 4) / 4
    x = x.astype(F32)
    if kind in ("nan", "inf"):
        special = F32(np.nan) if kind == "nan" else F32(np.inf)
        x[rng.integers(m), rng.integers(k)] = special
        if kind == "inf":
            x[rng.integers(m), rng.integers(k)] = -special
    found: Array = x
    return found


def every_pair(*choices: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """A few combinations of the choices that cover every pair (pairwise testing); deterministic."""
    rows = list(product(*(range(len(one)) for one in choices)))

    def pairs(row: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return set(combinations(enumerate(row), min(2, len(row))))

    left = set[tuple[tuple[int, int], ...]]().union(*map(pairs, rows))
    while left:
        row = max(rows, key=lambda row: len(pairs(row) & left))
        left -= pairs(row)
        yield tuple(one[index] for one, index in zip(choices, row, strict=True))


def input_max(dtype: torch.dtype) -> float:
    """The largest finite value of an input's dtype."""
    return float(torch.finfo(dtype).max)


def as_fp32(x: Tensor) -> Array:
    """The tensor's exact values as (m, k) fp32."""
    values: Array = x.detach().float().reshape(-1, x.shape[-1]).contiguous().numpy()
    return values


def shared_amax(subject: Subject, x: Tensor) -> dict[str, Tensor]:
    """The `amax` argument for all shards of a weight; {} if they share none."""
    if not subject.facts.shares_amax:
        return {}
    return {"amax": subject.tensor.shared_amax(x.detach().reshape(-1, x.shape[-1]))}


def array(tensor: Tensor) -> Array:
    """A plain tensor as numpy, in memory order of its dims; 16-bit values as their bits, like the model's."""
    plain = tensor.detach().contiguous().cpu()
    halves = plain.dtype in (torch.float16, torch.bfloat16)
    values: Array = plain.view(torch.uint16).numpy() if halves else plain.numpy()
    return values


def as_planes(subject: Subject, values: Mapping[str, Array]) -> dict[str, Tensor]:
    """Copies the model's planes into tensors of their dtypes."""
    dtypes = {plane.name: getattr(torch, plane.dtype) for plane in subject.layout.planes}
    return {name: torch.from_numpy(plane.copy()).view(dtypes[name]) for name, plane in values.items()}


def _canonical(values: Array) -> Array:
    """Replaces all fp32 NaNs by the same one; returns bytes."""
    if values.dtype == F32:
        values = np.where(np.isnan(values), F32(np.nan), values)
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def expect_same(
    subject: Subject,
    name: str,
    actual: Tensor | Array,
    expected: Tensor | Array,
    matrix: tuple[int, int] | None = None,
    **details: Any,
) -> None:
    """Fails unless both arrays are equal byte for byte, treating all NaNs as equal."""
    a = array(actual) if isinstance(actual, Tensor) else np.asarray(actual)
    b = array(expected) if isinstance(expected, Tensor) else np.asarray(expected)
    where = {"plane": name, "seed": subject.seed, **details}
    if matrix is not None:
        where.setdefault("shape", matrix)
    if a.dtype != b.dtype or a.shape != b.shape:
        raise Failure(f"{name} is {a.dtype} {a.shape}, not {b.dtype} {b.shape}", **where)
    one, other = _canonical(a), _canonical(b)
    TALLY.bytes += one.size
    if np.array_equal(one, other):
        return
    different = np.flatnonzero(one != other)
    byte = int(different[0])
    item = byte // a.itemsize
    index: Any = logical(name, subject.layout, *matrix, byte) if matrix is not None else None
    if index is None and a.ndim == 2:
        index = tuple(int(i) for i in np.unravel_index(item, a.shape))
    ours, wanted = a.reshape(-1)[item], b.reshape(-1)[item]
    codes = a.dtype == np.uint8
    raise Failure(
        f"{name} differs in {len(different)} of {one.size} bytes",
        **where,
        byte=byte,
        index=index,
        actual=f"0x{int(ours):02x}" if codes else repr(float(ours)),
        expected=f"0x{int(wanted):02x}" if codes else repr(float(wanted)),
    )


def expect_same_all(
    subject: Subject,
    actual: Mapping[str, Tensor | Array],
    expected: Mapping[str, Tensor | Array],
    matrix: tuple[int, int] | None = None,
    **details: Any,
) -> None:
    """Fails unless both have the same arrays under the same names."""
    if set(actual) != set(expected):
        raise Failure(f"it has {', '.join(actual)}, not {', '.join(expected)}", seed=subject.seed, **details)
    for name in expected:
        expect_same(subject, name, actual[name], expected[name], matrix, **details)


def expect(holds: bool, message: str, **details: Any) -> None:
    """Fails with a message unless the condition holds."""
    TALLY.facts += 1
    if not holds:
        raise Failure(message, **details)


def expect_refused(errors: type[BaseException] | tuple[type[BaseException], ...], call: Any, what: str) -> str:
    """Fails unless a call raises one of these errors; returns its message."""
    TALLY.facts += 1
    try:
        call()
    except errors as error:
        return str(error)
    except Exception as error:
        raise Failure(f"{what}: raised {type(error).__name__}: {error}") from error
    raise Failure(f"{what}: was not refused")
