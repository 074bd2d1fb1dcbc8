"""Loads Hugging Face safetensors into a model with quantized and sharded weights. Each rank reads only its part."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from layoutc.checkpoint.common import narrowing
from layoutc.checkpoint.common.buffers import made_anew
from layoutc.checkpoint.common.regions import box_of, entries_of, rows_of
from layoutc.checkpoint.common.verdicts import Problem, agree, everywhere, noted, rank_of, size_of
from layoutc.checkpoint.held.sources import BoundSource
from layoutc.checkpoint.held.stored import DTYPES, NAMES, Read, Stack, Stored
from layoutc.checkpoint.held.weights import Scales, record_scale, warn_apart
from layoutc.checkpoint.safetensors import planning
from layoutc.checkpoint.safetensors.beside import warn_left
from layoutc.checkpoint.safetensors.files import Contents, Slices, crc32_of, library, read_folder
from layoutc.checkpoint.safetensors.planning import Entry, Loaded, Rename, Step
from layoutc.checkpoint.safetensors.values import dequantized, read, values_of
from layoutc.ints.rects import Rect
from layoutc.runtime.bindings.fused import joined
from layoutc.runtime.cast.tensor import CastOnGather
from layoutc.runtime.errors import DamagedError, LayoutError, check_model
from layoutc.runtime.facts import Group
from layoutc.runtime.quantize import completing, weights
from layoutc.runtime.quantize.amax import reduce_max
from layoutc.runtime.quantize.block_edges import check_whole_blocks
from layoutc.runtime.sharding import meshes, shards
from layoutc.runtime.torch_private import local_tensor
from layoutc.runtime.weight import operators, stored_form
from layoutc.runtime.weight.tensor import QuantizedTensor, written


@torch.no_grad()
def load_safetensors(
    model: nn.Module,
    folder: str | PathLike[str],
    *,
    rename: Rename | None = None,
    strict: bool = True,
    convert: bool = False,
    files: str | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Loaded:
    """Loads model.safetensors, or the files that model.safetensors.index.json names, into a whole or sharded model.

    Plain values (F32, BF16, F16) are quantized to the same bytes as the whole weight, whatever the cuts; cast-on-gather
    weights store them unchanged. Quantized weights keep their bytes if the layout is the same, both from
    `export_safetensors` and from other checkpoint formats, by the bindings that specs define under `files`. convert:
    dequantize for another layout or a plain parameter; a stack of experts then accepts parts with separate amaxes.
    files: the binding (`deepseek`, or `fp8_block/deepseek`); default: the one that config.json names.

    Each rank reads headers, its share of checksums, and its slices, one parameter at a time. rename: maps a name in the
    model's state dict to the name in the files; for stacks of experts that are separate there, to patterns of their
    parts, `a.{expert}.w1.weight + a.{expert}.w3.weight`. Tied parameters need only one of their names there. Buffers
    that the files lack keep their values, and the result names them. Buffers outside the state dict, e.g. rotary
    frequencies, are recomputed in a transformers model; in other models the result names them. strict: raise for names
    that the files or the model lack. Activation scales, and layers that a transformers model declares as ignored, are
    not loaded; a warning on the first rank names them. Another warning names parameters whose values were rounded
    because their dtype is narrower than the files'; values that would overflow it raise.

    Collective if torch.distributed is initialized: all ranks of `process_group` (default: all) call it.

    Everything is checked before anything is written. If any rank finds a problem, every rank raises it:
    FileNotFoundError without files, DamagedError for truncated or changed files, LayoutError for names, shapes, dtypes
    and layouts that do not fit, ImportError without the safetensors package.

    Example:

        >>> model = nn.Sequential(nn.Linear(128, 128, bias=False))
        >>> layoutc.quantize_(model, "mxfp8")
        ['0.weight']
        >>> checkpoint.export_safetensors(model, "exported")
        ['model.safetensors']
        >>> checkpoint.load_safetensors(model, "exported").missing
        ()
    """
    check_model(model, "load_safetensors")
    problems: list[Problem] = []
    steps: list[Step] = []
    contents, loaded = Contents({}, {}, ""), Loaded((), ())
    unread, rounded, scales = list[str](), list[str](), Scales()
    with Slices() as slices:
        with noted(problems):
            library()
            contents = read_folder(Path(folder))
            theirs = planning.bindings(model, Path(folder), contents, files, rename)
            steps, loaded, unread = planning.plan(model, Path(folder), contents, rename, strict, theirs, problems)
            steps, planned = [], steps
            for step in planned:
                with noted(problems):
                    for source in planning.sources_of(step):
                        slices.open(source.path)
                    step = planning.in_parts(step, slices.read) if convert else step
                    steps.append(step)
                    check(step, convert)
                    _check_single_values(step, slices.read, scales)
                    rounded += rounds(step, slices.read)
        agree(problems, process_group, contents.digest, f"read different files in {folder}")
        with noted(problems):
            _verify(contents, process_group)
        agree(problems, process_group)
        write(steps, slices.read)
    say_rounded(folder, rounded, process_group)
    if rank_of(process_group) == 0:
        warn_left(Path(folder), unread)
        warn_apart(folder, scales)
    return loaded._replace(missing=(*loaded.missing, *made_anew(model)))


# ---------------------------------------------------------------------------------------------------------------- check
def check(step: Step, convert: bool) -> None:
    """Raises LayoutError if the source can't be written into the parameter."""
    name, param, source = step
    local = local_tensor(param)
    if source.shape != tuple(param.shape):
        raise LayoutError(f"{name}: shape {source.shape} in the files, {tuple(param.shape)} in the model")
    if local.is_meta:
        raise LayoutError(f"{name} is on the meta device: call model.to_empty(device=...) first")
    if isinstance(param, DTensor) and any(placement.is_partial() for placement in param.placements):
        raise LayoutError(f"{name} holds partial sums: redistribute it first")
    if not holds(param):
        return
    box = box_of(param, name)
    if isinstance(local, QuantizedTensor):
        local.check_writable()
        if local.transposed:
            raise LayoutError(f"{name} is transposed: load into the weight itself")
    if isinstance(source, Entry):
        if _is_same(local, source):
            _check_bytes(name, local, source, rows_of(source.shape, box))  # type: ignore[arg-type]
            if not completing.lacking(local, source.planes):  # type: ignore[arg-type]
                return
        elif not convert:
            raise LayoutError(_other(name, local, source))
        elif not local.is_floating_point():
            raise LayoutError(f"{name} is {local.dtype}, but a quantized weight only converts to floating point")
    elif not _converts(source.dtype, local):
        raise LayoutError(f"{name}: {_unfit(source, local)}")
    if isinstance(local, QuantizedTensor):
        groups, row_sharding = _sharing(name, param, local)
        check_whole_blocks(local, row_sharding)
        weights.check_out(local.LAYOUT, local, local, None, alone=not groups)


