"""Converts a folder of safetensors between bindings, or to plain values, with one weight in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layoutc.checkpoint.bindings import source_configs
from layoutc.checkpoint.bindings.configs import KEYS, OF_STORAGE
from layoutc.checkpoint.bindings.names import tensor_name
from layoutc.checkpoint.bindings.source_configs import Modules
from layoutc.checkpoint.common.folders import copy_companions
from layoutc.checkpoint.common.narrowing import check_finite
from layoutc.checkpoint.held import undecoded
from layoutc.checkpoint.held.stored import OF_OTHERS, Stored
from layoutc.checkpoint.held.weights import Held, Noted, made, warn_apart, warn_rounded
from layoutc.checkpoint.safetensors import choosing, recognize, writing
from layoutc.checkpoint.safetensors.beside import OF_ACTIVATIONS
from layoutc.checkpoint.safetensors.bound import NO_TEXTS, Found, held, named_in, weights_in
from layoutc.checkpoint.safetensors.choosing import Fit
from layoutc.checkpoint.safetensors.files import Contents, Slices, bytes_of, library, read_folder
from layoutc.checkpoint.safetensors.kept import KeptIn, kept_in
from layoutc.checkpoint.safetensors.recognize import Bound
from layoutc.checkpoint.safetensors.writing import Planned
from layoutc.runtime.bindings.fused import groups_of
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.facts import Facts
from layoutc.runtime.quantize import weights
from layoutc.runtime.weight import operators


class Converted(NamedTuple):
    """The files that a conversion wrote, the weights that are quantized in them, and the tensors that it left out.
    no_config: why there is no config.json, if one could not be made. dequantized: weights that are plain now.
    copied: companion files, e.g. the tokenizer's."""

    files: tuple[str, ...]
    quantized: tuple[str, ...]
    left: tuple[str, ...]
    no_config: str = ""
    dequantized: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()


class Job(NamedTuple):
    """A weight or a plain tensor, and the tensors that are written for it."""

    name: str
    source: Found | Stored
    into: Bound | None  # None: plain values
    tensors: tuple[Planned, ...]
    held: tuple[Held, ...] = ()
    kept: KeptIn | None = None

    @property
    def nbytes(self) -> int:
        """The job's bytes in a file."""
        return sum(one.nbytes for one in self.tensors)

    @property
    def quantizes(self) -> bool:
        """True if values are quantized; False if they stay plain, or codes are kept."""
        ids = [one.layout_id for one in (getattr(self.source, "bound", None), self.into) if one is not None]
        return self.into is not None and len({*ids}) == len(ids)


class Amaxes:
    """The shared amaxes of weights that are quantized and that engines join. Computed at a group's first weight."""

    def __init__(self, jobs: Sequence[Job], values: Callable[[Job], Tensor]) -> None:
        self._values, self._found = values, dict[str, Tensor]()
        own = {job.name: job for job in jobs if job.quantizes and job.into and job.into.cls.LAYOUT.shares_amax}
        fused = next((job.into.binding.fused for job in own.values() if job.into), ())
        groups = groups_of(own, fused).items()
        self._groups = {name: (group, [own[one] for one in names]) for group, names in groups for name in names}

    def of(self, job: Job) -> Tensor | None:
        """The shared amax of a weight's group; None if the weight shares none. Reads all weights of the group."""
        group, members = self._groups.get(job.name, ("", []))
        for one in () if group in self._found else members:
            assert one.into is not None
            amax = operators.shared_amax(one.into.cls, self._values(one))
            self._found[group] = amax if group not in self._found else torch.maximum(amax, self._found[group])
        return self._found.get(group)


