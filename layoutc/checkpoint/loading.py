"""Loading: reads, checks and assembles all bytes on the host before it writes any byte of a live model.

So a failed load changes nothing on any rank. Torch's load reads straight into the model.
"""

from __future__ import annotations

import os
import re
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.stateful import Stateful

from layoutc.checkpoint.assembly import Destination, local_of, requantize
from layoutc.checkpoint.common.folders import INCOMPLETE, previous, resolved
from layoutc.checkpoint.common.verdicts import everywhere, from_first, rank_of, together
from layoutc.checkpoint.items import read_item
from layoutc.checkpoint.manifest import check_manifest
from layoutc.checkpoint.optimizers import Matches, lacking, number, option
from layoutc.checkpoint.reading import METADATA, read_metadata
from layoutc.runtime.errors import DamagedError, LayoutError, check_state
from layoutc.runtime.optim.foreign_states import as_recipe, taken
from layoutc.runtime.torch_private import set_element
from layoutc.runtime.weight.tensor import QuantizedTensor

T = TypeVar("T")
READERS = min(8, os.cpu_count() or 1)  # threads that read and check items


@dataclass
class Loaded:
    """What a rank has read: new values for its tensors, and plain values."""

    tensors: dict[MetadataIndex, Destination] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


def load(
    state_dict: dict[str, Any],
    folder: str | os.PathLike[str],
    *,
    convert: bool = False,
    strict: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Loads a folder that `save` or torch.distributed.checkpoint wrote into the tensors of a state dict.

    state_dict: as for torch.distributed.checkpoint.load, sharded over any number of ranks in any way.
    convert: load plain values into quantized weights (quantized as a whole, with amaxes over all ranks; float64 is
    rounded to float32 first), quantized values into plain weights (dequantized), and one recipe's into another's.
    Without it, LayoutError says what differs. strict: reject checkpoint entries under the state dict's outer keys that
    the state dict lacks. process_group: the ranks that load; default: all.

    A state of torch's, torchao's or Transformer Engine's AdamW loads into layoutc's, and the other way round. A plain
    weight is its own master: it starts the master of a quantized weight, or is written from it. A group keeps the
    options that the checkpoint lacks, and options that it lacks are skipped. Bytes of torchao's states are kept where a
    recipe has their layout.

    Collective. Raises on all ranks, before a live model is written: DamagedError if files are torn, changed, missing or
    swapped, or hold anything but tensors and plain values (nothing in them is run); LayoutError if entries, shapes,
    layouts or cuts do not fit. Host memory holds all new values until they are written.

    Example:

        >>> model = nn.Sequential(nn.Linear(128, 128, bias=False))
        >>> checkpoint.save({"model": model.state_dict()}, "step_3")
        >>> checkpoint.load({"model": model.state_dict()}, "step_3")
    """
    check_state(state_dict, "load")
    path, group = Path(folder), process_group
    states = {key: live.state_dict() if isinstance(live, Stateful) else live for key, live in state_dict.items()}
    metadata, path = from_first(lambda: _metadata(path), group)
    planner = together(lambda: _planned(states, metadata, path, strict, rank_of(group) == 0), group)
    loaded = together(lambda: _read(planner, metadata, path, convert), group)
    mine = [destination.name for destination in loaded.tensors.values() if destination.requantizes]
    collective = {name for names in everywhere(mine, group) for name in names}
    with torch.no_grad():
        together(lambda: _write([one for one in loaded.tensors.values() if one.name not in collective]), group)
        for name, value in planner.state_dict.items():  # in the same order on all ranks, since quantizing is collective
            if name in collective and isinstance(live := as_recipe(local_of(value)), QuantizedTensor):
                requantize(live, [destination for destination in loaded.tensors.values() if destination.name == name])
    for name, value in loaded.values.items():
        planner.put(name, option(name, value, planner.whole[name]))
    for key, live in state_dict.items():
        if isinstance(live, Stateful):
            live.load_state_dict(states[key])
        else:
            state_dict[key] = states[key]


class _Planner(DefaultLoadPlanner):
    """Torch's planner, which decides what to read. `put` sets plain values; no pickle that could run code does."""

    reads: Sequence[ReadItem] = ()  # the items that this rank reads
    whole: dict[str, Any]  # the flattened state dict; `state_dict` is what of it is read
    matches: Matches

    def plan(self, metadata: Metadata) -> None:
        """Decides what to read. Raises ValueError or RuntimeError, which name an entry, if the checkpoint lacks it."""
        self.whole, self.matches = self.state_dict, Matches.of(self.state_dict, self.mappings, metadata)
        self.state_dict, self.metadata = self.matches.planned(self.whole, metadata)
        sources = self.matches.sources
        self.reads = [
            replace(item, storage_index=replace(item.storage_index, fqn=sources[item.dest_index.fqn]))
            if item.dest_index.fqn in sources
            else item
            for item in self.create_local_plan().items
        ]

    def put(self, name: str, value: Any) -> None:
        """Sets a plain value in the state dict."""
        set_element(self.original_state_dict, self.mappings[name], value)


def _metadata(folder: Path) -> tuple[Metadata, Path]:
    """The folder's checked metadata, and the folder. Runs on one rank, since a large model's metadata takes seconds."""
    folder = resolved(folder)
    if not folder.exists() and previous(folder).exists():
        warnings.warn(f"a save stopped while it replaced {folder}: loading {previous(folder)} instead", stacklevel=4)
        folder = previous(folder)
    if folder.name.endswith(INCOMPLETE):
        raise LayoutError(f"{folder} is from a save that did not finish: load an earlier checkpoint, and delete it")
    check_manifest(folder)
    return read_metadata(folder), folder


def _planned(states: dict[str, Any], metadata: Metadata, folder: Path, strict: bool, is_first: bool) -> _Planner:
    """Plans what this rank reads. Raises LayoutError if the checkpoint does not fit the state dict."""
    planner = _Planner()
    try:
        planner.set_up_planner(states, metadata, is_first)
        planner.plan(metadata)
    except (ValueError, RuntimeError) as error:  # torch's message names a key or a shape
        missing = re.fullmatch(r"Missing key in checkpoint state_dict: (.*)\.", str(error))
        advice = lacking(missing[1]) if missing else ""
        raise LayoutError(
            f"{folder} does not fit the state dict: {str(error).rstrip('.') if advice else error}{advice}"
        ) from error
    if strict:
        _check_unexpected(states, planner, metadata)
    return planner


def _check_unexpected(states: dict[str, Any], planner: _Planner, metadata: Metadata) -> None:
    """Raises LayoutError for checkpoint entries under the state dict's outer keys that the state dict lacks."""
    nested = {key for key, value in states.items() if isinstance(value, dict | list | tuple)}
    paths = metadata.planner_data or {}
    known = {*planner.whole, *planner.matches.sources.values(), *planner.matches.extra}
    extra = [
        name
        for name in metadata.state_dict_metadata
        if name not in known and (not nested or str(paths.get(name, (name,))[0]) in nested)
    ]
    if extra:
        more = ", ..." if len(extra) > 3 else ""
        raise LayoutError(
            f"the checkpoint has {', '.join(extra[:3])}{more}, which the state dict lacks ({len(extra)} entries); "
            "pass strict=False to skip them"
        )


def _read(planner: _Planner, metadata: Metadata, folder: Path, convert: bool) -> Loaded:
    """Reads each planned item once, checks it and assembles the new values."""
    loaded, wanted = Loaded(), defaultdict(list)
    for item in planner.reads:
        name = item.dest_index.fqn
        if item.type == LoadItemType.BYTE_IO and isinstance(planner.state_dict[name], Tensor):
            raise LayoutError(f"{name} is a tensor in the state dict, but a plain value in the checkpoint")
        wanted[item.storage_index].append(item)
        if item.type != LoadItemType.BYTE_IO and item.dest_index not in loaded.tensors:
            live = planner.lookup_tensor(item.dest_index).detach()
            loaded.tensors[item.dest_index] = Destination(item.dest_index.fqn, live, convert)
    storage = metadata.storage_data
    missing = [index.fqn for index in wanted if index not in storage]
    if missing:
        raise DamagedError(f"{folder / '.metadata'} does not say where {missing[0]} is stored")
    order = sorted(wanted, key=lambda index: (storage[index].relative_path, storage[index].offset))

    def read(index: MetadataIndex) -> Any:
        is_tensor = wanted[index][0].type != LoadItemType.BYTE_IO
        return read_item(folder, index.fqn, storage[index], is_tensor)

    for index, value in _ahead(read, order):
        for item in wanted[index]:
            _take(loaded, item, value, metadata)
    for destination in loaded.tensors.values():
        destination.check_complete()
    for name in planner.matches.numbers:
        found = [loaded.tensors.pop(index).value for index in list(loaded.tensors) if index.fqn == name]
        value = found[0] if found else loaded.values[name]
        loaded.values[name] = number(name, value, planner.whole[name])
    return loaded


def _ahead(work: Callable[[T], Any], todo: Sequence[T]) -> Iterator[tuple[T, Any]]:
    """Yields each item with its result, in order. Threads work a bounded number of items ahead, to limit memory."""
    with ThreadPoolExecutor(READERS) as pool:
        under_way: deque[tuple[T, Future[Any]]] = deque()
        for one in todo:
            under_way.append((one, pool.submit(work, one)))
            if len(under_way) > 2 * READERS:
                first, future = under_way.popleft()
                yield first, future.result()
        for first, future in under_way:
            yield first, future.result()


def _write(new: Sequence[Destination]) -> None:
    """Writes the new values that need no collective. Raises LayoutError if the device fails."""
    for one in new:
        try:
            one.commit()
        except Exception as error:
            raise LayoutError(
                f"{one.name} could not be written after other weights were: don't use the model before a load "
                f"succeeds ({type(error).__name__}: {error})"
            ) from error


def _take(loaded: Loaded, item: ReadItem, value: Any, metadata: Metadata) -> None:
    """Passes an item, or its requested part, to its destination."""
    name = item.dest_index.fqn
    if item.type == LoadItemType.BYTE_IO:
        loaded.values[name] = value
        return
    chunks: Any = metadata.state_dict_metadata[item.storage_index.fqn]
    chunk = next((c for c in chunks.chunks if c.offsets == item.storage_index.offset), None)
    if not isinstance(value, Tensor) or chunk is None or value.shape != chunk.sizes:
        stored = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise DamagedError(
            f"{name}: {stored} is stored in place of a piece of shape {chunk and tuple(chunk.sizes)}; read another "
            "copy of the files"
        )
    if (dtype := chunks.properties.dtype) != value.dtype:
        raise DamagedError(f"{name}: {value.dtype} is stored, but {METADATA} says {dtype}")
    whole, target = value.numel(), loaded.tensors[item.dest_index]
    value = value if type(value) is type(target.live) else taken(value)  # which may round
    try:
        for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            if (offset, length) != (0, value.shape[dim]):
                value = value.narrow(dim, offset, length)
        # Copy if the view would keep much more memory alive than it covers.
        value = value.clone() if 5 * value.numel() < 4 * whole else value
        target.take(value, item.dest_offsets, item.lengths)
    except LayoutError as error:
        raise error if str(error).startswith(name) else type(error)(f"{name}: {error}") from error
