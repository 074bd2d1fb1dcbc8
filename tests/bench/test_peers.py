"""The peers of `layoutc bench --peers`: they do the work that they are compared for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernels_on_cpu import use_kernels
from torch import Tensor

from layoutc.bench import clocks, measure, peers
from layoutc.bench import jobs as bench_jobs
from layoutc.bench.plain import NoPlain, Plain, plain
from layoutc.runtime import numerics
from layoutc.runtime.train.convert import recipe_class

RECIPES = tuple(importlib.import_module("layoutc.recipes").RECIPES)
OF_CODES, OF_ZEROS, OF_SCALES = (
    "code 0 of its elements",
    "blocks of zeros have a special scale",
    "no plain version of its scale",
)
NONE = {
    "nvfp4_4over6": "several scales",
    "nvfp4_activation": "transforms",
    "fp4_bitsandbytes": "neither floats nor integers",
    "nvfp4_gradient": "random bits",
    **dict.fromkeys(
        (
            "int4_packed128",
            "int4_packed128_zeros",
            "int4_packed32",
            "nf4",
            "nf4_bitsandbytes",
            "q6_k",
        ),
        OF_CODES,
    ),
    **dict.fromkeys(
        (f"nvfp4_{name}{ends}" for name in ("compressed_tensors", "modelopt") for ends in ("", "_experts")), OF_ZEROS
    ),
    **dict.fromkeys(("adam_m4", "adam_m8", "adam_v4", "adam_v8", "moment_fp8", "moment_fp8_sqrt"), "state of optim"),
    **dict.fromkeys(("grad_fp8", "grad_int4"), "gradients that ranks send"),
    **dict.fromkeys(("awq", "fp8_channel_bf16", "gptq", "nvfp4_mlx", "q4_k", "q8_0"), OF_SCALES),
    **dict.fromkeys((f"int{bits}_affine64" for bits in (2, 3, 4, 6, 8)), OF_SCALES),
}
SHAPE = (256, 256)
CPU = torch.device("cpu")


def reference(name: str) -> Any:
    return importlib.import_module(f"layoutc.recipes.{name}.reference")


def made(name: str, dtype: torch.dtype) -> tuple[Plain, Tensor, Tensor | None, dict[str, Tensor]]:
    """A plain version, a weight that has a block of zeros, its amax, and the reference's planes."""
    cls = recipe_class(name)
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)) * 0.02
    x[:128, :128] = 0
    x = x.to(dtype)
    amax = cls.shared_amax(x) if cls.LAYOUT.shares_amax else None
    planes = reference(name).quantize_reference(x, amax=amax)
    return plain(cls.LAYOUT, reference(name), SHAPE), x, amax, planes


def steps(plane: Tensor) -> Tensor:
    """Numbers whose differences count steps between codes, or between fp32 values."""
    flat = plane.contiguous().view(-1)
    return flat.view(torch.int32 if flat.element_size() == 4 else torch.uint8).long()


@pytest.mark.sample(12)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", [name for name in RECIPES if name not in NONE])
def test_plain_versions_quantize_as_recipes_do(name: str, dtype: torch.dtype) -> None:
    """Less than 1% of codes differ, scales by at most a step; the same from a transposed copy, transposed."""
    version, x, amax, planes = made(name, dtype)
    forms = version(x, amax, tuple(version.sources)), version.turning()(x, amax)
    expected = planes | peers.turned(planes, version)
    assert set(forms[0]) == set(planes)
    assert {key for key in forms[1] if key.startswith("turned")} == {
        key for key in expected if key.startswith("turned")
    }
    for form in forms:
        for key, found in form.items():
            if key.endswith("_data"):
                bits = version.sources["columnwise" if "columnwise" in version.sources else "rowwise"].element.bits
                one, other = (
                    numerics.unpack(plane.contiguous().view(torch.uint8), bits, True)
                    for plane in (found, expected[key])
                )
                assert one.shape == other.shape
                assert float((one != other).float().mean()) < 0.01, key
            else:
                assert int((steps(found) - steps(expected[key])).abs().max()) <= 1, key
        assert peers.share_of_bytes(form, expected) < 0.01


@pytest.mark.parametrize("name", NONE)
def test_where_there_is_no_plain_version_the_reason_is_said(name: str) -> None:
    with pytest.raises(NoPlain, match=NONE[name]):
        plain(recipe_class(name).LAYOUT, reference(name), SHAPE)


def test_blocks_that_stick_out_have_no_plain_version() -> None:
    with pytest.raises(NoPlain, match="128 long, do not divide 96"):
        plain(recipe_class("fp8_block").LAYOUT, reference("fp8_block"), (96, 128))


