"""The table of operators and handlers, for the weights of all recipes.

Exact on stored bytes, for every recipe: detach, alias, clone, to(device), pin_memory, record_stream, equal; view, where
leading dims are split, merged or flattened; t and transpose of a matrix; DTensors' collectives, of shards cut at any
row; copy_ from the same recipe, while a plain tensor is quantized. The recipe's tensor.py says which cuts and joins
are. Other views are refused. Other operators run on a dequantized copy, unless layoutc.strict() refuses that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from layoutc.runtime.dispatch import collectives, cuts_and_joins, einsum, handlers
from layoutc.runtime.dispatch.views import or_values
from layoutc.runtime.products import experts

aten = torch.ops.aten

HANDLERS: dict[Any, Callable[..., Any]] = {
    # the same planes under the same or another outer shape
    **dict.fromkeys((aten.detach.default, aten.alias.default), lambda func, args, kwargs: args[0].alias()),
    aten.detach_.default: lambda func, args, kwargs: args[0],  # only in inference mode, which records nothing
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default), handlers.view),
    aten.unsqueeze.default: or_values(handlers.unsqueeze),
    **dict.fromkeys((aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims), or_values(handlers.squeeze)),
    aten.t.default: handlers.transpose,
    aten.transpose.int: or_values(handlers.transpose),
    aten.permute.default: or_values(handlers.permute),
    aten.as_strided.default: handlers.as_strided,
    aten.expand.default: or_values(handlers.expand),
    # cuts along rows and columns
    aten.slice.Tensor: or_values(cuts_and_joins.slice_),
    aten.select.int: cuts_and_joins.select,
    aten.unbind.int: cuts_and_joins.unbind,
    aten.split.Tensor: cuts_and_joins.split,
    aten.split_with_sizes.default: cuts_and_joins.split_with_sizes,
    aten.cat.default: cuts_and_joins.cat,
    # new tensors of the recipe
    **dict.fromkeys((aten.new_empty.default, aten.new_zeros.default), cuts_and_joins.new),
    aten.empty_like.default: cuts_and_joins.empty_like,
    aten.clone.default: handlers.clone,
    aten._to_copy.default: handlers.to_copy,
    aten._pin_memory.default: handlers.pin_memory,
    # state for optimizers: plain tensors
    **dict.fromkeys(handlers.LIKE, handlers.like_plain),
    # bytes in place
    aten.copy_.default: handlers.copy_,
    aten.zero_.default: handlers.zero_,
    aten.record_stream.default: handlers.record_stream,
    aten.is_pinned.default: lambda func, args, kwargs: all(p.is_pinned() for p in args[0].store.planes.values()),
    aten.equal.default: handlers.equal,
    aten.is_set_to.default: handlers.is_set_to,
    # products: k contracted reads rowwise values, m contracted reads those for backward
    **dict.fromkeys(handlers.PRODUCTS, handlers.product),
    # products in low precision: of linear layers, and of experts
    **experts.HANDLERS,
    # products of values: torch.einsum
    **einsum.HANDLERS,
    # what DTensor does: bytes travel; values that are assigned to .data (torch.Tensor.data); all other operators (None)
    **collectives.HANDLERS,
}
