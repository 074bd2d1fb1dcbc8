"""What files keep of a weight that was read from them: codes of its values, and what a text says that is free."""

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
from layoutc.checkpoint.safetensors import choosing, recognize
from layoutc.checkpoint.safetensors.bound import Found, find
from layoutc.checkpoint.safetensors.files import Slices, read_folder
from layoutc.checkpoint.safetensors.recognize import Bound


class KeptIn(NamedTuple):
    """A weight as files hold it, with its texts by the names of their tensors. fetch: reads slices of the files. wide:
    planes that have values which the dtypes of the files don't hold."""

    found: Found
    texts: Mapping[str, bytes]
    fetch: Read
    wide: frozenset[str] = frozenset()

    @property
    def like(self) -> dict[str, Stored]:
        """Its planes' tensors by name; of those whose dtypes don't hold the values, as planes of fp32 are written."""
        return {
            stored.name: stored._replace(dtype="F32") if plane in self.wide else stored
            for plane, one in self.found.planes.items()
            for stored, _ in one.parts
        }

    @property
    def following(self) -> frozenset[str]:
        """The names of tensors that follow from its shape, of those that the files have."""
        return frozenset(one.name for one, _ in self.found.stated)

    def too_wide(self, planes: Mapping[str, Tensor] | None) -> frozenset[str]:
        """The planes that have values here which the dtypes of the files don't hold. None: values are not known yet,
        and may be any."""
        found = set[str]()
        for plane, one in self.found.planes.items():
            narrow = {place.plane.dtype for _, place in one.parts if not one.meanings} - {one.facts.dtype}
            if any(planes is None or not narrower.fits(planes[plane], dtype) for dtype in narrow):
                found.add(plane)
        return frozenset(found)

    def codes(self, plane: str, part: int) -> tuple[Encoded, Tensor]:
        """The codes that they have for a part's values of a plane, and what these stand for: fp32, of their shape."""
        return self.found.planes[plane].codes(part, self.fetch)

    def text(self, name: str) -> bytes | None:
        """The text of this name; None if the files have none."""
        return self.texts.get(name)


def kept_in(found: Found, fetch: Read) -> KeptIn:
    """What files keep of a weight that they hold. Raises as `Found.check_stated`."""
    found.check_stated(fetch)
    texts = {one.name: bytes(fetch(stored, ()).numpy()) for one, stored in found.stated if one.text is not None}
    return KeptIn(found, texts, fetch)


class Origin(NamedTuple):
    """Files that weights were loaded from: their tensors by name, what reads slices of them, and their config.json."""

    tensors: Mapping[str, Stored]
    slices: Slices
    config: Mapping[str, Any]

    @property
    def quantization(self) -> Mapping[str, Any]:
        """The `quantization_config` of config.json; {} without one."""
        return recognize.quantization_of(self.config)

    def of(self, name: str, shape: tuple[int, ...], bound: Bound) -> KeptIn | None:
        """What the files keep of a weight of this name and shape; None if they don't hold it by this binding.

        Raises LayoutError if tensors are missing, or have other shapes than the binding says; DamagedError, which is
        one, for texts that can't be what was written.
        """
        others = [Bound(bound.cls, one) for one in bound.cls.LAYOUT.files.values()]
        binding = bound.binding
        varies = any(plane.codes or narrower.is_narrower(plane, "BF16") for plane in binding.planes.values())
        follow = binding.shape or binding.groups or binding.codebook or binding.text
        if not (varies or binding.parts or follow):
            return None  # planes decide all of the files
        if not recognize.is_held(bound, name, shape, self.tensors):
            return None
        if recognize.is_for_another(bound, name, shape, self.tensors, others):
            return None
        found = find(name, shape, bound, self.tensors)
        return kept_in(found, self.slices.read) if found is not None else None


def origin(folder: str | PathLike[str] | None, slices: Slices) -> Origin:
    """The files of a folder; none without one. Raises as `read_folder` and `choosing.check_holds`."""
    if folder is None:
        return Origin({}, slices, {})
    contents, config = read_folder(Path(folder)), recognize.config_in(Path(folder))
    if not contents.described:
        told = recognize.recognized(recognize.quantization_of(config), recognize.installed())
        choosing.check_holds(Path(folder), None, told, contents.tensors)
    return Origin(contents.tensors, slices, config)


def warn_wide(source: object, names: Sequence[str]) -> None:
    """Says once which scales are written in fp32, since the dtype of the source does not hold them."""
    what = ": the scales are written as F32, because the dtype that"
    warn_of("", names, f"{what} {source} has them in does not hold their values")
