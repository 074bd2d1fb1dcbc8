"""What libraries of arrays get of weights: values, a copy of them, or a refusal; never what lies behind codes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from quantized_cases import each_recipe, make, module
from torch import nn

pytestmark = each_recipe


def cast(recipe: str, dtype: torch.dtype = torch.float32) -> Any:
    """Plain values that are cast on gather, which no recipe has as they are."""
    return module(recipe).CastTensor(torch.randn(256, 256, generator=torch.Generator().manual_seed(0)).to(dtype))


def test_codes_are_refused_or_copied_as_values(recipe: str) -> None:
    """DLPack would read whatever lies at the address of the wrapper's own, which is empty."""
    q = make(recipe)
    values = q.dequantize().numpy()
    for refused in (lambda: np.from_dlpack(q), lambda: torch.from_dlpack(q), q.numpy):
        with pytest.raises(BufferError, match=r"\(256, 256\).*holds codes.*dequantize\(\) is a copy"):
            refused()
    with pytest.raises(ValueError, match="holds codes"):
        q.__array__(copy=False)
    assert not hasattr(q, "__cuda_array_interface__")
    for copied in (q.numpy(force=True), np.asarray(q), np.array(q, np.float64), nn.Parameter(q).numpy(force=True)):
        np.testing.assert_array_equal(copied, values)
    assert q.tolist() == values.tolist()
    assert nn.Parameter(q).tolist() == values.tolist()
    np.asarray(q)[0, 0] += 1
    np.testing.assert_array_equal(q.dequantize().numpy(), values)
    assert q[:128].tolist() == values[:128].tolist()
    assert q.t().tolist() == values.T.tolist()


def test_values_that_are_cast_on_gather_are_in_memory(recipe: str) -> None:
    """Writes to the array are writes to the weight, as of a plain tensor."""
    weight = cast(recipe)
    values = weight.plain.clone().numpy()
    shared = (weight.numpy(), np.asarray(weight), np.from_dlpack(weight), torch.from_dlpack(weight).numpy())
    for array in shared:
        np.testing.assert_array_equal(array, values)
    shared[0][3, 5] = 7.0
    assert all(array[3, 5] == 7.0 for array in (*shared, weight.plain))
    assert weight[3:4].tolist() == weight.plain[3:4].tolist()
    np.array(weight)[3, 5] = 9.0
    assert weight.plain[3, 5] == 7.0
    assert np.asarray(weight, np.float64).dtype == np.float64


def test_a_weight_that_trains_is_refused_as_torch_refuses_it(recipe: str) -> None:
    """An array's writes are unseen by autograd."""
    for weight in (nn.Parameter(cast(recipe)), nn.Parameter(cast(recipe)).t()):
        for read in (
            weight.numpy,
            lambda weight=weight: np.asarray(weight),
            lambda weight=weight: np.from_dlpack(weight),
        ):
            with pytest.raises(RuntimeError, match=r"requires grad.*detach\(\)"):
                read()
        assert weight.detach().tolist() == weight.tolist() == weight.numpy(force=True).tolist()


def test_numpy_has_no_bfloat16(recipe: str) -> None:
    """torch's own words."""
    q, plain = make(recipe, dtype=torch.bfloat16), cast(recipe, torch.bfloat16)
    for weight, values in ((q, q.dequantize()), (plain, plain.plain)):
        with pytest.raises(TypeError, match="BFloat16"):
            weight.numpy(force=True)
        assert weight.tolist() == values.tolist()
