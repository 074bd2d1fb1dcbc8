"""Tensors in files that are derived from a weight's shape, the recipe, or both (JSON): made, and compared."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layoutc.checkpoint.bindings.names import tensor_name
from layoutc.checkpoint.held.stored import OF_OTHERS, Read, Stored
from layoutc.checkpoint.untrusted.files import json_of
from layoutc.runtime.bindings.facts import Binding
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.facts import Facts

ORDER = "{module}.weight_g_idx"
LONGEST_NUMBER = 25  # maximum bytes of an fp32 value in JSON


class Stated(NamedTuple):
    """A derived tensor: a weight's two sizes, or the block index of each column (from the shape); the codebook (from
    the recipe); zero points that are 0; or JSON (from both)."""

    name: str
    facts: Facts
    sizes: tuple[int, int]  # rows and columns; for block indices, the columns of the weight and of a block
    values: tuple[float, ...] = ()
    text: Mapping[str, Any] | None = None
    free: tuple[str, ...] = ()  # keys of the text that may have any value
    offsets: tuple[str, ...] = ()  # the free keys whose values come from encoding the weight's values
    may_be_unset: bool = False  # for block indices: files may have -1 for all

    def made(self, offsets: Mapping[str, float] | None = None, there: bytes | None = None) -> Tensor:
        """The tensor. offsets: new values for these keys of the text; None: no change. there: the text in the files
        that the weight was read from, to keep its other keys."""
        if self.values:
            return torch.tensor(self.values, dtype=self.facts.dtype, device="cpu")
        if self.text is not None:
            text = there
            if text is None or offsets is not None:
                said = self.text if there is None else json_of(there, self.name)
                text = json.dumps({**said, **(offsets or {})}).encode()
            return torch.frombuffer(bytearray(text), dtype=torch.uint8)
        if self.facts.shape == (2,):
            return torch.tensor(self.sizes, dtype=self.facts.dtype, device="cpu")
        if len(self.facts.shape) == 2:
            return torch.zeros(self.facts.shape, dtype=self.facts.dtype, device="cpu")
        return (torch.arange(self.sizes[0], device="cpu") // self.sizes[1]).to(self.facts.dtype)

    def most(self, there: bytes | None) -> int:
        """The maximum bytes of the text that `made` returns, with or without offsets."""
        assert self.text is not None
        said = self.text if there is None else json_of(there, self.name)
        room = len(json.dumps(said).encode()) + LONGEST_NUMBER * len(self.offsets) if self.offsets or not there else 0
        return max(room, len(there or b""))

    def check(self, stored: Stored, fetch: Read) -> None:
        """Raises LayoutError if the files hold a different tensor."""
        if self.text is not None:
            self._check_text(self.text, bytes(fetch(stored, ()).numpy()))
            return
        found = fetch(stored, ())
        if torch.equal(found, self.made()) or (self.may_be_unset and bool((found == -1).all())):
            return
        if self.values:
            raise LayoutError(f"{self.name} in the files holds other values of codes than the recipe has")
        if self.facts.shape == (2,):
            raise LayoutError(f"{self.name} in the files does not say {list(self.sizes)}, the weight's shape")
        if len(self.facts.shape) == 2:
            raise LayoutError(f"{self.name} in the files is not 0 everywhere, but the recipe has no zero points")
        raise LayoutError(
            f"{self.name} in the files does not number the columns in blocks of {self.sizes[1]}: they were quantized "
            "in the order of their activations (desc_act, actorder), which the recipe can't hold; quantize without it"
        )

    def _check_text(self, stated: Mapping[str, Any], stored: bytes) -> None:
        """Raises LayoutError if the text differs in a key that is not free; DamagedError if it is no JSON mapping."""
        found = json_of(stored, f"{self.name} in the files")
        for key in sorted((stated.keys() | found.keys()) - {*self.free}):
            if found.get(key) != stated.get(key):
                there, here = (repr(one[key])[:80] if key in one else "nothing" for one in (found, stated))
                raise LayoutError(f"{self.name} in the files has {there} as {key}, but a weight here has {here}")


def stated(binding: Binding, parameter: str, rows: int, columns: int) -> list[Stated]:
    """The derived tensors of a parameter in files."""
    found = list[Stated]()
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
    if binding.zeros:
        name, dtype = binding.zeros
        found.append(Stated(tensor_name(name, parameter), Facts((rows, 1), OF_OTHERS[dtype]), (rows, 1)))
    if binding.text:
        name, text, free = binding.text
        said = with_sizes(text, {"rows": rows, "columns": columns})
        facts = Facts((len(json.dumps(said).encode()),), torch.uint8)
        offsets = tuple(plane.codes.offset for plane in binding.planes.values() if plane.codes)
        found.append(Stated(tensor_name(name, parameter), facts, (rows, columns), (), said, free, offsets))
    return found


def order_beside(parameter: str, columns: int, each: int, there: Container[str]) -> list[Stated]:
    """The block index of each column (`weight_g_idx`), which compressed-tensors may store for any scheme; [] if absent.

    each: a block's columns. there: the names of tensors in the files.
    """
    name = tensor_name(ORDER, parameter)
    if name not in there:
        return []
    return [Stated(name, Facts((columns,), torch.int32), (columns, each), may_be_unset=True)]


def with_sizes(template: Any, sizes: Mapping[str, int]) -> Any:
    """The template with numbers in place of the names of sizes."""
    if isinstance(template, dict):
        return {key: with_sizes(one, sizes) for key, one in template.items()}
    if isinstance(template, list):
        return [with_sizes(one, sizes) for one in template]
    return sizes.get(template, template) if isinstance(template, str) else template


def sizes_in(template: Any, text: Any) -> dict[str, int]:
    """The numbers in a JSON value where the template has "rows" and "columns"."""
    if template in ("rows", "columns"):
        return {template: text} if type(text) is int and 0 < text < 2**63 else {}
    pairs: list[tuple[Any, Any]] = []
    if isinstance(template, Mapping) and isinstance(text, Mapping):
        pairs = [(one, text.get(key)) for key, one in template.items()]
    elif isinstance(template, list) and isinstance(text, list) and len(template) == len(text):
        pairs = list(zip(template, text, strict=True))
    return {key: size for one, there in pairs for key, size in sizes_in(one, there).items()}
