"""Recognizes the bindings of a folder and its weights, by config.json and the dtypes and shapes of tensors."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from layoutc.checkpoint.bindings.configs import KEYS, holder
from layoutc.checkpoint.bindings.names import parts_of, recognizes, tensor_name
from layoutc.checkpoint.held import narrower, places
from layoutc.checkpoint.held.regrouped import Regrouped, regrouped
from layoutc.checkpoint.held.stored import Stored
from layoutc.checkpoint.untrusted.files import json_of, read_whole
from layoutc.runtime.bindings.facts import Binding, BoundPlane
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.facts import Facts
from layoutc.runtime.installed import every, find, nearest
from layoutc.runtime.weight import stored_form
from layoutc.runtime.weight.tensor import QuantizedTensor

CONFIG = "config.json"
# Files that hold the config instead of config.json -> the quant_method that they leave out.
OLDER_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
    "quanto_qmap.json": "quanto",
    "quantization_map.json": "quanto",  # the name in optimum-quanto's README
}
LIMIT = 16_000_000  # maximum bytes of a config
OF_OTHER_SHAPES, NARROWER, ONE_VALUE, EXACT = 1, 2, 3, 4  # how well tensors fit a binding; 0: not at all
SAME_BYTES = ({"U8", "I8", "F8_E8M0"}, {"U16", "I16"}, {"U32", "I32"}, {"U64", "I64"})


class Bound(NamedTuple):
    """A recipe's class, and one of its bindings."""

    cls: type[QuantizedTensor]
    binding: Binding

    @property
    def label(self) -> str:
        """recipe/binding, the name that users pass."""
        return f"{self.cls.LAYOUT.name}/{self.binding.name}"

    @property
    def layout_id(self) -> str:
        """The id of the layout that determines a weight's bytes."""
        return self.cls.LAYOUT.layout_id

    @property
    def converts(self) -> bool:
        """True if files store a plane in another form, so that the recipe can't hold every stored value."""
        return any(plane.over is not None or plane.by is not None for plane in self.binding.planes.values())

    @property
    def of_stacks(self) -> bool:
        """True if each matrix of a stack has a separate amax."""
        return self.cls.LAYOUT.amax_of_matrices

    def is_alike(self, other: Bound) -> bool:
        """True if two bindings, perhaps of different recipes, describe the same tensors, blocks and configs."""
        one, two = self.binding, other.binding
        stored = all(self.cls.LAYOUT.stored[name] == other.cls.LAYOUT.stored.get(name) for name in one.planes)
        facts = ("planes", "shape", "groups", "codebook", "text", "config")
        return stored and all(getattr(one, fact) == getattr(two, fact) for fact in facts)

    def as_in(self, name: str, tensors: Container[str]) -> Bound:
        """The binding for these files: without parts if they hold the weight whole, as a stack of experts."""
        data = next((one.name for plane, one in self.binding.planes.items() if plane.endswith("_data")), None)
        if not self.binding.parts or data is None or tensor_name(data, name) not in tensors:
            return self
        return self.without_parts()

    def without_parts(self) -> Bound:
        """The binding for files that hold each weight whole, not in parts."""
        return self._replace(binding=self.binding._replace(parts=()))

    def check_shape(self, shape: tuple[int, ...], name: str) -> None:
        """Raises LayoutError for a shape that the recipe does not support."""
        try:
            self.cls.LAYOUT.check_shape(shape, name)
        except ValueError as error:
            raise LayoutError(str(error)) from error

    @property
    def is_read_only(self) -> bool:
        """True if the spec says so, or files store codes of a plane's values under a codebook that the binding does not
        define, or blocks whose sizes are not the recipe's."""
        coded = any(plane.codes is not None and not plane.codes.values for plane in self.binding.planes.values())
        return self.binding.read_only or coded or issubclass(self.cls, Regrouped)


def config_in(folder: Path) -> dict[str, Any]:
    """A folder's config.json, with the quantization_config that older programs store in a separate file; {} without
    either. Raises DamagedError for a damaged file."""
    config = _json_in(folder / CONFIG)
    if is_in_older_file(folder) and (name := older_file(folder)) is not None:
        stated = _json_in(folder / name)
        inner = stated.get(KEYS[-1])  # ModelOpt's
        if stated:
            config[KEYS[0]] = {"quant_method": OLDER_FILES[name], **(inner if isinstance(inner, Mapping) else stated)}
    return config