def _check_single_values(step: Step, fetch: Read, scales: Scales) -> None:
    """For other formats, checks derived tensors and planes that have one row for the whole weight, whose values may not
    fit the recipe. Adds the scales that engines join to `scales`."""
    if not isinstance(entry := step.source, Entry):
        return
    for found in entry.found:
        found.check_stated(fetch)
        of_whole = [one for one in found.planes.values() if one.shared or one.parts[0][1].bound.of_matrices]
        for stored, _ in (part for plane in of_whole for part in plane.parts):
            if (group := joined(stored.name, found.bound.binding.fused)) is not None:
                record_scale(scales, group, stored.name, fetch(stored, ()))
    if holds(step.param):
        for plane in (plane for one in (entry, *entry.apart) for plane in one.planes.values()):
            if isinstance(plane, BoundSource) and plane.shared:
                plane.read(tuple(slice(0, size) for size in plane.shape), fetch)


def rounds(step: Step, fetch: Read, decoded: bool = False) -> list[str]:
    """[name and dtypes] if the parameter's dtype rounds values of this rank's part; else []. [] also for quantized
    parameters and dequantized sources. The values to compare are read a second time by the load.

    decoded: the source is dequantized. Raises LayoutError for values that overflow the parameter's dtype.
    """
    name, param, source = step
    local = local_tensor(param)
    held = isinstance(local, QuantizedTensor) and (local.dtype is not torch.float16 or _is_same(local, source))
    if held or not local.is_floating_point() or not holds(param):
        return []
    plain = None if isinstance(source, Entry) or decoded or isinstance(local, QuantizedTensor) else source.dtype
    # Only fp16 has a smaller range than dequantized codes.
    into = local.dtype
    narrower = into is torch.float16 if plain is None else torch.promote_types(DTYPES[plain], into) is not into
    if not narrower:
        return []
    if isinstance(source, Entry):
        values = dequantized(param, local, source, fetch, torch.float32)
    else:
        values = read(source, box_of(param).slices, fetch)
    rounded = narrowing.rounds(name, values, into)
    return [f"{name} ({plain} to {NAMES[into]})"] if rounded and plain is not None else []


