"""The fallback for operators without a handler: they are decomposed, refused, or run on dequantized copies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from layoutc.runtime import callers, strict
from layoutc.runtime.dispatch import merges, truncated, update_warnings
from layoutc.runtime.dispatch.handlers import Args, Kwargs, copy_
from layoutc.runtime.errors import UnsupportedOperator
from layoutc.runtime.streams import capturing
from layoutc.runtime.torch_private import schema_of, tree_leaves, tree_map
from layoutc.runtime.weight.tensor import QuantizedTensor

aten = torch.ops.aten


def fallback(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Runs any operator that the tensors' table does not have.

    Composite operators, which inference mode dispatches as a whole (matmul, reshape, chunk), are decomposed and their
    parts dispatched. Views, also in place (t_, unsqueeze_), are refused with UnsupportedOperator. The rest runs on
    dequantized copies, and tensors that it writes are requantized, except by put_ and index_copy_ with an
    empty index; under strict(), it raises ImplicitDequantize.
    """
    if func._can_decompose():
        decomposed = func.decompose(*args, **kwargs)
        if decomposed is not NotImplemented:
            return decomposed
    schema = schema_of(func)
    label = next(a for a in tree_leaves((args, kwargs)) if isinstance(a, QuantizedTensor)).label()
    if any(argument.alias_info is not None and not argument.alias_info.is_write for argument in schema.arguments):
        raise UnsupportedOperator(f"{func}: no exact view of {label}; for a copy, call .dequantize() first")
    if torch.Tag.inplace_view in func.tags:
        raise UnsupportedOperator(
            f"{func}: {label} keeps its shape, order and memory; for another, call the operator without the underscore"
        )
    outputs = outputs_of(func, args, kwargs)
    targets = [value for value in outputs if isinstance(value, QuantizedTensor)]
    if any(one.store.writes.master is not None and capturing(one.device) for one in targets):
        raise UnsupportedOperator(
            f"{func}: in a CUDA graph, {label} loses this in the next step, since replays don't move its master; "
            "call it between replays, or leave it to the optimizer, as with weight_decay="
        )
    strict.count_dequantize(str(func), label)
    if targets:
        update_warnings.warn_inexact_update(func, targets, tree_leaves((args, kwargs)))
    else:
        merges.note_read(tree_leaves((args, kwargs)))

    initializes = callers.initializes()
    if targets and initializes:
        truncated.check_elements(label)

    # A written tensor starts from its initial values, since initializers have several steps, or its master's.
    starts = {id(one): one.initial_values(one.dtype, at_least=not initializes) for one in targets}
    widens = any((start := starts[id(one)]) is not None and start.dtype != one.dtype for one in targets)

    def plain(value: Any) -> Any:
        if not isinstance(value, QuantizedTensor):
            if not (widens and isinstance(value, torch.Tensor) and value.is_floating_point()):
                return value
            return value if any(value is one for one in outputs) else value.float()
        values = starts.get(id(value))
        if values is None and initializes:
            values = value.initial_values(value.dtype)
        values = value.dequantize() if values is None else values
        return values.float() if widens else values

    plain_args, plain_kwargs = tree_map(plain, args), tree_map(plain, kwargs)
    result = func(*plain_args, **plain_kwargs)
    if not schema.is_mutable:
        for one in tree_leaves((args, kwargs)):
            if isinstance(one, QuantizedTensor):
                update_warnings.note_values(one, result)
        return result
    # Requantizes the copies that the operator wrote, and returns the quantized tensors instead.
    back: dict[int, QuantizedTensor] = {}
    written = outputs_of(func, plain_args, plain_kwargs)
    places = [value for argument, value in given(func, args, kwargs) if argument.name in ("index", "indices")]
    nowhere = any(isinstance(place, torch.Tensor) and place.numel() == 0 for place in tree_leaves(places))
    for target, values in zip(outputs, written, strict=True):
        if isinstance(target, QuantizedTensor):
            back[id(values)] = target
            if starts[id(target)] is not None:
                target.store.writes.read = None  # they were computed from finer values
            if nowhere:  # in many recipes, requantizing dequantized values changes codes
                continue
            copy_(aten.copy_.default, (target, truncated.redrawn(func, target, values)), {})
    return tree_map(lambda value: back.get(id(value), value), result)


def given(func: Any, args: Args, kwargs: Kwargs) -> Iterator[tuple[Any, Any]]:
    """The arguments of an operator's schema with their values; None for omitted ones."""
    for position, argument in enumerate(schema_of(func).arguments):
        yield argument, args[position] if position < len(args) else kwargs.get(argument.name)


def outputs_of(func: Any, args: Args, kwargs: Kwargs) -> list[Any]:
    """The arguments that an operator writes, with lists flattened."""
    outputs: list[Any] = []
    for argument, value in given(func, args, kwargs):
        if argument.alias_info is not None and argument.alias_info.is_write:
            outputs += value if isinstance(value, list | tuple) else [value]
    return outputs
