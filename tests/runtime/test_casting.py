"""CastOnGather without FSDP2: values to optimizers, the quantized weight to a model, and what its hooks send."""

from __future__ import annotations

import copy
import io
import pickle
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from weight_recipes import CUT_APART, WEIGHTS

import layoutc
from layoutc.conformance.as_fsdp2 import called
from layoutc.runtime.cast.tensor import CastOnGather
from layoutc.runtime.errors import ImplicitDequantize, LayoutError, UnsupportedOperator
from layoutc.runtime.fsdp2 import hooks
from layoutc.runtime.weight.tensor import QuantizedTensor

RECIPES = WEIGHTS
SOME = ("fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4", "int8_rowwise")


def module_of(recipe: str) -> Any:
    """The generated module."""
    return import_module(f"layoutc.recipes.{recipe}")


def values_for(recipe: str, seed: int = 0) -> Tensor:
    """(256, 128) in fp32, or wider where the recipe takes no such weight."""
    width = max(128, module_of(recipe).LAYOUT.multiple_k)
    return torch.randn(256, width, generator=torch.Generator().manual_seed(seed))


def raw(tensor: Tensor) -> Tensor:
    """Bytes."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)


class Shards:
    """As much of a DeviceMesh as hooks without FSDP2 ask for."""

    def __init__(self, world: int) -> None:
        self.world = world

    def size(self) -> int:
        """Ranks."""
        return self.world


@pytest.mark.sample(4)
@pytest.mark.parametrize("recipe", CUT_APART)
@pytest.mark.parametrize("which", ["forward", "both"])
def test_shards_send_what_shards_of_the_quantized_weight_send(recipe: str, which: Any) -> None:
    """Byte for byte, for each pass, each recipe; and the post hook gives the quantized weight."""
    module, x = module_of(recipe), values_for(recipe)
    if module.LAYOUT.amax_of_matrices:  # shards of whole matrices, which need no amax of one another
        x = torch.stack([x[:128], 3 * x[128:]])
    model = nn.Linear(x.shape[-1], 256, bias=False)
    model.weight = nn.Parameter(x.clone())
    layoutc.cast_on_gather_(model, module)
    layoutc.precompute_amaxes(model)
    quantized, world, sent, rows = module.quantize(x), 2, [], len(x) // 2
    with hooks.simulate(which, x.shape, 128):
        for cast, expected in zip(model.weight.data.split(rows), quantized.split(rows), strict=True):
            mine, note = cast.fsdp_pre_all_gather(Shards(world))
            theirs, _ = expected.fsdp_pre_all_gather(Shards(world))
            assert [raw(a).tolist() for a in mine] == [raw(b).tolist() for b in theirs]
            sent.append(mine)
        outputs = tuple(torch.cat(parts) for parts in zip(*sent, strict=True))
        whole, inner = cast.fsdp_post_all_gather(outputs, note, torch.bfloat16)
    assert type(whole) is module.Tensor
    assert (whole.dtype, whole.shape) == (torch.bfloat16, x.shape)
    assert not inner or note.route.slots, "only what does not fill its slot is no gather output"
    held = whole.orientations[0]
    for name, buffer in whole.buffers().items():
        assert torch.equal(raw(buffer), raw(quantized.buffers()[name])), (held, name)


@pytest.mark.parametrize("recipe", SOME)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_use_the_quantized_weight_and_gradients_reach_the_values(recipe: str, dtype: torch.dtype) -> None:
    """Forward and both gradients are those of a quantized parameter."""
    module, values = module_of(recipe), values_for(recipe).to(dtype)
    weight = nn.Parameter(module.CastTensor(values))
    expected = nn.Parameter(module.quantize(values))
    x = torch.randn(4, values.shape[1], dtype=dtype, requires_grad=True)
    again = x.detach().clone().requires_grad_()
    for function in (F.linear, lambda x, w: x @ w.t(), lambda x, w: (w @ x.t()).t() @ w.view(256, -1)):
        for one, other in ((x, weight), (again, expected)):
            one.grad = other.grad = None
            function(one, other).square().sum().backward()
        assert torch.equal(function(x, weight), function(again, expected))
        assert x.grad is not None
        assert torch.equal(x.grad, again.grad)
        assert type(weight.grad) is Tensor
        assert torch.equal(weight.grad, expected.grad)
    with torch.no_grad():
        assert torch.equal(F.linear(x, weight), F.linear(x, expected))
    with torch.inference_mode():
        assert torch.equal(F.linear(x, weight), F.linear(x, expected))


@pytest.mark.parametrize("recipe", SOME)
def test_a_view_means_that_view_of_the_quantized_weight(recipe: str) -> None:
    """A part shares the scale of the whole, wherever rows are cut; a cut between columns of a block is refused."""
    module, values = module_of(recipe), values_for(recipe)
    weight, quantized = nn.Parameter(module.CastTensor(values)), module.quantize(values)
    x = torch.randn(3, 128)
    cuts: list[Any] = [lambda w: w[128:], lambda w: w[1:], lambda w: w.split(128)[1], lambda w: w.split(7)[2]]
    for view in (*cuts, lambda w: w.view(2, 128, 128)[1], lambda w: w.detach()):
        assert type(view(weight)) is module.CastTensor
        assert torch.equal(F.linear(x, view(weight)), F.linear(x, view(quantized)))
    if module.LAYOUT.column_multiple > 1:
        with pytest.raises(LayoutError, match="would cut a block"):
            F.linear(x[:, 1:], weight[:, 1:])
    with torch.no_grad():
        weight[128:].zero_()
    assert not values[128:].any()
    assert values[:128].all()


@pytest.mark.parametrize("recipe", ["nvfp4_compressed_tensors_experts", "nvfp4_modelopt_experts"])
def test_a_view_of_a_stack_keeps_the_amax_of_each_of_its_matrices(recipe: str) -> None:
    """Whatever the view's shape makes of the matrices."""
    module = module_of(recipe)
    values = values_for(recipe).view(4, 64, 128) * torch.tensor([1, 10, 100, 0.1]).view(4, 1, 1)
    cuts: list[Any] = [lambda w: w[:2], lambda w: w[1], lambda w: w[1][:32], lambda w: w[:, :32]]
    cuts += [lambda w: w.unbind()[3], lambda w: w.split(1)[2]]
    for view in (*cuts, lambda w: w.view(-1, 128), lambda w: w.view(2, 128, 128), lambda w: w.transpose(1, 2)):
        found, expected = view(module.CastTensor(values)).quantize(), view(module.quantize(values))
        assert found.shape == expected.shape
        for name, plane in expected.planes().items():
            assert torch.equal(raw(found.planes()[name]), raw(plane)), name
    whole = values_for(recipe)
    stacked = module.CastTensor(whole).view(4, 64, 128).quantize()
    assert torch.equal(stacked.dequantize(), module.quantize(whole).dequantize().view(4, 64, 128))


