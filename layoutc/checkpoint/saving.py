"""Saving: torch.distributed.checkpoint's files, in a folder that is complete or not there, with checksums of all bytes.

What torch.save writes of a tensor is a zip with a CRC-32 of each record. `.metadata` remembers the CRC-32 of each
zip's directory, and `layoutc.json` that of `.metadata`, so that files that were torn, changed or swapped are found.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from layoutc import __version__
from layoutc.checkpoint.apart import apart, goes_on
from layoutc.checkpoint.reading import directory_crc_of
from layoutc.checkpoint.verdicts import Problem, agree

MANIFEST = "layoutc.json"
INCOMPLETE = ".incomplete"  # how the name of a folder ends that is being written
FORMAT = 1  # of layoutc.json


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
    as they are. folder: on a file system that all ranks see. overwrite: replace what is there, once the new one is
    complete. options: of torch's `save` (planner). Collective. Raises LayoutError on all ranks where the folder exists.
    """
    writer = prepare(folder, overwrite, process_group)
    state_dict_saver.save(state_dict, storage_writer=writer, process_group=process_group, **options)


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
    save that is begun before the last one is done waits for it. A save that is killed leaves no folder.
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
    """The writer of a folder. Raises LayoutError on all ranks where it exists and may not be replaced."""
    path, problems = Path(folder), []
    if path.exists() and not overwrite:
        problems.append(Problem("LayoutError", f"{path} exists: save into another folder, or with overwrite=True"))
    agree(problems, group)
    return Writer(path)


class Writer(FileSystemWriter):
    """torch's writer, which writes beside the folder and renames when all ranks are done. May be pickled."""

    def __init__(self, folder: Path, **options: Any) -> None:
        """options: of FileSystemWriter (thread_count, sync_files)."""
        folder = Path(os.path.abspath(folder))
        self.folder = folder
        super().__init__(folder.with_name(f".{folder.name}{INCOMPLETE}"), overwrite=True, **options)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """As torch's; the folder stays what it was made for."""
        super().reset(None)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As torch's, which would warn of what an earlier save has left beside the folder."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator, before any rank writes: removes what an earlier save that was killed has left."""
        partial = Path(self.path)
        for left in partial.iterdir() if partial.exists() else ():
            left.unlink()
        return super().prepare_global_plan(plans)

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
        partial = Path(self.path)
        held = (partial / ".metadata").read_bytes()
        manifest = {
            "format": FORMAT,
            "layoutc": __version__,
            "torch": torch.__version__,
            "metadata": {"bytes": len(held), "crc32": zlib.crc32(held)},
            "files": {file.name: file.stat().st_size for file in sorted(partial.glob("*.distcp"))},
        }
        with (partial / MANIFEST).open("w", encoding="utf-8") as file:
            json.dump(manifest, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        _publish(partial, self.folder)


def previous(folder: Path) -> Path:
    """Where a checkpoint stands for the moment in which another takes its place."""
    return folder.with_name(f".{folder.name}.previous")


def _publish(partial: Path, folder: Path) -> None:
    """Gives a complete folder its name."""
    sync(partial)
    old = previous(folder)
    if old.exists() and folder.exists():
        shutil.rmtree(old)
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    sync(folder.parent)
    if old.exists():
        shutil.rmtree(old)


def sync(path: Path) -> None:
    """Makes what was written to a file or folder last: until it returns, a crash of the machine may undo it."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
