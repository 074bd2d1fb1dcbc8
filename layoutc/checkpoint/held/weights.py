"""A weight's tensors in other checkpoint formats: made from its planes, or kept from the files it was read from."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from layoutc.checkpoint.bindings.names import tensor_name
from layoutc.checkpoint.held import places
from layoutc.checkpoint.held.codes import Encoded, encode
from layoutc.checkpoint.held.narrower import INTO_F32
from layoutc.checkpoint.held.stated import Stated
from layoutc.runtime.bindings.facts import Codes
from layoutc.runtime.errors import LayoutError, printable
from layoutc.runtime.facts import Facts

Scales = dict[str, dict[str, float]]  # joined name -> tensor name -> scale


class Held(NamedTuple):
    """A tensor that files hold for a weight: rows of a plane, or a derived tensor (`stated`).

    part: the index of the weight's part in the files. codes: set if files store codes of the plane's values; then `of`
    is the tensor's role: "codes", "codebook" or "scale". joined: for the scale of a whole weight, its name by `joined`
    of bindings; "" if engines join it with no other.
    """

    name: str
    facts: Facts
    plane: str
    rows: tuple[int, int]
    place: places.Place | None
    stated: Stated | None = None
    part: int = 0
    codes: Codes | None = None
    of: str = ""
    joined: str = ""

    @property
    def may_be_shorter(self) -> bool:
        """True for a text with numbers that are not known before it is made."""
        return self.stated is not None and bool(self.stated.offsets)


def with_codes(one: Held, parameter: str, count: int) -> list[Held]:
    """A plane's tensor; for codes of `count` values, also their codebook and scale."""
    if (codes := one.codes) is None:
        return [one]
    codebook = Facts((256,), torch.float32)
    scale = Facts((-(-count // codes.block),), torch.float32)
    return [
        one._replace(of="codes"),
        one._replace(name=tensor_name(codes.codebook, parameter), facts=codebook, of="codebook"),
        one._replace(name=tensor_name(codes.scale, parameter), facts=scale, of="scale"),
    ]


class Noted(NamedTuple):
    """Collected for warnings after all weights are made: errors of inexact codes, and scales that engines join."""

    errors: list[float]
    scales: Scales

    @classmethod
    def of_ranks(cls, every: Iterable[Noted]) -> Noted:
        """Merges the notes of several ranks, about different weights."""
        errors, scales = list[float](), Scales()
        for one in every:
            errors += one.errors
            for group, found in one.scales.items():
                scales.setdefault(group, {}).update(found)
        return cls(errors, scales)


class Kept(Protocol):
    """Files that a weight, or an earlier state of it, was read from."""

    def codes(self, plane: str, part: int) -> tuple[Encoded, Tensor]:
        """The stored codes of a part of a plane, and their decoded values: fp32, same shape."""

    def text(self, name: str) -> bytes | None:
        """The stored text tensor of this name; None if the files lack it."""


def made(
    tensors: Iterable[Held], planes: Mapping[str, Tensor], kept: Kept | None = None, noted: Noted | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) for each of a weight's tensors, made from its whole planes without sharing their memory.

    Uses the codes in `kept` if they decode to the values bit for bit; else encodes the values, and adds their error, if
    any, to `noted`. Adds scales that engines join to `noted`, too. Raises LayoutError, with the tensor's name, for
    values that can't be encoded.
    """
    tensors = tuple(tensors)
    coded = {(one.part, one.plane): _encoded(one, planes, kept) for one in tensors if one.of == "codes"}
    for encoded in coded.values():
        if noted is not None and encoded.error:
            noted.errors.append(encoded.error)
    for one in tensors:
        tensor = _made(one, planes, coded, kept)
        if noted is not None and one.joined:
            record_scale(noted.scales, one.joined, one.name, tensor)
        yield one.name, tensor


def _made(
    one: Held, planes: Mapping[str, Tensor], coded: Mapping[tuple[int, str], Encoded], kept: Kept | None
) -> Tensor:
    if one.stated is not None:
        if one.stated.text is None:
            return one.stated.made()
        of_part = [encoded for (part, _), encoded in coded.items() if part == one.part]
        there = kept.text(one.name) if kept is not None else None
        if there is not None and all(encoded.kept for encoded in of_part):
            return one.stated.made(None, there)
        offsets = (encoded.offset for encoded in of_part)
        return one.stated.made(dict(zip(one.stated.offsets, offsets, strict=True)), there)
    if one.codes is None:
        assert one.place is not None
        rows, dtype = _rows(one, planes), one.place.plane.dtype
        # Convert to the file's dtype if it is narrower than the plane's; it holds the values.
        return places.write(one.place, rows.to(dtype) if dtype in INTO_F32.values() else rows, one.facts.dtype)
    encoded = coded[one.part, one.plane]
    device = planes[one.plane].device
    if one.of == "codes":
        assert one.place is not None
        return places.write(one.place, encoded.codes.to(device), one.facts.dtype)
    return (encoded.scale if one.of == "scale" else encoded.codebook).to(device, copy=True)


def _rows(one: Held, planes: Mapping[str, Tensor]) -> Tensor:
    """The part's rows of a plane; the whole plane if one row covers all parts."""
    plane = planes[one.plane]
    return plane if one.rows[1] - one.rows[0] == len(plane) else plane[one.rows[0] : one.rows[1]]


def _encoded(one: Held, planes: Mapping[str, Tensor], kept: Kept | None) -> Encoded:
    assert one.codes is not None
    values = _rows(one, planes).cpu()
    if kept is not None:
        encoded, stand_for = kept.codes(one.plane, one.part)
        if torch.equal(stand_for.view(torch.int32), values.contiguous().view(torch.int32)):
            return encoded
    try:
        return encode(values, one.codes.values, one.codes.block)
    except LayoutError as error:
        raise LayoutError(f"{one.name}: {error}") from error


def record_scale(scales: Scales, group: str, name: str, value: Tensor) -> None:
    """Records the scalar scale of a weight that engines join with others."""
    scales.setdefault(group, {})[name] = float(value.flatten()[0])


def warn_apart(where: object, scales: Mapping[str, Mapping[str, float]]) -> None:
    """Warns once of weights that engines join but whose scales differ, with the largest ratio."""
    apart = {group: found for group, found in scales.items() if len({*found.values()}) > 1}
    if not apart:
        return

    def ratio(found: Mapping[str, float]) -> float:
        least, most = (one(map(abs, found.values())) for one in (min, max))
        return most / least if least else float("inf")

    worst = max(apart, key=lambda group: ratio(apart[group]))
    shown = ", ".join(f"{name} = {value:.4g}" for name, value in sorted(apart[worst].items()))
    warnings.warn(
        f"{where}: {len(apart)} groups of weights that engines join have scales that differ by up to "
        f"{ratio(apart[worst]):.3g} times ({printable(shown)}). Engines take one scale for each group, and so compute "
        "other values. Quantize such weights under one scale, with `layoutc convert --match` from plain values, or "
        "with share_amax=True in quantize_, quantized_init and cast_on_gather_",
        stacklevel=4,
    )


def warn_rounded(label: str, errors: Sequence[float]) -> None:
    """Warns once that the files' codes do not decode to the exact values. errors: one per weight."""
    if errors:
        warnings.warn(
            f"{label}: the scales of {len(errors)} weights are rounded to codes, by at most {max(errors):.2%} of a "
            "weight's largest scale. To keep the codes that weights were loaded from, export with source=folder",
            stacklevel=4,
        )
