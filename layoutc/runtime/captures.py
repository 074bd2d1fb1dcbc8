"""Tells whether a CUDA graph is being captured.

A replay runs the captured kernels and no Python: state that is kept between steps must stay in the same memory, and a
replay does not see what Python computed after the capture.
"""

from __future__ import annotations

from typing import Any

import torch

from layoutc.runtime.torch_private import current_card

_kept: list[Any] = []


def keep(*tensors: torch.Tensor) -> None:
    """Keeps tensors that a captured graph reads while the process lives: nothing tells when a graph is gone."""
    _kept.extend(tensors)


def capturing(device: torch.device) -> bool:
    """True while a CUDA graph is being captured on the device's current stream."""
    if device.type != "cuda":
        return False
    if device.index is None or device.index == current_card():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
