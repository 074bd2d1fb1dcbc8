"""A device's current stream, and whether a CUDA graph is being captured on it.

`torch.cuda.stream` and `current_stream` make a Stream on each call: 17 and 7 us where a launch takes 5 us. A replay
runs the captured kernels and no Python: state that is kept between steps must stay in the same memory, and a replay
does not see what Python computed after the capture.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from layoutc.runtime.torch_private import current_card, raw_stream, set_stream, stream_key

_streams: dict[tuple[int, int, int], torch.cuda.Stream] = {}  # by stream_key


def stream_of(device: torch.device) -> int:
    """The device's current stream, as a number; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    return raw_stream(torch.cuda.current_device() if device.index is None else device.index)


def current(device: torch.device, handle: Any) -> Any:
    """The device's current stream. handle: torch's module for the device type, such as torch.cuda."""
    if device.type != "cuda" or device.index is None:
        return handle.current_stream()
    key = stream_key(device.index)
    if (found := _streams.get(key)) is None:
        found = _streams[key] = torch.cuda.current_stream(device)
    return found


def on(stream: Any, handle: Any) -> AbstractContextManager[Any]:
    """A context in which a stream is the current one. handle: see `current`."""
    if type(stream) is torch.cuda.Stream and stream.device_index == current_card():
        return _On(stream)
    return handle.stream(stream)  # type: ignore[no-any-return]


class _On:
    """Makes a stream of the current card the current one."""

    __slots__ = ("_before", "_key")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._key = stream.stream_id, stream.device_index, stream.device_type
        self._before = self._key

    def __enter__(self) -> None:
        self._before = stream_key(self._key[1])
        if self._before != self._key:
            set_stream(self._key)

    def __exit__(self, *_: object) -> None:
        if self._before != self._key:
            set_stream(self._before)


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
