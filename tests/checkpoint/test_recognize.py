"""Which bindings there are: each of each recipe, also where several recipes have one layout."""

from __future__ import annotations

import importlib
from typing import Any

import unshipped

from layoutc.checkpoint.safetensors.recognize import Bound, bindings_of
from layoutc.recipes import fp8_block, nf4_bitsandbytes


def test_a_recipe_without_files_hides_no_files_of_its_layout() -> None:
    """Whichever comes last: a recipe of one's own may have the layout of one that is installed."""
    unshipped.add_if_known("nf4_frozen")
    other: Any = importlib.import_module("layoutc.recipes.nf4_frozen")
    ours: Any = nf4_bitsandbytes.Tensor
    assert other.Tensor.LAYOUT.layout_id == ours.LAYOUT.layout_id
    for classes in ([ours, other.Tensor], [other.Tensor, ours]):
        assert [one.label for one in bindings_of(classes)] == ["nf4_bitsandbytes/bitsandbytes"]


def test_equal_bindings_of_a_layout_are_one() -> None:
    """Else files of a copied recipe would fit two."""
    copied: Any = type("Copied", (fp8_block.Tensor,), {})
    found = bindings_of([fp8_block.Tensor, copied, copied])
    assert found == [Bound(copied, binding) for binding in fp8_block.Tensor.LAYOUT.files.values()]
