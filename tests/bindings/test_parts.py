"""Which tensors of the files hold a parameter, where a binding has it in parts."""

from __future__ import annotations

from typing import Any

import pytest

from layoutc.checkpoint.bindings.names import parts_of
from layoutc.recipes import mxfp4

STACK, SINGLE = ("{module}.w", ["{module}.{expert}.w1", "{module}.{expert}.w3"]), ("{module}.w", ["{module}.v"])
OTHER = ("{module}.other", ["{module}.x"])


@pytest.mark.parametrize("parts", [(OTHER, STACK, SINGLE), (OTHER, SINGLE, STACK)])
def test_the_first_entry_that_fits_has_the_parts(parts: Any) -> None:
    """By its name, and as a stack or a single matrix: entries before it that fit either alone are passed over."""
    binding = next(iter(mxfp4.LAYOUT.files.values()))._replace(parts=parts)
    assert parts_of(binding, "mlp.w", 2) == ["mlp.0.w1", "mlp.0.w3", "mlp.1.w1", "mlp.1.w3"]
    assert parts_of(binding, "mlp.w", None) == ["mlp.v"]
    assert parts_of(binding, "mlp.other", None) == ["mlp.x"]
    assert parts_of(binding, "mlp.else", None) == ["mlp.else"]