@torch.no_grad()
def convert_safetensors(
    source: str | PathLike[str],
    folder: str | PathLike[str],
    *,
    files: str | None = None,
    dtype: torch.dtype | str | None = None,
    match: Sequence[str] = (),
    source_files: str | None = None,
    max_shard_bytes: int = 5 * 2**30,
) -> Converted:
    """Rewrites a folder of safetensors in another checkpoint format, in one process, without a model.

    files: the binding to write, e.g. `mxfp8/compressed_tensors`; `compressed_tensors` alone suffices if only one recipe
    has it, or the source's recipe does. dtype: dequantize instead, to this dtype (torch.bfloat16 or its name).
    Weights that both bindings store identically keep their bytes. Others are dequantized and requantized; those that
    engines fuse (the binding's `fused`) share an amax. match: fnmatch patterns for names of plain 2-D tensors to
    quantize too. Other plain tensors are copied. source_files: the source's binding; default: the one that its
    config.json names. max_shard_bytes: as for `export_safetensors`.

    Formats with quantized scales (`bitsandbytes_double`) round them, and a warning says by how much; from the same
    binding, codes and texts are kept. Stacks of experts are copied or dequantized, but not moved to another binding,
    since formats define stacks differently. If the binding stays the same, quantization_config and activation scales
    are kept; else they are left out, and the result names them. Small files are copied: tokenizer, templates.

    Raises FileExistsError if the folder is not empty, FileNotFoundError and DamagedError like `load_safetensors`, and
    LayoutError or ValueError, all before anything is written.

    Example:

        >>> model = nn.Sequential(nn.Linear(128, 128, bias=False))
        >>> layoutc.quantize_(model, "fp8_block")
        ['0.weight']
        >>> checkpoint.export_safetensors(model, "fp8", files="deepseek")
        ['model.safetensors']
        >>> result = checkpoint.convert_safetensors("fp8", "bf16", dtype="bfloat16")
    """
    to = dtype_of(dtype) if dtype is not None else None
    if (files is None) == (dtype is None):
        raise ValueError("pass files= for quantized weights, or dtype= for plain ones")
    if dtype is not None and match:
        raise ValueError("match= goes with files=")
    library()
    path, out = Path(source), Path(folder)
    writing.check_new(out, "convert")
    contents, every = read_folder(path), recognize.installed()
    named = recognize.chosen(files, every) if files is not None else []
    found = _quantized(path, contents, every, source_files, named)
    into = choosing.one_of(named, {weight.bound.layout_id for weight in found.values()}) if named else None
    slices, noted = Slices(), Noted([], {})
    _check_decoded(path, contents, found, every)
    if into is not None and not found and not match:
        raise LayoutError(
            f"{path} holds no quantized weight, and nothing says which of its plain ones to quantize: name them with "
            "match= (--match), as in --match '*_proj.weight'"
        )
    config = recognize.config_in(path)
    before = recognize.quantization_of(config)
    goes_on = (
        into is not None
        and source_configs.goes_on([into.binding], before)
        and all(weight.bound.binding.config == into.binding.config for weight in found.values())
    )
    with slices:
        jobs = _jobs(contents, found, into, to, match, slices, goes_on)
    amaxes = Amaxes(jobs, lambda job: _values(job, slices, torch.float32))
    split = writing.split_into_files(jobs, max_shard_bytes)
    quantization = dict[str, Any]()
    with writing.new_folder(out) as partly:
        with slices:
            for name, some in split.items():
                tensors = (tensor for job in some for tensor in _made(job, slices, to, amaxes, noted))
                writing.write_streamed(partly / name, (one for job in some for one in job.tensors), tensors)
        if into is not None:
            now = Modules(
                *(_modules(job.name for job in jobs if which(job)) for which in (_is_plain, lambda job: job.into))
            )
            was = Modules(_modules(contents.tensors.keys() - found.keys()), _modules(found))
            quantization = writing.quantization_of([into], before if goes_on else {}, now, was)
            if all(weight.bound.layout_id == into.layout_id for weight in found.values()):
                quantization |= {key: before[key] for key in OF_STORAGE if key in before and key in quantization}
        if into is not None or config.keys() - {*KEYS}:
            writing.write_config(partly, config, quantization)
        copied = copy_companions(path, partly)
        writing.finish_folder(
            partly, out, {name: [one for job in some for one in job.tensors] for name, some in split.items()}
        )
    warn_rounded(f"files {files!r}", noted.errors)
    warn_apart(out, noted.scales)
    taken = {tensor.name for job in jobs for tensor in job.tensors}
    taken |= {stored.name for weight in found.values() for one in weight.planes.values() for stored, _ in one.parts}
    held = {tensor for weight in found.values() for tensor in weight.tensors} | _beside(contents, found)
    left = sorted(held & contents.tensors.keys() - taken)
    quantized = tuple(job.name for job in jobs if job.into is not None)
    return Converted(tuple(split), quantized, tuple(left), "", () if into else tuple(found), copied)


