"""What tensors say to code that asks whether they share memory, and what such code then does."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import triton
import triton.language as tl
from one_rank import gather
from torch import Tensor, nn
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.multiprocessing.reductions import StorageWeakRef

import layoutc
from layoutc.conformance.as_fsdp2 import called
from layoutc.runtime.errors import UnsupportedOperator

RECIPES = ("fp8_current", "fp8_rowwise", "mxfp8", "nvfp4", "nvfp4_1d")
pytestmark = pytest.mark.parametrize("recipe", RECIPES)


def weight(recipe: str, seed: int = 0, rows: int = 256, **options: Any) -> Any:
    x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(seed))
    return importlib.import_module(f"layoutc.recipes.{recipe}").quantize(x, **options)


ASKS: dict[str, Callable[[Tensor, Tensor], bool]] = {
    "storage": lambda a, b: a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr(),
    "typed": lambda a, b: a.storage().data_ptr() == b.storage().data_ptr(),
    "cdata": lambda a, b: a.untyped_storage()._cdata == b.untyped_storage()._cdata,
    "weak": lambda a, b: StorageWeakRef(a.untyped_storage()) == StorageWeakRef(b.untyped_storage()),
    "bytes": lambda a, b: storage_id(a) == storage_id(b),
}


def storage_id(tensor: Tensor) -> tuple[str, int, int]:
    """As writers of flat files tell tensors apart: device, address, bytes."""
    storage = tensor.untyped_storage()
    return str(tensor.device), storage.data_ptr(), storage.nbytes()


@pytest.mark.parametrize("how", ASKS)
def test_views_share_memory_and_other_weights_do_not(recipe: str, how: str) -> None:
    w, shares = weight(recipe), ASKS[how]
    views = [w.detach(), w.view(-1), w.t(), w[:128], w.data, nn.Parameter(w), *w.chunk(2), w.detach().chunk(2)[1]]
    assert all(shares(w, view) for view in views)
    others = [
        weight(recipe, 1),
        w.clone(),
        copy.deepcopy(w),
        torch.empty_like(w),
        called(w, "new_zeros", w.shape),
        w.dequantize(),
    ]
    assert not any(shares(w, other) for other in others)


def test_weights_under_one_amax_do_not_share_memory(recipe: str) -> None:
    """What they do share is no plane of codes."""
    if "amax" not in weight(recipe).planes():
        pytest.skip("has no amax")
    amax = torch.tensor([3.0])
    a, b = weight(recipe, amax=amax), weight(recipe, 1, amax=amax)
    joined = torch.cat([a[:128], a[128:]])
    assert not any(ASKS["storage"](a, other) for other in (b, joined))


def test_bytes_are_those_that_can_be_read(recipe: str) -> None:
    """A storage has as many as stand at its address."""
    w = weight(recipe)
    codes = next(plane for name, plane in w.planes().items() if name not in w.LAYOUT.shared)
    storage = w.untyped_storage()
    assert (storage.data_ptr(), storage.nbytes()) == (codes.data_ptr(), codes.nbytes)
    assert torch.equal(torch.tensor([], dtype=torch.uint8).set_(storage), codes.flatten().view(torch.uint8))
    assert w.nbytes == w.numel() * w.element_size()
    assert w.storage().nbytes() == storage.nbytes()


def cast(recipe: str, seed: int = 0, rows: int = 256) -> Any:
    """The weight's values, cast on gather."""
    x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(seed))
    return importlib.import_module(f"layoutc.recipes.{recipe}").CastTensor(x)


def address(tensor: Any) -> int:
    """Where what a wrapper holds begins."""
    if hasattr(tensor, "plain"):
        return int(tensor.plain.data_ptr())
    return int(next(p for name, p in tensor.planes().items() if name not in tensor.LAYOUT.shared).data_ptr())


@pytest.mark.parametrize("made", [weight, cast])
def test_addresses_tell_weights_apart(recipe: str, made: Callable[..., Any]) -> None:
    """As those of plain tensors do: by them accelerate finds parameters again."""
    w = made(recipe)
    assert w.data_ptr() == address(w) != 0
    aliases = [w.detach(), w.data, w.view(-1), w.t(), w[:128], nn.Parameter(w), w.chunk(2)[0]]
    assert {alias.data_ptr() for alias in aliases} == {w.data_ptr()}
    piece = w[128:]
    assert piece.data_ptr() == address(piece) > w.data_ptr()
    assert piece[:64].data_ptr() == piece.data_ptr() < piece[64:].data_ptr()
    others = [w, made(recipe, 1), w.clone(), copy.deepcopy(w), torch.empty_like(w), nn.Parameter(w.clone())]
    assert len({other.data_ptr() for other in others}) == len(others)
    assert torch.empty_like(w, device="meta").data_ptr() == 0
    assert torch.empty_like(w, device="meta")[128:].data_ptr() == 0
    w.untyped_storage().resize_(0)
    assert w.data_ptr() == piece.data_ptr() == 0


def test_a_weight_that_is_cast_has_the_storage_of_its_values(recipe: str) -> None:
    """By which files that hold plain values find views and tied weights."""
    w = cast(recipe)
    assert w.untyped_storage().nbytes() == w.nbytes
    for shares in ASKS.values():
        assert all(shares(w, view) for view in (w.detach(), w.t(), w[128:], w.plain, nn.Parameter(w)))
        assert not any(shares(w, other) for other in (cast(recipe, 1), w.clone(), copy.deepcopy(w)))


