"""Copies of views of weights, or in another dtype: they hold values, and a model multiplies as with the view.

Quantizing their values again would change blocks, and so products: a transposed copy would have blocks along the other
axis, a copy of some rows another amax, and a copy that autocast or `weight.to(x.dtype)` made would be rounded before it
is quantized.
"""

from __future__ import annotations

import weakref

from torch import Tensor

from layoutc.runtime.cast.shared_amax import Cast
from layoutc.runtime.errors import LayoutError


class Values(dict[str, Tensor]):
    """{"values": all values of a weight}, as a dict with weak references.

    is_apart: a graph was given a view's values beside these, and writes to one do not show in the other.
    """

    __slots__ = ("__weakref__", "is_apart")

    def __init__(self, values: Tensor) -> None:
        super().__init__(values=values)
        self.is_apart = False


class CopiedView:
    """The view that a tensor is a copy of. It keeps no weight alive; a copy that outlives it is independent."""

    def __init__(self, view: Cast, copy: Cast) -> None:
        if (first := view._copied_view()) is not None:  # `view` is one of a copy of a view
            views, transposed = (*first._views, *view._views), first.transposed != view.transposed
            view = first.alias()
            view._views, view.transposed = views, transposed
        self.store = weakref.ref(view.store)
        self.products = view.own_products
        self._rest = view._views, view.transposed, view.weight_name, view._agreed, view.own_products
        self._written = view._agreed.count(view), copy._agreed.count(copy)

    def view(self, copy: Cast) -> Cast | None:
        """The view. None if its weight is gone, or if a copy of a whole weight, which has its own blocks, was written.
        Raises LayoutError if a view's weight, or the copy of a view, was written."""
        if (planes := self.store()) is None:
            return None
        view = copy._wrap(planes, planes["values"])
        view._views, view.transposed, view.weight_name, view._agreed, view.own_products = self._rest
        if self._written != (view._agreed.count(view), copy._agreed.count(copy)):
            if not view._views:
                return None
            raise LayoutError(
                f"{copy.label()} is a copy of a view of a weight, and one of the two was written since, so its blocks "
                "are unknown: copy the view again to multiply with the weight, or copy view.detach() for a weight "
                "with its own blocks"
            )
        return view
