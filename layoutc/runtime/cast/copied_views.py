"""Copies of views of weights, and copies in another dtype: they have the values, and a model multiplies with them as
with the view.

To quantize their values anew would give them blocks of their own, and other products than FSDP2's gathered weight has:
a transposed copy would have blocks along the other axis, a copy of some rows an amax of its own; and a copy that
autocast made, or a layer by `weight.to(x.dtype)`, would be rounded before it is quantized.
"""

from __future__ import annotations

import weakref

from torch import Tensor

from layoutc.runtime.cast.shared_amax import Cast
from layoutc.runtime.errors import LayoutError


class Values(dict[str, Tensor]):
    """{"values": all of a weight's}, which can be referred to weakly."""

    __slots__ = ("__weakref__",)


class CopiedView:
    """The view that a tensor is a copy of. It keeps no weight alive: a copy that outlives the weight is by itself."""

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
        """The view; None where its weight is gone, or a copy of a whole one, which has blocks of its own, no longer is
        one. Raises LayoutError if the weight of a view or the copy has been written since."""
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