def say_rounded(where: str | PathLike[str], names: list[str], group: dist.ProcessGroup | None) -> None:
    """Warns once, on the first rank, of parameters that were rounded on any rank. Collective."""
    every = sorted({name for of_rank in everywhere(names, group) for name in of_rank})
    if rank_of(group) == 0:
        said = f"{where}: values were rounded into the model's dtype: "
        narrowing.warn_of(said, every, ". A model in the files' dtype holds them as they are")


def holds(param: Tensor) -> bool:
    """False for a DTensor whose mesh does not include this rank."""
    return not isinstance(param, DTensor) or param.device_mesh.get_coordinate() is not None


def _converts(dtype: str, local: Tensor) -> bool:
    as_dtype = DTYPES.get(dtype)
    if isinstance(local, QuantizedTensor):
        return as_dtype in weights.FLOATS
    if local.is_floating_point():  # not from 8-bit floats, whose scale is missing
        return {as_dtype, local.dtype} <= {*weights.FLOATS, torch.float64}
    return as_dtype == local.dtype


def _unfit(source: Stored | Stack, local: Tensor) -> str:
    into, hint = f"the model has {local.dtype}".replace("torch.", ""), ""
    if isinstance(local, QuantizedTensor):
        into = f"{local.LAYOUT.name} takes F32, BF16 and F16"
    if source.dtype.startswith(("F8", "F4", "F6", "I", "U")) and local.is_floating_point():
        hint = "; quantized values of other programs are not converted: dequantize the checkpoint first"
    return f"{source.dtype} in the files, but {into}{hint}"


def _check_bytes(name: str, local: QuantizedTensor, source: Entry, runs: list[Rect]) -> None:
    layout = local.LAYOUT
    lacking = [plane for plane in local.store.planes if plane not in source.planes]
    if lacking and all(isinstance(plane, Stored) for plane in source.planes.values()):
        raise LayoutError(
            f"{name}: the files have its {', '.join(source.planes)}, but the model also needs {', '.join(lacking)}"
        )
    if len(runs) > 1 and any(rows.r0 % layout.block_rows or rows.r1 % layout.block_rows for rows in runs):
        raise LayoutError(f"{name} is cut inside blocks of {layout.block_rows} rows on another dim than dim 0")


def _other(name: str, local: Tensor, source: Entry) -> str:
    theirs = source.cls.LAYOUT
    if not isinstance(local, QuantizedTensor):
        kind = f"cast on gather to {local.LAYOUT.name}" if isinstance(local, CastOnGather) else "plain"
        differs = f"the files have it quantized in {theirs.name}, the model has it {kind}"
    else:
        ours = local.LAYOUT
        how = stored_form.difference(stored_form.describe(theirs), stored_form.describe(ours))
        differs = f"layout {theirs.layout_id} in the files, {ours.layout_id} in the model: {how}"
    return f"{name}: {differs}. convert=True dequantizes the files' weight"


def _verify(contents: Contents, group: dist.ProcessGroup | None) -> None:
    """Checks this rank's share of the checksums: one rank of the group checks each. Raises DamagedError."""
    loads = [0] * size_of(group)
    planes = [
        (contents.tensors[f"{name}.{plane}"], entry["crc32"][plane])
        for name, entry in contents.described.items()
        for plane in entry["planes"]
    ]
    for plane, crc32 in sorted(planes, key=lambda one: (one[0].begin - one[0].end, one[0].name)):
        least = loads.index(min(loads))
        loads[least] += plane.end - plane.begin
        if least == rank_of(group) and crc32_of(plane) != crc32:
            raise DamagedError(
                f"{plane.path}: the bytes of {plane.name} are not those that were written (CRC-32 differs); read "
                "another copy of the file"
            )