def dtype_of(dtype: torch.dtype | str) -> torch.dtype:
    """A dtype for plain values, from a torch.dtype or its name. Raises ValueError for any other dtype."""
    found = {str(one).removeprefix("torch."): one for one in weights.FLOATS}.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise ValueError(f"dtype= must be float32, bfloat16 or float16, not {dtype}")
    return found


# ----------------------------------------------------------------------------------------------------------------- plan
def _quantized(
    path: Path, contents: Contents, every: Sequence[Bound], files: str | None, into: Sequence[Bound]
) -> dict[str, Found]:
    """The source's quantized weights, by their bindings; the recipes of `into` are tried first. Raises LayoutError."""
    if contents.described:
        raise LayoutError(f"{path} was written by export_safetensors: load it into a model, and export that")
    if not (told := choosing.told(path, files, every, contents.tensors)):
        return {}
    choosing.check_holds(path, files, told, contents.tensors)
    fits, refused, by = list[Fit](), list[tuple[LayoutError, Fit]](), dict[str, dict[str, Found]]()
    targets = {one.layout_id for one in into}
    for one in sorted(told, key=lambda one: one.layout_id not in targets):  # prefer the one that keeps the bytes
        try:
            found = weights_in(one, contents.tensors, told)
        except LayoutError as error:
            refused.append((error, Fit(one, tuple(named_in(one, contents.tensors, told)))))
            continue
        by[one.label] = found
        fits += [Fit(one, tuple(found))] if found else []
    choosing.check_all_fit(fits, refused)
    chosen = dict[str, Found]()
    for group in choosing.alternatives(fits):
        choosing.check_alike([fit.bound for fit in group], str(path), "source_files= (--from)")
        chosen |= by[group[0].bound.label]
    return chosen


def _check_decoded(path: Path, contents: Contents, found: Mapping[str, Found], every: Sequence[Bound]) -> None:
    """Raises LayoutError if a folder has codes that belong to none of the found weights."""
    known = {one for weight in found.values() for one in weight.tensors}
    left = undecoded.undecoded(contents.tensors, known)
    others = {name: one for name, one in contents.tensors.items() if name not in known}
    fit = sorted({one.label for one in choosing.holding(every, others)}) if left else []
    instead = "No installed recipe has tensors of such names and dtypes together"
    if fit:
        instead = f"Such names and dtypes have {', '.join(fit)}: pass source_files= (--from) one of them"
    undecoded.refuse(str(path), left, instead)


def _jobs(
    contents: Contents,
    found: Mapping[str, Found],
    into: Bound | None,
    dtype: torch.dtype | None,
    match: Sequence[str],
    slices: Slices,
    goes_on: bool,
) -> list[Job]:
    """The jobs, sorted by name. Raises LayoutError for weights that the target can't hold."""
    of_weights = {tensor for weight in found.values() for tensor in weight.tensors}
    beside = _beside(contents, found)
    of_weights = of_weights - beside if goes_on else of_weights | beside
    for weight in found.values():
        weight.check_stated(slices.read)
    jobs = [_weight(name, weight, weight.shape, into, dtype, slices) for name, weight in found.items()]
    for name, stored in contents.tensors.items():
        if name in of_weights:
            continue
        if stored.dtype not in OF_OTHERS:  # not an operand of products: copy as bytes
            jobs.append(Job(name, stored, None, (writing.copy_of(name, stored),)))
            continue
        facts = Facts(stored.shape, OF_OTHERS[stored.dtype])
        chosen = into is not None and any(fnmatchcase(name, pattern) for pattern in match)
        if chosen and (len(facts.shape) != 2 or facts.dtype not in weights.FLOATS):
            raise LayoutError(
                f"{name} is {stored.dtype} of {list(stored.shape)}: `match` takes F32, BF16, F16 of two dims"
            )
        if chosen:
            jobs.append(_weight(name, stored, stored.shape, into, dtype, slices))
        else:
            jobs.append(Job(name, stored, None, (Planned(name, facts),)))
    if unused := [pattern for pattern in match if not any(fnmatchcase(job.name, pattern) for job in jobs)]:
        raise LayoutError(f"match= chooses nothing: no tensor is named like {unused[0]!r}")
    taken: dict[str, str] = {}
    for job in jobs:
        for tensor in job.tensors:
            if tensor.name in taken:
                raise LayoutError(f"{job.name} and {taken[tensor.name]} would both be named {tensor.name}")
            taken[tensor.name] = job.name
    return sorted(jobs, key=lambda job: job.name)