def test_operators_of_a_model_are_counted_and_have_quantized_values() -> None:
    """Never high precision unseen: what is no product dequantizes, is counted, and is refused by strict()."""
    module, values = module_of("mxfp8"), values_for("mxfp8")
    weight, quantized = nn.Parameter(module.CastTensor(values)), module.quantize(values)
    before = layoutc.implicit_dequantizes().total()
    out = (weight * 2).sum()
    assert torch.equal(out, (quantized.dequantize() * 2).sum())
    index = torch.tensor([3, 5])
    with torch.no_grad():
        assert torch.equal(F.embedding(index, weight), quantized.dequantize()[index])
    assert layoutc.implicit_dequantizes().total() == before + 2
    with layoutc.strict():
        F.linear(values, weight)
        with pytest.raises(ImplicitDequantize):
            weight * 2
    out.backward()
    assert torch.equal(weight.grad, torch.full((256, 128), 2.0))
    with torch.no_grad():
        assert torch.equal(weight.norm(), values.norm())
        assert torch.equal(values.clone().lerp_(weight, 0.5), values)
        assert torch.equal(torch.cat([weight.view(-1)]), values.view(-1))
    assert layoutc.implicit_dequantizes().total() == before + 2


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"weight_decay": 0.1, "amsgrad": True},
    "Adam": {"weight_decay": 0.1},
    "SGD": {"momentum": 0.9, "weight_decay": 0.1},
    "Adafactor": {"weight_decay": 0.1},
    "NAdam": {},
    "RAdam": {},
    "Adamax": {},
    "Adagrad": {"weight_decay": 0.1},
    "Adadelta": {},
    "ASGD": {},
    "RMSprop": {"momentum": 0.9},
    "Rprop": {},
    "LBFGS": {},
    "Muon": {},
}


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_torch_optimizer_steps_as_on_plain_parameters(name: str, foreach: bool) -> None:
    """Values to the bit, plain state, and the class is kept; nothing dequantizes."""
    if not hasattr(torch.optim, name):
        pytest.skip(f"no {name} in this torch")
    options = dict(OPTIMIZERS[name])
    if name not in ("LBFGS", "Muon"):
        options["foreach"] = foreach
    casts = module_of("mxfp8").CastTensor
    plain = [nn.Parameter(values_for("mxfp8", seed)[:64]) for seed in range(3)]
    cast = [nn.Parameter(casts(param.detach().clone())) for param in plain]
    before = layoutc.implicit_dequantizes()
    optimizers = [getattr(torch.optim, name)(params, **options) for params in (plain, cast)]
    for step in range(3):
        for params, optimizer in zip((plain, cast), optimizers, strict=True):
            for seed, param in enumerate(params):
                param.grad = values_for("mxfp8", 10 * step + seed)[:64]
            optimizer.step(lambda: torch.ones(())) if name == "LBFGS" else optimizer.step()
    for one, other in zip(plain, cast, strict=True):
        assert type(other.data) is casts
        assert torch.equal(one.detach(), other.data.plain)
    states = [value for one in optimizers[1].state.values() for value in one.values()]
    assert not any(isinstance(value, CastOnGather) for value in states)
    assert layoutc.implicit_dequantizes() == before


