"""Describes a checkpoint entry: how it is stored, its size, and whether an installed recipe reads it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from layoutc.runtime.errors import LayoutError
from layoutc.runtime.facts import Layout
from layoutc.runtime.weight import stored_form

VALUE, UNREAD, MIXED = "value", "unread", "mixed"  # kinds that are neither a recipe nor a dtype
BF16 = 2  # bytes


@dataclass(frozen=True)
class LayoutFacts:
    """A layout of a tensor's pieces, and whether an installed recipe reads it."""

    recipe: str
    layout_id: str
    language: int  # version of the spec language
    spec_sha256: str
    installed: bool
    difference: str | None  # from the installed recipe of that name, as text; None if the layout is installed
    pieces: int  # pieces with this layout, among those whose headers were read


@dataclass(frozen=True)
class EntryFacts:
    """An entry of a checkpoint.

    kind: the recipe of a quantized tensor; the dtype of a plain one; "value" if it is not a tensor; "mixed" if its
    pieces are stored in different ways (see `layouts` and `plain`); "unread" if the writer transformed the bytes.
    """

    name: str
    kind: str
    shape: tuple[int, ...] | None  # of the whole tensor; None for a value
    dtype: str | None  # a quantized tensor's is the dtype that it dequantizes to
    layouts: tuple[LayoutFacts, ...]  # () for a plain tensor
    plain: int  # plain pieces, among those whose headers were read
    planes: tuple[str, ...]
    orientations: tuple[str, ...]
    pieces: int
    stored_bytes: int
    bytes_per_element: float | None  # None if there are no elements
    bf16_bytes: int  # size without headers if floating-point values were bf16


def header_of_others(layout: Layout, label: str, planes: Iterable[str]) -> dict[str, Any]:
    """The header of an entry in another format's files: what layoutc's own files say of it. label: of the binding."""
    here = {"recipe": label, "planes": list(planes), "orientations": [next(iter(layout.sources))]}
    return stored_form.describe(layout) | here


def entry_of(
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype | str,
    headers: Sequence[Mapping[str, Any] | None],
    pieces: int,
    stored_bytes: int,
    kind: str = "",
) -> EntryFacts:
    """Describes a tensor from its pieces' headers. kind: how it is stored, used if there are no headers."""
    layouts = [header for header in headers if header is not None and "layout_id" in header]
    plain = sum(header is not None and "layout_id" not in header for header in headers)
    ids = dict.fromkeys(header["layout_id"] for header in layouts)
    value = str(dtype).removeprefix("torch.")
    kinds = {header["recipe"] for header in layouts} | ({value} if plain else set())
    kind = (kind or UNREAD) if not kinds else kinds.pop() if len(kinds) == 1 and len(ids) < 2 else MIXED
    elements, as_dtype = math.prod(shape), vars(torch).get(value)
    itemsize = as_dtype.itemsize if isinstance(as_dtype, torch.dtype) else 0
    floating = isinstance(as_dtype, torch.dtype) and as_dtype.is_floating_point
    return EntryFacts(
        name,
        kind,
        shape,
        value,
        tuple(_layout(one, [header for header in layouts if header["layout_id"] == one]) for one in ids),
        plain,
        tuple(dict.fromkeys(plane for header in layouts for plane in header["planes"])),
        tuple(dict.fromkeys(which for header in layouts for which in header["orientations"])),
        pieces,
        stored_bytes,
        stored_bytes / elements if elements else None,
        elements * (BF16 if floating else itemsize) if floating or itemsize else stored_bytes,
    )


def _layout(layout_id: str, headers: Sequence[Mapping[str, Any]]) -> LayoutFacts:
    header, difference = headers[0], None
    try:
        stored_form.class_of(header)
    except LayoutError:
        difference = stored_form.against_installed(header["recipe"], header)
    return LayoutFacts(
        header["recipe"],
        layout_id,
        header["language"],
        header["spec_sha256"],
        difference is None,
        difference,
        len(headers),
    )