def _weight(
    name: str,
    source: Found | Stored,
    shape: tuple[int, ...],
    into: Bound | None,
    dtype: torch.dtype | None,
    slices: Slices,
) -> Job:
    if into is None:
        assert dtype is not None
        return Job(name, source, None, (Planned(name, Facts(shape, dtype)),))
    if isinstance(source, Found) and source.bound.is_alike(into):
        into = source.bound  # another recipe, but identical files
    if len(shape) > 2 and not (isinstance(source, Found) and source.bound.binding.planes == into.binding.planes):
        raise LayoutError(
            f"{name} is a stack of experts, and layoutc knows no other binding that holds it alike: load and export it"
        )
    into.check_shape(shape, name)
    alone = into.without_parts()
    same = isinstance(source, Found) and source.bound.binding == alone.binding
    kept = kept_in(source, slices.read) if isinstance(source, Found) and same else None
    like = dict[str, Stored]()
    if isinstance(source, Found) and source.bound.layout_id == into.layout_id:
        named = {plane: tensor_name(into.binding.planes[plane].name, name) for plane in source.planes}
        like = {named[plane]: one.parts[0][0] for plane, one in source.planes.items() if not one.meanings}
    if not same:  # programs differ in the dims of single values
        like = {tensor: one._replace(shape=(0,)) for tensor, one in like.items()}
    tensors = held(name, shape, alone, kept.texts if kept else NO_TEXTS, like, kept.following if kept else None)
    planned = tuple(Planned(one.name, one.facts, one.may_be_shorter) for one in tensors)
    return Job(name, source, into, planned, tensors, kept)


def _beside(contents: Contents, found: Mapping[str, Found]) -> set[str]:
    """Activation scales, other unread tensors, and column orders of quantized weights in a folder."""
    unread = {name for weight in found.values() for name in weight.unread}
    unread |= {one.name for weight in found.values() for one, _ in weight.stated if one.may_be_unset}
    return {name for name in contents.tensors if found and (name in unread or OF_ACTIVATIONS.search(name))}


def _is_plain(job: Job) -> bool:
    """Guesses from name and dims whether a plain tensor is a linear weight: files don't say. Extra names do no harm."""
    shape, name = job.tensors[0].facts.shape, job.name
    matrix = isinstance(job.source, Stored) and len(shape) == 2 and name.endswith(".weight")
    return job.into is None and matrix and "norm" not in name and "embed" not in name


def _modules(names: Iterable[str]) -> list[str]:
    return [name.removesuffix(".weight") for name in names]


# ---------------------------------------------------------------------------------------------------------------- write
def _made(
    job: Job, slices: Slices, dtype: torch.dtype | None, amaxes: Amaxes, noted: Noted
) -> Iterator[tuple[str, Tensor]]:
    """A job's tensors."""
    if isinstance(job.source, Stored) and job.source.dtype not in OF_OTHERS:
        yield job.name, bytes_of(job.source)
    elif job.quantizes:
        assert job.into is not None
        values, first = _values(job, slices, torch.float32).contiguous(), next(iter(job.into.cls.LAYOUT.sources))
        quantized = weights.quantize(job.into.cls, values, orientations=(first,), amax=amaxes.of(job))
        yield from made(job.held, quantized.planes(), job.kept, noted)
    elif job.into is not None:
        assert isinstance(job.source, Found)
        yield from made(job.held, _stored(job.source, slices), job.kept, noted)
    else:
        values = _values(job, slices, dtype)
        if isinstance(job.source, Found):
            values = check_finite(job.name, values, partial(_values, job, slices, torch.float32))
        yield job.name, values


def _values(job: Job, slices: Slices, dtype: torch.dtype | None) -> Tensor:
    """A plain tensor as is, or a quantized weight dequantized to this dtype."""
    if isinstance(job.source, Stored):
        return slices.read(job.source, ())
    assert dtype is not None
    return job.source.values(_stored(job.source, slices), dtype)


def _stored(source: Found, slices: Slices) -> dict[str, Tensor]:
    return {name: one.read(tuple(slice(0, n) for n in one.shape), slices.read) for name, one in source.planes.items()}