@pytest.mark.parametrize("name", ["hybrid_fp8", "mxfp8", "mxfp4", "nvfp4_1d"])
def test_torchao_quantizes_as_recipes_do(name: str) -> None:
    pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason="needs torchao")
    version, x, amax, planes = made(name, torch.bfloat16)
    expected, said = planes | peers.turned(planes, version), list[str]()
    forms = list(peers._torchao_forms(name, version, said.append))
    assert (len(forms), said) == (1 if name == "hybrid_fp8" else 2, [])
    for _, form in forms:
        found = form(x, amax)
        if name == "nvfp4_1d":  # its least scale is one step, where blocks of zeros have 0
            assert int((steps(found["rowwise_scale"]) - steps(expected["rowwise_scale"])).abs().max()) <= 8
            found = {key: plane for key, plane in found.items() if key.endswith("data")}
        assert peers.share_of_bytes(found, expected) < 0.01


def test_what_torchao_has_not_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    version = made("nvfp4", torch.bfloat16)[0]
    pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor", reason="needs torchao")
    assert list(peers._torchao_forms("nvfp4", version, said.append)) == []
    monkeypatch.setitem(sys.modules, "torchao.prototype.mx_formats.mx_tensor", None)
    assert list(peers._torchao_forms("mxfp8", made("mxfp8", torch.bfloat16)[0], said.append)) == []
    assert "its blocks are 1x16, and these 16x16" in said[0]
    assert "torchao's to_mx" in said[1]
    assert "None in sys.modules" in said[1]


@pytest.fixture
def kernels_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels in the interpreter; peers traced as one graph each, and not compiled further."""
    use_kernels(monkeypatch)

    def traced(function: Callable[..., Any]) -> Any:
        torch._dynamo.reset()
        return torch.compile(function, backend="eager", fullgraph=True, dynamic=False)

    monkeypatch.setattr(peers, "compiled", traced)


@pytest.mark.thorough
@pytest.mark.usefixtures("kernels_on_cpu")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", ["mxfp8", "fp8_current"])
def test_jobs_of_peers_run_and_say_how_far_they_are(name: str) -> None:
    shape, said = (64, 64), list[str]()
    cls = recipe_class(name)
    found = {job.work: job for job in peers.compiled_jobs(name, cls, shape, CPU, said.append)}
    wanted = ["quantize rowwise, torch.compile", "quantize x and x.t(), torch.compile"]
    if name == "mxfp8":
        wanted.insert(1, "quantize rowwise+columnwise, torch.compile")
    assert [work for work in found if "torchao" not in work] == wanted
    for job in found.values():
        job.make()()
        assert job.differs is not None
        assert job.differs < 0.01
    facts = cls.LAYOUT.written(*shape, ("rowwise",))
    assert found[wanted[0]].nbytes == 64 * 64 * 2 + sum(one.nbytes for one in facts.values())


@pytest.mark.usefixtures("kernels_on_cpu")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_peer_that_does_other_work_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    wrong = {"rowwise_data": torch.zeros(64, 64, dtype=torch.uint8)}
    monkeypatch.setattr(peers, "_plain_forms", lambda *args: [("wrong", lambda x, amax: wrong), ("fails", None)])
    monkeypatch.setattr(peers, "_torchao_forms", lambda *args: [])
    monkeypatch.setattr(peers, "compiled", lambda function: function)
    assert list(peers.compiled_jobs("mxfp8", recipe_class("mxfp8"), (64, 64), CPU, said.append)) == []
    assert "of its bytes differ" in said[0]
    assert "fails: TypeError" in said[1]


def test_a_recipe_without_a_plain_version_has_no_jobs() -> None:
    said: list[str] = []
    cls = recipe_class("nvfp4_4over6")
    assert list(peers.compiled_jobs("nvfp4_4over6", cls, (64, 64), CPU, said.append)) == []
    assert "no plain version: it tries several scales" in said[0]


def test_a_peer_that_cannot_be_captured_has_one_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(make: object, nbytes: int) -> float:
        raise RuntimeError("not while capturing")

    monkeypatch.setattr(clocks, "rotated", fails)
    monkeypatch.setattr(clocks, "flushed", lambda work: 8.0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    job = bench_jobs.Job("mxfp8", "quantize", "bfloat16", 1000, lambda: lambda: None, differs=0.001)
    row = measure.timed(job, (8, 8), (500.0, 250.0))
    assert (row.us, row.flushed_share, row.differs) == (None, 0.5, 0.001)
    with pytest.raises(RuntimeError, match="capturing"):
        measure.timed(job._replace(differs=None), (8, 8), (500.0, 250.0))
