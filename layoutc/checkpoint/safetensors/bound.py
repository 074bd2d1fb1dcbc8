"""A weight's planes in other programs' files: where they lie, and slices of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from layoutc.checkpoint.safetensors import places, recognize
from layoutc.checkpoint.safetensors.files import NAMES, OF_OTHERS, Stored
from layoutc.checkpoint.safetensors.recognize import Bound
from layoutc.checkpoint.untrusted.files import json_of, open_file, read_at, short
from layoutc.runtime.bindings.facts import BoundPlane
from layoutc.runtime.bindings.names import parameter_name, parts_of, tensor_name
from layoutc.runtime.bindings.texts import sizes_in, with_sizes
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.facts import Facts

LONGEST_TEXT = 1 << 16  # bytes


class PlaneSource(Protocol):
    """A plane of a weight in files that hold it in a form of their own."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The plane's shape."""

    def read(self, index: tuple[slice, ...], fetch: places.Read) -> Tensor:
        """Entries of the plane, of its dtype. fetch: reads slices of tensors. Raises LayoutError."""


class BoundSource(NamedTuple):
    """A plane of a weight in files: whole, or in parts that hold equal shares of its rows, one after another.

    shared: the plane's one row covers all rows of the weight, so all parts hold it. meanings: of each part, what its
    codes stand for, where files have codes of the values.
    """

    name: str
    facts: Facts
    parts: tuple[tuple[Stored, places.Place], ...]
    shared: bool
    meanings: tuple[places.Meaning, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The plane's shape."""
        return self.facts.shape

    def read(self, index: tuple[slice, ...], fetch: places.Read) -> Tensor:
        """Entries of the plane, of its dtype. Raises LayoutError if parts that share a value have different ones."""
        spans = [range(size)[part] for part, size in zip(index, self.shape, strict=False)]
        rows, columns = (spans[0], spans[-1]) if len(self.shape) == 2 else (range(1), range(1))
        if self.shared:
            found = [self._part(i, rows, columns, fetch) for i in range(len(self.parts))]
            if any(not torch.equal(one, found[0]) for one in found):
                raise LayoutError(
                    f"{self.name}: its parts in the files have values of their own, but the weight has one for all: "
                    "quantize the parts as weights of their own"
                )
            return found[0]
        each = self.shape[0] // len(self.parts)
        pieces = []
        for i in range(rows.start // max(each, 1), len(self.parts)):
            a, b = max(rows.start, i * each), min(rows.stop, (i + 1) * each)
            if a >= b:
                break
            pieces.append(self._part(i, range(a - i * each, b - i * each), columns, fetch))
        if not pieces:
            return torch.empty((0, len(columns)), dtype=self.facts.dtype)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _part(self, number: int, rows: range, columns: range, fetch: places.Read) -> Tensor:
        stored, place = self.parts[number]
        shape = stored.shape

        def box(index: tuple[slice, ...]) -> Tensor:
            return fetch(stored, index if len(index) == len(shape) else ())

        try:
            found = places.read(place, (rows.start, rows.stop), (columns.start, columns.stop), box)
            width = place.plane.shape[-1]
            return self.meanings[number].of(found, rows, columns, width, fetch) if self.meanings else found
        except LayoutError as error:
            raise LayoutError(f"{stored.name}, {self.name}: {error}") from error


class Stated(NamedTuple):
    """A tensor that follows from a weight's shape: its two sizes, or the number of each column's block; or from the
    recipe alone, the values of codes; or from both, JSON."""

    name: str
    facts: Facts
    sizes: tuple[int, int]  # rows and columns; or columns of the weight and of a block
    values: tuple[float, ...] = ()
    text: Mapping[str, Any] | None = None
    free: tuple[str, ...] = ()  # keys of the text that may have any value

    def made(self) -> Tensor:
        """The tensor."""
        if self.values:
            return torch.tensor(self.values, dtype=self.facts.dtype)
        if self.text is not None:
            return torch.frombuffer(bytearray(json.dumps(self.text).encode()), dtype=torch.uint8)
        if self.facts.shape == (2,):
            return torch.tensor(self.sizes, dtype=self.facts.dtype)
        return (torch.arange(self.sizes[0]) // self.sizes[1]).to(self.facts.dtype)

    def check(self, stored: Stored, fetch: places.Read) -> None:
        """Raises LayoutError if the files hold something else."""
        if self.text is not None:
            self._check_text(self.text, bytes(fetch(stored, ()).numpy()))
            return
        if torch.equal(fetch(stored, ()), self.made()):
            return
        if self.values:
            raise LayoutError(f"{self.name} in the files holds other values of codes than the recipe has")
        if self.facts.shape == (2,):
            raise LayoutError(f"{self.name} in the files does not say {list(self.sizes)}, the weight's shape")
        raise LayoutError(
            f"{self.name} in the files does not number the columns in blocks of {self.sizes[1]}: they were quantized "
            "in the order of their activations (desc_act), which the recipe can't hold; quantize without it"
        )

    def _check_text(self, stated: Mapping[str, Any], stored: bytes) -> None:
        """Raises LayoutError unless the files say the same, but for keys that may have any value; DamagedError, which
        is one, for what is no mapping in JSON."""
        found = json_of(stored, f"{self.name} in the files")
        for key in sorted((stated.keys() | found.keys()) - {*self.free}):
            if found.get(key) != stated.get(key):
                there, here = (repr(one[key])[:80] if key in one else "nothing" for one in (found, stated))
                raise LayoutError(f"{self.name} in the files has {there} as {key}, but a weight here has {here}")


class Held(NamedTuple):
    """A tensor that files hold for a weight: rows of a plane, or what follows from the weight's shape."""

    name: str
    facts: Facts
    plane: str
    rows: tuple[int, int]
    place: places.Place | None
    stated: Stated | None = None

    def made(self, planes: Mapping[str, Tensor]) -> Tensor:
        """The tensor, of the weight's whole planes, in memory of its own."""
        if self.stated is not None:
            return self.stated.made()
        assert self.place is not None
        plane = planes[self.plane]
        part = plane if self.place.plane.shape == tuple(plane.shape) else plane[self.rows[0] : self.rows[1]]
        return places.write(self.place, part, self.facts.dtype)


def held(name: str, shape: tuple[int, ...], bound: Bound) -> tuple[Held, ...]:
    """The tensors that files hold by this binding for a weight of this name and shape.

    Raises LayoutError if its rows can't be cut into the parts, or its values into the dims, that the binding says; and
    for files that have codes of a plane's values.
    """
    layout, binding = bound.cls.LAYOUT, bound.binding
    about = f"{name} in files of {bound.label}"
    if bound.is_read_only:
        others = [one for one in layout.files.values() if not recognize.Bound(bound.cls, one).is_read_only]
        instead = f"; export as {layout.name}/{others[0].name}" if others else ""
        raise LayoutError(f"{about}: they have codes of values that the recipe holds, which are never made{instead}")
    parameters, each, matrices = _parts(about, name, shape, bound)
    of_part = layout.planes(each, shape[-1])
    tensors = []
    for number, parameter in enumerate(parameters):
        for plane, pattern in binding.planes.items():
            tensor = tensor_name(pattern.name, parameter)
            place = _place(f"{about}: {tensor}", pattern, of_part[plane], matrices)
            first = number * of_part[plane].shape[0]
            rows = (first, first + of_part[plane].shape[0])
            facts = Facts(place.shape, OF_OTHERS[pattern.dtype])
            tensors.append(Held(tensor, facts, plane, rows, place))
        for stated in _stated(bound, parameter, each, shape[-1]):
            tensors.append(Held(stated.name, stated.facts, "", (0, 0), None, stated))
    return tuple(tensors)


def _stated(bound: Bound, parameter: str, rows: int, columns: int) -> list[Stated]:
    """The tensors of a parameter in files that follow from its shape."""
    binding, found = bound.binding, list[Stated]()
    if binding.shape:
        name, dtype = binding.shape
        found.append(Stated(tensor_name(name, parameter), Facts((2,), OF_OTHERS[dtype]), (rows, columns)))
    if binding.groups:
        name, dtype, each = binding.groups
        found.append(Stated(tensor_name(name, parameter), Facts((columns,), OF_OTHERS[dtype]), (columns, each)))
    if binding.codebook:
        name, dtype, values = binding.codebook
        facts = Facts((len(values),), OF_OTHERS[dtype])
        found.append(Stated(tensor_name(name, parameter), facts, (rows, columns), values))
    if binding.text:
        name, text, free = binding.text
        said = with_sizes(text, {"rows": rows, "columns": columns})
        facts = Facts((len(json.dumps(said).encode()),), torch.uint8)
        found.append(Stated(tensor_name(name, parameter), facts, (rows, columns), (), said, free))
    return found


def _parts(about: str, name: str, shape: tuple[int, ...], bound: Bound) -> tuple[list[str], int, int | None]:
    """The parameters in files that hold a weight, the rows of each, and the matrices that each is a stack of."""
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
            "that the files have apart: keep the parts as weights of their own"
        )
    return parameters, each, matrices if len(parameters) == 1 else None


def _place(about: str, pattern: BoundPlane, plane: Facts, matrices: int | None) -> places.Place:
    try:
        return places.place(pattern, plane, matrices)
    except LayoutError as error:
        raise LayoutError(f"{about}: {error}") from error


class Found(NamedTuple):
    """A weight in files: its shape, the source of each plane, the names of all tensors that belong to it; which of
    these, if they are there, nothing reads; and which must hold what follows from the shape."""

    bound: Bound
    shape: tuple[int, ...]
    planes: Mapping[str, BoundSource]
    tensors: frozenset[str]
    unread: frozenset[str]
    stated: tuple[tuple[Stated, Stored], ...]

    def check_stated(self, fetch: places.Read) -> None:
        """Raises LayoutError if the files hold something else than follows from the weight's shape, or nothing that
        their codes could stand for."""
        for one, stored in self.stated:
            one.check(stored, fetch)
        for meaning in (meaning for plane in self.planes.values() for meaning in plane.meanings):
            meaning.added(fetch)


def find(
    name: str, shape: tuple[int, ...], bound: Bound, tensors: Mapping[str, Stored], *, whole: bool = False
) -> Found | None:
    """The weight of this name and shape in the files, if they hold it quantized by this binding. whole: not in parts.

    Raises LayoutError if tensors are missing, or have other shapes or dtypes than the binding says.
    """
    layout, binding = bound.cls.LAYOUT, bound.binding
    if whole:
        binding = binding._replace(parts=())
        bound = bound._replace(binding=binding)
    named = parts_of(binding, name, prod(shape[:-2]) if len(shape) > 2 else None)
    if len(shape) < 2 or not any(
        tensor_name(scale, part) in tensors for scale in recognize.scales_of(bound) for part in named
    ):
        return None
    about = f"{name} in files of {bound.label}"
    parameters, each, matrices = _parts(about, name, shape, bound)
    facts, of_part = layout.planes(prod(shape[:-1]), shape[-1]), layout.planes(each, shape[-1])
    found, names = {}, set[str]()
    for plane, pattern in binding.planes.items():
        parts, meanings = [], list[places.Meaning]()
        in_file = of_part[plane]._replace(dtype=torch.uint8) if pattern.codes else of_part[plane]
        for parameter in parameters:
            tensor = tensor_name(pattern.name, parameter)
            place = _place(f"{about}: {tensor}", pattern, in_file, matrices)
            stored = _there(about, tensors, tensor, pattern.dtype, place.shape)
            parts.append((stored, place))
            names.add(tensor)
            meanings += _meaning(about, bound, pattern, parameter, prod(in_file.shape), tensors)
        names |= {one.name for meaning in meanings for one in (meaning.codebook, meaning.scale)}
        shared = layout.stored[plane].rows_per_value is None
        found[plane] = BoundSource(f"{plane} of {name}", facts[plane], tuple(parts), shared, tuple(meanings))
    stated = [one for parameter in parameters for one in _stated(bound, parameter, each, shape[-1])]
    names |= {one.name for one in stated}
    there = tuple((one, tensors[one.name]) for one in stated if one.name in tensors)
    for follows, stored in there:
        _check_stated(about, stored, follows)
    unread = frozenset(tensor_name(pattern, parameter) for pattern in binding.ignored for parameter in parameters)
    return Found(bound, shape, found, frozenset(names) | unread, unread, there)


def _meaning(
    about: str, bound: Bound, pattern: BoundPlane, parameter: str, count: int, tensors: Mapping[str, Stored]
) -> list[places.Meaning]:
    """What the codes of `count` values of a parameter stand for; [] where files have the values themselves."""
    if pattern.codes is None or bound.binding.text is None:
        return []
    codes, text = pattern.codes, tensor_name(bound.binding.text[0], parameter)
    if text not in tensors:
        raise LayoutError(f"{about}: {text}, which has {codes.offset}, is not there")
    codebook = _there(about, tensors, tensor_name(codes.codebook, parameter), "F32", (256,))
    scale = _there(about, tensors, tensor_name(codes.scale, parameter), "F32", (-(-count // codes.block),))
    return [places.Meaning(codebook, scale, tensors[text], codes.block, codes.offset)]


def _there(about: str, tensors: Mapping[str, Stored], name: str, dtype: str, shape: tuple[int, ...]) -> Stored:
    """A tensor of this shape and dtype. Raises LayoutError."""
    if (stored := tensors.get(name)) is None:
        raise LayoutError(f"{about}: {name} is not there")
    _check(about, stored, dtype, shape)
    return stored


def named_in(bound: Bound, tensors: Mapping[str, Stored], told: Iterable[Bound] = ()) -> dict[str, Stored]:
    """The weights that files hold quantized by a binding's names, in the order of their scales, with the tensors of
    their codes; but for those that only another of `told` has the dtypes of."""
    planes, found = bound.binding.planes, dict[str, Stored]()
    data, scale = (
        next(one.name for plane, one in planes.items() if plane.endswith(end)) for end in ("_data", "_scale")
    )
    for tensor in tensors:
        name = parameter_name(scale, tensor)
        codes = tensors.get(tensor_name(data, name)) if name else None
        alone = bound._replace(binding=bound.binding._replace(parts=()))
        if name is not None and codes is not None and not recognize.is_for_another(alone, name, None, tensors, told):
            found[name] = codes
    return found


def weights_in(bound: Bound, tensors: Mapping[str, Stored], told: Iterable[Bound] = ()) -> dict[str, Found]:
    """All weights of `named_in`.

    Where the shape of the codes does not tell that of the weight, it is read from the tensor that states it. Raises
    LayoutError if tensors of one are missing, or have other shapes or dtypes than the binding says; DamagedError, which
    is one, if what states a shape can't be what was written.
    """
    layout, planes = bound.cls.LAYOUT, bound.binding.planes
    data, found = next(plane for plane in planes if plane.endswith("_data")), dict[str, Found]()
    for name, stored in named_in(bound, tensors, told).items():
        shape = places.weight_shape(planes[data], stored.shape, layout.stored[data].columns_per_value or 1)
        shape = shape or _stated_shape(bound, name, tensors)
        weight = find(name, shape, bound, tensors, whole=True) if shape else None
        if weight is None:
            raise LayoutError(f"{stored.name} of {list(stored.shape)} is no weight in files of {bound.label}")
        found[name] = weight
    return found


def _stated_shape(bound: Bound, name: str, tensors: Mapping[str, Stored]) -> tuple[int, int] | None:
    """Rows and columns of a weight as a text in the files states them; None if the binding has no such text.

    Sizes are bounded before anything is read, and numbers are checked against the bytes of the planes by `find`.
    """
    if bound.binding.text is None:
        return None
    pattern, template, _ = bound.binding.text
    tensor = tensor_name(pattern, name)
    if (stored := tensors.get(tensor)) is None:
        raise LayoutError(f"{name} in files of {bound.label}: {tensor}, which states its shape, is not there")
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
    shape = sizes["rows"], sizes["columns"]
    try:
        bound.cls.LAYOUT.check_shape(shape, name)
    except ValueError as error:
        raise LayoutError(str(error)) from error
    return shape


def _check_stated(about: str, stored: Stored, one: Stated) -> None:
    """Raises LayoutError for a tensor that can't hold what follows from the weight. Texts may be of other lengths."""
    shape = one.facts.shape
    if one.text is not None and len(stored.shape) == 1 and stored.shape[0] <= LONGEST_TEXT:
        shape = stored.shape
    _check(about, stored, NAMES[one.facts.dtype], shape)


def _check(about: str, stored: Stored, dtype: str, shape: tuple[int, ...]) -> None:
    """Raises LayoutError for a tensor of another shape or dtype. One value may have any number of dims."""
    same_shape = stored.shape == shape or (prod(stored.shape) == prod(shape) == 1)
    if not same_shape or not recognize.is_dtype(stored, dtype):
        raise LayoutError(
            f"{about}: {stored.name} is {stored.dtype} of {list(stored.shape)}, but a weight of this shape has "
            f"{dtype} of {list(shape)} there"
        )