def test_master_weights_take_bf16_values() -> None:
    """fp32 masters around bf16 values: the same steps as for a plain bf16 parameter."""
    values = values_for("nvfp4").bfloat16()
    plain, cast = nn.Parameter(values.clone()), nn.Parameter(module_of("nvfp4").CastTensor(values.clone()))
    for param in (plain, cast):
        optimizer = layoutc.MasterWeights(torch.optim.AdamW, [param], lr=1e-3)
        for step in range(3):
            param.grad = values_for("nvfp4", step + 1).bfloat16()
            optimizer.step()
    assert type(cast.data) is module_of("nvfp4").CastTensor
    assert torch.equal(plain.detach(), cast.data.plain)


def test_a_history_advances_once_for_each_change_of_the_values() -> None:
    """However often they are used; a reload starts it anew; a copy takes it along."""
    module = module_of("fp8_delayed")
    model = nn.Linear(128, 256, bias=False)
    layoutc.cast_on_gather_(model, module)
    weight: Any = model.weight
    expected = module.quantize(weight.data.plain)
    assert torch.equal(weight.data.quantize().store.planes["amax"], expected.store.planes["amax"])
    for factor in (2.0, 3.0, 0.5):
        with torch.no_grad():
            weight.mul_(factor)
        module.quantize(weight.data.plain, out=expected)
        layoutc.precompute_amaxes(model)
        other = copy.deepcopy(model)
        for one in (weight, weight, weight.clone(), other.weight, pickle.loads(pickle.dumps(model)).weight):
            found = one.data.quantize()
            assert torch.equal(found.store.planes["amax"], expected.store.planes["amax"])
            assert torch.equal(found.dequantize(), expected.dequantize())
    model.load_state_dict(model.state_dict())
    assert torch.equal(weight.data.quantize().dequantize(), module.quantize(weight.data.plain).dequantize())


def test_some_of_the_values_and_another_dtype_start_a_history_anew() -> None:
    module = module_of("fp8_delayed")
    model = nn.Linear(128, 256, bias=False)
    layoutc.cast_on_gather_(model, module)
    layoutc.precompute_amaxes(model)
    weight: Any = model.weight
    with torch.no_grad():
        weight.mul_(4)
        for made in (weight[:128].detach().clone(), weight.detach().bfloat16()):
            found, expected = made.quantize().planes(), module.quantize(made.plain).planes()
            assert all(torch.equal(raw(plane), raw(expected[name])) for name, plane in found.items())


@pytest.mark.parametrize("recipe", ["fp8_current", "nvfp4", "fp8_delayed"])
def test_a_precomputed_amax_holds_until_values_are_written(recipe: str) -> None:
    """By operators, by lists of them, through views and through plain tensors that share memory."""
    module = module_of(recipe)
    model = nn.Linear(128, 256, bias=False)
    layoutc.cast_on_gather_(model, module)
    weight: Any = model.weight
    writes = (
        lambda: weight.mul_(3),
        lambda: torch._foreach_mul_([weight], 3.0),
        lambda: weight[:128].mul_(3),
        lambda: weight.data.plain.mul_(3),
        lambda: model.state_dict()["weight"].mul_(3),
        lambda: weight.copy_(weight * 3),
    )
    for write in writes:
        layoutc.precompute_amaxes(model)
        agreed = weight._agreed
        assert agreed.ahead == agreed.count(weight)
        with torch.no_grad():
            write()
        assert agreed.ahead != agreed.count(weight)


