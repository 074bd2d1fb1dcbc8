"""Saving: writes torch.distributed.checkpoint's files atomically, with checksums of all bytes.

torch.save writes each tensor as a zip with a CRC-32 per record. `.metadata` has the CRC-32 of each zip's directory,
and `layoutc.json` the CRC-32 of `.metadata`, so torn, changed and swapped files are detected.
"""

from __future__ import annotations

import os
import warnings
from concurrent import futures
from itertools import chain
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from layoutc.checkpoint.common import folders
from layoutc.checkpoint.manifest import write_manifest
from layoutc.checkpoint.reading import directory_crc_of
from layoutc.runtime.errors import LayoutError, check_state
from layoutc.runtime.sharding.meeting import meet

_apart: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()  # keyed by the default group
_last: WeakKeyDictionary[dist.ProcessGroup, futures.Future[Any]] = WeakKeyDictionary()  # each group's last save


def save(
    state_dict: dict[str, Any],
    folder: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    process_group: dist.ProcessGroup | None = None,
    **options: Any,
) -> None:
    """Saves like torch.distributed.checkpoint.save, into a folder that appears only when it is complete.

    state_dict: nested dicts of tensors, DTensors and plain values, as from get_state_dict. Quantized tensors are stored
    without conversion. folder: the same on all ranks, on a shared file system; a symbolic link is followed when the
    save begins. overwrite: replace an existing checkpoint once the new one is complete. process_group: the ranks that
    save; default: all. options: those of torch's `save` (planner).

    Collective. Raises LayoutError on all ranks. Before anything is written: if ranks name different folders or do not
    see the same one, if the folder exists, or, with overwrite=True, if it holds anything but a checkpoint. Before the
    folder is renamed into place: if a file that a rank wrote is missing.

    Example:

        >>> model = nn.Sequential(nn.Linear(128, 128, bias=False))
        >>> checkpoint.save({"model": model.state_dict()}, "step_1")
    """
    check_state(state_dict, "save")
    writer = prepare(folder, overwrite, process_group)
    try:
        state_dict_saver.save(state_dict, storage_writer=writer, process_group=process_group, **options)
    except CheckpointException as error:  # a BaseException with a multi-line message
        refused = (cause for _, (cause, _) in sorted(error.failures.items()) if isinstance(cause, LayoutError))
        if (cause := next(refused, None)) is not None:
            raise type(cause)(*cause.args) from error
        raise


def async_save(
    state_dict: dict[str, Any],
    folder: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    process_group: dist.ProcessGroup | None = None,
    **options: Any,
) -> Any:
    """Saves like torch.distributed.checkpoint.async_save; returns its future.

    The state dict is copied to the host before this returns, so the model may change afterwards. Arguments are those of
    `save`. options: async_checkpointer_type (thread or process), planner, async_stager (pinned or shared memory; the
    caller closes it, and may reuse it from torch 2.12 on). process_group: must have a CPU backend, and nothing else may
    use it during the save; default: a gloo group of all ranks that only these saves use.

    A new save waits for one that is still running. A killed save leaves no folder. Raises what `save` does, before it
    returns. If files are missing at the end, the future raises a LayoutError inside torch's CheckpointException.

    Example:

        >>> model = nn.Sequential(nn.Linear(128, 128, bias=False))
        >>> future = checkpoint.async_save({"model": model.state_dict()}, "step_2")
        >>> _ = future.result()
    """
    check_state(state_dict, "async_save")
    group = _group_apart(process_group)
    writer = prepare(folder, overwrite, group)
    # Without a stager, torch stages with the writer, whose zeros_like copies make dense tensors.
    own_stager = options.pop("async_stager", None)
    stager = own_stager or DefaultStager(StagingOptions(False, False, False, False))
    response: Any = state_dict_saver.async_save(
        state_dict, storage_writer=writer, process_group=group, async_stager=stager, **options
    )
    upload = getattr(response, "upload_completion", response)
    if group is not None:
        _last[group] = upload
    if own_stager is None:
        upload.add_done_callback(lambda _: stager.close())
    return response


def _group_apart(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group of a background save: `group`, else a gloo group of all ranks that nothing else uses, made on the
    first call; None without a default group. Collective. Waits for the group's last save, but leaves that save's
    errors to its future.

    All ranks must call a group's collectives in the same order. A save thread that shared its group with training would
    break that order at random, and hang. This can't make a group of fewer ranks: torch.distributed.new_group must be
    called on every rank, or, with use_local_synchronization, equally often on each rank that calls it (torch 2.11,
    2.13).
    """
    if not dist.is_initialized():
        return None
    world = dist.group.WORLD
    assert world is not None  # there is a default group
    if group is None and world not in _apart:
        meet(world)
        _apart[world] = dist.new_group(backend="gloo")
    group = group or _apart[world]
    if (last := _last.get(group)) is not None:
        futures.wait([last])
    return group


def prepare(folder: str | os.PathLike[str], overwrite: bool, group: dist.ProcessGroup | None) -> Writer:
    """The writer for a folder that all ranks agree on. Raises what `folders.agreed` does, on all ranks. Collective."""
    return Writer(folders.agreed(folder, overwrite, group), overwrite)


class Writer(FileSystemWriter):
    """torch's writer, which writes into `folders.incomplete` and renames it when all ranks are done. Can be pickled."""

    def __init__(self, folder: Path, replaces: bool = False, **options: Any) -> None:
        """replaces: whether to replace a checkpoint of that name. options: passed to FileSystemWriter (thread_count,
        sync_files)."""
        self.folder, self.replaces = folder, replaces
        super().__init__(folders.incomplete(folder), overwrite=True, **options)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Like torch's method, but keeps the writer's folder."""
        super().reset(None)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Like torch's method, but without the warning about files left by an earlier save."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return super().prepare_local_plan(plan)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's files, and adds the CRC-32 of each item's directory to its storage info."""
        results = super().write_data(plan, planner).wait()
        for result in results:
            info = result.storage_data
            info.crc32 = directory_crc_of(Path(self.path), info)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, after all ranks: writes .metadata and layoutc.json, and renames the folder."""
        super().finish(metadata, results)
        write_manifest(Path(self.path), metadata, chain.from_iterable(results))
        folders.publish(self.folder, self.replaces)
