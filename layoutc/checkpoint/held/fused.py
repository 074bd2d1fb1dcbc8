"""Scales of whole weights that engines join into one: whether those of files are the same."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from torch import Tensor

from layoutc.runtime.errors import printable

Scales = dict[str, dict[str, float]]  # by the name that weights are joined under, those of their tensors


def record_scale(scales: Scales, group: str, name: str, value: Tensor) -> None:
    """Adds a tensor with one value, the scale of a weight that engines join with others."""
    scales.setdefault(group, {})[name] = float(value.flatten()[0])


def warn_apart(where: object, scales: Mapping[str, Mapping[str, float]]) -> None:
    """Says once which weights that engines join have scales of their own, and how far apart."""
    apart = {group: found for group, found in scales.items() if len({*found.values()}) > 1}
    if not apart:
        return

    def ratio(found: Mapping[str, float]) -> float:
        least, most = (one(map(abs, found.values())) for one in (min, max))
        return most / least if least else float("inf")

    worst = max(apart, key=lambda group: ratio(apart[group]))
    shown = ", ".join(f"{name} = {value:.4g}" for name, value in sorted(apart[worst].items()))
    warnings.warn(
        f"{where}: {len(apart)} groups of weights that engines join into one have scales apart, by up to "
        f"{ratio(apart[worst]):.3g} times ({printable(shown)}). Engines take one scale for all of a group, so that "
        "their values are others than these. Weights are quantized under one by `layoutc convert --match` of plain "
        "values, and by share_amax=True in quantize_, quantized_init and cast_on_gather_",
        stacklevel=4,
    )
