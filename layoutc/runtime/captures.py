"""CUDA graphs: whether one is being captured.

A replay runs the kernels that were captured, and no Python: what is kept from step to step must then stay in the same
memory, and nothing that Python has worked out since is seen.
"""

from __future__ import annotations

import torch

from layoutc.runtime.torch_private import current_card


def capturing(device: torch.device) -> bool:
    """True while a CUDA graph is captured on the device's current stream."""
    if device.type != "cuda":
        return False
    if device.index is None or device.index == current_card():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
