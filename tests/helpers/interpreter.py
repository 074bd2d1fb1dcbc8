"""Triton's interpreter without what it does again and again: tests of kernels spend their time in nothing else.

It runs Python for each operation of each program. Most of that works out what depends on types alone (the name of a
block's type, numpy's dtype of it, the type of a result), or prepares the language again; a third computes whether
integers overflow, which nobody reads unless its `debug` is on. Here such facts are kept, and what nobody reads isn't
computed. Values pass through the interpreter's own code. LAYOUTC_PLAIN_INTERPRETER=1 leaves it as it is.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from functools import cache, wraps
from importlib.util import find_spec
from inspect import ismodule
from typing import Any

import numpy as np
from replay import RECORDING, replay_programs


@cache
def quicken() -> None:
    """Patches what of it this Triton has, once; the rest stays slow."""
    if os.environ.get("TRITON_INTERPRET") != "1" or os.environ.get("LAYOUTC_PLAIN_INTERPRETER") == "1":
        return
    if find_spec("triton") is None:
        return
    from triton.language import core, semantic
    from triton.runtime import interpreter, jit

    keep_constants(jit, core)
    for patch in (prepare_once, drop_overflow):
        patch(interpreter)
    for facts in (keep_types, keep_tensors, quick_unwrap, quick_equal):
        facts(core)
    keep_dtypes(interpreter, core)
    quick_calls(interpreter)
    keep_results(semantic.TritonSemantic, core)
    keep_operands(interpreter, semantic.TritonSemantic, core)
    replay_programs(interpreter, core, replace)


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """What `make` makes of an attribute stands in its place; nothing happens where there is none."""
    original = vars(owner).get(name)
    if original is not None:
        setattr(owner, name, wraps(original)(make(original)))


def prepare_once(interpreter: Any) -> None:
    """The language is prepared once for each launch, not for each call of a function.

    What is prepared lasts until the launch ends, so all but the first time do nothing.
    """
    prepared: set[str] = set()

    @cache
    def languages(function: Any) -> set[str]:
        modules = (value for value in function.__globals__.values() if ismodule(value))
        return {module.__name__ for module in modules if module in (interpreter.tl, interpreter.tl.core)}

    def make(prepare: Any) -> Any:
        def prepare_new(function: Any) -> Any:
            function = getattr(function, "function", function)
            if prepared and languages(function) <= prepared:
                return interpreter._LangPatchScope()  # nothing to restore
            is_launch, scope = not prepared, prepare(function)
            prepared.update(languages(function))
            if is_launch:
                restore = scope.restore

                def end() -> None:
                    prepared.clear()
                    restore()

                scope.restore = end
            return scope

        return prepare_new

    replace(interpreter, "_patch_lang", make)


def drop_overflow(interpreter: Any) -> None:
    """No overflow is looked for where `device_assert` would say nothing of it."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def keep_constants(jit: Any, core: Any) -> None:
    """Functions of constants, such as of a codebook's 255 steps, are computed once."""

    def make(original: Any) -> Any:
        known: dict[Any, Any] = {}

        def call(self: Any, *args: Any, **options: Any) -> Any:
            key = self.fn, tuple([(type(one), one) for one in map(core._unwrap_if_constexpr, args)])
            if options.keys() - {"_semantic"}:
                return original(self, *args, **options)
            try:
                if key not in known:
                    known[key] = original(self, *args, **options)
            except TypeError:  # of lists, which have no hash
                return original(self, *args, **options)
            return known[key]

        return call

    if hasattr(jit, "ConstexprFunction"):
        replace(jit.ConstexprFunction, "__call__", make)


