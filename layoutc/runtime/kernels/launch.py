"""The host's side of a launch: when kernels can run, which planes they write, how many programs they take."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache, reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

from layoutc.ints.sizes import cdiv
from layoutc.runtime.facts import Facts, Layout
from layoutc.runtime.streams import capturing

Out = Mapping[str, Tensor] | None
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
WIDE = 16  # threads read 16 bytes at a time only if Triton knows that 16 divides strides and sizes


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def usable(x: Tensor, dtype: torch.dtype | None = None) -> bool:
    """True if kernels can replace the reference: for a plain, non-empty tensor on a card, with Triton installed.

    dtype: of the written values.
    """
    plain = type(x) is Tensor and x.is_cuda and (dtype is None or dtype in FLOATS)
    return plain and x.numel() > 0 and _has_triton()


def level_of(capability: tuple[int, int]) -> int:
    """Which conversions a card of a compute capability has: 0 for none; 90 to fp8; 100 also to e2m1, e2m3, e3m2, e8m0.

    Cards of 12.0 have all of them too, but kernels were never compiled for these.
    """
    return 100 if capability[0] == 10 else 90 if capability >= (8, 9) else 0


_levels: dict[torch.device, int] = {}


def hardware(device: torch.device) -> int:
    """The level of conversions that kernels leave to a device: level_of for a card, 0 for any other device.

    Level 100 is verified: once per process, the first call for a device compares its conversions with integer
    arithmetic. If any differs, the call warns with RuntimeWarning, and the level is 90. All levels give the same bytes.
    """
    level = _levels.get(device)
    return _find_level(device) if level is None else level


def _find_level(device: torch.device) -> int:
    level = level_of(torch.cuda.get_device_capability(device)) if device.type == "cuda" else 0
    if level == 100:
        if capturing(device):
            return 90  # a capture can't wait for results; a later call verifies
        from layoutc.runtime.kernels import conversion_checks

        if differing := conversion_checks.differing(device, conversion_checks.COMPARISONS):
            level = 90
            name, conversions = torch.cuda.get_device_name(device), ", ".join(differing)
            warnings.warn(
                f"{name}: the card's conversions {conversions} give wrong bytes; kernels will use only those that "
                "compute capability 9.0 has, and will be slower",
                RuntimeWarning,
                stacklevel=3,
            )
    return _levels.setdefault(device, level)


def in_runs(x: Tensor) -> Tensor:
    """A matrix that kernels can read: its rows or its columns are contiguous. Others are copied.

    Reading others would waste most of each sector, and the ptxas of Triton 3.6 and 3.7 crashes on some kernels with two
    unknown strides, such as 0 and 0 of a sum's gradient.
    """
    return x if 1 in x.stride() else x.clone(memory_format=torch.contiguous_format)


def in_rows(x: Tensor) -> Tensor:
    """A matrix with rows of adjacent values from multiples of 16 on, as kernels that transpose codes read; else a copy.

    If columns are runs, two launches of such a kernel (fp8_current) gave different bytes (H200, Triton 3.6). If threads
    read 2 or 4 bytes of a row at a time, codes or scales were wrong (fp8_block, fp8_current, nvfp4_gradient): ptxas of
    CUDA 12.8 and 12.9 mixes up registers, but not with --opt-level 0.
    """
    is_read = x.stride(1) == 1 and x.data_ptr() % 16 == 0 and (x.stride(0) % WIDE == 0 or x.is_contiguous())
    return x if is_read else x.clone(memory_format=torch.contiguous_format)


def all_writable(outs: Sequence[Mapping[str, Tensor]], device: torch.device) -> bool:
    """True if kernels can write into all these planes: contiguous, aligned to 4 bytes, on the device."""
    planes = [plane for out in outs for plane in out.values()]
    words = reduce(or_, map(Tensor.data_ptr, planes), 0) % 4 == 0
    return words and all(map(Tensor.is_contiguous, planes)) and all(plane.device == device for plane in planes)


def readable(planes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Planes that kernels can read: contiguous and aligned to 4 bytes. Others are copied."""
    return {
        name: plane if is_readable(plane) else plane.clone(memory_format=torch.contiguous_format)
        for name, plane in planes.items()
    }


def is_readable(plane: Tensor) -> bool:
    """True for a contiguous plane that begins at a multiple of 4 bytes."""
    return plane.is_contiguous() and plane.data_ptr() % 4 == 0


