"""A readable summary of what AdamW stores for each parameter, and of which launch writes its weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from layoutc.runtime.weight.tensor import QuantizedTensor


class Held(NamedTuple):
    """One parameter: its name ("" unless it is a quantized weight), its shape, and what this rank stores for it.

    codes: "" if the launch that updates the master also writes the weight; else why another launch does.
    """

    name: str
    shape: tuple[int, ...]
    master: str
    moments: Mapping[str, str]
    nbytes: int
    codes: str

    def __str__(self) -> str:
        moments = ", ".join(f"{name} {form}" for name, form in self.moments.items())
        how = "written with its master" if not self.codes else f"written after it: {self.codes}"
        shape = " x ".join(map(str, self.shape))
        return f"{self.name or 'a parameter'} ({shape}): master {self.master}, {moments or 'no step yet'}; {how}"


def form_of(tensor: Tensor) -> str:
    """The name of a tensor's recipe, or of its dtype as users write it."""
    if isinstance(tensor, QuantizedTensor):
        return tensor.LAYOUT.name
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))


def nbytes_of(tensor: Tensor) -> int:
    """The bytes of all planes."""
    return (
        sum(plane.nbytes for plane in tensor.planes().values())
        if isinstance(tensor, QuantizedTensor)
        else tensor.nbytes
    )
