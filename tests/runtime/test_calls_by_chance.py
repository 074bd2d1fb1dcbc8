"""Calls of torch by chance, from the list that torch tests itself with, with a quantized weight in a tensor's place.

A call gives what it gives for the weight's values, to the bit, or refuses in words. LAYOUTC_SEED=7 draws other calls.
"""

from __future__ import annotations

import importlib.util
import os
import random
import sys
import types
import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from quantized_cases import RECIPES, module, same, same_bits, same_tensors, snapshot, weight
from torch import Tensor
from torch.testing import make_tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from layoutc.runtime.errors import LayoutError
from layoutc.runtime.weight.tensor import QuantizedTensor

ROWS, COLUMNS = 64, 128
# Values of a tensor: those of diagflat and tensorsolve would have 2**26, and take as long as all others.
LARGEST = 2**20
DRAWN = (
    *RECIPES,
    "int8_rowwise",
    "int8_block",
    "int4_group32",
    "mxfp4",
    "mxfp8_2d",
    "hybrid_fp8",
    "nf4",
    "q4_k",
    "awq",
)
# Memory that nobody has written differs from call to call; so does the solution of lstsq of equal plain values.
NO_VALUES = ("empty", "resize_", "uninitialized", "lstsq")


@dataclass(frozen=True)
class Call:
    """A call with one place for a weight."""

    name: str
    recipe: str
    function: Callable[..., Any]
    leaves: tuple[Any, ...]  # of (args, kwargs)
    structure: Any
    place: int

    def of(self, value: Tensor) -> Any:
        """The result with `value` in the weight's place, and copies of all other tensors."""
        leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        leaves[self.place] = value
        args, kwargs = tree_unflatten(leaves, self.structure)
        torch.manual_seed(0)
        return self.function(*args, **kwargs)

    def weight(self) -> QuantizedTensor:
        """The same bytes at each call."""
        quantized: QuantizedTensor = module(self.recipe).quantize(weight(*self.leaves[self.place].shape))
        return quantized

    def __str__(self) -> str:
        shown = [tuple(leaf.shape) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return f"{self.name} of {shown}, with {self.recipe} in place {self.place}"


# ---------------------------------------------------------------------------------------------------------------- draws
def operators() -> list[Any]:
    """Torch's list of what it tests, for fp32 on a CPU, without operators that are its own: those check no shapes."""
    if (
        "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None
    ):  # which the list's module imports, for a base class alone
        sys.modules["expecttest"] = types.ModuleType("expecttest")
        sys.modules["expecttest"].TestCase = unittest.TestCase  # type: ignore[attr-defined]
    from torch.testing._internal.common_methods_invocations import op_db

    public = (
        op for op in op_db if op.supports_dtype(torch.float32, "cpu") and not op.name.startswith(("_", "native_"))
    )
    return [op for op in public if not any(word in op.name for word in NO_VALUES)]


def draw(chance: random.Random, number: int) -> Iterator[Call]:
    """So many calls that plain values can make."""
    listed = operators()
    while number:
        torch.manual_seed(chance.randrange(2**31))
        if (call := _call(chance, chance.choice(listed), chance.choice(DRAWN))) is not None:
            number -= 1
            yield call


def _call(chance: random.Random, op: Any, recipe: str) -> Call | None:
    """A call of an operator, as function, method or in place; None if no sample's shapes fit the recipe."""
    samples = list(op.sample_inputs("cpu", torch.float32, requires_grad=False))
    for sample in chance.sample(samples, min(len(samples), 6)):
        leaves, structure = tree_flatten(((sample.input, *sample.args), sample.kwargs))
        places = [place for place, leaf in enumerate(leaves) if _takes_a_weight(leaf)]
        if not places:
            continue
        place = chance.choice(places)
        forms = {"": op.op, "method ": op.method_variant, "in place ": op.inplace_variant if place == 0 else None}
        form, function = chance.choice([pair for pair in forms.items() if pair[1] is not None])
        for sized in (*_resized(leaves, place), leaves):
            if any(leaf.numel() > LARGEST for leaf in sized if isinstance(leaf, Tensor)):
                continue
            call = Call(form + op.full_name, recipe, function, tuple(sized), structure, place)
            try:
                result = call.of(call.weight().dequantize())
            except Exception:  # whatever the recipe's quantize or the operator says of these shapes
                continue
            if all(leaf.numel() <= LARGEST for leaf in tree_leaves(result) if isinstance(leaf, Tensor)):
                return call
    return None


def _takes_a_weight(leaf: Any) -> bool:
    return (
        type(leaf) is Tensor and leaf.layout is torch.strided and leaf.dtype == torch.float32 and leaf.dim() in (2, 3)
    )


def _resized(leaves: list[Any], place: int) -> Iterator[list[Any]]:
    """The tensors with 64 rows and 128 columns in that place, and as many wherever they had as many as it."""
    *batch, rows, columns = leaves[place].shape
    sizes = {rows: ROWS, columns: COLUMNS}
    if {0, 1} & sizes.keys() or leaves[place].numel() == 0:
        return
    made = list(leaves)
    for at, leaf in enumerate(leaves):
        if at == place:
            made[at] = leaf.new_empty(*batch, sizes[rows], sizes[columns])
        elif (
            isinstance(leaf, Tensor)
            and leaf.layout is torch.strided
            and leaf.numel()
            and sizes.keys() & set(leaf.shape)
        ):
            shape = [sizes.get(extent, extent) for extent in leaf.shape]
            # Whole numbers may be places in another tensor.
            limits = (
                {} if leaf.is_floating_point() or leaf.is_complex() else {"low": 0, "high": max(1, int(leaf.max()))}
            )
            made[at] = make_tensor(shape, dtype=leaf.dtype, device="cpu", **limits)
    yield made


# ------------------------------------------------------------------------------------------------------------- verdicts
def verdict(call: Call) -> tuple[str, str]:
    """(how it went, "") of a call that goes as it should, else ("", what is wrong)."""
    q, values = call.weight(), call.weight().dequantize()
    before, expected = snapshot(q), call.of(values)
    if difference(call.of(call.weight().dequantize()), expected):
        return "by chance", ""
    try:
        result = call.of(q)
    except LayoutError:
        changed = any(not same_bits(plane, before[name]) for name, plane in q.planes().items())
        return ("", "refused, but the weight has changed") if changed else ("refused", "")
    except Exception as error:  # which is what is wrong
        return "", f"{type(error).__name__}: {error}"
    if not same_bits(values, call.weight().dequantize()):
        wanted = module(call.recipe).quantize(values)
        return ("written", "") if same(q, wanted) else ("", "not the bytes of the values that were to be written")
    if call.name.startswith("in place"):  # which has changed no value
        return ("written", "") if same_bits(q.dequantize(), values) else ("", "written, where values stay")
    if not same(q, call.weight()):
        return "", "the weight has changed"
    if not (found := difference(result, expected)):
        return "equal", ""
    # Products along the rows read the columnwise values. For any subclass torch chooses what gradients need, as for
    # eigvalsh, which computes vectors too.
    others = [call.weight().dequantize().requires_grad_()]
    others += [q.values_of(name, q.dtype) for name in q.orientations if name == "columnwise"]
    return ("equal", "") if any(not difference(result, call.of(other)) for other in others) else ("", found)


def difference(a: Any, b: Any) -> str:
    """Where a result differs from what is expected, in words, or nothing. Views of a weight are its values."""
    a = a.dequantize() if isinstance(a, QuantizedTensor) else a
    if isinstance(b, tuple | list):
        if type(a) is not type(b) or len(a) != len(b):
            return f"{type(a).__name__} in place of {type(b).__name__}"
        return next((found for pair in zip(a, b, strict=True) if (found := difference(*pair))), "")
    if type(a) is not type(b):
        return f"{type(a).__name__} in place of {type(b).__name__}"
    if not isinstance(b, Tensor):
        return "" if a == b or (a != a and b != b) else f"{a} in place of {b}"
    facts, wanted = ((x.dtype, tuple(x.shape), x.layout) for x in (a, b))
    if facts != wanted:
        return f"{facts} in place of {wanted}"
    a, b = (x.detach() if x.layout is torch.strided else x.detach().to_dense() for x in (a, b))
    a, b = (x.resolve_conj().resolve_neg() for x in (a, b))
    return "" if not a.numel() or same_bits(a, b) else "other values"


def check(seed: int, number: int) -> None:
    """Draws and makes calls; says which went wrong, and the seed."""
    went, wrong = Counter[str](), []
    # torch.manual_seed formats a traceback for each kind of card not yet in use, and samples call it often.
    seeds = mock.patch.object(torch, "manual_seed", torch.default_generator.manual_seed)
    with warnings.catch_warnings(), seeds:
        warnings.simplefilter("ignore")  # deprecated operators, and writes in place
        for call in draw(random.Random(seed), number):
            how, what = verdict(call)
            went[how] += 1
            wrong += [f"{call}: {what}"] if what else []
    assert not wrong, "\n".join([f"LAYOUTC_SEED={seed}", *wrong])
    assert went["equal"] + went["written"] > number * 2 / 3, went


@pytest.mark.parametrize("recipe", ["int4_group32", "awq", "q4_k", "nvfp4"])
def test_an_operator_in_place_that_writes_nowhere_leaves_the_codes(recipe: str) -> None:
    """Quantizing the values again would give other codes in most of these recipes."""
    q, nowhere = module(recipe).quantize(weight(256, 256)), torch.empty(0, dtype=torch.int64)
    before = snapshot(q)
    none = torch.empty(0, q.shape[1])
    calls: dict[str, Callable[[], Any]] = {
        "put_": lambda: q.put_(nowhere, torch.empty(0)),
        "index_copy_": lambda: q.index_copy_(0, nowhere, none),
        "index_fill_": lambda: q.index_fill_(0, nowhere, 7.0),
        "index_put_": lambda: q.index_put_((nowhere,), none),
        "scatter_": lambda: q.scatter_(0, nowhere.view(0, 1), 7.0),
    }
    for name, call in calls.items():
        assert call() is q, name
        assert same_tensors(q.planes(), before), name


SEED = int(os.environ.get("LAYOUTC_SEED", "1"))


@pytest.mark.thorough
def test_calls_give_what_the_values_give_or_refuse() -> None:
    check(SEED, 60)