def test_it_keeps_its_class_where_fsdp2_and_modules_need_it() -> None:
    """Views, new tensors, conversions; state of optimizers is plain."""
    casts = module_of("nvfp4").CastTensor
    weight = casts(values_for("nvfp4"))
    kept = [weight.detach(), weight.view(-1), weight[:16], weight.split(16)[0], *weight.chunk(4), weight.t()]
    kept += [
        called(weight, "new_zeros", (32, 128)),
        called(weight, "new_empty", 0),
        torch.empty_like(weight, device="meta"),
        weight.clone(),
    ]
    kept += [
        weight.to(torch.bfloat16),
        weight.to("meta"),
        copy.deepcopy(weight),
        weight.data,
        nn.Parameter(weight).data,
    ]
    assert {type(one) for one in kept} == {casts}
    plain = [
        torch.zeros_like(weight),
        torch.ones_like(weight),
        torch.rand_like(weight),
        called(weight, "new_zeros", 2, dtype=torch.int),
        weight.new_zeros(32, 128),
        weight.new_empty(32, 128),
    ]
    assert {type(one) for one in plain} == {Tensor}
    assert weight[:16].plain.data_ptr() == weight.plain.data_ptr()
    assert weight.clone().plain.data_ptr() != weight.plain.data_ptr()
    assert "dequant" not in repr(weight)
    target = torch.empty(256, 128)
    assert target.copy_(weight) is target
    assert torch.equal(target, weight.plain)
    assert weight.copy_(module_of("mxfp8").quantize(target)) is weight
    assert torch.equal(weight.plain, module_of("mxfp8").quantize(target).dequantize())
    quantized = module_of("mxfp8").quantize(torch.zeros(256, 128))
    quantized.copy_(weight)
    assert torch.equal(quantized.dequantize(), module_of("mxfp8").quantize(weight.plain).dequantize())


