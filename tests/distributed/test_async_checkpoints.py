"""dcp.async_save: training goes on at once, and the files hold what the weights were."""

from __future__ import annotations

import os
import time
import traceback
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import PRELOADED, Ranks, mesh_of, on
from models import adam, recipe_module
from resharding import assert_holds, awkward, build, kept, kinds_in, shard, step
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from layoutc import checkpoint
from layoutc.checkpoint import saving
from layoutc.conformance.ranks import process_context

RECIPES = ("fp8_delayed", "nvfp4", "int4_group32", "mxfp6_e3m2")
SAVES = 2
REUSABLE = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 12)  # torch 2.11 uses a stager once


def options_of(kind: str, folder: str) -> dict[str, Any]:
    """What async_save is given; for all saves, where torch can use a stager again."""
    if kind.startswith("reused"):
        options = StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=kind == "reused_shared",
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
        return {"async_stager": DefaultStager(options)}
    if kind.startswith("blocking"):
        return {"storage_writer": FileSystemWriter(folder, cache_staged_state_dict=kind == "blocking_cached")}
    return {}


def keeps_old_bytes(recipes: tuple[str, ...], kind: str, folder: str, process: bool = False) -> None:
    """Some saves, a step of training right after each has begun."""
    sizes = {recipe: awkward(recipe) for recipe in recipes}
    whole, mesh = build(sizes), mesh_of(dist.get_world_size())
    model = shard(build(sizes), mesh)
    optimizers, expected = [adam(whole), adam(model)], []
    options = options_of(kind, f"{folder}/0") | {"process_group": dist.new_group()}  # the other one trains meanwhile
    if process:
        options["async_checkpointer_type"] = AsyncCheckpointerType.PROCESS
    for number in range(SAVES):
        if "async_stager" in options and not REUSABLE:
            options |= options_of(kind, folder)
        expected.append(kept(whole, None))
        # Caching stagers pin what is not quantized, which takes a card.
        state = {k: v for k, v in model.state_dict().items() if v.dim() > 1 or kind != "blocking_cached"}
        saving = dcp.async_save(state, checkpoint_id=f"{folder}/{number}", **options)
        for one, optimizer in zip((whole, model), optimizers, strict=True):
            step(one, optimizer, number)
        getattr(saving, "upload_completion", saving).result()  # some stagers promise two things apart
    assert_holds(model, None, kept(whole, None))
    if "async_stager" in options:
        options["async_stager"].close()
    other = shard(build(sizes, 1), mesh)
    for number, wanted in enumerate(expected):
        loaded = {k: v for k, v in other.state_dict().items() if v.dim() > 1 or kind != "blocking_cached"}
        dcp.load(loaded, checkpoint_id=f"{folder}/{number}")
        with torch.no_grad():
            for name, param in other.named_parameters():
                if name not in loaded:
                    param._local_tensor.copy_(dict(model.named_parameters())[name]._local_tensor)  # type: ignore
                    wanted[name] = kept(whole, None)[name]
        assert_holds(other, None, wanted)
        for name, kinds in kinds_in(f"{folder}/{number}").items():
            recipe = name.split(".")[0]
            assert kinds == {recipe_module(recipe).Tensor if name.endswith("weight") else torch.Tensor}, name


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["default", "reused", "reused_shared", "blocking", "blocking_cached"])
def test_a_save_in_a_thread_keeps_what_the_weights_were(two: Ranks, kind: str, tmp_path: Path) -> None:
    """It saves bytes, of the class, whichever stager copies them."""
    two.run(keeps_old_bytes, RECIPES, kind, str(tmp_path))


