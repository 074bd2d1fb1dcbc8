"""CUDA graphs: whether one is being captured.

A replay runs the kernels that were captured, and no Python: what is kept from step to step must then stay in the same
memory, and nothing that Python has worked out since is seen.
"""

from __future__ import annotations

import torch


def capturing(device: torch.device) -> bool:
    """True while a CUDA graph is captured on the device's current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
