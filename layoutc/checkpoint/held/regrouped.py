"""Decodes files whose blocks have another size along rows, run across rows, or have scales of another dtype.

Padding each block to whole blocks of the recipe, and repeating its scale for them, turns the weight into one of the
recipe. So any class of plain codes, scales and zero points decodes all groups. These classes are only read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from layoutc.checkpoint.bindings.configs import spelled
from layoutc.checkpoint.bindings.names import values_at
from layoutc.ints.sizes import cdiv
from layoutc.runtime.bindings.facts import Binding
from layoutc.runtime.facts import Facts, Plane
from layoutc.runtime.weight.tensor import QuantizedTensor

AT_A_TIME = 1 << 22  # values to decode at a time
ALL = 2**31 - 1  # the columns of a block that covers a whole row
GROUP = "group_size"  # the config key for a block's columns
BLOCK = "blocksize"  # the same key in a weight's text
SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # bitsandbytes' block sizes
SCALE = "rowwise_scale"
PER_BLOCK = (SCALE, "rowwise_zero")
HALVES = (torch.float16, torch.bfloat16)


class Regrouped(QuantizedTensor):
    """A decode-only weight in files whose blocks have a different size along rows from those of the recipe OF.

    COLUMNS: a block's columns; None: a whole row. RESIZED: COLUMNS differs from the recipe's.
    """

    OF: ClassVar[type[QuantizedTensor]]
    COLUMNS: ClassVar[int | None]
    RESIZED: ClassVar[bool]

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Like QuantizedTensor's. Treats each block as a row, padded to whole blocks of the recipe."""
        (m, k), planes = self._rows(), self.store.planes
        columns, own = self.COLUMNS or k, self.OF.LAYOUT.column_multiple
        blocks, times = cdiv(k, columns), cdiv(columns, own)
        code = self.OF.LAYOUT.stored["rowwise_data"].columns_per_value or 1
        width, padded = round(columns / code), round(times * own / code)
        data = _wider(planes["rowwise_data"], blocks * width).view(m * blocks, width)
        each, pieces = max(1, AT_A_TIME // max(1, columns)), list[Tensor]()
        for first in range(0, max(1, len(data)), each):
            some = {name: planes[name].reshape(-1, 1)[first : first + each] for name in PER_BLOCK if name in planes}
            whole = {name: plane.repeat_interleave(times, 1) for name, plane in some.items()}
            whole["rowwise_data"] = _wider(data[first : first + each], padded)
            rows = len(whole["rowwise_data"])
            values = self.OF.REFERENCE.dequantize_reference(whole, rows, times * own, "rowwise")
            pieces.append(values[:, :columns])
        found = torch.cat(pieces).view(m, blocks * columns)[:, :k]
        return found.reshape(self.shape).to(dtype or self.dtype)

    def _rows(self) -> tuple[int, int]:
        """The rows that blocks do not cross, and their columns."""
        m, k = self.store.matrix
        return m, k


class Flat(Regrouped):
    """A weight in files whose blocks are counted over the flattened weight, so that they run across rows."""

    def _rows(self) -> tuple[int, int]:
        return 1, prod(self.store.matrix)


def _wider(codes: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(codes, (0, width - codes.shape[-1]))


@lru_cache(maxsize=64)
def _flat_of(cls: type[QuantizedTensor], columns: int, least: int) -> type[Flat]:
    """The class that decodes blocks of `columns` values of the flattened weight. It fits no weight whose rows are whole
    blocks, and none of at most `least` values, which smaller blocks also hold in one block."""
    layout = cls.LAYOUT
    code = round(layout.stored["rowwise_data"].columns_per_value or 1)

    def planes(m: int, k: int) -> dict[str, Facts]:
        blocks = cdiv(m * k, columns) if k % columns and m * k > least else 0
        data, scale = layout.dtypes["rowwise_data"], layout.dtypes[SCALE]
        return {"rowwise_data": Facts((1, cdiv(m * k, code)), data), SCALE: Facts((1, blocks), scale)}

    changed = replace(
        layout,
        layout_id=f"{layout.layout_id}/flat{columns}",
        column_multiple=1,
        multiple_k=1,
        stored={name: Plane(ALL, None, layout.dtypes[name]) for name in ("rowwise_data", SCALE)},
        own_planes=planes,
    )
    facts = {"LAYOUT": changed, "OF": cls, "COLUMNS": columns, "RESIZED": True}
    return type(f"Flat{cls.__name__}", (Flat, cls), facts)


@lru_cache(maxsize=64)
def _class_of(cls: type[QuantizedTensor], columns: int | None, divides: bool) -> type[Regrouped]:
    """The class that decodes blocks of `columns` columns (None: a whole row) with scales that fp32 holds. divides:
    rows must be whole blocks; in other rows blocks continue in the next row, so the class fits no file."""
    layout, data = cls.LAYOUT, cls.LAYOUT.stored["rowwise_data"]
    stored = {name: layout.dtypes[name] for name in PER_BLOCK if name in layout.stored}
    dtypes = {name: torch.float32 if dtype in HALVES else dtype for name, dtype in stored.items()}

    def planes(m: int, k: int) -> dict[str, Facts]:
        blocks = cdiv(k, columns) if columns else 1
        if divides and columns and k % columns:
            blocks = 0
        of_blocks = {name: Facts((m, blocks), dtype) for name, dtype in dtypes.items()}
        return {"rowwise_data": layout.planes(m, k)["rowwise_data"], **of_blocks}

    least = columns or round(data.columns_per_value or 1)
    changed = replace(
        layout,
        layout_id=f"{layout.layout_id}/{columns}",
        column_multiple=least,
        multiple_k=least,
        blocks={"rowwise": f"1x{columns or 'k'}"},
        stored={"rowwise_data": data} | {name: Plane(1, columns, dtype) for name, dtype in dtypes.items()},
        own_planes=planes,
    )
    facts = {"LAYOUT": changed, "OF": cls, "COLUMNS": columns, "RESIZED": columns != layout.column_multiple}
    return type(f"Regrouped{cls.__name__}", (Regrouped, cls), facts)


def regrouped(
    cls: type[QuantizedTensor], binding: Binding, config: Mapping[str, Any]
) -> Iterator[tuple[type[Regrouped], Binding]]:
    """Classes and bindings for files whose config states a block's columns under the binding's key: one for each size,
    reading 16-bit scales and zero points from any 16- or 32-bit dtype. If each weight's text states the size instead,
    the sizes are bitsandbytes', which counts blocks over the flattened weight."""
    layout, scale = cls.LAYOUT, cls.LAYOUT.stored.get(SCALE)
    if not {"rowwise_data", SCALE} <= layout.stored.keys() <= {"rowwise_data", *PER_BLOCK}:
        return
    along_rows = scale is not None and scale.rows_per_value == 1 and scale.columns_per_value is not None
    if scale is None or not along_rows or layout.dtypes[SCALE] not in (*HALVES, torch.float32):
        return
    own = scale.columns_per_value
    halves = [name for name in PER_BLOCK if layout.dtypes.get(name) in HALVES]
    widened = {name: binding.planes[name]._replace(dtype="F32", bits=32) for name in halves}
    stated = dict(_stated(binding, config))
    for columns, changed in stated.items():
        if columns and binding.text is not None:
            words = f"{binding.name}, blocks of {columns} across rows"
            least = max((one for one in stated if one and one < columns), default=0)
            yield _flat_of(cls, columns, least), changed._replace(name=words)
        if columns == own and not halves:
            continue
        words = "scales of other dtypes" if columns == own else f"groups of {columns}" if columns else "one scale a row"
        yield (
            _class_of(cls, columns, binding.text is not None),
            changed._replace(
                name=f"{binding.name}, {words}",
                planes={**binding.planes, **widened},
                groups=binding.groups and (*binding.groups[:2], columns or ALL),
            ),
        )


def _stated(binding: Binding, config: Mapping[str, Any]) -> Iterator[tuple[int | None, Binding]]:
    """The block columns that a config may state (None: a whole row), each with a binding that states them."""
    path = next((one.split(".") for one in binding.recognized if one.split(".")[-1] == GROUP), None)
    for size in dict.fromkeys(values_at(spelled(config), path)) if path else ():
        whole = size in (None, -1)
        if whole or (type(size) is int and size > 1 and size % 2 == 0):
            yield None if whole else size, binding._replace(config=_replaced(binding.config, path or (), size))
    if binding.text is not None and BLOCK in binding.text[1]:
        name, text, free = binding.text
        for size in SIZES:
            yield size, binding._replace(text=(name, {**text, BLOCK: size}, free))


def _replaced(config: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    """A config with the value at `path` replaced; `*` in the path matches any key."""
    first, rest = path[0], path[1:]
    return {
        key: (_replaced(one, rest, value) if rest else value) if key == first or first == "*" else one
        for key, one in config.items()
    }
