"""The stored form of a quantized tensor in files: plain tensors and plain metadata, which name a layout and no class.

torch.save, pickle and torch.distributed.checkpoint all go through here. Only what the tensor's own rows need is
written: no other row's codes, each scale once, and a CRC-32 of every plane. The only global in the file is the function
`layoutc.restore_tensor`, which never moves and finds the class of the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from layoutc.ints.cuts import Halo
from layoutc.ints.sizes import cdiv
from layoutc.runtime import installed
from layoutc.runtime.errors import DamagedError, LayoutError
from layoutc.runtime.facts import Layout
from layoutc.runtime.storage.planes import own
from layoutc.runtime.storage.store import Stack
from layoutc.runtime.torch_private import FakeTensor
from layoutc.runtime.weight.checksums import crc32
from layoutc.runtime.weight.plane_tensor import PlaneTensor

FORMAT = 1  # the version of what `describe` and `state_of` write
DIMS = 64  # torch's limit
_left: ContextVar[list[int] | None] = ContextVar("bytes that may still be checked", default=None)
_classes: dict[str, dict[str, type[PlaneTensor]]] = {}  # by layout id, then by the module of the generated code


def state_of(tensor: PlaneTensor) -> dict[str, Any]:
    """A tensor as numbers, strings, tuples, dicts and plain tensors. The inverse of `restore_tensor`."""
    tensor.check_readable()
    store = tensor.store
    planes = {name: own(store.entries(name)) for name in store.planes}
    return {
        "format": FORMAT,
        **describe(tensor.LAYOUT),
        "module": type(tensor).__module__,  # a preference among several classes of one layout
        "shape": tuple(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "matrix": store.matrix,
        "halo": tuple(store.halo[:2]),
        "orientations": store.declared,
        "transposed": tensor.transposed,
        "requires_grad": tensor.requires_grad,
        "parameter": isinstance(tensor, nn.Parameter),
        "crc32": {name: crc32(plane) for name, plane in planes.items() if not plane.is_meta},
        "planes": planes,
        **({} if store.stack is None else {"stack": tuple(store.stack)}),
    }


def describe(layout: Layout) -> dict[str, Any]:
    """A layout as plain values: its id identifies it; the facts let a reader say what differs."""
    return {
        "recipe": layout.name,
        "layout_id": layout.layout_id,
        "language": layout.language,
        "spec_sha256": layout.spec_sha256,
        "facts": {
            "blocks": dict(layout.blocks),
            "planes": {
                name: (plane.rows_per_value, plane.columns_per_value, str(layout.dtypes[name]).removeprefix("torch."))
                for name, plane in layout.stored.items()
            },
        },
    }


def restore_tensor(state: dict[str, Any]) -> Any:
    """Rebuilds a tensor for pickle and torch.load. state: what `state_of` returned.

    Raises DamagedError for changed bytes, LayoutError if no installed recipe, or not this version, reads them.

    Example:

        >>> weight = layoutc.recipes.nvfp4.quantize(torch.ones(128, 128))
        >>> torch.save(weight, "weight.pt")  # a pickle that names this function
        >>> torch.equal(torch.load("weight.pt").dequantize(), weight.dequantize())
        True
    """
    return restored(state, _crc32)


@contextmanager
def at_most(nbytes: int) -> Iterator[None]:
    """Limits the bytes that `restore_tensor` checks: a hostile file could refer to the same bytes many times."""
    token = _left.set([nbytes])
    try:
        yield
    finally:
        _left.reset(token)


def _crc32(plane: Tensor) -> int:
    if (left := _left.get()) is not None:
        left[0] -= plane.nbytes
        if left[0] < 0:
            raise DamagedError("the file has more tensors than bytes for them")
    return crc32(plane)


def restored(state: dict[str, Any], crc32_of: Callable[[Tensor], int]) -> Any:
    """As `restore_tensor`. crc32_of: gives a plane's CRC-32, for callers that have already computed it."""
    if not isinstance(state, dict) or type(form := state.get("format")) is not int:
        raise DamagedError("the state of a quantized tensor is not one that layoutc writes")
    if form != FORMAT:
        raise LayoutError(f"the file holds tensors in format {form}; this version of layoutc reads {FORMAT}")
    if (wrong := wrong_in(state, lambda one: isinstance(one, Tensor) and one.layout == torch.strided)) is not None:
        raise DamagedError(f"the state of a quantized tensor is damaged: {wrong}")
    planes: dict[str, Tensor] = state["planes"]
    shape, matrix, halo = tuple(state["shape"]), tuple(state["matrix"]), Halo(*state["halo"])
    cls = class_of(state)
    _check_planes(cls.LAYOUT, planes, matrix, halo, shape)
    for name, plane in planes.items():
        if plane.is_meta or isinstance(plane, FakeTensor):  # as FakeTensorMode loads it: without bytes
            continue
        if crc32_of(plane) != state["crc32"].get(name):
            raise DamagedError(
                f"{name} of a weight of shape {shape} in {state['recipe']}: the bytes are not those that were "
                "written (CRC-32 differs); read another copy of the file"
            )
    tensor = cls(
        with_halo(cls.LAYOUT, planes, matrix, halo) if halo.rows else planes,
        shape,
        getattr(torch, state["dtype"]),
        matrix=matrix,
        orientations=tuple(state["orientations"]),
        transposed=state["transposed"],
        halo=halo,
    )
    if cls.LAYOUT.amax_of_matrices and "stack" in state:  # 0.2 did not write it: the shape is that of a stack
        tensor.store.stack = Stack(*state["stack"])
    if state["parameter"]:
        return nn.Parameter(tensor, state["requires_grad"])
    return tensor.requires_grad_(state["requires_grad"])