@triton.jit
def doubled(x, out, n: tl.constexpr):  # type: ignore[no-untyped-def]
    """As somebody would write it who knows nothing of wrappers."""
    at = tl.arange(0, n)
    tl.store(out + at, 2 * tl.load(x + at))


def test_a_kernel_that_would_take_codes_for_values_is_refused(recipe: str) -> None:
    out = torch.zeros(64)
    with pytest.raises(UnsupportedOperator, match="a Triton kernel can't read a weight of shape"):
        doubled[(1,)](weight(recipe), out, 64)
    assert not out.any()
    doubled[(1,)](cast(recipe), out, 64)
    assert torch.equal(out, 2 * cast(recipe).plain.view(-1)[:64])


def test_safetensors_writes_no_codes_as_values(recipe: str, tmp_path: Path) -> None:
    """transformers' save_pretrained writes so."""
    library = pytest.importorskip("safetensors.torch", reason="needs safetensors")
    for made in (weight(recipe), nn.Parameter(weight(recipe)), weight(recipe)[128:]):
        with pytest.raises(UnsupportedOperator, match="export_safetensors") as error:
            library.save_file({"w": made}, tmp_path / "w.safetensors")
        assert f"can't write a weight of shape {tuple(made.shape)}" in str(error.value)
        assert not (tmp_path / "w.safetensors").exists()
    library.save_file({"w": cast(recipe)}, tmp_path / "w.safetensors")
    assert torch.equal(library.load_file(tmp_path / "w.safetensors")["w"], cast(recipe).plain)


def test_is_set_to(recipe: str) -> None:
    w = weight(recipe)
    with layoutc.strict():
        assert w.is_set_to(w.detach())
        assert w[:128].is_set_to(w[:128])
        assert not any(w.is_set_to(other) for other in (w.clone(), w[:128], w.t(), w.view(-1), torch.zeros(256, 256)))
        assert not torch.zeros(256, 256).is_set_to(w)


def test_meta_and_freed_weights(recipe: str) -> None:
    """No address and, where freed, no bytes, as of plain tensors; the storages are still told apart."""
    with torch.device("meta"):
        layers = [nn.Linear(256, 256) for _ in range(2)]
        for layer in layers:
            layoutc.quantize_(layer, recipe)
    a, b = (layer.weight for layer in layers)
    assert a.untyped_storage().data_ptr() == 0
    assert ASKS["weak"](a, a[:128])
    assert not ASKS["weak"](a, b)
    w, other = weight(recipe), weight(recipe, 1)
    piece = w[:128]
    for tensor in (w, other):
        for plane in tensor.planes().values():
            plane.untyped_storage().resize_(0)
    assert (w.untyped_storage().data_ptr(), w.untyped_storage().nbytes()) == (0, 0)
    assert ASKS["weak"](w, piece)
    assert not ASKS["weak"](w, other)


def test_gathered_weights(recipe: str) -> None:
    """A piece and an alias share the weight's memory in every pass; the shard does not."""
    shard, memory = weight(recipe), list[Tensor]()
    whole = gather(shard, "forward", memory)
    piece, alias = whole[128:], whole.detach()
    for which in ("forward", "backward", "forward"):
        gather(shard, which, memory, whole)
        for how, shares in ASKS.items():
            assert shares(whole, alias), how
            assert shares(whole, piece), how
            assert not shares(whole, shard), how


def files(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.distcp"))


@pytest.mark.parametrize("staged", [False, True])
def test_a_checkpoint_holds_each_byte_once(recipe: str, staged: bool, tmp_path: Path) -> None:
    """Whole weights, and narrow views of large ones, saved as they are and from a copy that a stager made."""
    whole = weight(recipe, rows=4096)
    state = {"weight": weight(recipe), "view": whole[256:512]}
    saved = StateDictStager().stage(state) if staged else state
    dcp.save(saved, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    held = sum(plane.nbytes for tensor in state.values() for plane in tensor.planes().values())
    assert held < files(tmp_path) < held + 24_000
    target = {"weight": weight(recipe, 5), "view": weight(recipe, 6)}
    dcp.load(target, checkpoint_id=tmp_path, no_dist=True)
    for name, tensor in state.items():
        assert torch.equal(target[name], tensor)


def test_casting_and_moving_a_model_keeps_what_is_shared(recipe: str) -> None:
    """nn.Module.to and state dicts, tied weights included."""
    model = nn.ModuleList([nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False)])
    model[1].weight = model[0].weight
    layoutc.quantize_(model, recipe)
    model.to("cpu").to(torch.bfloat16)
    assert ASKS["storage"](model[0].weight, model[1].weight)
    state = model.state_dict()
    assert ASKS["storage"](state["0.weight"], model[0].weight)
    assert not ASKS["storage"](copy.deepcopy(model)[0].weight, model[0].weight)


def test_a_graph_takes_a_weight_and_its_views(recipe: str) -> None:
    """torch.compile tells its inputs apart by their storages, wrappers' and planes'."""
    w, x = weight(recipe), torch.randn(4, 256)
    compiled = torch.compile(
        lambda x, a, b, c: x @ a.t() + x @ b + (x @ c.t()).sum(), backend="aot_eager", fullgraph=True
    )
    inputs = (w, w.detach(), w[128:])
    torch._dynamo.reset()
    expected = x @ w.t() + x @ w + (x @ w[128:].t()).sum()
    assert torch.equal(compiled(x, *inputs), expected)
