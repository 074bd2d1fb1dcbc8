"""quantize(), quantize_() and quantized_init(): arguments, histories, names, ties, errors."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from places import TESTS
from quantized_cases import (
    RECIPES,
    SHARED,
    aliases,
    each_recipe,
    is_compact,
    make,
    module,
    same,
    same_bits,
    same_tensors,
    snapshot,
    weight,
)
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import layoutc
from layoutc import recipes as layoutc_recipes
from layoutc.runtime.errors import LayoutError, MissingOrientation
from layoutc.runtime.weight import operators


# ------------------------------------------------------------------------------------------------------------- quantize
@pytest.mark.parametrize(
    "name", ["fp8_current", "fp8_delayed", "fp8_rowwise", "int8_rowwise", "nvfp4", "nvfp4_gradient"]
)
def test_docstrings_say_what_a_recipe_takes(name: str, golden: Callable[[Path, str], None]) -> None:
    """They are made of the layout's facts: an amax of the tensor or of columns, a history, random bits, multiples."""
    package = importlib.import_module(f"layoutc.recipes.{name}")
    text = "\n\n".join(map(inspect.cleandoc, (package.quantize.__doc__, package.quantize_buffers.__doc__)))
    golden(TESTS / "golden" / "docstrings" / f"{name}.txt", text + "\n")
    for function in (package.quantize, package.quantize_buffers):  # where tracebacks and help() say that they are
        assert function.__module__ == package.Tensor.__module__
        assert function.__qualname__ == function.__name__


@each_recipe
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_quantize_stores_what_the_reference_gives(recipe: str, dtype: torch.dtype) -> None:
    """Planes of the reference, the outer shape and dtype of the input, which is left as it was."""
    x = weight(4, 128, 256, dtype=dtype).requires_grad_()
    before = x.detach().clone()
    q = module(recipe).quantize(x)
    assert (q.shape, q.dtype, q.requires_grad, q.is_contiguous()) == (x.shape, dtype, False, True)
    planes = module(recipe).quantize_reference(x.detach().view(512, 256))
    assert all(same_bits(q.planes()[name], plane) for name, plane in planes.items())
    assert same_bits(x.detach(), before)
    assert is_compact(q)
    values = module(recipe).dequantize_reference(q.planes(), 512, 256)
    assert same_bits(q.dequantize(torch.float32).view(512, 256), values)
    assert same_bits(q.dequantize().view(512, 256), values.to(dtype))


@each_recipe
def test_an_orientation_may_be_given_by_its_name_alone(recipe: str) -> None:
    """Also beside `out`, which must hold it."""
    x = weight(128, 256)
    q = module(recipe).quantize(x, orientations="rowwise")
    assert q.orientations == module(recipe).quantize(x, orientations=("rowwise",)).orientations
    again = module(recipe).quantize(2 * x, orientations="rowwise", out=q)
    assert again is q
    if not module(recipe).LAYOUT.history:  # which follows the amaxes of both
        assert same(q, module(recipe).quantize(2 * x, orientations="rowwise"))