# The name in files, which must not change when this code moves.
restore_tensor.__module__ = "layoutc"
torch.serialization.add_safe_globals([restore_tensor])


def _check_planes(
    layout: Layout, planes: Mapping[str, Tensor], matrix: tuple[int, ...], halo: Halo, shape: tuple[int, ...]
) -> None:
    """Raises DamagedError if the planes don't have the shapes and dtypes that the weight's shape requires."""
    block, weight = layout.block_rows, f"a weight of shape {shape} in {layout.name}"
    if max(halo[:2]) >= block:
        raise DamagedError(f"{weight} has a halo of {tuple(halo[:2])} rows, but its blocks have only {block}")
    if not planes:
        raise DamagedError(f"{weight} has no planes")
    facts = layout.planes(matrix[0], matrix[1])
    for name, plane in planes.items():
        if not plane.is_meta and plane.nbytes > plane.untyped_storage().nbytes():
            raise DamagedError(f"{name} of {weight} has more elements than the file has bytes for it")
        expected = facts[name].shape if name in facts else None
        if expected and halo.rows and (rows := layout.stored[name].rows_per_value) is not None:
            expected = (cdiv(matrix[0] - halo.after, rows) - halo.before // rows, *expected[1:])
        if expected != tuple(plane.shape) or facts[name].dtype != plane.dtype:
            raise DamagedError(
                f"{name} of a weight of shape {shape} in {layout.name} should be {expected}, but the file has "
                f"{tuple(plane.shape)} {plane.dtype}"
            )


def is_size(value: Any) -> bool:
    """True for an int that is a valid size, and no bool."""
    return type(value) is int and 0 <= value < 2**63


def is_shape(value: Any) -> bool:
    """True for a tuple of as many sizes as a tensor may have."""
    return isinstance(value, tuple) and len(value) <= DIMS and all(map(is_size, value))


def _is_text(value: Any) -> bool:
    return type(value) is str


def is_facts(value: Any) -> bool:
    """{"blocks": {orientation: text}, "planes": {name: (rows, columns, dtype)}}."""
    if not isinstance(value, dict) or set(value) != {"blocks", "planes"}:
        return False
    blocks, planes = value["blocks"], value["planes"]
    if not isinstance(blocks, dict) or not isinstance(planes, dict):
        return False
    return all(isinstance(text, str) for pair in blocks.items() for text in pair) and all(
        isinstance(name, str)
        and isinstance(plane, tuple | list)
        and len(plane) == 3
        and all(one is None or (isinstance(one, int | float) and one > 0) for one in plane[:2])
        and isinstance(plane[2], str)
        for name, plane in planes.items()
    )


_STATE: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("recipe", "layout_id", "spec_sha256", "module"), _is_text),
    "language": is_size,
    "facts": is_facts,
    "shape": is_shape,
    "dtype": lambda value: _is_text(value) and getattr(vars(torch).get(value), "is_floating_point", False) is True,
    **dict.fromkeys(("matrix", "halo"), lambda value: is_shape(value) and len(value) == 2),
    "orientations": lambda value: isinstance(value, tuple) and all(map(_is_text, value)),
    **dict.fromkeys(("transposed", "requires_grad", "parameter"), lambda value: isinstance(value, bool)),
    "crc32": lambda value: isinstance(value, dict) and all(map(is_size, value.values())),
}