def older_file(folder: Path) -> str | None:
    """The name of a folder's older config file; None without one."""
    return next((name for name in OLDER_FILES if (folder / name).is_file()), None)


def is_in_older_file(folder: Path) -> bool:
    """True if config.json has no quantization_config, but an older config file exists."""
    return holder(_json_in(folder / CONFIG)) is None and older_file(folder) is not None


def _json_in(path: Path) -> dict[str, Any]:
    return dict(json_of(read_whole(path, LIMIT), f"{path}: the config")) if path.is_file() else {}


def quantization_config(folder: Path) -> Mapping[str, Any]:
    """The `quantization_config` in a folder's config.json, of the model or a part; {} without. Raises DamagedError."""
    return quantization_of(config_in(folder))


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The `quantization_config` in a config, for the model or a part of it; {} without one."""
    found = holder(dict(config))
    return found[0][found[1]] if found else {}


def bindings_of(classes: Iterable[type[QuantizedTensor]]) -> list[Bound]:
    """All bindings of classes, without duplicates within a layout (the last wins)."""
    found = list[Bound]()
    for cls in classes:
        for binding in cls.LAYOUT.files.values():
            found = [one for one in found if one.cls.LAYOUT.layout_id != cls.LAYOUT.layout_id or one.binding != binding]
            found.append(Bound(cls, binding))
    return found


def installed() -> list[Bound]:
    """All bindings of `classes`."""
    return bindings_of(classes())


def classes() -> list[type[QuantizedTensor]]:
    """The classes of layoutc's recipes, and of packages that register recipes."""
    return [recipe.Tensor for recipe in every()]


def chosen(files: str, bound: Iterable[Bound]) -> list[Bound]:
    """The bindings that a name means, e.g. `deepseek` or `fp8_block/deepseek`. Also finds recipes in the current
    folder's `generated/`. Raises LayoutError if there are none."""
    every = list(bound)
    found = [one for one in every if files in (one.binding.name, one.label)]
    if not found and "/" in files:
        with suppress(ValueError):
            found = [one for one in bindings_of([find(files.partition("/")[0]).Tensor]) if one.label == files]
    if not found and files.rpartition("/")[2] in {one.name for cls in classes() for one in cls.LAYOUT.containers}:
        raise LayoutError(
            f"{files!r} is of one file, not of a folder: layoutc convert SRC DST.gguf --like FILE.gguf, or "
            "layoutc.checkpoint.export_gguf(model, file, source=...) and load_gguf"
        )
    if not found:
        meant = nearest(files, [name for one in every for name in (one.label, one.binding.name)])
        there = ", ".join(sorted(one.label for one in every)) or "none: their specs state no `files`"
        hint = f"did you mean {meant}?" if meant else f"bindings there are: {there}"
        raise LayoutError(f"no recipe of the model has files {files!r}; {hint}")
    return found


def recognized(config: Mapping[str, Any], bound: Iterable[Bound]) -> list[Bound]:
    """The bindings that match a config, including those for other block sizes than the recipes'; if there are none,
    those of recipes that this process has imported from elsewhere. First come bindings that hold values without
    conversion, then those that compare more of the config."""
    found = [one for one in with_other_blocks(bound, config) if recognizes(one.binding, config)]
    imported = (cls for cls in stored_form.registered() if issubclass(cls, QuantizedTensor))
    found = found or [one for one in bindings_of(imported) if recognizes(one.binding, config)]
    return sorted(found, key=lambda one: (one.converts, -len(one.binding.recognized)))


def with_other_blocks(bound: Iterable[Bound], config: Mapping[str, Any]) -> list[Bound]:
    """The bindings, then their variants for scales of other dtypes, then those for the block sizes of a config."""
    own = list(bound)
    others = (other for one in own for other in regrouped(one.cls, one.binding, config))
    return own + [Bound(*one) for one in sorted(others, key=lambda one: one[0].RESIZED)]


# -------------------------------------------------------------------------------------------------- weights of a folder
def is_for(
    bound: Bound, name: str, shape: tuple[int, ...], tensors: Mapping[str, Stored], told: Iterable[Bound] = ()
) -> bool:
    """True if files have this weight's scales under a binding's names, and no other binding of `told` fits their dtypes
    and shapes better.

    A folder may hold weights in several recipes, whose tensors may have the same names.
    """
    if len(shape) < 2:
        return False
    matrices, as_is = prod(shape[:-2]) if len(shape) > 2 else None, bound.as_in(name, tensors)
    if not any(
        tensor_name(pattern, part) in tensors
        for part in parts_of(as_is.binding, name, matrices)
        for pattern in scales_of(bound)
    ):
        return False
    return not is_for_another(bound, name, shape, tensors, told)