def test_modules_are_converted_moved_and_materialized() -> None:
    """to(dtype), meta device, to_empty, assigned state: the weight stays cast on gather."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 128))
    assert layoutc.cast_on_gather_(model, "mxfp8") == ["0.weight", "1.weight"]
    casts = module_of("mxfp8").CastTensor
    state = nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 128)).state_dict()
    assigned = copy.deepcopy(model)
    assigned.load_state_dict(state, assign=True)
    model.to_empty(device="cpu")
    model.load_state_dict(state)
    for one in (model, assigned, model.to(torch.bfloat16)):
        assert type(one[0].weight.data) is casts
        assert isinstance(one[0].weight, nn.Parameter)
    assert model[0].weight.dtype == model[0].weight.data.plain.dtype == torch.bfloat16
    assert torch.equal(assigned(torch.ones(1, 128)), _quantized(state)(torch.ones(1, 128)))


@pytest.mark.parametrize("recipe", SOME)
def test_values_in_fp64_are_quantized_as_fp32(recipe: str) -> None:
    """Bytes are those of the values rounded to fp32, also of blocks whose scales fp32 can hardly hold."""
    module, values = module_of(recipe), values_for(recipe).double() / 3
    values[128:] *= 1e-42
    linear = nn.Linear(values.shape[1], 256, bias=False)
    layoutc.cast_on_gather_(linear, recipe)
    linear.double()
    linear.weight.data.copy_(values)
    expected, found = module.quantize(values.float()), linear.weight.quantize()
    planes = {name: raw(plane) for name, plane in found.planes().items()}
    assert planes.keys() == expected.planes().keys()
    for name, plane in expected.planes().items():
        assert torch.equal(planes[name], raw(plane)), name
    x = torch.randn(4, values.shape[1], dtype=torch.float64)
    assert torch.equal(linear(x), F.linear(x, expected.dequantize(torch.float64)))


def _quantized(state: dict[str, Tensor]) -> nn.Module:
    model = nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 128))
    model.load_state_dict(state)
    layoutc.quantize_(model, "mxfp8")
    return model


def test_files_of_state_dicts_need_nothing_but_torch() -> None:
    """Plain values, compact; a whole module keeps its class."""
    model = nn.Linear(128, 256)
    layoutc.cast_on_gather_(model, "mxfp8")
    casts = module_of("mxfp8").CastTensor
    by_hand = {"weight": model.weight.detach(), "part": model.weight.detach()[:16]}
    for state in (model.state_dict(), by_hand):
        file = io.BytesIO()
        torch.save(state, file)
        assert b"layoutc" not in file.getvalue()
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert {type(value) for value in loaded.values()} == {Tensor}
        assert torch.equal(loaded["weight"], model.weight.data.plain)
    assert loaded["part"].untyped_storage().nbytes() == 16 * 128 * 4
    again = pickle.loads(pickle.dumps(model))
    assert type(again.weight.data) is casts
    assert isinstance(again.weight, nn.Parameter)
    assert type(model.state_dict(keep_vars=True)["weight"].data) is casts
    file = io.BytesIO()
    torch.save(model.weight, file)
    file.seek(0)
    assert type(torch.load(file, weights_only=True).data) is casts


def test_bad_input_is_refused_before_anything_is_changed() -> None:
    """The same words as quantize_."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(33, 32))
    with pytest.raises(ValueError, match=r"1\.weight: mxfp8 takes rows in multiples of 32"):
        layoutc.cast_on_gather_(model, "mxfp8")
    assert type(model[0].weight) is nn.Parameter
    assert not isinstance(model[0].weight.data, CastOnGather)
    tied = nn.Sequential(nn.Embedding(32, 32), nn.Linear(32, 32))
    tied[1].weight = tied[0].weight
    with pytest.raises(ValueError, match="tied"):
        layoutc.cast_on_gather_(tied, "mxfp8")
    both = layoutc.cast_on_gather_(tied, "mxfp8", filter_fn=lambda m, _: isinstance(m, nn.Embedding | nn.Linear))
    assert both == ["0.weight", "1.weight"]
    assert tied[0].weight is tied[1].weight
    for convert in (layoutc.cast_on_gather_, layoutc.quantize_):
        with pytest.raises(ValueError, match="quantized already"):
            convert(tied, "mxfp8")
    with pytest.raises(ValueError, match="no recipe"):
        layoutc.cast_on_gather_(model, "mxfp9")
    with pytest.raises(UnsupportedOperator), torch.enable_grad():
        tied[1].weight.diagonal()


def test_compiled_models_compute_what_eager_ones_do() -> None:
    """Weights of recipes without a history are quantized in the graph."""
    for recipe in ("mxfp8", "nvfp4"):
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
        layoutc.cast_on_gather_(model, recipe)
        x = torch.randn(4, 64)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        for _ in range(2):
            expected, out = model(x), compiled(x)
            assert torch.equal(out, expected)
            grads = []
            for one in (expected, out):
                one.square().sum().backward()
                grads.append(model[0].weight.grad)
                model.zero_grad()
            assert torch.equal(*grads)
            with torch.no_grad():
                model[0].weight.mul_(2)
        assert isinstance(model[0].weight.data.quantize(), QuantizedTensor)