@pytest.mark.parametrize("recipe", ["fp8_rowwise", "int8_rowwise"])
def test_scales_of_rows_alone_look_for_no_amax_of_columns(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That would read all values once more."""
    x = weight(128, 256)
    expected = module(recipe).quantize(x), module(recipe).quantize_buffers(x)
    monkeypatch.setattr(operators, "shared_amax", lambda *_: pytest.fail("all values were read for an amax"))
    planes = module(recipe).quantize(x, orientations="rowwise").planes()
    buffers = module(recipe).quantize_buffers(x, orientations="rowwise")
    assert all(same_bits(plane, expected[0].planes()[name]) for name, plane in planes.items())
    assert all(same_bits(one, expected[1][name]) for name, one in buffers.items())
    assert {"rowwise_data", "rowwise_scale"} <= {*planes} & {*buffers}


@each_recipe
@pytest.mark.parametrize("orientations", [None, ("rowwise",), ("columnwise",)])
def test_quantize_buffers_gives_the_buffers_of_a_quantized_tensor(recipe: str, orientations: Any) -> None:
    """Flat scales too, where the spec says how a GEMM reads them; where it does not, they are refused."""
    x = weight(4, 128, 256, dtype=torch.bfloat16)
    package = module(recipe)
    q = package.quantize(x, orientations=orientations)
    for swizzled in (False, True):
        if swizzled and not package.LAYOUT.swizzled:
            for call in (lambda: q.buffers(swizzled=True), lambda: package.quantize_buffers(x, swizzled=True)):
                with pytest.raises(ValueError, match=f"{recipe}: swizzled=True needs a spec with gemm"):
                    call()
            continue
        expected = q.buffers(swizzled=swizzled)
        made = package.quantize_buffers(x, orientations=orientations, swizzled=swizzled)
        assert list(made) == list(expected)
        assert all(same_bits(made[name], buffer) for name, buffer in expected.items())
        for name in set(package.LAYOUT.swizzled) & set(expected) if swizzled else ():
            plain = q.buffers()
            gemm_scale = importlib.import_module(f"layoutc.recipes.{recipe}.reference").gemm_scale
            assert same_bits(made[name], gemm_scale(plain, name.split("_")[0]))
            assert made[name].shape == (plain[name].numel(),)


@pytest.mark.parametrize("recipe", ["fp8_current", "nvfp4", "mxfp8"])
def test_buffers_without_values_are_those_of_values(recipe: str) -> None:
    """As a compiler sees them; an amax too, where none is given."""
    package, x = module(recipe), weight(4, 128, 256, dtype=torch.bfloat16)

    def facts(x: Tensor) -> dict[str, Any]:
        made = package.quantize_buffers(x)
        return {name: (one.shape, one.dtype, one.stride()) for name, one in made.items()}

    with FakeTensorMode() as mode:
        fake = facts(mode.from_tensor(x))
    assert fake == facts(x)


@each_recipe
def test_strides_of_the_input_do_not_matter(recipe: str) -> None:
    """A transposed or cut input gives the bytes of its contiguous copy."""
    x = weight(512, 512)
    for view in (x.t(), x[:256, 128:384], x[::2], x[None, :256]):
        assert same(module(recipe).quantize(view), module(recipe).quantize(view.contiguous()))


@each_recipe
@pytest.mark.parametrize("cut", [lambda q: q, lambda q: q.view(2, 128, 256), lambda q: q.view(-1)])
def test_quantize_into_a_view_writes_the_weight_in_place(recipe: str, cut: Callable[[Any], Any]) -> None:
    """`out` is returned; its aliases, planes and addresses stay."""
    q, x = make(recipe), weight(256, 256, seed=1)
    addresses = {name: plane.data_ptr() for name, plane in q.planes().items()}
    expected = make(recipe)
    module(recipe).quantize(x, out=expected)
    out = cut(q)
    assert module(recipe).quantize(x.view(out.shape), out=out) is out
    assert same(q, expected)
    assert {name: plane.data_ptr() for name, plane in q.planes().items()} == addresses


@each_recipe
@pytest.mark.parametrize("orientations", [("rowwise",), ("columnwise",), ("columnwise", "rowwise"), ["rowwise"]])
def test_orientations_choose_what_is_held(recipe: str, orientations: Any) -> None:
    """In the recipe's order; bytes are those of the whole tensor."""
    q, both = make(recipe, orientations=orientations), make(recipe)
    assert set(q.orientations) >= set(orientations) or q.orientations == tuple(sorted(orientations, reverse=True))
    assert all(name in q.orientations for name in orientations)
    assert all(same_bits(plane, both.planes()[name]) for name, plane in q.planes().items())
    for name in orientations:
        assert same_bits(q.values_of(name, torch.float32), both.values_of(name, torch.float32))
    if recipe == "mxfp8":
        assert len(q.planes()) == 2 * len(set(orientations))
        module(recipe).quantize(weight(256, 256, seed=1), out=q)
        assert len(q.planes()) == 2 * len(set(orientations))
        if len(orientations) == 1:
            other = "columnwise" if orientations[0] == "rowwise" else "rowwise"
            with pytest.raises(MissingOrientation):
                module(recipe).quantize(weight(256, 256), out=q, orientations=(other,))


@pytest.mark.parametrize("recipe", SHARED)
@pytest.mark.parametrize("shape", [(1,), ()])
def test_a_given_amax_decides_the_scale(recipe: str, shape: tuple[int, ...]) -> None:
    """A part quantized under the whole's amax has the whole's bytes; one value, whether its shape is (1,) or ()."""
    x = weight(256, 256)
    whole = module(recipe).quantize(x)
    part = module(recipe).quantize(x[:128], amax=x.abs().amax().reshape(shape))
    assert same_tensors(part.planes(), whole[:128].planes())
    again = module(recipe).quantize(x[:128], amax=x.abs().amax().double().reshape(shape))
    assert same(part, again)


@each_recipe
def test_bad_arguments_are_refused_in_words_and_change_nothing(recipe: str) -> None:
    """Each names what it got; `out` is intact."""
    quantize, layout = module(recipe).quantize, module(recipe).LAYOUT
    q, x = make(recipe), weight(256, 256)
    before = snapshot(q)
    other = make("mxfp8" if recipe != "mxfp8" else "nvfp4")
    failing: list[tuple[Any, str, Callable[[], Any]]] = [
        (TypeError, "int64", lambda: quantize(x.long())),
        (TypeError, "float64", lambda: quantize(x.double())),
        (ValueError, r"\(256,\)", lambda: quantize(x[0])),
        (ValueError, r"\(\)", lambda: quantize(x[0, 0])),
        (ValueError, "sideways", lambda: quantize(x, orientations=("sideways",))),
        (ValueError, "none", lambda: quantize(x, orientations=())),
        (ValueError, r"\(128, 256\)", lambda: quantize(x[:128], out=q)),
        (ValueError, r"\(256, 256\)", lambda: quantize(x, out=q.t())),
        (LayoutError, other.LAYOUT.name, lambda: quantize(x, out=other)),
    ]
    if not layout.shares_amax:
        failing.append((ValueError, "takes no amax", lambda: quantize(x, amax=torch.ones(1))))
    if layout.multiple_k > 1:
        k = layout.multiple_k
        pattern = rf"multiples of {layout.multiple_m}.*multiples of {k}.*\(256, {k + 1}\)"
        failing.append((ValueError, pattern, lambda: quantize(torch.zeros(256, k + 1))))
        failing.append((ValueError, r"\(3, 256\)", lambda: quantize(torch.zeros(3, 256))))
    for error, pattern, call in failing:
        with pytest.raises(error, match=pattern):
            call()
        assert same_tensors(q.planes(), before)


@pytest.mark.parametrize("recipe", [*SHARED, "fp8_rowwise", "int8_rowwise"])
def test_which_orientations_take_the_shared_amax(recipe: str) -> None:
    """Codes of those that do change with it; of others, none."""
    layout, x = module(recipe).LAYOUT, weight(128, 256)
    amax = x.abs().max().expand(layout.amax_shape(256))
    for one in layout.orientations:
        made = [
            module(recipe).quantize_reference(x, amax=shared, orientations=(one,))
            for shared in (amax.clone(), amax * 64)
        ]
        equal = all(same_bits(*(planes[name] for planes in made)) for name in made[0] if name != "amax")
        assert equal == (one in layout.own_amax) == (not layout.takes_amax((one,)))


@each_recipe
def test_a_plain_out_is_refused_in_words(recipe: str) -> None:
    """With its class, not with an attribute that it lacks."""
    with pytest.raises((TypeError, LayoutError), match="Tensor"):
        module(recipe).quantize(weight(256, 256), out=torch.zeros(256, 256))


@pytest.mark.parametrize("recipe", SHARED)
@pytest.mark.parametrize("shape", [(2,), (256, 1), (0,)])
def test_an_amax_of_more_than_one_value_is_refused(recipe: str, shape: tuple[int, ...]) -> None:
    """It would be broadcast over rows, or stored in place of one."""
    q = make(recipe)
    before = snapshot(q)
    for out in (None, q):
        with pytest.raises(ValueError, match="amax"):
            module(recipe).quantize(weight(256, 256), amax=torch.ones(shape), out=out)
        assert same_tensors(q.planes(), before)


def delayed(*amaxes: float) -> Tensor:
    """A history, as it is stored."""
    history = torch.zeros(module("fp8_delayed").LAYOUT.history)
    history[: len(amaxes)] = torch.tensor(amaxes)
    return history


def test_the_history_starts_with_the_current_amax_and_rolls() -> None:
    """fp8_delayed: the scale follows the largest of the earlier amaxes; the current one goes in front."""
    quantize = module("fp8_delayed").quantize
    xs = [torch.full((4, 4), value) for value in (2.0, 8.0, 4.0, 1.0)]
    q = quantize(xs[0])
    assert same_bits(q.planes()["amax"], delayed(2.0))
    first = q.planes()["rowwise_scale"].clone()
    assert torch.equal(q.dequantize(), xs[0])
    quantize(xs[1], out=q)
    assert same_bits(q.planes()["amax"], delayed(8.0, 2.0))
    assert same_bits(q.planes()["rowwise_scale"], first)
    assert torch.equal(q.dequantize(), torch.full((4, 4), 2.0)), "saturates, since the scale is one step behind"
    quantize(xs[2], out=q)
    assert same_bits(q.planes()["amax"], delayed(4.0, 8.0, 2.0))
    assert same_bits(q.planes()["rowwise_scale"], quantize(xs[1]).planes()["rowwise_scale"])
    q.copy_(xs[3])
    assert same_bits(q.planes()["amax"], delayed(1.0)), "values that come from elsewhere start a history of their own"
    assert same_bits(q.planes()["rowwise_scale"], quantize(xs[3]).planes()["rowwise_scale"])


def test_an_old_amax_leaves_the_history_at_its_end() -> None:
    """fp8_delayed: as many amaxes as the spec says."""
    quantize, length = module("fp8_delayed").quantize, module("fp8_delayed").LAYOUT.history
    q = quantize(torch.full((2, 2), 64.0))
    for step in range(1, length):
        quantize(torch.full((2, 2), 1.0), out=q)
        assert q.planes()["amax"][step].item() == 64.0
    assert same_bits(q.planes()["rowwise_scale"], quantize(torch.full((2, 2), 64.0)).planes()["rowwise_scale"])
    quantize(torch.full((2, 2), 1.0), out=q)
    assert q.planes()["amax"].max().item() == 1.0
    quantize(torch.full((2, 2), 1.0), out=q)
    assert same_bits(q.planes()["rowwise_scale"], quantize(torch.ones(2, 2)).planes()["rowwise_scale"])


def test_a_history_of_zeros_starts_anew() -> None:
    """fp8_delayed: a zero weight, then real values: the first amax that is not zero decides."""
    quantize = module("fp8_delayed").quantize
    q = quantize(torch.zeros(2, 2))
    assert q.planes()["rowwise_scale"].item() == 1.0
    quantize(torch.full((2, 2), 3.0), out=q)
    assert same_bits(q.planes()["rowwise_scale"], quantize(torch.full((2, 2), 3.0)).planes()["rowwise_scale"])
    assert same_bits(q.planes()["amax"], delayed(3.0))


def test_the_most_recent_amax_decides_where_a_recipe_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp8_delayed with `pick: most-recent`: the amax of the step before, whatever is larger in the history."""
    package = module("fp8_delayed")
    monkeypatch.setattr(package.Tensor, "LAYOUT", dataclasses.replace(package.LAYOUT, pick="most-recent"))
    amaxes = [8.0, 2.0, 4.0, 1.0]
    q = package.quantize(torch.full((4, 4), amaxes[0]))
    for step in range(1, len(amaxes)):
        x = torch.full((4, 4), amaxes[step])
        package.quantize(x, out=q)
        assert same_bits(q.planes()["amax"], delayed(*reversed(amaxes[: step + 1])))
        expected = package.quantize_reference(x, amax=torch.tensor([amaxes[step - 1]]))
        assert all(same_bits(plane, q.planes()[name]) for name, plane in expected.items())


# -------------------------------------------------------------------------------------------- quantize_, quantized_init
class Net(nn.Module):
    """Linears, a norm, an embedding."""

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 256, device=device)
        self.blocks = nn.ModuleList(
            [nn.Linear(256, 256, device=device), nn.Linear(256, 256, bias=False, device=device)]
        )
        self.norm = nn.LayerNorm(256, device=device)
        self.head = nn.Linear(256, 256, bias=False, device=device, dtype=torch.bfloat16)


NAMES = ["blocks.0.weight", "blocks.1.weight", "head.weight"]


@each_recipe
@pytest.mark.parametrize("by_module", [True, False])
def test_quantize_replaces_the_weights_of_linears_and_names_them(recipe: str, by_module: bool) -> None:
    """Same bytes as quantize(), same dtype, requires_grad kept; all else untouched; a second call is refused."""
    net = Net()
    net.blocks[1].weight.requires_grad_(False)
    plain = dict(net.named_parameters())
    assert layoutc.quantize_(net, module(recipe) if by_module else recipe) == NAMES
    for name, param in net.named_parameters():
        if name in NAMES:
            assert isinstance(param, nn.Parameter)
            assert same(param, module(recipe).quantize(plain[name].detach()))
            assert (param.dtype, param.requires_grad, param.weight_name) == (
                plain[name].dtype,
                plain[name].requires_grad,
                name,
            )
        else:
            assert param is plain[name]
    with pytest.raises(ValueError, match=r"nothing to do: blocks\.0\.weight and all others .* are quantized already"):
        layoutc.quantize_(net, recipe)


@each_recipe
def test_a_filter_chooses_modules_by_name_and_kind(recipe: str) -> None:
    """An embedding too, if it is asked for; a module alone has the name `weight`."""
    net, seen = Net(), []

    def choose(part: nn.Module, name: str) -> bool:
        seen.append(name)
        return name in ("embed", "blocks.1")

    assert layoutc.quantize_(net, recipe, choose) == ["embed.weight", "blocks.1.weight"]  # as torchao's quantize_
    assert set(seen) == {name for name, _ in net.named_modules()}
    assert isinstance(net.embed.weight, module(recipe).Tensor)
    assert layoutc.quantize_(nn.Linear(256, 256), recipe) == ["weight"]


@each_recipe
def test_ties_stay_ties_or_are_refused(recipe: str) -> None:
    """Two chosen modules share one parameter; a tie to a module that is not chosen changes nothing and names both."""
    net = Net()
    net.blocks[1].weight = net.blocks[0].weight
    layoutc.quantize_(net, recipe)
    assert net.blocks[1].weight is net.blocks[0].weight
    net = Net()
    net.blocks[0].weight = net.embed.weight
    with pytest.raises(ValueError, match=r"blocks\.0\.weight is tied to embed\.weight"):
        layoutc.quantize_(net, recipe)
    assert not any(hasattr(param, "planes") for param in net.parameters())


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_a_shape_that_does_not_fit_is_refused_by_name_and_nothing_is_changed(recipe: str) -> None:
    """The first fits; it stays plain all the same."""
    net = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 100))
    with pytest.raises(ValueError, match=rf"1\.weight.*{recipe}.*\(100, 256\)"):
        layoutc.quantize_(net, recipe)
    assert type(net[0].weight) is nn.Parameter


def test_an_unknown_recipe_is_refused_with_where_those_that_exist_are_listed() -> None:
    """Before anything is built."""
    with pytest.raises(ValueError, match=r"no recipe 'fp9'.*layoutc list"):
        layoutc.quantize_(Net(), "fp9")
    with pytest.raises(ValueError, match=r"no recipe 'fp9'"), layoutc.quantized_init("fp9"):
        pass
    assert set(RECIPES) <= set(layoutc_recipes.RECIPES)


@each_recipe
def test_a_model_built_inside_quantized_init_is_as_quantized_after(recipe: str) -> None:
    """The same random values, after every initializer; nested modules and bare layers; nothing outside is touched."""
    torch.manual_seed(3)
    expected = Net()
    layoutc.quantize_(expected, recipe)
    outside = nn.Linear(256, 256)
    torch.manual_seed(3)
    with layoutc.quantized_init(recipe):
        net = Net()
        single = nn.Linear(256, 256)
        assert type(net.head.weight) is nn.Parameter
    assert [name for name, param in net.named_parameters() if hasattr(param, "planes")] == NAMES
    for (name, a), (_, b) in zip(net.named_parameters(), expected.named_parameters(), strict=True):
        assert same(a, b) if name in NAMES else torch.equal(a, b)
    assert isinstance(single.weight, module(recipe).Tensor)
    assert type(outside.weight) is nn.Parameter
    assert type(nn.Linear(256, 256).weight) is nn.Parameter
    with layoutc.quantized_init(recipe, filter_fn=lambda _, name: name == "head"):
        net = Net()
    assert [name for name, param in net.named_parameters() if hasattr(param, "planes")] == ["head.weight"]


@each_recipe
def test_an_exception_inside_quantized_init_quantizes_nothing(recipe: str) -> None:
    """And leaves no hook behind."""
    kept: list[nn.Linear] = []

    def fail() -> None:
        with layoutc.quantized_init(recipe):
            kept.append(nn.Linear(256, 256))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert type(kept[0].weight) is nn.Parameter
    assert type(nn.Linear(256, 256).weight) is nn.Parameter


@each_recipe
def test_the_meta_device_allocates_nothing_and_to_empty_keeps_the_class(recipe: str) -> None:
    """Planes on meta have the layout's shapes; the real ones that follow take values."""
    net = Net(device="meta")
    assert layoutc.quantize_(net, recipe) == NAMES
    for name in NAMES:
        q = net.get_parameter(name)
        assert q.is_meta
        assert {n: (tuple(p.shape), p.dtype) for n, p in q.planes().items()} == dict(q.LAYOUT.planes(256, 256))
        assert all(plane.is_meta for plane in q.planes().values())
    net.to_empty(device="cpu")
    q = net.get_parameter(NAMES[0])
    assert type(q) is module(recipe).Tensor
    assert isinstance(q, nn.Parameter)
    with torch.no_grad():
        q.copy_(make(recipe))
    assert same(q, make(recipe))
    assert not aliases(q, make(recipe))


@pytest.mark.parametrize("call", ["quantize", "quantize_buffers"])
def test_vectors_are_refused_with_their_shape(call: str) -> None:
    for shape in ((), (64,)):
        said = f"weight: mxfp8 takes weights of 2 dims or more, not shape {shape}"
        with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
            getattr(module("mxfp8"), call)(torch.ones(shape))
