"""An independent implementation of transforms: the butterfly entry by entry, in numpy fp32."""

from __future__ import annotations

import numpy as np

from layoutc.conformance.model.codes import F32, Array
from layoutc.layout.layout import Transform


def transformed(transform: Transform, x: Array, *, inverse: bool = False) -> Array:
    """Transforms (m, k) fp32 values in groups along the axis, or undoes it if `inverse`."""
    if transform.axis == "m":
        of_columns = Transform("k", transform.size, transform.signs)
        return np.ascontiguousarray(transformed(of_columns, x.T, inverse=inverse).T)
    size = transform.size
    signs = np.array([F32(-1) if transform.signs & 1 << entry else F32(1) for entry in range(size)])
    groups = np.array(x, F32).reshape(-1, size)
    with np.errstate(all="ignore"):
        groups = groups if inverse else groups * signs
        for bit in range(size.bit_length() - 1):
            made = groups.copy()
            for first in (entry for entry in range(size) if not entry & 1 << bit):
                second = first | 1 << bit
                made[:, first] = groups[:, first] + groups[:, second]
                made[:, second] = groups[:, first] - groups[:, second]
            groups = made
        groups = groups * F32(1 / np.sqrt(np.float64(size)))
        groups = groups * signs if inverse else groups
    return groups.reshape(x.shape)


def growth(transform: Transform) -> np.float32:
    """The smallest power of two that is at least the square root of the size: the factor on the amax of all values."""
    return F32(2.0 ** np.ceil(np.log2(transform.size) / 2))
