"""Saving: torch.distributed.checkpoint's files, in a folder that is complete or not there, with checksums of all bytes.

What torch.save writes of a tensor is a zip with a CRC-32 of each record. `.metadata` remembers the CRC-32 of each
zip's directory, and `layoutc.json` that of `.metadata`, so that files that were torn, changed or swapped are found.
"""

from __future__ import annotations

import os
import warnings
from itertools import chain
from pathlib import Path
from typing import Any

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
from layoutc.checkpoint.process_groups import apart, goes_on
from layoutc.checkpoint.reading import directory_crc_of
from layoutc.runtime.errors import LayoutError


def save(
    state_dict: dict[str, Any],
    folder: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    process_group: dist.ProcessGroup | None = None,
    **options: Any,
) -> None:
    """Saves as torch.distributed.checkpoint.save does, into a folder that appears when it is complete.

    state_dict: nested dicts of tensors, DTensors and plain values, as from get_state_dict. Quantized tensors are stored
    as they are. folder: the same on all ranks, on a file system that all of them see; a symbolic link is the folder to
    which it leads when the save begins. overwrite: replace the checkpoint that is there, once the new one is complete.
    options: of torch's `save` (planner).

    Collective. Raises LayoutError on all ranks, before anything is written, where they name different folders or do not
    see the same one, where the folder exists, and with overwrite=True where it holds anything but a checkpoint; and
    before the folder has its name, where not everything is there that the ranks have written.
    """
    writer = prepare(folder, overwrite, process_group)
    try:
        state_dict_saver.save(state_dict, storage_writer=writer, process_group=process_group, **options)
    except CheckpointException as error:  # no Exception, and of many lines
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
    """Saves as torch.distributed.checkpoint.async_save does, and returns what it returns: a future.

    The state dict is copied to the host before this returns, so the model may be changed. Arguments as for `save`;
    options: async_checkpointer_type (thread or process), async_stager (pinned or shared memory; it may be used again
    from torch 2.12 on, and is its owner's to close), planner. process_group: one with a CPU backend, that nothing else
    uses meanwhile; by default a gloo group of all ranks is made for these saves, so that training may use any other. A
    save that is begun before the last one is done waits for it. A save that is killed leaves no folder. Raises what
    `save` does, at once or, where files are missing in the end, inside of torch's CheckpointException from the future.
    """
    group = apart(process_group)
    writer = prepare(folder, overwrite, group)
    # Not the writer itself, which torch would take for the stager that copies as zeros_like does: to dense tensors.
    given = options.pop("async_stager", None)
    stager = given or DefaultStager(StagingOptions(False, False, False, False))
    response: Any = state_dict_saver.async_save(
        state_dict, storage_writer=writer, process_group=group, async_stager=stager, **options
    )
    upload = getattr(response, "upload_completion", response)
    goes_on(group, upload)
    if given is None:
        upload.add_done_callback(lambda _: stager.close())
    return response


def prepare(folder: str | os.PathLike[str], overwrite: bool, group: dist.ProcessGroup | None) -> Writer:
    """The writer of a folder, on which all ranks agree. Raises on all ranks what `folders.agreed` does. Collective."""
    return Writer(folders.agreed(folder, overwrite, group), overwrite)


class Writer(FileSystemWriter):
    """torch's writer, which writes beside the folder and renames when all ranks are done. May be pickled."""

    def __init__(self, folder: Path, replaces: bool = False, **options: Any) -> None:
        """replaces: a checkpoint that has the folder's name by then. options: of FileSystemWriter (thread_count,
        sync_files)."""
        self.folder, self.replaces = folder, replaces
        super().__init__(folders.incomplete(folder), overwrite=True, **options)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """As torch's; the folder stays what it was made for."""
        super().reset(None)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As torch's, which would warn of what an earlier save has left beside the folder."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return super().prepare_local_plan(plan)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's files; to where each item lies it adds the CRC-32 of the item's directory."""
        results = super().write_data(plan, planner).wait()
        for result in results:
            info = result.storage_data
            info.crc32 = directory_crc_of(Path(self.path), info)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, when all ranks have written: .metadata, layoutc.json, and the folder's name."""
        super().finish(metadata, results)
        write_manifest(Path(self.path), metadata, chain.from_iterable(results))
        folders.publish(self.folder, self.replaces)
