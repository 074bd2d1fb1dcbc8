"""Reads a model from shapes on the command line: `NAME=4096x14336`; `NAME*32=...` for one in each of 32 layers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from layoutc.models.weights import MOST_SIZE, Model, ModelError, Weight, check_layers, in_layers, kind_by_name

_STATED = re.compile(r"([A-Za-z_][\w.]*)(?:\*([1-9][0-9]{0,17}))?=([1-9][0-9]*(?:[xX][1-9][0-9]*){0,3})", re.ASCII)
EXAMPLE = "up=14336x4096, or up*32=14336x4096 for one in each of 32 layers, or experts*32=8x14336x4096"


def read(stated: Sequence[str]) -> Model:
    """The model of shapes. Raises ModelError for text that is not a shape."""
    return in_layers("shapes", "--shapes", [weight for text in stated for weight in _weights(text.strip())])


def _weights(text: str) -> Iterator[Weight]:
    match = _STATED.fullmatch(text)
    if match is None:
        raise ModelError(f"'{text}' is not a shape of a weight; write NAME=ROWSxCOLUMNS, as in {EXAMPLE}")
    name, times, sizes = match.groups()
    shape = tuple(int(size) for size in re.split("[xX]", sizes))
    if max(shape) > MOST_SIZE:
        raise ModelError(f"'{text}' is larger than a weight can be")
    check_layers("--shapes", f"the number of layers of '{text}'", int(times or 1))
    named = kind_by_name(name, shape)
    kind = "linear" if len(shape) == 2 and named == "other" else "experts" if len(shape) == 3 else named
    share = float(kind in ("linear", "router"))
    for layer in range(int(times)) if times else (None,):
        yield Weight(name if layer is None else f"layers.{layer}.{name}", shape, kind, share)
