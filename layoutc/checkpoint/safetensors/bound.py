"""Finds a weight's planes in other checkpoint formats, and checks them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from functools import partial
from math import prod
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from layoutc.checkpoint.bindings.names import parameter_name, parts_of, tensor_name
from layoutc.checkpoint.held import narrower, places
from layoutc.checkpoint.held.codes import Meaning
from layoutc.checkpoint.held.sources import BoundSource
from layoutc.checkpoint.held.stated import Stated, order_beside, sizes_in, stated
from layoutc.checkpoint.held.stored import NAMES, OF_OTHERS, Read, Stored
from layoutc.checkpoint.held.weights import Held, with_codes
from layoutc.checkpoint.safetensors import recognize
from layoutc.checkpoint.safetensors.recognize import Bound
from layoutc.checkpoint.untrusted.files import json_of, open_file, read_at, short
from layoutc.runtime.bindings.facts import BoundPlane
from layoutc.runtime.bindings.fused import joined
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.facts import Facts
from layoutc.runtime.weight.tensor import QuantizedTensor

LONGEST_TEXT = 1 << 16  # bytes
NO_TEXTS: Mapping[str, bytes] = MappingProxyType({})
NO_TENSORS: Mapping[str, Stored] = MappingProxyType({})


def held(
    name: str,
    shape: tuple[int, ...],
    bound: Bound,
    texts: Mapping[str, bytes] = NO_TEXTS,
    like: Mapping[str, Stored] = NO_TENSORS,
    following: Container[str] | None = None,
) -> tuple[Held, ...]:
    """The tensors that files of this binding hold for a weight of this name and shape.

    texts, like: texts and tensors, by name, of the files that the weight was read from. The contents of texts, narrower
    dtypes of planes, and the dims of single values are kept. following: the names of derived tensors in these files,
    since some programs leave them out; None: write all. Raises LayoutError if the weight's rows or values can't be
    split as the binding says, or if files store codes of a plane's values that the binding can't make.
    """
    layout, binding = bound.cls.LAYOUT, bound.binding
    about = f"{name} in files of {bound.label}"
    if bound.is_read_only:
        others = [one for one in layout.files.values() if not recognize.Bound(bound.cls, one).is_read_only]
        instead = f"; export as {layout.name}/{others[0].name}" if others else ""
        raise LayoutError(f"{about}: layoutc reads such files, and does not write their codes{instead}")
    parameters, each, matrices = _parts(about, name, shape, bound)
    of_part = layout.planes(each, shape[-1])
    tensors = list[Held]()
    for number, parameter in enumerate(parameters):
        for plane, pattern in binding.planes.items():
            tensor = tensor_name(pattern.name, parameter)
            there = like.get(tensor)
            as_is, in_file = narrower.as_stored(pattern, of_part[plane], there.dtype if there else None)
            place = _place(f"{about}: {tensor}", as_is, in_file, matrices)
            dtype = as_is.dtype
            if there is not None and there.header is not None:
                dtype, place = there.header[0], place._replace(shape=there.header[1])
            elif there is not None and prod(there.shape) == prod(place.shape) == 1:
                place = place._replace(shape=there.shape)
            first = number * in_file.shape[0]
            rows = (first, first + in_file.shape[0])
            facts = Facts(place.shape, OF_OTHERS[dtype])
            whole = layout.stored[plane].rows_per_value is None or pattern.of_matrices
            group = (joined(tensor, binding.fused) if whole else None) or ""
            one = Held(tensor, facts, plane, rows, place, part=number, codes=pattern.codes, joined=group)
            tensors += with_codes(one, parameter, prod(in_file.shape))
        for follows in stated(binding, parameter, each, shape[-1]):
            if following is not None and follows.name not in following:
                continue
            facts = follows.facts
            if follows.text is not None:
                facts = Facts((follows.most(texts.get(follows.name)),), facts.dtype)
            tensors.append(Held(follows.name, facts, "", (0, 0), None, follows, number))
    return tuple(tensors)


def _parts(about: str, name: str, shape: tuple[int, ...], bound: Bound) -> tuple[list[str], int, int | None]:
    """A weight's parameters in files, the rows of each, and the number of matrices if one parameter stacks them."""
    layout, binding = bound.cls.LAYOUT, bound.binding
    matrices = prod(shape[:-2]) if len(shape) > 2 else None
    parameters, m = parts_of(binding, name, matrices), prod(shape[:-1])
    if m % len(parameters):
        raise LayoutError(f"{about}: {m} rows are not {len(parameters)} equal parts")
    each = m // len(parameters)
    rows_per_value = max((layout.stored[plane].rows_per_value or 1) for plane in binding.planes)
    if len(parameters) > 1 and each % rows_per_value:
        raise LayoutError(
            f"{about}: parts of {each} rows end inside blocks of {rows_per_value}, so the weight would share scales "
            "that the files keep apart: keep the parts as separate weights"
        )
    return parameters, each, matrices if len(parameters) == 1 else None


