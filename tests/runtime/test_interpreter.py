"""What tests keep of Triton's interpreter is what it finds by itself: every fact, by the functions replaced."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

triton = pytest.importorskip("triton", reason="needs triton, whose interpreter this is")
from triton.language import core  # noqa: E402
from triton.language.semantic import TritonSemantic  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

MEANING = interpreter.interpreter_semantic
pytestmark = pytest.mark.skipif(
    not hasattr(interpreter._get_np_dtype, "__wrapped__"), reason="needs TRITON_INTERPRET=1, made quick by conftest.py"
)
TYPES = [getattr(core, name) for name in ("int1", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64")]
TYPES += [getattr(core, name) for name in ("uint64", "float8e4nv", "float8e5", "float16", "bfloat16", "float32")]
TYPES += [core.float64]
SHAPES = [[16], [16, 1], [1, 16], [4, 4], [2, 2, 4]]


def original(owner: Any, name: str) -> Any:
    return vars(owner)[name].__wrapped__


def answer(function: Any, *args: Any) -> Any:
    """What a function gives, or how it refuses."""
    try:
        return function(*args)
    except (AttributeError, TypeError, ValueError) as error:  # the first, with Triton 3.6, of fp8 beside a number
        return type(error), str(error)


def plain_block(element: Any, shape: Any) -> Any:
    """A block's type as Triton makes it."""
    made = core.block_type.__new__(core.block_type)
    original(core.block_type, "__init__")(made, element, shape)
    return made


def plain_tensor(type_: Any) -> Any:
    made = core.tensor.__new__(core.tensor)
    original(core.tensor, "__init__")(made, None, type_)
    return made


def test_constants() -> None:
    """Of tuples, which are kept, and of lists, which are not."""
    from layoutc.runtime.triton import codebooks

    steps = (-0.75, -0.25, 0.25, 0.5)
    for given in (steps, list(steps), steps):
        assert codebooks.keys_of(given, 1 << 23) == codebooks.keys_of.fn(given, 1 << 23)


@pytest.mark.parametrize("again", [False, True])
def test_types_of_results(again: bool) -> None:
    """Asked for once, and again."""
    found, plain = TritonSemantic.computation_type_impl, original(TritonSemantic, "computation_type_impl")
    for a, b, *flags in product(TYPES, TYPES, *[[False, True]] * 3):
        args = (MEANING, a, flags[0], b, flags[1], flags[2])
        assert answer(found, *args) == answer(plain, *args)


def test_numpys_dtypes_and_what_fits() -> None:
    pointers = [core.pointer_type(element) for element in TYPES]
    fits, plain = interpreter._validate_np_data_size, original(interpreter, "_validate_np_data_size")
    for element in [*TYPES, *pointers] * 2:
        for each in (element, core.block_type(element, [4, 4])):
            assert interpreter._get_np_dtype(each) == original(interpreter, "_get_np_dtype")(each)
        for array in (np.zeros(2, dtype) for dtype in (bool, np.uint8, np.float16, np.float32, np.int64)):
            assert fits(array, element) == plain(array, element)


def test_types_of_blocks_and_tensors_of_them() -> None:
    """Of sizes and of constants; equal where element and shape are, and not where one differs."""
    kinds = [(element, shape) for element in (*TYPES, core.pointer_type(core.int32)) for shape in SHAPES]
    for element, shape in kinds * 2:
        plain = plain_block(element, shape)
        for made in (core.block_type(element, shape), core.block_type(element, [core.constexpr(n) for n in shape])):
            assert (made.name, made.numel, made.scalar) == (plain.name, plain.numel, plain.scalar)
            assert list(made.shape) == list(plain.shape) == shape
            tensor, other = core.tensor(None, made), plain_tensor(plain)
            assert (tensor.type, tensor.dtype, tensor.handle) == (made, element, None)
            assert [size.value for size in tensor.shape] == [size.value for size in other.shape]
            assert tensor.numel.value == other.numel.value
        for other_element, other_shape in kinds:
            same = (other_element, other_shape) == (element, shape)
            assert (core.block_type(element, shape) == core.block_type(other_element, other_shape)) is same
    for shape in ([], [3], [1 << 30]):
        assert answer(core.block_type, core.int8, shape) == answer(plain_block, core.int8, shape)


def test_what_is_unwrapped() -> None:
    two = core.constexpr(2)
    for value in (1, 1.5, "a", True, None, core.int8, two, [1, two], (two, 3)):
        assert core._unwrap_if_constexpr(value) == original(core, "_unwrap_if_constexpr")(value)
    assert type(core._unwrap_if_constexpr(two)) is int


NUMBERS = (0, 1, -1, 7, 300, 2**31, 0.0, -0.0, 1.5, float("inf"), float("nan"), True)
FLAGS = ((), (True, True), (False, False, False), (False, False, True, True))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_operands() -> None:
    """Of two blocks, and of a block and a number on either side; asked for once, and again."""
    name = "binary_op_type_checking_impl"
    found, plain = getattr(TritonSemantic, name), original(TritonSemantic, name)

    def block(element: Any, shape: list[int]) -> Any:
        handle = interpreter.TensorHandle(np.ones(shape, interpreter._get_np_dtype(element)), element)
        return core.tensor(handle, core.block_type(element, shape))

    def told(operands: Any) -> Any:
        if not isinstance(operands[0], core.tensor):
            return operands
        return [
            (one.type, one.handle.dtype, one.handle.data.shape, one.handle.data.tobytes(), one.handle.data.dtype)
            for one in operands
        ]

    elements = [core.int8, core.uint8, core.int32, core.int64, core.float16, core.float32, core.float8e4nv]
    for left, shape, flags in product(elements, [[4, 4], [4, 1]], FLAGS):
        one = block(left, shape)
        others = [*NUMBERS, *(block(right, [4, 4]) for right in elements)]
        for other, turned in product(others, (False, True)):
            args = (MEANING, *((other, one) if turned else (one, other)), *flags)
            expected = told(answer(plain, *args))
            assert told(answer(found, *args)) == told(answer(found, *args)) == expected
    with pytest.raises(ValueError, match="read-only"):
        found(MEANING, block(core.int32, [4, 4]), 7)[1].handle.data[0, 0] = 8