def is_held(bound: Bound, name: str, shape: tuple[int, ...] | None, tensors: Mapping[str, Stored]) -> bool:
    """True if files have this weight's planes under a binding's names, with its shapes, in its dtypes or narrower ones.

    shape: None for a 2-D weight whose shape follows from the files' codes.
    """
    return fit_of(bound, name, shape, tensors) > OF_OTHER_SHAPES


def scales_of(bound: Bound) -> list[str]:
    """The name patterns of tensors that identify a quantized weight: all planes but its codes."""
    return [pattern.name for plane, pattern in bound.binding.planes.items() if "data" not in plane]


def is_for_another(
    bound: Bound, name: str, shape: tuple[int, ...] | None, tensors: Mapping[str, Stored], told: Iterable[Bound]
) -> bool:
    """True if another binding of `told` fits a weight's tensors better than `bound`, or if both fit exactly and the
    other has more planes, e.g. zero points. shape: as for `is_held`."""
    own, names = fit_of(bound, name, shape, tensors), {plane.name for plane in bound.binding.planes.values()}
    if own < EXACT:
        return any(fit_of(other, name, shape, tensors) > own for other in told)
    larger = [other for other in told if {plane.name for plane in other.binding.planes.values()} > names]
    return any(fit_of(other, name, shape, tensors) == EXACT for other in larger)


def fit_of(bound: Bound, name: str, shape: tuple[int, ...] | None, tensors: Mapping[str, Stored]) -> int:
    """EXACT if the first tensor of each plane exists with the binding's dtype and dims; ONE_VALUE if a single value has
    other dims; NARROWER for dtypes whose every value the planes hold; OF_OTHER_SHAPES if only the dtypes fit; 0 if they
    do not, or a tensor is missing."""
    matrices, fit = prod(shape[:-2]) if shape is not None and len(shape) > 2 else None, EXACT
    parts = parts_of(bound.as_in(name, tensors).binding, name, matrices)
    planes = bound.binding.planes
    of_weight: Mapping[str, Facts] = {}
    if bound.binding.text is not None and tensor_name(bound.binding.text[0], parts[0]) not in tensors:
        return 0  # the text's name includes the type of codes
    data = tensors.get(next((tensor_name(one.name, parts[0]) for key, one in planes.items() if "data" in key), ""))
    if shape is None and data is not None:
        code = next(key for key in planes if "data" in key)
        per_entry = bound.cls.LAYOUT.stored[code].columns_per_value or 1
        shape = places.weight_shape(planes[code], data.shape, per_entry)
    if shape is not None:
        of_weight = bound.cls.LAYOUT.planes(prod(shape[:-1]) // len(parts), shape[-1])
    for key, plane in planes.items():
        stored = tensors.get(tensor_name(plane.name, parts[0]))
        if stored is None:
            return 0
        as_is = is_dtype(stored, plane.dtype) or narrower.is_storage(plane, stored)
        if not as_is and not narrower.is_narrower(plane, stored.dtype):
            return 0
        fit = fit if as_is else min(fit, NARROWER)
        if of_weight:
            fit = min(fit, _fit_of_shape(plane, of_weight[key], stored, matrices if len(parts) == 1 else None))
    return fit


def _fit_of_shape(plane: BoundPlane, facts: Facts, stored: Stored, matrices: int | None) -> int:
    """Like `fit_of`, for one tensor's shape."""
    as_is, in_file = narrower.as_stored(plane, facts, stored.dtype)
    try:
        shape = places.place(as_is, in_file, matrices).shape
    except LayoutError:
        return OF_OTHER_SHAPES
    if stored.shape == shape or narrower.is_storage(plane, stored):
        return EXACT
    return ONE_VALUE if prod(stored.shape) == prod(shape) == 1 else OF_OTHER_SHAPES


def is_dtype(stored: Stored, dtype: str) -> bool:
    """True if the dtypes are equal, or view the same bytes."""
    return stored.dtype == dtype or any({stored.dtype, dtype} <= group for group in SAME_BYTES)