def wrong_in(state: Mapping[str, Any], is_plane: Callable[[Any], bool]) -> str | None:
    """What is wrong with a state, in words; None if `state_of` could have written it. is_plane: checks a plane."""
    for name, fits in _STATE.items():
        if name not in state or not fits(state[name]):
            return f"{name} is not what layoutc writes"
    each = state.get("stack", (1, 0))
    if not is_shape(each) or len(each) != 2 or each[0] == 0:
        return "stack is not what layoutc writes"
    planes = state.get("planes")
    if not isinstance(planes, dict) or not all(_is_text(name) and is_plane(one) for name, one in planes.items()):
        return "planes is not what layoutc writes"
    (m, k), shape = state["matrix"], state["shape"]
    same = prod(shape) == (m - sum(state["halo"])) * k and sum(state["halo"]) <= m
    return None if same else "shape and matrix have different numbers of elements"


def with_halo(layout: Layout, planes: Mapping[str, Tensor], matrix: tuple[int, ...], halo: Halo) -> dict[str, Tensor]:
    """Stored entries as planes of whole blocks: zeros for the rows of the halo, which other ranks store."""
    filled = {}
    for name, facts in layout.planes(matrix[0], matrix[1]).items():
        if name not in planes:
            continue
        if name in layout.shared:
            filled[name] = planes[name]
            continue
        filled[name] = planes[name].new_zeros(facts.shape)
        first = halo.before // (layout.stored[name].rows_per_value or 1)
        filled[name][first : first + len(planes[name])] = planes[name]
    return filled


# -------------------------------------------------------------------------------------------------- layouts and classes
def register(cls: type[PlaneTensor]) -> None:
    """Registers a generated class, so that tensors of its layout are restored as it."""
    _classes.setdefault(cls.LAYOUT.layout_id, {})[cls.__module__] = cls


def registered() -> list[type[PlaneTensor]]:
    """The classes of all recipes that this process has imported, installed or not."""
    return [cls for classes in _classes.values() for cls in classes.values()]


def class_of(stored: Mapping[str, Any]) -> type[Any]:
    """The class of a stored layout, from what `describe` wrote: of an imported recipe, else of an installed one.

    Of several, returns that of the stored module, else the first. Raises LayoutError if there is none, and says how the
    installed recipe of that name differs.
    """
    if (cls := _registered(stored)) is not None:
        return cls
    name = stored["recipe"]
    installed.named(name)
    if (cls := _registered(stored)) is not None:
        return cls
    raise LayoutError(
        f"the file holds {name} of layout {stored['layout_id']} (spec language {stored['language']}, spec "
        f"{stored['spec_sha256'][:12]}), which no installed recipe has; {against_installed(name, stored)}. Import the "
        "package that was generated from that spec"
    )


def _registered(stored: Mapping[str, Any]) -> type[PlaneTensor] | None:
    classes = _classes.get(stored["layout_id"], {})
    return classes.get(stored.get("module", "")) or next(iter(classes.values()), None)


def against_installed(name: str, stored: Mapping[str, Any]) -> str:
    """How the installed recipe of a name differs from a stored layout, in words."""
    here = next((cls.LAYOUT for cls in registered() if cls.LAYOUT.name == name), None)
    if here is None:
        return f"no recipe {name} is installed"
    return f"the installed {name} is layout {here.layout_id}: {difference(stored, describe(here))}"


def difference(stored: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """What differs between two layouts as `describe` writes them, in words."""
    differences = []
    for what in ("recipe", "language"):
        if stored[what] != here[what]:
            differences.append(f"{what} {stored[what]} in the file, {here[what]} here")
    for kind in ("blocks", "planes"):
        ours, theirs = here["facts"][kind], stored["facts"][kind]
        for key in dict.fromkeys([*theirs, *ours]):
            a, b = (_plain(side.get(key)) for side in (theirs, ours))
            if a != b:
                differences.append(f"{kind.removesuffix('s')} {key} {a or 'absent'} in the file, {b or 'absent'} here")
    if not differences and stored["layout_id"] != here["layout_id"]:
        differences.append("arithmetic or order of bytes; blocks and planes are the same (see `layoutc breaking`)")
    return "; ".join(differences) or "nothing"


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        rows, columns, dtype = value
        return f"{dtype}, one for {rows or 'all'} rows and {columns or 'all'} columns"
    return value
