"""Scales under scales, and records of codes and scales, beside the packages that define them: bitsandbytes, gguf."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import unshipped
from numpy_models import F32, Array, recipe, reference
from test_exchanged_formats import weights

RECORDS = {
    "Q8_0": "",
    "Q4_K": "",
    "Q6_K": "",
    "Q4_0": """
formats: {i4: {integer: 4, offset: 8}}
shape: {k: 32}
element: {format: i4}
scale: {format: f16, rule: scale-first, unrounded: true}
orientations:
  rowwise:
    block: {m: 1, k: 32}
    data: {layout: m k}
    scale: {layout: m k/32}
    record: {size: 32, fields: [scale, "data 0:16 | data 16:32"]}
""",
    "Q5_0": """
formats: {i5: {integer: 5, offset: 16}}
shape: {k: 32}
element: {format: i5}
scale: {format: f16, rule: scale-first, unrounded: true}
orientations:
  rowwise:
    block: {m: 1, k: 32}
    data: {layout: m k}
    scale: {layout: m k/32}
    record: {size: 32, fields: [scale, "data bits 4:5", "data 0:16 bits 0:4 | data 16:32 bits 0:4"]}
""",
    "Q4_1": """
formats: {u4: {integer: 4, offset: 0}}
shape: {k: 32}
element: {format: u4}
scale: {format: f16, rule: scale-and-bias, zero: f16}
orientations:
  rowwise:
    block: {m: 1, k: 32}
    data: {layout: m k}
    scale: {layout: m k/32}
    record: {size: 32, fields: [scale, zero, "data 0:16 | data 16:32"]}
""",
    "IQ4_NL": """
formats: {nl: {values: [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]}}
shape: {k: 32}
element: {format: nl}
scale: {format: f16, rule: scale-first, unrounded: true}
orientations:
  rowwise:
    block: {m: 1, k: 32}
    data: {layout: m k}
    scale: {layout: m k/32}
    record: {size: 32, fields: [scale, "data 0:16 | data 16:32"]}
""",
}


def known(kind: str) -> str:
    """The name of the recipe of one of ggml's types: shipped, or made here."""
    name = kind.lower()
    if RECORDS[kind]:
        name = f"ggml_{name}"
        unshipped.add(name, f"layoutc: 1\nname: {name}\nsummary: GGUF {kind}\n{RECORDS[kind].lstrip()}")
    return name


def same(a: Array, b: Array) -> bool:
    """Equal to the bit, but for the bits of NaN."""
    return bool(np.all((a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))))


@pytest.mark.parametrize("kind", RECORDS)
def test_records_of_gguf_have_its_values(kind: str) -> None:
    """Any bytes: read as planes, they dequantize to gguf's values, and come back as they were."""
    gguf: Any = pytest.importorskip("gguf", reason="needs gguf")
    name, (m, k) = known(kind), (64, 1024)
    made = reference(name)
    size = recipe(name).LAYOUT.buffers(m, k)["rowwise_record"].shape
    stored = np.random.default_rng(1).integers(0, 256, size, np.uint8)
    planes = made.read_record(torch.from_numpy(stored), m, k)
    values = made.dequantize_reference(planes, m, k).numpy()
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[kind])
    assert np.isfinite(expected).mean() > 0.9
    assert same(values, expected)
    assert np.array_equal(made.lay_out(planes, m, k, ("rowwise",))["rowwise_record"].numpy(), stored)


