"""Which bindings there are, also where several recipes have one layout; and which of them read a folder's weights."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import unshipped

from layoutc.checkpoint.held.stored import Stored
from layoutc.checkpoint.safetensors.choosing import Fit, alternatives, check_all_fit
from layoutc.checkpoint.safetensors.recognize import Bound, bindings_of, is_for
from layoutc.recipes import (
    fp8_block,
    fp8_block_e8m0,
    mxfp4,
    mxfp4_gpt_oss,
    nf4_bitsandbytes,
    nvfp4_1d,
    nvfp4_modelopt,
)
from layoutc.runtime.errors import LayoutError


def test_a_recipe_without_files_hides_no_files_of_its_layout() -> None:
    """Whichever comes last: a recipe of one's own may have the layout of one that is installed."""
    unshipped.add_if_known("nf4_frozen")
    other: Any = importlib.import_module("layoutc.recipes.nf4_frozen")
    ours: Any = nf4_bitsandbytes.Tensor
    assert other.Tensor.LAYOUT.layout_id == ours.LAYOUT.layout_id
    for classes in ([ours, other.Tensor], [other.Tensor, ours]):
        assert [one.label for one in bindings_of(classes)] == [
            "nf4_bitsandbytes/bitsandbytes",
            "nf4_bitsandbytes/bitsandbytes_double",
        ]


def test_equal_bindings_of_a_layout_are_one() -> None:
    """Else files of a copied recipe would fit two."""
    copied: Any = type("Copied", (fp8_block.Tensor,), {})
    found = bindings_of([fp8_block.Tensor, copied, copied])
    assert found == [Bound(copied, binding) for binding in fp8_block.Tensor.LAYOUT.files.values()]


def fit(names: str, cls: Any = fp8_block.Tensor, binding: str = "deepseek") -> Fit:
    return Fit(Bound(cls, cls.LAYOUT.files[binding]), tuple(names))


def test_bindings_that_hold_some_of_the_same_weights_are_alternatives() -> None:
    """Also where only a third holds some of both; the one that holds most comes first."""
    a, b, c = fit("ab"), fit("cd", mxfp4.Tensor, "gpt_oss"), fit("bce", mxfp4_gpt_oss.Tensor, "gpt_oss")
    assert alternatives([a, b]) == [[a], [b]]
    assert alternatives([a, b, c]) == [[c, a, b]]
    assert alternatives([]) == []


def test_of_alternatives_those_that_convert_are_left_out() -> None:
    converts, exact = fit("ab", nvfp4_1d.Tensor, "modelopt"), fit("b", nvfp4_modelopt.Tensor, "modelopt")
    assert converts.bound.converts
    assert alternatives([converts, exact]) == [[exact]]
    assert alternatives([converts]) == [[converts]]


def test_a_refusal_counts_where_a_weight_follows_no_other() -> None:
    error = LayoutError("what is wrong")
    check_all_fit([fit("ab"), fit("c")], [(error, ["a", "c"])])
    with pytest.raises(LayoutError, match="what is wrong"):
        check_all_fit([fit("ab"), fit("c")], [(error, ["a", "d"])])


@pytest.mark.parametrize(
    ("data", "scale", "for_dense", "for_experts"),
    [
        ("F8_E4M3", "F8_E8M0", True, False),
        ("I8", "F8_E8M0", False, True),
        ("U8", "U8", False, True),  # the same bytes
        ("F32", "F8_E8M0", True, True),  # nobody's: each says what it misses
        ("F8_E4M3", None, False, False),  # a plain weight in FP8
        (None, "F8_E8M0", True, True),
    ],
)
def test_dtypes_tell_bindings_of_one_folder_apart(
    data: str | None, scale: str | None, for_dense: bool, for_experts: bool
) -> None:
    stored = {"a.weight": data, "a.scale": scale}
    tensors = {name: Stored(Path("f"), name, dtype, (1,), 0, 1) for name, dtype in stored.items() if dtype}
    told = [fit("", cls, "deepseek_v4").bound for cls in (fp8_block_e8m0.Tensor, mxfp4.Tensor)]
    assert [is_for(one, "a.weight", (32, 32), tensors, told) for one in told] == [for_dense, for_experts]
    assert [is_for(one, "a.weight", (32, 32), tensors) for one in told] == [scale is not None] * 2
    assert not any(is_for(one, "a.weight", (32,), tensors, told) for one in told)