# ---------------------------------------------------------------------------------------------------------------- write
def _sharing(name: str, param: Tensor, local: QuantizedTensor) -> tuple[list[dist.ProcessGroup], Any]:
    """The groups whose ranks share amaxes with this rank, and the sharding of rows over ranks that may share blocks."""
    if isinstance(param, DTensor):
        return meshes.amax_groups(local.LAYOUT, param, name), shards.row_sharding_of(param, local)
    return shards.amax_groups(local)[0], shards.row_sharding(local)


def _joint_amaxes(steps: list[Step], fetch: Read) -> dict[str, Tensor]:
    """The shared amax of each parameter that is quantized from values and shares one. Collective over their shards."""
    groups, found = dict[str, Group](), dict[Group, Tensor]()
    for step in steps:
        local = local_tensor(step.param)
        group = local.fused if isinstance(local, QuantizedTensor) and holds(step.param) else None
        if group is None or not isinstance(local, QuantizedTensor) or _is_same(local, step.source):
            continue
        values = values_of(step, fetch).to(local.device)
        amax = operators.shared_amax(type(local), weights.as_matrix(values, (local.store.rows, local.store.matrix[1])))
        amax = reduce_max(amax, _sharing(step.name, step.param, local)[0])
        found[group] = torch.maximum(amax, found.get(group, amax).to(amax.device))
        groups[step.name] = group
    return {name: found[group] for name, group in groups.items()}


def _is_same(local: Tensor, source: Stored | Stack | Entry) -> bool:
    """True if the files hold a weight in the model's layout."""
    if not (isinstance(source, Entry) and isinstance(local, QuantizedTensor)):
        return False
    return local.LAYOUT.layout_id == source.cls.LAYOUT.layout_id and bool(source.planes)


def write(steps: list[Step], fetch: Read) -> None:
    """Writes parameters. Collective if shards share amaxes, or blocks that cuts split."""
    amaxes = _joint_amaxes(steps, fetch)
    for step in steps:
        _write(step, fetch, amaxes.get(step.name))


def _write(step: Step, fetch: Read, amax: Tensor | None) -> None:
    """Writes a parameter. amax: the one that it shares with others."""
    name, param, source = step
    if not holds(param):
        return
    local = local_tensor(param).detach()
    if isinstance(source, Entry) and isinstance(local, QuantizedTensor) and _is_same(local, source):
        _write_planes(param, local, source, fetch)
        if completing.lacking(local, source.planes):  # planes that other formats don't store
            groups, row_sharding = _sharing(name, param, local)
            tag = shards.tag(local)
            completing.complete_(local, source.planes, groups=groups, tag=tag, row_sharding=row_sharding)
        return
    values = values_of(step, fetch)
    if isinstance(local, QuantizedTensor):
        # Like copy_, but also for shards that fully_shard did not make.
        groups, row_sharding = _sharing(name, param, local)
        shared = {"group": groups or None, "tag": shards.tag(local), "row_sharding": row_sharding}
        values = values.to(local.device).contiguous()
        weights.quantize(type(local), values, out=local, restart=True, amax=amax, **shared)
    elif isinstance(local, CastOnGather):
        local.plain.copy_(values)
        local._agreed.forget()  # the history of amaxes is unrelated to these values
    else:
        local.copy_(values)


def _write_planes(param: Tensor, local: QuantizedTensor, source: Entry, fetch: Read) -> None:
    """Writes the entries that cover the shard's rows, run by run; shared planes even if the shard has no rows."""
    layout, k, box = local.LAYOUT, param.shape[-1], box_of(param)
    all_rows, runs = [Rect(0, 0, box.first[-1], box.last[-1])], rows_of(source.shape, box)
    for name in (name for name in local.store.planes if name in source.planes):
        plane, stored, into, start = layout.stored[name], source.planes[name], local.entries(name), 0
        for rows in all_rows if plane.rows_per_value is None else runs:
            piece = read(stored, entries_of(plane, stored.shape, rows, k), fetch).view(into.dtype)
            into[start : start + len(piece)].copy_(piece)
            start += len(piece)
    written([local])