def test_casts_to_other_recipes_compile_apart() -> None:
    """To torch all casts of a weight look alike; so do tensors without values, by which graphs are found again."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    x, mode = torch.randn(64, 64), FakeTensorMode()
    casts: list[Any] = [module_of(recipe).CastTensor(x) for recipe in ("mxfp8", "nvfp4", "fp8_current")]
    assert len({cast._stable_hash_for_caching() for cast in casts}) == 3
    fakes = [mode.from_tensor(cast) for cast in casts]
    reduced = [fake.__reduce_ex__(2) for fake in (*fakes, *(mode.from_tensor(c.quantize()) for c in casts))]
    assert all(kind is str for kind, _ in reduced)
    assert len({key for _, (key,) in reduced}) == 6


def test_values_are_moved_to_shared_memory_once() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    layoutc.cast_on_gather_(model, "mxfp8")
    cast: Any = model[0].weight
    before = cast.detach().clone()
    assert not cast.is_shared()
    cast.share_memory_()
    assert cast.is_shared()
    assert torch.equal(cast.detach(), before)


def test_a_history_can_not_be_traced() -> None:
    """A graph would quantize with the amax of the step that it was traced in, for ever."""
    model = nn.Sequential(nn.Linear(64, 64))
    layoutc.cast_on_gather_(model, "fp8_delayed")
    with pytest.raises(
        Exception, match="takes its scale from a history of amaxes, which a traced graph would never advance"
    ):
        torch.compile(model, backend="eager", fullgraph=True)(torch.randn(4, 64))


COPIES: dict[str, Any] = {"deepcopy": copy.deepcopy, "pickle": lambda model: pickle.loads(pickle.dumps(model))}


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("recipe", ["fp8_current", "nvfp4", "fp8_delayed"])
def test_what_is_written_into_a_copy_is_quantized_by_its_own_amax(recipe: str, copied: str) -> None:
    """Not by the one that was found for the values that were copied; the first write counts, also below the class."""
    for write in (lambda one: one.weight.mul_(3), lambda one: one.state_dict()["weight"].mul_(3)):
        model = nn.Linear(64, 64, bias=False)
        layoutc.cast_on_gather_(model, recipe)
        layoutc.precompute_amaxes(model)
        found = []
        for one in (model, COPIES[copied](model)):
            with torch.no_grad():
                write(one)
            found.append(one.weight.data.quantize().planes())
        assert all(torch.equal(raw(plane), raw(found[1][name])) for name, plane in found[0].items())


def test_a_deep_copy_takes_what_users_have_set_on_the_weight() -> None:
    """Copies of it, and one of what is on several weights."""
    weights = [nn.Parameter(module_of("mxfp8").CastTensor(torch.ones(32, 32))) for _ in range(2)]
    note = ["decay"]
    for weight in weights:
        weight.note = note  # type: ignore[attr-defined]
    one, other = copy.deepcopy(weights)
    assert one.note == note  # type: ignore[attr-defined]
    assert one.note is not note  # type: ignore[attr-defined]
    assert one.note is other.note  # type: ignore[attr-defined]


def test_initializers_write_what_they_write_into_plain_weights() -> None:
    """Those of several steps work on values, not on what the values quantize to."""
    for name in ("orthogonal_", "trunc_normal_", "kaiming_normal_"):
        plain, cast = nn.Linear(128, 256), nn.Linear(128, 256)
        layoutc.cast_on_gather_(cast, "nvfp4")
        for layer in (plain, cast):
            getattr(nn.init, name)(layer.weight, generator=torch.Generator().manual_seed(3))
        assert torch.equal(cast.weight.plain, plain.weight)  # type: ignore[operator]


@pytest.mark.parametrize("how", ["autocast", "to", "compiled"])
@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8"])
def test_a_copy_in_another_dtype_is_multiplied_as_the_gathered_weight(recipe: str, how: str) -> None:
    """Values are quantized before they are rounded, as FSDP2 gathers them; the copy's own values are the weight's."""
    weight = nn.Parameter(module_of(recipe).CastTensor(values_for(recipe)))
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(1))

    def run(x: Tensor, weight: Tensor) -> Tensor:
        if how == "to":
            return F.linear(x.bfloat16(), weight.to(torch.bfloat16))
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x, weight)

    call = torch.compile(run, backend="aot_eager") if how == "compiled" else run
    plain = nn.Parameter(module_of(recipe).quantize(weight.plain.float()).dequantize())  # type: ignore[attr-defined]
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    made, expected = call(inputs[0], weight), run(inputs[1], plain)
    assert torch.equal(made, expected)
    for out in (made, expected):
        out.float().square().sum().backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)  # type: ignore[arg-type]
    assert torch.equal(weight.grad, plain.grad)  # type: ignore[arg-type]
    rounded: Any = weight.to(torch.bfloat16)
    assert torch.equal(rounded.plain, weight.plain.bfloat16())  # type: ignore[attr-defined]
    with torch.no_grad():
        weight.mul_(2)  # now the copy is by itself
        own = module_of(recipe).quantize(rounded.plain).dequantize()
        assert torch.equal(F.linear(x.bfloat16(), rounded), F.linear(x.bfloat16(), own))


def test_a_vector_made_from_it_is_plain() -> None:
    """As spectral_norm makes one for each side of a weight, and draws into it."""
    layer = nn.Linear(128, 256, bias=False)
    layoutc.cast_on_gather_(layer, "mxfp8")
    assert type(called(layer.weight, "new_empty", 256)) is type(layer.weight.new_empty(256)) is Tensor
    nn.utils.parametrizations.spectral_norm(layer)
    assert torch.isfinite(layer(torch.randn(2, 128))).all()