@pytest.mark.parametrize("shape", [(64, 256), (33, 1056)])
def test_q8_0_of_gguf(shape: tuple[int, int]) -> None:
    """To the bit where no quotient lies midway between two codes: gguf rounds halves away from zero."""
    gguf: Any = pytest.importorskip("gguf", reason="needs gguf")
    x = weights(shape[0], 32 * shape[1] // 32, 8)
    x[5] = 0
    q = recipe("q8_0").quantize(torch.from_numpy(x))
    kind = gguf.GGMLQuantizationType.Q8_0
    stored = q.buffers()["rowwise_record"].numpy()
    assert np.array_equal(stored, gguf.quants.quantize(x, kind))
    assert same(q.dequantize(torch.float32).numpy(), gguf.quants.dequantize(stored, kind))


def test_q4_k_of_its_own_quantizing_has_gguf_s_values() -> None:
    """gguf quantizes no K types; what our rule makes is read by it, and is near the values."""
    gguf: Any = pytest.importorskip("gguf", reason="needs gguf")
    x = weights(64, 512, 9)
    q = recipe("q4_k").quantize(torch.from_numpy(x))
    stored = q.buffers()["rowwise_record"].numpy()
    values = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType.Q4_K)
    assert same(q.dequantize(torch.float32).numpy(), values)
    spread = np.repeat(np.ptp(x.reshape(64, -1, 256), axis=2), 256, axis=1)
    assert np.all(np.abs(values - x) <= spread / 15)


def test_q6_k_of_its_own_quantizing_has_gguf_s_values() -> None:
    """Likewise: a step is at most that of the block's own amax, and of half a step of its scale."""
    gguf: Any = pytest.importorskip("gguf", reason="needs gguf")
    x = weights(64, 512, 10)
    x[3, :256] = 0
    q = recipe("q6_k").quantize(torch.from_numpy(x))
    stored = q.buffers()["rowwise_record"].numpy()
    values = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType.Q6_K)
    assert same(q.dequantize(torch.float32).numpy(), values)
    assert not values[3, :256].any()
    largest = np.repeat(np.abs(x.reshape(64, -1, 256)).max(2), 256, axis=1)
    assert np.all(np.abs(values - x) <= largest / 40)


def test_nf4_with_double_quantization_of_bitsandbytes() -> None:
    """One super-block: codes, scales of 8 bits, their scale and their mean, where the sum of scales is exact."""
    functional: Any = pytest.importorskip("bitsandbytes.functional", reason="needs bitsandbytes")
    rng = np.random.default_rng(3)
    for _ in range(20):
        x = rng.uniform(-1, 1, (1, 1024)).astype(F32)
        x[0, ::64] = rng.integers(64, 2048, 16).astype(F32) / 64  # amaxes, whose mean every order of adding gives
        planes = {name: one.numpy() for name, one in reference("nf4").quantize_reference(torch.from_numpy(x)).items()}
        packed, state = functional.quantize_4bit(
            torch.from_numpy(x), blocksize=64, quant_type="nf4", compress_statistics=True
        )
        assert np.array_equal(planes["rowwise_data"].ravel(), packed.numpy().ravel())
        assert np.array_equal(planes["rowwise_offset"].ravel(), state.offset.reshape(1).numpy())
        assert np.array_equal(planes["rowwise_super"].ravel(), state.state2.absmax.numpy())
        assert np.array_equal(planes["rowwise_scale"].ravel(), state.absmax.numpy())
        values = reference("nf4").dequantize_reference({n: torch.from_numpy(one) for n, one in planes.items()}, 1, 1024)
        assert torch.equal(values, functional.dequantize_4bit(packed, state))


@pytest.mark.parametrize("shape", [(40, 1024), (24, 4096), (3, 16384)])
def test_weights_of_bitsandbytes_have_its_values(shape: tuple[int, int]) -> None:
    """Its super-blocks of 16,384 elements are whole super-blocks here, of which each has its own copy."""
    functional: Any = pytest.importorskip("bitsandbytes.functional", reason="needs bitsandbytes")
    (m, k), x = shape, torch.from_numpy(weights(*shape, 10))
    packed, state = functional.quantize_4bit(x, blocksize=64, quant_type="nf4", compress_statistics=True)
    shared = state.state2.absmax.repeat_interleave(16)[: m * k // 1024].view(m, k // 1024)
    planes = {
        "rowwise_data": packed.view(m, k // 2),
        "rowwise_scale": state.absmax.view(m, k // 64),
        "rowwise_super": shared,
        "rowwise_offset": torch.full_like(shared, float(state.offset)),
    }
    assert torch.equal(reference("nf4").dequantize_reference(planes, m, k), functional.dequantize_4bit(packed, state))
    made = reference("nf4").quantize_reference(x)
    assert torch.equal(made["rowwise_data"], planes["rowwise_data"])