def _place(about: str, pattern: BoundPlane, plane: Facts, matrices: int | None) -> places.Place:
    try:
        return places.place(pattern, plane, matrices)
    except LayoutError as error:
        raise LayoutError(f"{about}: {error}") from error


class Found(NamedTuple):
    """A weight in files: its shape, the source of each plane, the names of all its tensors, the names of those that
    nothing reads (`unread`), and its derived tensors (`stated`)."""

    bound: Bound
    shape: tuple[int, ...]
    planes: Mapping[str, BoundSource]
    tensors: frozenset[str]
    unread: frozenset[str]
    stated: tuple[tuple[Stated, Stored], ...]

    def check_stated(self, fetch: Read) -> None:
        """Raises LayoutError if a derived tensor in the files is wrong, if the codes of a plane's values can't be
        decoded, or if a scale of the whole weight is NaN or infinite, or is 0 although some codes do not stand for
        0."""
        for one, stored in self.stated:
            one.check(stored, fetch)
        for meaning in (meaning for plane in self.planes.values() for meaning in plane.meanings):
            meaning.added(fetch)
        whole = next((name for name in self.planes if name == "amax" or name.endswith("_level")), None)
        for number, (stored, _) in enumerate(self.planes[whole].parts if whole else ()):
            scale = fetch(stored, ()).float().flatten()
            wrong = ~scale.isfinite()
            if not wrong.any() and not scale.all():
                wrong = (scale == 0) & ~self._are_zero(fetch, number, len(scale), whole)
            if wrong.any():
                at = "" if len(scale) == 1 else f"[{wrong.nonzero()[0].item()}]"
                raise LayoutError(
                    f"{stored.name}{at} in the files is {scale[wrong][0].item():g}, which is no scale of these codes: "
                    "the weight was not calibrated, or the file is damaged"
                )

    def _are_zero(self, fetch: Read, number: int, matrices: int, whole: str | None) -> Tensor:
        """For each matrix of a part: True if all its codes stand for 0, whatever the scales in the plane `whole` are.
        A scale in the plane "amax" applies to all parts."""
        planes = {name: one.read(tuple(slice(0, n) for n in one.shape), fetch) for name, one in self.planes.items()}
        ones = planes | {name: torch.ones_like(planes[name]) for name in (whole,) if name is not None}
        each = len(planes["rowwise_data"]) // len(self.planes["rowwise_data"].parts)
        rows = slice(number * each, (number + 1) * each) if whole != "amax" else slice(None)
        values = [self.values(one, torch.float32).flatten(0, -2)[rows] for one in (planes, ones)]
        return (torch.stack(values) == 0).view(2, matrices, -1).all(-1).all(0)

    def values(self, planes: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Dequantizes the weight's planes."""
        cls = self.bound.cls
        given = next(name for name, needed in cls.LAYOUT.sources.items() if set(needed) <= planes.keys())
        viewed = {name: plane.contiguous().view(cls.LAYOUT.dtypes[name]) for name, plane in planes.items()}
        whole: QuantizedTensor = cls(viewed, self.shape, dtype, orientations=(given,))
        return whole.dequantize(dtype)


def find(
    name: str, shape: tuple[int, ...], bound: Bound, tensors: Mapping[str, Stored], *, whole: bool = False
) -> Found | None:
    """The weight of this name and shape, if the files hold it quantized by this binding. whole: not in parts.

    Raises LayoutError if tensors are missing, or their shapes or dtypes contradict the binding.
    """
    bound = bound.without_parts() if whole else bound.as_in(name, tensors)
    layout, binding = bound.cls.LAYOUT, bound.binding
    named = parts_of(binding, name, prod(shape[:-2]) if len(shape) > 2 else None)
    if len(shape) < 2 or not any(
        tensor_name(scale, part) in tensors for scale in recognize.scales_of(bound) for part in named
    ):
        return None
    about = f"{name} in files of {bound.label}"
    _check_not_transposed(about, named, shape, bound, tensors)
    parameters, each, matrices = _parts(about, name, shape, bound)
    facts, of_part = layout.planes(prod(shape[:-1]), shape[-1]), layout.planes(each, shape[-1])
    found, names = {}, set[str]()
    for plane, pattern in binding.planes.items():
        parts, meanings = [], list[Meaning]()
        for parameter in parameters:
            tensor = tensor_name(pattern.name, parameter)
            dtype = tensors[tensor].dtype if tensor in tensors else None
            as_is, in_file = narrower.as_stored(pattern, of_part[plane], dtype)
            place = _place(f"{about}: {tensor}", as_is, in_file, matrices)
            stored = _there(about, tensors, tensor, as_is.dtype, place.shape, as_is)
            parts.append((stored, place))
            names.add(tensor)
            meanings += _meaning(about, bound, pattern, parameter, prod(in_file.shape), tensors)
        names |= {one.name for meaning in meanings for one in (meaning.codebook, meaning.scale)}
        shared = layout.stored[plane].rows_per_value is None
        of = f"{plane} of {name}", facts[plane], tuple(parts), shared, tuple(meanings)
        found[plane] = BoundSource(*of, partial(_with_one_for_each, bound))
    follow = [one for parameter in parameters for one in stated(binding, parameter, each, shape[-1])]
    scale = next(layout.stored[plane] for plane in binding.planes if plane.endswith("_scale"))
    block = round(scale.columns_per_value or shape[-1])
    follow += [one for parameter in parameters for one in order_beside(parameter, shape[-1], block, tensors)]
    names |= {one.name for one in follow}
    there = tuple((one, tensors[one.name]) for one in follow if one.name in tensors)
    for follows, stored in there:
        of_text = follows.text is not None and len(stored.shape) == 1 and stored.shape[0] <= LONGEST_TEXT
        _check(about, stored, NAMES[follows.facts.dtype], stored.shape if of_text else follows.facts.shape)
    unread = frozenset(tensor_name(pattern, parameter) for pattern in binding.ignored for parameter in parameters)
    return Found(bound, shape, found, frozenset(names) | unread, unread, there)


def _check_not_transposed(
    about: str, parts: list[str], shape: tuple[int, ...], bound: Bound, tensors: Mapping[str, Stored]
) -> None:
    """Raises LayoutError if a stack holds the transposes of the matrices in the files, side by side."""
    data, pattern = next(one for one in bound.binding.planes.items() if one[0].endswith("_data"))
    if len(parts) == 1 or (first := tensors.get(tensor_name(pattern.name, parts[0]))) is None:
        return
    of_part = places.weight_shape(pattern, first.shape, bound.cls.LAYOUT.stored[data].columns_per_value or 1)
    columns, of_each = shape[-1], len(parts) // prod(shape[:-2])
    if of_part not in (None, (shape[-2] // of_each, columns)) and of_part == (columns // of_each, shape[-2]):
        raise LayoutError(
            f"{about}: {first.name} is a matrix of {list(of_part)}, whose transpose the model's stack has: make a "
            "model with a linear layer for each expert, such as transformers.quantizers.base."
            "SequentialLlama4TextExperts(config) for Llama 4's experts"
        )


def _with_one_for_each(bound: Bound) -> list[str]:
    """The recipes for the same files whose stacks have one amax per matrix."""
    every = recognize.installed()
    return [one.cls.LAYOUT.name for one in every if one.of_stacks and one.binding.config == bound.binding.config]


def find_apart(name: str, shape: tuple[int, ...], bound: Bound, tensors: Mapping[str, Stored]) -> list[Found]:
    """A weight's parts in the files, each as a separate weight: a part may have its own scale for all its rows, and may
    end inside a block. [] if the files don't hold the weight by this binding. Raises like `find`."""
    matrices, m = prod(shape[:-2]) if len(shape) > 2 else None, prod(shape[:-1])
    parts = parts_of(bound.as_in(name, tensors).binding, name, matrices)
    if len(parts) == 1 or m % len(parts):
        found = [find(name, shape, bound, tensors)]
    else:
        _check_not_transposed(f"{name} in files of {bound.label}", parts, shape, bound, tensors)
        found = [find(part, (m // len(parts), shape[-1]), bound, tensors, whole=True) for part in parts]
        if any(found) and not all(found):
            raise LayoutError(f"{parts[found.index(None)]}, a part of {name}, is missing in files of {bound.label}")
    return [one for one in found if one is not None]


def _meaning(
    about: str, bound: Bound, pattern: BoundPlane, parameter: str, count: int, tensors: Mapping[str, Stored]
) -> list[Meaning]:
    """How to decode the codes of `count` values of a parameter; [] if files store the values themselves."""
    if pattern.codes is None or bound.binding.text is None:
        return []
    codes, text = pattern.codes, tensor_name(bound.binding.text[0], parameter)
    if text not in tensors:
        raise LayoutError(f"{about}: {text}, which has {codes.offset}, is missing")
    codebook = _there(about, tensors, tensor_name(codes.codebook, parameter), "F32", (256,))
    scale = _there(about, tensors, tensor_name(codes.scale, parameter), "F32", (-(-count // codes.block),))
    return [Meaning(codebook, scale, tensors[text], codes.block, codes.offset)]


def _there(
    about: str,
    tensors: Mapping[str, Stored],
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    bound: BoundPlane | None = None,
) -> Stored:
    """The tensor of this name. Raises LayoutError if it is missing, or has another shape or dtype."""
    if (stored := tensors.get(name)) is None:
        raise LayoutError(f"{about}: {name} is missing")
    if bound is not None and narrower.is_storage(bound, stored) and stored.end - stored.begin == prod(shape):
        return stored._replace(dtype="U8", shape=shape, header=(stored.dtype, stored.shape))
    _check(about, stored, dtype, shape)
    return stored


def named_in(bound: Bound, tensors: Mapping[str, Stored], told: Iterable[Bound] = ()) -> dict[str, Stored]:
    """The quantized weights in files that match a binding's names, in the order of their scales, each with the tensor
    of its codes. Leaves out weights whose dtypes match only another binding of `told`."""
    planes, found = bound.binding.planes, dict[str, Stored]()
    data, scale = (
        next(one.name for plane, one in planes.items() if plane.endswith(end)) for end in ("_data", "_scale")
    )
    for tensor in tensors:
        name = parameter_name(scale, tensor)
        codes = tensors.get(tensor_name(data, name)) if name else None
        alone = bound.without_parts()
        if name is not None and codes is not None and not recognize.is_for_another(alone, name, None, tensors, told):
            found[name] = codes
    return found


def weights_in(bound: Bound, tensors: Mapping[str, Stored], told: Iterable[Bound] = ()) -> dict[str, Found]:
    """All weights of `named_in`.

    If the codes' shape does not determine the weight's shape, reads it from the text that states it. Raises LayoutError
    if a weight's tensors are missing, or their shapes or dtypes contradict the binding; DamagedError, a subclass, if
    the text is not what was written.
    """
    layout, planes, alone = bound.cls.LAYOUT, bound.binding.planes, bound.without_parts()
    data, found = next(plane for plane in planes if plane.endswith("_data")), dict[str, Found]()
    for name, stored in named_in(bound, tensors, told).items():
        shape = places.weight_shape(planes[data], stored.shape, layout.stored[data].columns_per_value or 1)
        if shape is None and (shape := _stated_shape(bound, name, tensors)) is not None:
            if recognize.is_for_another(alone, name, shape, tensors, told):
                continue
            bound.check_shape(shape, name)
        weight = find(name, shape, bound, tensors, whole=True) if shape else None
        if weight is None:
            raise LayoutError(f"{stored.name} of shape {list(stored.shape)} is not a weight in files of {bound.label}")
        found[name] = weight
    return found


def _stated_shape(bound: Bound, name: str, tensors: Mapping[str, Stored]) -> tuple[int, int] | None:
    """A weight's rows and columns, read from a text in the files; None if the binding has no text.

    Bounds the text's size before reading. `find` checks the numbers against the bytes of the planes.
    """
    if bound.binding.text is None:
        return None
    pattern, template, _ = bound.binding.text
    tensor = tensor_name(pattern, name)
    if (stored := tensors.get(tensor)) is None:
        raise LayoutError(f"{name} in files of {bound.label}: {tensor}, which states its shape, is missing")
    if stored.dtype != "U8" or len(stored.shape) != 1 or stored.shape[0] > LONGEST_TEXT:
        raise LayoutError(
            f"{name} in files of {bound.label}: {tensor} is {stored.dtype} of {list(stored.shape)}, but should be a "
            f"text of at most {LONGEST_TEXT} bytes, U8"
        )
    with open_file(stored.path) as file:
        text = json_of(read_at(file, stored.begin, stored.end - stored.begin), f"{tensor} in the files")
    sizes = sizes_in(template, text)
    if sizes.keys() != {"rows", "columns"}:
        raise LayoutError(f"{tensor} in the files does not state the two sizes of a weight: {short(text)}")
    return sizes["rows"], sizes["columns"]


def _check(about: str, stored: Stored, dtype: str, shape: tuple[int, ...]) -> None:
    """Raises LayoutError if a tensor has another shape or dtype. A single value may have any number of dims."""
    same_shape = stored.shape == shape or (prod(stored.shape) == prod(shape) == 1)
    if not same_shape or not recognize.is_dtype(stored, dtype):
        raise LayoutError(
            f"{about}: {stored.name} is {stored.dtype} of {list(stored.shape)}, but a weight of this shape has "
            f"{dtype} of {list(shape)} there"
        )
