"""Layouts that no shipped recipe has: padding of transposed codes; amaxes of blocks of columns, the last one short."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from layoutc.conformance.subject import compile_subject

HEAD = "layoutc: 1\nname: {name}\nsummary: made up by a test\n"
PADDED = """\
element: {format: e4m3}
scale: {format: e8m0, rule: power-of-two, round: up}
shape: {m: 32, k: 32}
orientations:
  rowwise:
    block: {m: 1, k: 32}
    data: {layout: m k, pad: [48, 64]}
    scale: {layout: m k/32}
  columnwise:
    block: {m: 32, k: 1}
    data: {layout: k m, pad: [80, 48]}
    scale: {layout: k m/32}
"""
COLUMNS = """\
element: {format: e4m3}
scale: {format: f32, rule: amax-over-max}
orientations:
  rowwise:
    block: {m: all, k: 16}
    data: {layout: m k}
    scale: {layout: k/16}
"""


@contextmanager
def package(folder: Path, name: str, text: str) -> Iterator[ModuleType]:
    """The package that is generated from a spec."""
    path = folder / f"{name}.yaml"
    path.write_text(HEAD.format(name=name) + text, encoding="utf-8")
    subject = compile_subject(path)
    try:
        yield subject.package
    finally:
        subject.close()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("shape", [(32, 32), (96, 160), (192, 64)])
def test_padding_of_transposed_codes_is_zero_and_behind_the_codes(tmp_path: Path, shape: tuple[int, int]) -> None:
    """By plain indexing of planes with bytes that are never zero; in the reference and in kernels."""
    m, k = shape
    rng = np.random.default_rng(m)
    with package(tmp_path, "padded_transposed", PADDED) as made:
        facts = made.LAYOUT.planes(m, k)
        planes = {
            name: torch.from_numpy(rng.integers(1, 126, fact.shape, dtype=np.uint8)).view(fact.dtype)
            for name, fact in facts.items()
        }
        expected = {}
        for name, transposed, pads in (("rowwise_data", False, (48, 64)), ("columnwise_data", True, (80, 48))):
            codes = planes[name].view(torch.uint8).numpy()
            codes = codes.T if transposed else codes
            rows, columns = (-(-size // pad) * pad for size, pad in zip(codes.shape, pads, strict=True))
            expected[name] = np.zeros((rows, columns), np.uint8)
            expected[name][: codes.shape[0], : codes.shape[1]] = codes
        found = [made.reference.lay_out(planes, m, k, made.LAYOUT.orientations)]
        if torch.cuda.is_available() or _interprets():
            kernels = importlib.import_module(f"{made.__name__}.kernels").KERNELS
            found.append(kernels.lay_out(planes, m, k, made.LAYOUT.orientations))
        for buffers in found:
            for name, codes in expected.items():
                assert np.array_equal(buffers[name].view(torch.uint8).numpy(), codes), name


def _interprets() -> bool:
    try:
        import triton
    except ImportError:
        return False
    return bool(triton.knobs.runtime.interpret)


@pytest.mark.parametrize("k", [16, 40, 57, 7])
def test_columns_that_end_inside_a_block_have_an_amax_of_their_own(tmp_path: Path, k: int) -> None:
    """The last block of columns is short: its amax counts, given or found, whole or over shards of rows."""
    x = torch.rand(24, k, generator=torch.Generator().manual_seed(k)) - 0.5
    blocks = range(0, k, 16)
    for number, at in enumerate(blocks):  # scales are powers of two, which leave nothing to rounding
        x[:, at : at + 16] *= 2.0**number
        x[number, -1 if at + 16 > k else at] = -448 * 2.0**number
    amax = torch.tensor([[448 * 2.0**number for number in range(len(blocks))]])
    with package(tmp_path, "ragged_columns", COLUMNS) as made:
        assert made.LAYOUT.amax_columns == 16
        assert made.LAYOUT.amax_shape(k) == (1, len(blocks))
        scales = amax.view(-1) / 448
        codes = (x / scales.repeat_interleave(16)[:k]).to(torch.float8_e4m3fn).view(torch.uint8)
        for whole in (made.quantize(x), made.quantize(x, amax=amax)):
            assert torch.equal(whole.buffers()["rowwise_scale"].view(-1), scales)
            assert torch.equal(whole.buffers()["rowwise_data"].view(torch.uint8), codes)
        for part in (x[:7], x[7:]):
            cut = made.quantize(part, amax=amax)
            assert torch.equal(cut.buffers()["rowwise_scale"].view(-1), scales)
        for wrong in (amax[:, 1:], torch.cat([amax, amax], 1)):
            with pytest.raises(ValueError, match=r"amax must be floating point of shape"):
                made.quantize(x, amax=wrong)
