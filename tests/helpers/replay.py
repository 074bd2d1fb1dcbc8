"""Programs of one launch of Triton's interpreter after the first: its operations again, without the Python around them.

A kernel's Python is the same for every program of a launch where it decides nothing by values that differ between
programs. So the first program is run and noted, as calls of the interpreter's builder, which are all that compute,
load or store; the others are those calls with their own program's index. What depends on no index and no memory is
computed once. Where Python decides by another value before anything is stored, a program is noted for each way that is
taken; where it does so later, or where values come from elsewhere, programs run as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

LEAST = 2  # programs of a launch that is worth noting
MOST = 8  # ways through a kernel that are noted
MEMORY = ("load", "store", "atomic", "gather", "scatter", "program_id", "print", "assert", "barrier")
EFFECTS = ("store", "scatter", "atomic", "print", "assert", "barrier")
RECORDING: list[Recorder] = []  # at most one


class Recorder:
    """What one program calls. `calls`: (function, arguments, where values of other calls go, keywords, results).

    Where Python read a value, there are no results, and the value stands for the keywords.
    """

    def __init__(self, handle_type: type, arguments: Any) -> None:
        self.handle_type, self.is_replayable, self.depth = handle_type, True, 0
        self.calls: list[tuple[Callable[..., Any], list[Any], list[tuple[int, int]], Any, list[int] | None]] = []
        self.has_effects = False
        self.places: dict[int, int] = {}  # of results that differ between programs, by id
        self.constants: set[int] = set()
        self.alive: list[Any] = []  # so that ids stay their own
        self.count = 0
        self.take(arguments)

    def take(self, value: Any) -> None:
        """Arguments of the launch, which all programs share."""
        if isinstance(value, tuple | list):
            for one in value:
                self.take(one)
        elif isinstance(getattr(value, "handle", None), self.handle_type):
            self.constant(value.handle)

    def constant(self, handle: Any) -> None:
        """What is the same in all programs."""
        self.alive.append(handle)
        self.constants.add(id(handle))
        self.places.pop(id(handle), None)

    def look(self, handle: Any, read: Callable[[Any], Any]) -> None:
        """Python decides something by a value."""
        if self.depth or id(handle) in self.constants:
            return
        if self.has_effects or id(handle) not in self.places:
            self.is_replayable = False
            return
        self.calls.append((read, [None], [(0, self.places[id(handle)])], read(handle), None))

    def note(self, name: str, function: Callable[..., Any], given: tuple[Any, ...], named: Any, made: Any) -> None:
        """A call, and what it returned."""
        if not self.is_replayable:
            return
        results = made if isinstance(made, tuple) else () if made is None else (made,)
        filled, arguments = [], list(given)
        for index, one in enumerate(arguments):
            if isinstance(one, self.handle_type):
                if id(one) in self.places:
                    filled.append((index, self.places[id(one)]))
                elif id(one) not in self.constants:
                    self.is_replayable = False
            elif hasattr(one, "base") or (isinstance(one, tuple | list) and self.has_handles(one)):
                self.is_replayable = False
        if self.has_handles(tuple(named.values())) or not all(isinstance(one, self.handle_type) for one in results):
            self.is_replayable = False
        if not filled and not any(part in name for part in MEMORY):
            for one in results:
                self.constant(one)
            return
        self.has_effects |= any(part in name for part in EFFECTS)
        places = []
        for one in results:
            self.alive.append(one)
            self.constants.discard(id(one))
            self.places[id(one)] = self.count
            places.append(self.count)
            self.count += 1
        for index, _ in filled:
            arguments[index] = None
        self.calls.append((function, arguments, filled, named, places))

    def has_handles(self, values: Any) -> bool:
        return any(isinstance(one, self.handle_type) or hasattr(one, "base") for one in values)


def replayed(recorder: Recorder) -> bool:
    """Makes the calls of a program, for the index that the builder is at; stops where Python would go another way."""
    values: list[Any] = [None] * recorder.count
    for function, arguments, filled, named, places in recorder.calls:
        given = arguments.copy()
        for index, place in filled:
            given[index] = values[place]
        if places is None:
            if function(*given) != named:
                return False
            continue
        made = function(*given, **named)
        if len(places) == 1:
            values[places[0]] = made[0] if type(made) is tuple else made
        else:
            for place, one in zip(places, made or (), strict=True):
                values[place] = one
    return True


@cache
def signature_of(function: Any) -> inspect.Signature:
    return inspect.signature(function)


class Program:
    """A kernel during one launch, in the place of its function."""

    def __init__(self, interpreter: Any, function: Any) -> None:
        self.interpreter, self.function = interpreter, function
        self.ways: list[Recorder] = []
        self.is_plain = False
        self.__globals__, self.__annotations__ = function.__globals__, function.__annotations__
        self.__name__, self.__signature__ = function.__name__, signature_of(function)

    def __call__(self, **arguments: Any) -> None:
        builder = self.interpreter.interpreter_builder
        nx, ny, nz = builder.grid_dim
        if any(map(replayed, self.ways)):
            return
        if nx * ny * nz < LEAST or self.is_plain or len(self.ways) == MOST:
            self.function(**arguments)
        else:
            recorder = Recorder(self.interpreter.TensorHandle, tuple(arguments.values()))
            record(builder, recorder)
            RECORDING.append(recorder)
            try:
                self.function(**arguments)
            finally:
                RECORDING.clear()
                for name in names(type(builder)):
                    builder.__dict__.pop(name, None)
            self.is_plain = not recorder.is_replayable
            self.ways += [recorder] if recorder.is_replayable else []


@cache
def names(builder: type) -> tuple[str, ...]:
    """Of methods that compute."""
    given = [name for name in dir(builder) if name.startswith(("create_", "get_")) and not name.endswith("_ty")]
    return tuple(name for name in given if callable(getattr(builder, name)))


def record(builder: Any, recorder: Recorder) -> None:
    """The builder notes what it is asked for; a method that calls another is noted alone."""

    def noted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            if recorder.depth:
                return method(*given, **named)
            recorder.depth += 1
            try:
                made = method(*given, **named)
            finally:
                recorder.depth -= 1
            recorder.note(name, method, given, named, made)
            return made

        return call

    for name in names(type(builder)):
        builder.__dict__[name] = noted(name, getattr(builder, name))


def replay_programs(interpreter: Any, core: Any, replace: Callable[..., None]) -> None:
    """Patches the interpreter."""

    def make_init(original: Any) -> Any:
        def init(self: Any, fn: Any, *rest: Any, **named: Any) -> None:
            original(self, fn, *rest, **named)
            self.fn = Program(interpreter, fn)

        return init

    def make_apply(original: Any) -> Any:
        """Reductions and scans, which read values beside the builder."""

        def apply_impl(self: Any, tensors: Any) -> Any:
            recorder = RECORDING[0] if RECORDING else None
            if recorder is None or recorder.depth:
                return original(self, tensors)
            recorder.depth += 1
            try:
                made = original(self, tensors)
            finally:
                recorder.depth -= 1
            types = [one.type for one in tensors]

            def again(*handles: Any) -> Any:
                found = original(self, tuple(map(core.tensor, handles, types)))
                return tuple(one.handle for one in (found if isinstance(found, tuple | list) else (found,)))

            results = tuple(one.handle for one in (made if isinstance(made, tuple | list) else (made,)))
            recorder.note("reduce", again, tuple(one.handle for one in tensors), {}, results)
            return made

        return apply_impl

    def make_patch(original: Any) -> Any:
        def patch(tensor: Any, scope: Any) -> None:
            original(tensor, scope)
            of_bool, of_index = vars(tensor)["__bool__"], vars(tensor)["__index__"]
            scope.set_attr(tensor, "__bool__", looking(of_bool, as_bool))
            scope.set_attr(tensor, "__index__", looking(of_index, lambda handle: int(handle.data.squeeze())))

        return patch

    def as_bool(handle: Any) -> bool:
        return bool(handle.data) if handle.data.size == 1 else True

    def looking(original: Any, read: Callable[[Any], Any]) -> Any:
        def look(self: Any) -> Any:
            for recorder in RECORDING:
                recorder.look(getattr(self, "handle", self), read)
            return original(self)

        return look

    replace(interpreter.GridExecutor, "__init__", make_init)
    for owner in (interpreter.ReduceOps, interpreter.ScanOps):
        replace(owner, "apply_impl", make_apply)
    replace(interpreter, "_patch_lang_tensor", make_patch)
    replace(
        interpreter.TensorHandle, "__bool__", lambda original: looking(original, lambda handle: bool(handle.data.all()))
    )
