"""Current streams, as torch's own ways find and set them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from layoutc.runtime import streams

CPU = torch.device("cpu")
needs_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Handle:
    """In place of torch's module for devices of a kind: notes what is asked of it."""

    def __init__(self) -> None:
        self.asked: list[object] = []

    def current_stream(self) -> str:
        self.asked.append("current")
        return "a stream"

    def stream(self, stream: object) -> object:
        self.asked.append(stream)
        return torch.no_grad()


def test_other_devices_are_left_to_torch() -> None:
    handle = Handle()
    assert streams.current(CPU, handle) == "a stream"
    with streams.on("another stream", handle):
        assert not torch.is_grad_enabled()
    assert handle.asked == ["current", "another stream"]
    assert streams.stream_of(CPU) == 0


@pytest.mark.parametrize(("device", "expected"), [("cpu", False), ("cuda", False), ("cuda:0", False), ("cuda:1", True)])
def test_a_capture_is_on_the_card_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, device: str, expected: bool
) -> None:
    """Whichever is the current one: the second captures here, the first is the current one."""
    current = [0]

    @contextmanager
    def on(one: torch.device) -> Iterator[None]:
        current.append(one.index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[-1] == 1)
    monkeypatch.setattr(streams, "current_card", lambda: current[-1])
    assert streams.capturing(torch.device(device)) is expected
    assert current == [0]


@pytest.mark.gpu
@needs_card
def test_a_stream_is_the_current_one_inside_whatever_happens() -> None:
    """Nested, with the stream that is current anyway, and where an error ends it."""
    before, one, other = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
    device = torch.device("cuda", torch.cuda.current_device())
    with streams.on(one, torch.cuda):
        assert torch.cuda.current_stream() == streams.current(device, torch.cuda) == one
        with streams.on(other, torch.cuda), streams.on(other, torch.cuda):
            assert torch.cuda.current_stream() == streams.current(device, torch.cuda) == other
            assert streams.stream_of(device) == other.cuda_stream
        assert torch.cuda.current_stream() == one
        with pytest.raises(ValueError, match="of a step"), streams.on(other, torch.cuda):
            raise ValueError("of a step")
        assert torch.cuda.current_stream() == one
    assert torch.cuda.current_stream() == streams.current(device, torch.cuda) == before


@pytest.mark.gpu
@needs_card
def test_a_kept_stream_is_the_one_that_torch_gives() -> None:
    """With its priority, and when it is asked for again."""
    device = torch.device("cuda", torch.cuda.current_device())
    stream = torch.cuda.Stream(priority=-1)
    with torch.cuda.stream(stream):
        first, again = streams.current(device, torch.cuda), streams.current(device, torch.cuda)
    assert first is again
    assert (first, first.cuda_stream, first.priority) == (stream, stream.cuda_stream, -1)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_stream_of_another_card_makes_that_the_current_one() -> None:
    stream = torch.cuda.Stream(1)
    with torch.cuda.device(0):
        with streams.on(stream, torch.cuda):
            assert (torch.cuda.current_device(), torch.cuda.current_stream()) == (1, stream)
        assert torch.cuda.current_device() == 0
