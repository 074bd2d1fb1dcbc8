"""Defines the operators of torch.ops.layoutc, which represent the runtime's computations in traced graphs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layoutc.runtime.torch_private import call_in_inductor

_library: Any = torch.library.Library("layoutc", "DEF")  # type: ignore[no-untyped-call]


def of_weights(schema: str) -> Any:
    """Defines an operator that the class of a quantized weight implements, in its table of handlers."""

    def no_weight(*_: Any) -> Any:
        raise TypeError(f"layoutc.{schema.partition('(')[0]} takes a quantized weight")

    return define(schema, no_weight, no_weight)


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any], tags: tuple[torch.Tag, ...] = ()) -> Any:
    """Defines and returns an operator of torch.ops.layoutc: `run` computes, `fake` returns shapes and dtypes.

    Inductor's code calls `run` directly, as `torch.ops.layoutc.run_` plus the operator's name.
    """
    name = _library.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    _library.impl(name, run, "CompositeExplicitAutograd")
    setattr(torch.ops.layoutc, f"run_{name}", run)

    def traced_as(*args: Any) -> Any:
        if "torch._inductor.lowering" in sys.modules:  # else no graph is compiled, or not by Inductor
            call_in_inductor(f"torch.ops.layoutc.{name}.default", f"torch.ops.layoutc.run_{name}")
        return fake(*args)

    torch.library.register_fake(f"layoutc::{name}", traced_as, lib=_library)
    return getattr(torch.ops.layoutc, name).default


def own(made: Tensor, *inputs: Tensor | None) -> Tensor:
    """Makes a result valid for an operator to return: contiguous, and not an alias of an input."""
    return own_all([made], *inputs)[0]


def own_all(made: list[Tensor], *inputs: Tensor | None) -> list[Tensor]:
    """Makes results valid for an operator to return: contiguous, and not aliases of inputs or of one another."""
    taken = {tensor.untyped_storage().data_ptr() for tensor in inputs if tensor is not None}
    owned: list[Tensor] = []
    for one in made:
        one = one.contiguous()
        storage = one.untyped_storage().data_ptr()
        if storage in taken and one.numel():
            one = one.clone()
        taken.add(storage)
        owned.append(one)
    return owned
