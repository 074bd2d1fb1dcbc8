"""Experts of a layer as one call: tokens to their experts, gated products, and back to tokens."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from layoutc.runtime.operands.routes import FromExperts, ToExperts, routes_of


def routed_experts(
    x: Tensor, chosen: Tensor, weights: Tensor, experts: int, compute: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """x (tokens, columns) by the experts that each token has chosen -> (tokens, columns), the sum by their weights.

    chosen, weights: (tokens, chosen of each); an expert from `experts` on is another rank's, and adds nothing. compute:
    (rows in the order of experts, where those of each end) -> rows.
    """
    routes = routes_of(chosen, experts)
    y = compute(ToExperts.apply(x, *routes), routes.ends)  # type: ignore[no-untyped-call]
    made: Tensor = FromExperts.apply(y, weights, *routes)  # type: ignore[no-untyped-call]
    return made
