"""CRC-32 by parts and threads is zlib's."""

from __future__ import annotations

import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layoutc.runtime.weight import checksums


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_parts_combine(a: bytes, b: bytes) -> None:
    assert checksums.combine(zlib.crc32(a), zlib.crc32(b), len(b)) == zlib.crc32(a + b)


@pytest.mark.parametrize("size", [0, 1, 1000, checksums.CHUNK, checksums.CHUNK + 1, 3 * checksums.CHUNK - 7])
def test_threads_give_what_one_gives(size: int) -> None:
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    assert checksums.crc32(data) == zlib.crc32(data.numpy().tobytes())


def test_views_and_other_dtypes_are_read_in_row_major_order() -> None:
    values = torch.randn(64, 48, dtype=torch.bfloat16)
    for view in (values, values.t(), values[:, ::3], values[5, ::2], values[3, 7]):
        expected = view.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy().tobytes()
        assert checksums.crc32(view) == zlib.crc32(expected)


def test_memory_that_was_read_can_be_freed() -> None:
    """FSDP2 resizes the storage of a gathered weight, which hooks of saved tensors may have pickled."""
    storage = (data := torch.arange(64.0)).untyped_storage()
    checksums.crc32(data)
    storage.resize_(0)
    assert storage.nbytes() == 0
