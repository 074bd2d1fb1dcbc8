"""Plain parameters that are sent, and arrive, as words, by launches that copy planes: the bytes of those as they are.

No ranks are needed: what FSDP2 keeps of a parameter is one list of tensors.
"""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from layoutc.runtime.fsdp2.runs import Part, PlainParameter, plain, runs_of
from layoutc.runtime.kernels import launch
from layoutc.runtime.kernels.copies import MOVING

RANKS, START = 2, 16


def parameter(numel: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    """numel: of a rank's part."""
    shard, output = torch.zeros(numel), torch.zeros(RANKS * numel, dtype=dtype)
    return SimpleNamespace(_sharded_param_data=shard, all_gather_outputs=[output])


def received(numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The rows of all ranks, in bytes, with a parameter at START and others around it; and the parameter."""
    values = torch.randn(RANKS, numel).to(dtype)
    around = torch.randint(256, (RANKS, START), dtype=torch.uint8)
    rows = torch.cat([around, values.view(torch.uint8), around.flip(1)], 1)
    return rows.flatten(), values.flatten()


def sending(param: Any, dtype: torch.dtype, numel: int, start: int = START) -> Part:
    return plain(param, dtype, start, numel)[0]


def arriving(param: Any, dtype: torch.dtype, numel: int, start: int = START) -> Part:
    return plain(param, dtype, start, numel)[1]


def in_words(part: Part) -> bool:
    piece: Any = part[0]
    return bool(piece.in_words)


def arrive(param: Any, dtype: torch.dtype, numel: int, rows: Tensor) -> None:
    runs = runs_of([arriving(param, dtype, numel)])
    assert runs is not None
    for run in runs:
        run.arrive(rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("numel", [4, 6, 64])
def test_a_parameter_arrives_as_words_where_these_fit(numel: int, dtype: torch.dtype) -> None:
    param = parameter(numel, dtype)
    piece, *_ = arriving(param, dtype, numel)
    assert isinstance(piece, PlainParameter)
    assert piece.in_words == (numel * dtype.itemsize % 8 == 0)
    rows, expected = received(numel, dtype)
    arrive(param, dtype, numel, rows)
    assert torch.equal(param.all_gather_outputs[0], expected)


def test_one_that_begins_between_words_arrives_as_it_is() -> None:
    assert not in_words(arriving(parameter(8), torch.bfloat16, 8, 4))


def test_it_is_written_where_fsdp2_keeps_it_then() -> None:
    """In memory that was freed since, under inference mode, and in another tensor, without a change of its version."""
    numel, param = 8, parameter(8)
    runs = runs_of([arriving(param, torch.bfloat16, numel)])
    assert runs is not None
    before, other = param.all_gather_outputs[0], torch.zeros(RANKS * numel, dtype=torch.bfloat16)
    version = before._version
    for output in (before, before, other):
        param.all_gather_outputs = [output]
        output.untyped_storage().resize_(0)
        rows, expected = received(numel, torch.bfloat16)
        with torch.inference_mode(output is before):
            runs[0].arrive(rows)
        assert torch.equal(output, expected)
    assert before._version == version
    assert before.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()


def test_one_that_is_not_cast_is_sent_as_words() -> None:
    """Wherever its shard lies then: also between words, in another tensor, and in another dtype, as `assign=True` loads
    them."""
    numel = 12
    param = parameter(numel, torch.float32)
    around = torch.zeros(numel * 2 + 1)
    runs = runs_of([sending(param, torch.float32, numel)])
    assert runs is not None
    assert isinstance(piece := runs[0].places[0].piece, PlainParameter)
    assert piece.in_words
    others = [torch.zeros(numel, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)]
    for shard in (param._sharded_param_data, *others, around[2:][:numel], around[1:][:numel]):
        param._sharded_param_data = shard
        for seed in range(2):
            shard.copy_(torch.randn(numel, generator=torch.Generator().manual_seed(seed)))
            sent = torch.full((START + 4 * numel + 8,), 7, dtype=torch.uint8)
            runs[0].fill(sent)
            assert torch.equal(sent[START:-8].view(torch.float32), shard.float())
            assert (sent[:START] == 7).all()
            assert (sent[-8:] == 7).all()


def test_nothing_of_a_shard_is_kept_that_has_been_replaced() -> None:
    param = parameter(8, torch.float32)
    runs = runs_of([sending(param, torch.float32, 8)])
    assert runs is not None
    runs[0].fill(torch.zeros(START + 32, dtype=torch.uint8))
    before = weakref.ref(param._sharded_param_data)
    param._sharded_param_data = torch.ones(8)
    assert before() is None
    param._sharded_param_data.data = torch.full((8,), 3.0)
    runs[0].fill(sent := torch.zeros(START + 32, dtype=torch.uint8))
    assert torch.equal(sent[START:].view(torch.float32), torch.full((8,), 3.0))


def test_many_arrive_by_kernels_wherever_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than there are arguments for; their memory is freed, and elsewhere in the next gather."""
    triton = pytest.importorskip("triton", reason="needs triton, which kernels are written in")
    if not triton.knobs.runtime.interpret:
        pytest.skip("needs TRITON_INTERPRET=1")
    monkeypatch.setattr(launch, "usable", lambda *_: True)
    numel, count = 16, MOVING + 3
    params = [parameter(numel) for _ in range(count)]
    parts = [plain(param, torch.bfloat16, START + 2 * numel * at, numel)[1] for at, param in enumerate(params)]
    runs = runs_of(parts)
    assert runs is not None
    (run,) = runs
    for step in range(3):
        values = torch.randn(RANKS, count, numel, generator=torch.Generator().manual_seed(step)).bfloat16()
        rows = torch.cat([torch.zeros(RANKS, START, dtype=torch.uint8), values.view(RANKS, -1).view(torch.uint8)], 1)
        for param in params[step:]:
            param.all_gather_outputs = [torch.zeros(RANKS * numel, dtype=torch.bfloat16)]
        run.arrive(rows.flatten())
        for at, param in enumerate(params):
            assert torch.equal(param.all_gather_outputs[0], values[:, at].flatten())


def test_one_that_is_cast_is_sent_as_it_is() -> None:
    assert not in_words(sending(parameter(8), torch.bfloat16, 8))
    assert in_words(arriving(parameter(8), torch.bfloat16, 8))