@on("two")
def test_saves_and_training_use_groups_of_their_own(tmp_path: Path) -> None:
    """What shares a group has to keep one order on all ranks, and a thread keeps none. Two saves without a pause, on
    ranks of unequal speed, while the same ranks use the group of all."""
    folder = str(tmp_path)
    sizes = {recipe: awkward(recipe) for recipe in RECIPES}
    whole, rank = build(sizes), dist.get_rank()
    model = shard(build(sizes), mesh_of(dist.get_world_size()))
    dist.new_group([0])  # ranks need not have as many groups as one another
    optimizers, expected, saves = [adam(whole), adam(model)], [], []
    write = saving.Writer.write_data

    def slow(*args: Any) -> Any:
        time.sleep(0.2 * rank)
        return write(*args)

    with patch.object(saving.Writer, "write_data", slow):
        for number in range(2):
            expected.append(kept(whole, None))
            saves.append(checkpoint.async_save(model.state_dict(), f"{folder}/{number}"))
            for one, optimizer in zip((whole, model), optimizers, strict=True):
                step(one, optimizer, number)
            for count in range(100):
                total = torch.tensor(float(rank + count))
                dist.all_reduce(total)
                assert total == 1 + 2 * count
        assert saves[0].done()
        saves[1].result()
    other = shard(build(sizes, 1), mesh_of(dist.get_world_size()))
    for number, wanted in enumerate(expected):
        checkpoint.load(other.state_dict(), f"{folder}/{number}")
        assert_holds(other, None, wanted)


def test_a_save_that_fails_is_its_own_callers_matter(tmp_path: Path) -> None:
    """The next one is made whole; without a process group there is nothing to wait for."""
    state = {"weight": torch.ones(4)}
    with patch.object(saving.Writer, "finish", side_effect=RuntimeError("no room")):
        failed = checkpoint.async_save(state, tmp_path / "a")
        with pytest.raises(CheckpointException, match="no room"):
            failed.result()
    checkpoint.async_save(state, tmp_path / "b").result()
    assert [one.name for one in tmp_path.iterdir() if not one.name.startswith(".")] == ["b"]


def test_a_stager_is_closed_by_whoever_made_it(tmp_path: Path) -> None:
    """What a save makes for itself when the save is done, or has failed; a caller's own by the caller."""
    made: list[DefaultStager] = []
    closed: list[DefaultStager] = []

    class Watched(DefaultStager):
        def __init__(self, *options: Any) -> None:
            super().__init__(*options)
            made.append(self)

        def close(self) -> None:
            closed.append(self)
            super().close()

    state = {"weight": torch.ones(4)}
    with patch.object(saving, "DefaultStager", Watched):
        checkpoint.async_save(state, tmp_path / "a").result()
        with patch.object(saving.Writer, "finish", side_effect=RuntimeError("no room")):
            failed = checkpoint.async_save(state, tmp_path / "b")
            with pytest.raises(CheckpointException, match="no room"):
                failed.result()
        deadline = time.monotonic() + 300
        while len(closed) < 2 and time.monotonic() < deadline:  # just after the result is there
            time.sleep(0.01)
        assert [set(closed), len(made)] == [set(made), 2]
        own = Watched(StagingOptions(False, False, False, False))
        checkpoint.async_save(state, tmp_path / "c", async_stager=own).result()
        assert own not in closed
        own.close()


def in_processes(kind: str, folder: str, rank: int) -> None:
    """A rank by itself, since a daemon can't have the process that writes."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
        keeps_old_bytes(("fp8_delayed", "mxfp8", "nvfp4"), kind, folder, process=True)
    except BaseException:
        Path(folder, f"told_{rank}").write_text(traceback.format_exc(), encoding="utf-8")
    os._exit(0)  # the process that writes waits for a word that need not come


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["reused_shared"])
def test_a_save_in_another_process_keeps_what_the_weights_were(kind: str, tmp_path: Path) -> None:
    """As the weight arrives there, over shared memory."""
    context = process_context(PRELOADED)
    ranks = [context.Process(target=in_processes, args=(kind, str(tmp_path), rank)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    try:
        for rank in ranks:
            rank.join(100)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    assert not [path.read_text(encoding="utf-8") for path in tmp_path.glob("told_*")]
    assert [rank.exitcode for rank in ranks] == [0, 0]
