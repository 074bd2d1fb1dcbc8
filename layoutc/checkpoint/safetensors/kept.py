"""What an export keeps from the files that a weight was read from: codes of its values, and free keys of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from layoutc.checkpoint.common.narrowing import warn_of
from layoutc.checkpoint.held import narrower
from layoutc.checkpoint.held.codes import Encoded
from layoutc.checkpoint.held.stored import Read, Stored
from layoutc.checkpoint.held.weights import Noted, warn_apart, warn_rounded
from layoutc.checkpoint.safetensors import choosing, recognize
from layoutc.checkpoint.safetensors.bound import Found, find
from layoutc.checkpoint.safetensors.files import Slices, read_folder
from layoutc.checkpoint.safetensors.recognize import Bound


class KeptIn(NamedTuple):
    """A weight in files. texts: its texts, by tensor name. fetch: reads slices of the files. wide: planes with values
    that the files' dtypes can't hold."""

    found: Found
    texts: Mapping[str, bytes]
    fetch: Read
    wide: frozenset[str] = frozenset()

    @property
    def like(self) -> dict[str, Stored]:
        """The planes' tensors by name. Wide planes get the dtype F32."""
        return {
            stored.name: stored._replace(dtype="F32") if plane in self.wide else stored
            for plane, one in self.found.planes.items()
            for stored, _ in one.parts
        }

    @property
    def following(self) -> frozenset[str]:
        """The names of the weight's derived tensors that the files have."""
        return frozenset(one.name for one, _ in self.found.stated)

    def too_wide(self, planes: Mapping[str, Tensor] | None) -> frozenset[str]:
        """The planes with values that the files' dtypes can't hold. None: the values are not known yet."""
        found = set[str]()
        for plane, one in self.found.planes.items():
            narrow = {place.plane.dtype for _, place in one.parts if not one.meanings} - {one.facts.dtype}
            if any(planes is None or not narrower.fits(planes[plane], dtype) for dtype in narrow):
                found.add(plane)
        return frozenset(found)

    def codes(self, plane: str, part: int) -> tuple[Encoded, Tensor]:
        """The stored codes of a part of a plane, and their decoded values: fp32, same shape."""
        return self.found.planes[plane].codes(part, self.fetch)

    def text(self, name: str) -> bytes | None:
        """The text of this name; None if the files lack it."""
        return self.texts.get(name)


def kept_in(found: Found, fetch: Read) -> KeptIn:
    """What to keep from files that hold a weight. Raises like `Found.check_stated`."""
    found.check_stated(fetch)
    texts = {one.name: bytes(fetch(stored, ()).numpy()) for one, stored in found.stated if one.text is not None}
    return KeptIn(found, texts, fetch)


class Origin(NamedTuple):
    """Files that weights were loaded from: their tensors by name, a reader of slices, and their config.json."""

    tensors: Mapping[str, Stored]
    slices: Slices
    config: Mapping[str, Any]

    @property
    def quantization(self) -> Mapping[str, Any]:
        """The `quantization_config` in config.json; {} without one."""
        return recognize.quantization_of(self.config)

    def of(self, name: str, shape: tuple[int, ...], bound: Bound) -> KeptIn | None:
        """What to keep from the files for a weight of this name and shape; None if they don't hold it by this binding.

        Raises LayoutError if tensors are missing, or shapes contradict the binding; DamagedError for a changed text.
        """
        others = [Bound(bound.cls, one) for one in bound.cls.LAYOUT.files.values()]
        binding = bound.binding
        varies = any(plane.codes or narrower.is_narrower(plane, "BF16") for plane in binding.planes.values())
        follow = binding.shape or binding.groups or binding.codebook or binding.text
        if not (varies or binding.parts or follow or "{expert}" in name):
            return None  # the planes determine every tensor
        if not recognize.is_held(bound, name, shape, self.tensors):
            return None
        if recognize.is_for_another(bound, name, shape, self.tensors, others):
            return None
        found = find(name, shape, bound, self.tensors)
        return kept_in(found, self.slices.read) if found is not None else None


def origin(folder: str | PathLike[str] | None, slices: Slices) -> Origin:
    """The files of a folder; empty if `folder` is None. Raises like `read_folder` and `choosing.check_holds`."""
    if folder is None:
        return Origin({}, slices, {})
    contents, config = read_folder(Path(folder)), recognize.config_in(Path(folder))
    if not contents.described:
        told = recognize.recognized(recognize.quantization_of(config), recognize.installed())
        choosing.check_holds(Path(folder), None, told, contents.tensors)
    return Origin(contents.tensors, slices, config)


def warn_written(files: str | None, source: object, said: Noted, names: Sequence[str]) -> None:
    """Warns once each of scales that were rounded to codes, of scales of joined weights that differ, and of weights
    (`names`) whose scales are written in fp32 because the source's dtype can't hold them."""
    warn_rounded(f"files {files!r}", said.errors)
    warn_apart(f"files {files!r}", said.scales)
    what = ": the scales are written as F32, because the dtype that"
    warn_of("", names, f"{what} {source} has them in does not hold their values")