def quick_calls(interpreter: Any) -> None:
    """A function of the language is called with the interpreter's meaning of it, its other arguments as they came."""

    def make(_: Any) -> Any:
        def patch(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
            meaning = interpreter.interpreter_semantic

            def called(*args: Any, **kwargs: Any) -> Any:
                kwargs["_semantic"] = meaning
                return member(*args, **kwargs)

            scope.set_attr(obj, name, called)

        return patch

    replace(interpreter, "_patch_attr", make)


def keep_types(core: Any) -> None:
    """Equal blocks' types share what describes them."""
    known: dict[tuple[int, tuple[Any, ...]], dict[str, Any]] = {}

    def make(original: Any) -> Any:
        def init(self: Any, element_ty: Any, shape: Any) -> None:
            if not isinstance(shape, (list, core.tuple)):
                original(self, element_ty, shape)  # refuses it
            sizes = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
            facts = known.get((id(element_ty), sizes))
            if facts is None:
                original(self, element_ty, shape)
                self.sizes, self.of_tensors = sizes, {}
                known[id(element_ty), sizes] = dict(vars(self))  # keeps element_ty, so that its id stays its own
            else:
                self.__dict__.update(facts)

        return init

    replace(core.block_type, "__init__", make)


def keep_tensors(core: Any) -> None:
    """Tensors of one type share their shape and their number of elements."""

    def make(original: Any) -> Any:
        def init(self: Any, handle: Any, type: Any) -> None:
            kept = type.__dict__.get("of_tensors")
            if kept:
                self.__dict__.update(kept)
                self.handle, self.type = handle, type
                return
            original(self, handle, type)
            kept = type.__dict__.setdefault("of_tensors", {})
            kept.update((name, value) for name, value in vars(self).items() if name not in ("handle", "type"))

        return init

    replace(core.tensor, "__init__", make)


def quick_unwrap(core: Any) -> None:
    """What is a number or a name is no constant's wrapping."""

    def make(original: Any) -> Any:
        plain = {int, str, float, bool, type(None), core.dtype, core.block_type, core.pointer_type, core.tensor}

        def unwrap(value: Any) -> Any:
            return value if type(value) in plain else original(value)

        return unwrap

    replace(core, "_unwrap_if_constexpr", make)


def quick_equal(core: Any) -> None:
    """A type equals itself, and shapes are compared as numbers."""

    def make(original: Any) -> Any:
        def equal(self: Any, other: Any) -> bool:
            if self is other:
                return True
            if type(self) is core.block_type and type(other) is core.block_type:
                return bool(self.sizes == other.sizes and self.element_ty == other.element_ty)
            return bool(original(self, other))

        return equal

    for owner in (core.dtype, core.block_type, core.pointer_type):
        replace(owner, "__eq__", make)


def keep_dtypes(interpreter: Any, core: Any) -> None:
    """Numpy's dtype of a type, and whether values fit it, by the type's name."""

    def make_dtype(original: Any) -> Any:
        known: dict[str, Any] = {}

        def dtype(tt_dtype: Any) -> Any:
            found = known.get(tt_dtype.name)
            if found is None:
                found = known[tt_dtype.name] = original(tt_dtype)
            return found

        return dtype

    def make_fits(original: Any) -> Any:
        known: dict[tuple[int, str], bool] = {}

        def fits(np_array: Any, tl_dtype: Any) -> bool:
            key = (np_array.itemsize, tl_dtype.name)
            found = known.get(key)
            if found is None:
                found = known[key] = original(np_array, tl_dtype)
            return found

        return fits

    replace(interpreter, "_get_np_dtype", make_dtype)
    replace(interpreter, "_validate_np_data_size", make_fits)


def keep_results(meanings: Any, core: Any) -> None:
    """The type of a result by those of its operands; blocks of one shape need no broadcast."""

    def make_type(original: Any) -> Any:
        known: dict[tuple[Any, ...], Any] = {}

        def result(self: Any, a_ty: Any, a_is_scalar: bool, b_ty: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
            key = (a_ty.name, a_is_scalar, b_ty.name, b_is_scalar, div_or_mod)
            found = known.get(key)
            if found is None:
                found = known[key] = original(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod)
            return found

        return result

    def make_broadcast(original: Any) -> Any:
        def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
            if lhs.type.__dict__.get("sizes") == rhs.type.__dict__.get("sizes"):
                return lhs, rhs
            return original(self, lhs, rhs)

        return broadcast

    replace(meanings, "computation_type_impl", make_type)
    replace(meanings, "broadcast_impl_value", make_broadcast)


def keep_operands(interpreter: Any, meanings: Any, core: Any) -> None:
    """Which operands an operation takes as they are, by their types; and what a number becomes beside such a block.

    A number becomes a block of one entry that is read everywhere, and that nothing can write to.
    """
    as_they_are: set[tuple[Any, ...]] = set()
    known: dict[tuple[Any, ...], Any] = {}
    numbers = {int, float}

    def kind_of(value: Any) -> int:
        """What all blocks of one element and shape have, and no others; 0 of anything else."""
        held = value.type.__dict__.get("of_tensors") if type(value) is core.tensor else None
        return 0 if held is None else id(held)

    def fresh(self: Any, data: Any, element: Any, type_: Any) -> Any:
        handle = interpreter.TensorHandle(data, element)
        for recorder in RECORDING:
            recorder.constant(handle)
        return self.tensor(handle, type_)

    def make(original: Any) -> Any:
        def operands(self: Any, lhs: Any, rhs: Any, *flags: bool, **named: bool) -> Any:
            kinds = kind_of(lhs), kind_of(rhs)
            if type(lhs) in numbers or type(rhs) in numbers:
                number, is_left = (lhs, True) if type(lhs) in numbers else (rhs, False)
                key = (*kinds, type(number), number, *flags, *named.items())
                if key not in known:
                    left, right = original(self, lhs, rhs, *flags, **named)
                    taken, made = (right, left) if is_left else (left, right)
                    if not any(kinds) or taken is not (rhs if is_left else lhs) or not made.type.is_block():
                        return left, right
                    entries = made.handle.data
                    known[key] = np.broadcast_to(entries.flat[0], entries.shape), made.handle.dtype, made.type
                beside = fresh(self, *known[key])
                return (beside, rhs) if is_left else (lhs, beside)
            key = (*kinds, *flags, *named.items())
            if key in as_they_are:
                return lhs, rhs
            left, right = original(self, lhs, rhs, *flags, **named)
            if all(kinds) and left is lhs and right is rhs:
                as_they_are.add(key)
            return left, right

        return operands

    replace(meanings, "binary_op_type_checking_impl", make)