@cache
def registers(device: torch.device, most: int | None) -> int | None:
    """The cap on a thread's registers on a device: `most` on cards of compute capability 9.0, where it was measured.

    None elsewhere: no cap.
    """
    return most if device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0) else None


def planes(
    layout: Layout, m: int, k: int, orientations: tuple[str, ...], device: torch.device, out: Out = None
) -> dict[str, Tensor]:
    """The planes of orientations for a kernel to write: those of `out`, or new ones. Raises as checked_planes."""
    facts = plane_facts(layout, m, k, orientations)
    return new(facts, device) if out is None else checked_planes(layout, facts, out)


def new(facts: Mapping[str, Facts], device: torch.device) -> dict[str, Tensor]:
    """New, uninitialized tensors."""
    return {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in facts.items()}


@lru_cache(maxsize=4096)
def plane_facts(layout: Layout, m: int, k: int, orientations: tuple[str, ...]) -> dict[str, Facts]:
    """The planes that a kernel writes for orientations of an (m, k) weight: name -> shape and dtype.

    Raises ValueError for a shape that the recipe does not take.
    """
    layout.check_shape((m, k), "x")
    return layout.written(m, k, orientations)


def check_planes(layout: Layout, planes: Mapping[str, Tensor], m: int, k: int) -> None:
    """Raises ValueError unless the recipe takes (m, k), and planes have the shapes and dtypes of such a weight."""
    facts = _stored_facts(layout, m, k)
    for name, plane in planes.items():
        if name in facts and (plane.shape != facts[name].shape or plane.dtype != facts[name].dtype):
            shape, dtype = facts[name]
            raise ValueError(
                f"{layout.name}: {name} of a weight of ({m}, {k}) is {dtype} of shape {shape}, not {plane.dtype} of "
                f"shape {tuple(plane.shape)}"
            )


@lru_cache(maxsize=4096)
def _stored_facts(layout: Layout, m: int, k: int) -> dict[str, Facts]:
    """The planes of an (m, k) weight, without the amax, which is never laid out."""
    layout.check_shape((m, k), "planes")
    return {name: facts for name, facts in layout.planes(m, k).items() if name != "amax"}


def checked_planes(layout: Layout, facts: Mapping[str, Facts], out: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The planes of `out` that a kernel writes. Raises ValueError for another shape or dtype, or a wrong alignment."""
    written = {name: out[name] for name in facts}
    for name, plane in written.items():
        shape, dtype = facts[name]
        if plane.shape != shape or plane.dtype != dtype or not is_readable(plane):
            raise ValueError(
                f"{layout.name}: {name} must be contiguous {dtype} of shape {shape}, at a multiple of 4 bytes"
            )
    return written


def template(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor without memory, for torch.empty_like, which takes half of torch.empty's host time. It is cached, so
    memory would be held, even that of a CUDA graph's pool."""
    with torch.inference_mode(False):
        made = torch.empty(tuple(shape), dtype=dtype, device=device)
    made.untyped_storage().resize_(0)
    return made


Like = tuple[Any, ...]  # all that a launch for buffers depends on, except values; ends in orientations, swizzled


def quantized_like(x: Tensor, amax: Tensor | None, orientations: tuple[str, ...], swizzled: bool, typed: bool) -> Like:
    """The key of quantizing x. typed: in the dtypes that products read."""
    kind = None if amax is None else (amax.dtype, amax.shape)
    return x.shape, x.stride(), x.dtype, kind, x.device, typed, orientations, swizzled


def laid_out_like(
    m: int, k: int, device: torch.device, orientations: tuple[str, ...], swizzled: bool, planes: int
) -> Like:
    """The key of laying out planes of an (m, k) weight."""
    return "lay_out", m, k, device, planes, orientations, swizzled


def programs(m: int, k: int, tile_m: int, tile_k: int) -> int:
    """One for each tile."""
    return cdiv(m, tile_m) * cdiv(k, tile_k)


def pad_to_six(names: tuple[str, ...]) -> tuple[str, ...]:
    """Names of planes or buffers, padded with empty names to the six that kernels take."""
    return (*names, *("",) * (6 - len(names)))


@lru_cache(maxsize=64)
def codebooks(values: tuple[float, ...], device: torch.device) -> Tensor | None:
    """The values of codebooks in a device's memory, fp32; None if there are none."""
    return torch.tensor(values, dtype=torch.float32, device=device) if values else None
