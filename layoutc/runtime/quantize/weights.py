"""Quantizing weights, new or in place: one at a time, or many with one collective and few launches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import compress
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from layoutc.runtime.errors import LayoutError, MissingOrientation, UnsupportedOperator, whole_instead
from layoutc.runtime.facts import Layout
from layoutc.runtime.kernels import launch
from layoutc.runtime.quantize import ddp_replicas
from layoutc.runtime.quantize.amax import (
    Groups,
    agree_on_amax,
    amax_of_each,
    check_same,
    for_rows,
    join,
    reduce_max,
    shared_amaxes,
    with_histories,
    with_history,
)
from layoutc.runtime.quantize.block_edges import check_whole_blocks, with_halos
from layoutc.runtime.random_bits import Seed
from layoutc.runtime.sharding import shards
from layoutc.runtime.sharding.shards import RowSharding
from layoutc.runtime.storage import initial_values
from layoutc.runtime.torch_private import foreach_copy_, traced
from layoutc.runtime.weight import operators
from layoutc.runtime.weight.tensor import QuantizedTensor, written

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
Requantized = tuple[QuantizedTensor, Tensor, Tensor | None]  # a target, its new (m, k) values and their amax


def quantize(
    cls: type[QuantizedTensor],
    x: Tensor,
    *,
    orientations: Sequence[str] | None = None,
    amax: Tensor | None = None,
    group: dist.ProcessGroup | Groups | None = None,
    out: QuantizedTensor | None = None,
    restart: bool = False,
    tag: str | None = None,
    row_sharding: RowSharding | None = None,
    seed: Seed | None = None,
) -> QuantizedTensor:
    """Quantizes high-precision values. The body of every generated `quantize`.

    x: (..., k), fp32, bf16 or fp16. amax: the shared amax, fp32; by default that of x and, with `group`, the maximum
    over the shards. out: a tensor of the same shape to overwrite; if it trains, it stores x for its master. restart:
    forget its history of amaxes. tag: see reduce_max. row_sharding: how the weight that `out` is a shard of is cut; the
    call is then collective. seed: as for operators.seed_of.

    Raises ValueError for a shape, an orientation, an amax or a seed that the recipe does not take, TypeError for other
    dtypes, and with an `out` also what check_out and check_whole_blocks raise.
    """
    layout = cls.LAYOUT
    _check_in(layout, x, amax)
    chosen = chosen_orientations(layout, orientations)
    seeds = operators.seed_of(cls, x, seed)
    if out is not None:
        asked = None if orientations is None else chosen
        check_out(layout, x, out, asked, alone=amax is None and group is None)
        check_whole_blocks(out, row_sharding)
        matrix = as_matrix(x, (out.store.rows, out.store.matrix[1]))
        current = agree_on_amax(cls, matrix, amax, group, tag, matrices=out.store.amaxes)
        before = initial_values.around(out.store)
        overwrite_(cls, [out], with_halos([layout], [matrix], [row_sharding]), [current], restart, seeds)
        initial_values.keep(out.store, matrix, before)
        return out
    m, k = layout.check_shape(x.shape)
    matrix = as_matrix(x, (m, k))
    amax = agree_on_amax(cls, matrix, amax, group, tag, chosen, matrices=layout.amaxes_of(x.shape))
    shared, extra = with_history(layout, amax, None)
    planes = operators.quantize(cls, matrix, shared, chosen, seed=seeds) | extra
    return cls(planes, x.shape, x.dtype, matrix=(m, k), orientations=chosen)


def quantize_buffers(
    cls: type[QuantizedTensor],
    x: Tensor,
    *,
    orientations: Sequence[str] | None = None,
    amax: Tensor | None = None,
    group: dist.ProcessGroup | Groups | None = None,
    swizzled: bool = False,
    seed: Seed | None = None,
) -> dict[str, Tensor]:
    """Quantizes high-precision values to the buffers that a GEMM reads. The body of every generated `quantize_buffers`.

    Arguments and exceptions are those of `quantize`; also ValueError for `swizzled` if the spec states no swizzle. A
    recipe with a history uses the current amax, as for a weight that has no history yet.
    """
    layout = cls.LAYOUT
    _check_in(layout, x, amax)
    layout.check_swizzled(swizzled)
    m, k = layout.check_shape(x.shape)
    chosen = chosen_orientations(layout, orientations)
    matrix = as_matrix(x, (m, k))
    amax = agree_on_amax(cls, matrix, amax, group, None, chosen, matrices=layout.amaxes_of(x.shape))
    shared, extra = with_history(layout, amax, None)
    seeds = operators.seed_of(cls, matrix, seed)
    return operators.quantize_buffers(cls, matrix, shared, chosen, swizzled, seed=seeds) | extra


def as_matrix(x: Tensor, shape: tuple[int, int]) -> Tensor:
    """A weight's values as kernels and the reference read them: a matrix of the given shape, detached from autograd."""
    if type(x) is Tensor and x.shape == shape and not x.requires_grad:
        return x
    values: Tensor = getattr(x, "plain", x)  # a weight that is cast on gather has its values in `plain`
    return values.detach().reshape(shape)


def requantize_batch_(
    batch: list[tuple[QuantizedTensor, Tensor]],
    groups: list[dist.ProcessGroup],
    row_shardings: Sequence[RowSharding | None] | None = None,
    amaxes: Tensor | None = None,
) -> None:
    """Overwrites quantized tensors with new values, with one MAX all-reduce per group for all their amaxes. Collective.

    batch: each target, with values of its shape. row_shardings: how the weight of each target is cut. If cuts split
    blocks, there is one more all-gather per group. Default: no target is a shard whose blocks are cut. amaxes: of the
    targets that share one, if each has one and they are known: this rank's, int32, fp32 bits. Raises as `quantize` does
    with an `out`, before anything is written.
    """
    sharing = [
        (target, values, as_matrix(values, (target.store.rows, target.store.matrix[1])))
        for target, values in batch
        if target.LAYOUT.shares_amax
    ]
    of_weights = [one for one in sharing if not one[0].LAYOUT.amax_of_matrices]
    of_matrices = [one for one in sharing if one[0].LAYOUT.amax_of_matrices]
    found: list[Tensor] = []
    shapes: list[tuple[int, ...]] = []
    if amaxes is not None:
        found, shapes = [amaxes.view(torch.float32)], [(1,)] * len(of_weights)
    elif of_weights:
        measured, shapes = shared_amaxes([(type(target), matrix) for target, _, matrix in of_weights])
        found.append(measured)
    for target, _, matrix in of_matrices:
        found.append(amax_of_each(matrix, target.store.amaxes))
        shapes.append((len(found[-1]),))
    shared: dict[int, Tensor] = {}
    if found:
        packed = found[0] if len(found) == 1 else torch.cat([one.to(found[0].device) for one in found])
        pieces = torch.split(reduce_max(packed, groups), [prod(shape) for shape in shapes])
        sharing = of_weights + of_matrices
        join(pieces, [target.fused for target, *_ in sharing])
        for (target, values, matrix), piece, shape in zip(sharing, pieces, shapes, strict=True):
            amax = (piece if len(shape) == 1 else piece.view(shape)).to(values.device)
            shared[id(target)] = for_rows(amax, matrix) if target.LAYOUT.amax_of_matrices else amax
    requantize_many_(batch, [shared.get(id(target)) for target, _ in batch], row_shardings)


def requantize_many_(
    weights: Sequence[tuple[QuantizedTensor, Tensor]],
    amaxes: Sequence[Tensor | None],
    row_shardings: Sequence[RowSharding | None] | None = None,
) -> None:
    """As `quantize` for each (target, values), with out=target and its amax, in few launches.

    amaxes: the amax that the shards of each weight share, fp32, of `Layout.amax_shape`; None for recipes that share
    none. row_shardings: as for `quantize`. Raises as `quantize` does with an `out`, before anything is written.
    """
    row_shardings = row_shardings or [None] * len(weights)
    for (target, x), amax, row_sharding in zip(weights, amaxes, row_shardings, strict=True):
        target.LAYOUT.check_weights(target.weight_name or "")
        _check_in(target.LAYOUT, x, amax)
        check_out(target.LAYOUT, x, target, None, alone=amax is None)
        check_whole_blocks(target, row_sharding)
    with torch.no_grad():
        kinds: dict[Any, list[Requantized]] = defaultdict(list)
        targets = [target for target, _ in weights]
        own = [as_matrix(x, (target.store.rows, target.store.matrix[1])) for target, x in weights]
        for target, matrix, amax in zip(
            targets, with_halos([target.LAYOUT for target in targets], own, row_shardings), amaxes, strict=True
        ):
            usable = type(matrix), matrix.device, 0 in target.store.matrix  # all that launch.usable depends on
            kinds[type(target), usable, matrix.dtype, target.store.declared, *target.store.planes].append(
                (target, matrix, amax)
            )
        for same_kind in kinds.values():
            for members in _by_launch(same_kind):
                outs, matrices, currents = zip(*members, strict=True)
                overwrite_(type(outs[0]), outs, matrices, currents)


def _by_launch(members: list[Requantized]) -> Iterable[Sequence[Requantized]]:
    """Splits weights of one recipe, dtype and device, which hold the same planes, into as few launches as possible."""
    device = members[0][1].device
    if not launch.usable(members[0][1]):
        return [[member] for member in members]
    if launch.all_writable([target.store.planes for target, *_ in members], device):
        return [members]
    able = [launch.all_writable([target.store.planes], device) for target, *_ in members]
    rest = [[member] for member, one in zip(members, able, strict=True) if not one]
    return [*filter(None, [list(compress(members, able))]), *rest]


def overwrite_(
    cls: type[QuantizedTensor],
    outs: Sequence[QuantizedTensor],
    matrices: Sequence[Tensor],
    currents: Sequence[Tensor | None],
    restart: bool = False,
    seed: Tensor | None = None,
) -> None:
    """Quantizes matrices into tensors of one recipe and with the same orientations.

    currents: the current amax of each weight; its history goes into `outs` as well. restart: start histories anew.
    seed: of the random bits of one tensor.
    """
    layout, orientations = cls.LAYOUT, outs[0].orientations
    shared, extras = with_histories(layout, outs, currents, restart)
    amaxes = [amax for amax in shared if amax is not None] or None
    targets = [out.store.planes for out in outs]
    results = extras
    if len(outs) == 1 or not cls.quantize_batch(matrices, amaxes, orientations, targets):
        results = [
            operators.quantize(cls, matrix, amax, orientations, planes, seed) | extra
            for matrix, amax, planes, extra in zip(matrices, shared, targets, extras, strict=True)
        ]
    copies = [
        (into, plane)
        for planes, new in zip(targets, results, strict=True)
        for name, plane in new.items()
        if (into := planes[name]) is not plane
    ]
    if copies:
        foreach_copy_([into for into, _ in copies], [plane for _, plane in copies])
    written(outs)


def requantize_(target: QuantizedTensor, x: Tensor, like: QuantizedTensor | None = None) -> None:
    """Overwrites a quantized tensor with unrelated values, so that a history of amaxes starts anew.

    like: the tensor that `target` replaces; default: `target` itself. If it is a shard, the call is collective: ranks
    share amaxes, and values of blocks that cuts split.
    """
    if ddp_replicas.receive(target):
        return
    like = target if like is None else like
    (groups, tag), row_sharding = shards.amax_groups(like), shards.row_sharding(like)
    if row_sharding is not None and row_sharding.splits_blocks(like.LAYOUT) and not groups:
        check_same(shards.tag(like), row_sharding.group, x.device)
    shared = {"group": groups or None, "tag": tag, "row_sharding": row_sharding}
    quantize(type(target), x, out=target, restart=True, **shared)  # type: ignore[arg-type]


def replacement(target: QuantizedTensor, x: Tensor) -> QuantizedTensor:
    """Plain values quantized as `target` is, with amaxes shared over its shards: a new tensor of x's dtype and device.

    Returns an alias of the target if x is what it dequantizes to, since quantizing that again could change scales.
    Shards that share amaxes or blocks are always quantized, because all ranks would have to agree on the alias.
    """
    if _dequantizes_to(target, x):
        return target.alias(dtype=x.dtype)
    new = target.with_planes(
        {name: torch.empty_like(plane, device=x.device) for name, plane in target.store.planes.items()}, dtype=x.dtype
    )
    requantize_(new, x if x.dtype in FLOATS else x.float(), target)
    return new


def _dequantizes_to(target: QuantizedTensor, x: Tensor) -> bool:
    """True if x is exactly what the target, a whole weight, dequantizes to."""
    if x.device != target.device or x.is_meta or traced(x) or not x.is_floating_point():
        return False
    if target.store.home is not None or target.store.writes.waiting or not target.orientations:
        return False
    if shards.amax_groups(target)[0] or shards.row_sharding(target) is not None:
        return False
    return torch.equal(target.dequantize(x.dtype), x)


def planes_of(cls: type[QuantizedTensor], x: Tensor, amax: Tensor | None) -> dict[str, Tensor]:
    """(..., k) values of a whole weight -> planes of all orientations. amax: the shared amax; default: that of x."""
    matrix = x.detach().reshape(*cls.LAYOUT.check_shape(tuple(x.shape)))
    return operators.quantize(cls, matrix, amax, cls.LAYOUT.orientations)


def buffers_of(
    tensors: Sequence[QuantizedTensor], *, orientations: Sequence[str] | None = None, swizzled: bool = False
) -> list[dict[str, Tensor]]:
    """Returns `buffers()` of each quantized tensor, in order. The tensors may be of different recipes.

    orientations: those to lay out, of every tensor; default: all that it holds. swizzled: as for `buffers`.

    Raises before any work: TypeError for anything but a quantized tensor; ValueError for an orientation that a recipe
    does not have, or for `swizzled` without a swizzle in the spec; MissingOrientation for an orientation that a tensor
    does not hold; LayoutError as `buffers` does.

    Example:

        >>> weight = layoutc.recipes.nvfp4.quantize(torch.ones(128, 256))
        >>> layoutc.buffers_of([weight])[0]["rowwise_data"].shape
        torch.Size([128, 128])
    """
    asked: list[tuple[QuantizedTensor, tuple[str, ...]]] = []
    for tensor in tensors:
        if not isinstance(tensor, QuantizedTensor):
            raise TypeError(f"buffers_of takes quantized tensors, not {type(tensor).__name__}")
        tensor.LAYOUT.check_swizzled(swizzled)
        tensor.check_whole()
        present = tensor.orientations
        chosen = present if orientations is None else chosen_orientations(tensor.LAYOUT, orientations)
        if not chosen or any(name not in present for name in chosen):
            raise MissingOrientation(
                f"{tensor.label()} holds {', '.join(present) or 'no orientation'}, "
                f"not {', '.join(chosen) or 'any to lay out'}"
            )
        asked.append((tensor, chosen))
    return [tensor.laid_out(chosen, swizzled) for tensor, chosen in asked]


def chosen_orientations(layout: Layout, orientations: Sequence[str] | None) -> tuple[str, ...]:
    """The orientations that a caller asks for, rowwise first; all for None. Raises ValueError for unknown ones."""
    if orientations is None:
        return layout.orientations
    chosen = (orientations,) if isinstance(orientations, str) else tuple(orientations)
    unknown = [name for name in chosen if name not in layout.orientations]
    if unknown or not chosen:
        raise ValueError(
            f"{layout.name} has orientations {', '.join(layout.orientations)}, not {', '.join(unknown) or 'none'}"
        )
    return tuple(name for name in layout.orientations if name in chosen)


def _check_in(layout: Layout, x: Tensor, amax: Tensor | None) -> None:
    """Raises TypeError for a dtype that no recipe quantizes, ValueError for an amax that this one does not take."""
    if x.dtype not in FLOATS:
        raise TypeError(f"{layout.name} quantizes float32, bfloat16 and float16, not {x.dtype}")
    if amax is not None and not layout.shares_amax:
        raise ValueError(f"{layout.name} takes no amax: its scales depend on nothing outside their block")


def check_out(layout: Layout, x: Tensor, out: QuantizedTensor, orientations: Sequence[str] | None, alone: bool) -> None:
    """Raises if x can't be quantized into `out`.

    alone: the amax is taken from x, and not shared with other shards. Raises TypeError and ValueError for an `out` of
    another type or shape; LayoutError for one of another recipe, and for a gathered weight; UnsupportedOperator for a
    part of a weight whose scale covers more; MissingOrientation if `out` lacks an orientation.
    """
    if not isinstance(out, QuantizedTensor):
        raise TypeError(f"{layout.name}: out must be a tensor of the recipe, not {type(out).__name__}")
    if out.shape != x.shape or out.transposed:
        raise ValueError(f"{layout.name}: out has shape {tuple(out.shape)}, x has {tuple(x.shape)}")
    if out.LAYOUT.layout_id != layout.layout_id:
        raise LayoutError(f"{layout.name}: out is a tensor of {out.LAYOUT.name}")
    out.check_writable()
    if out.store.common and (alone or out.store.common - layout.shared):
        raise UnsupportedOperator(
            f"{out.label()} is a part of a weight whose scale covers more than the part: quantizing the part by "
            "itself would change what the rest means; quantize the whole weight"
        )
    if alone and out.peers == () and dist.is_initialized():
        raise UnsupportedOperator(
            f"{out.label()} is a shard, or a copy of a part, of a weight whose scale covers more, and does not know "
            f"the other shards: {whole_instead(layout.name)}"
        )
    if orientations is None:
        return
    if missing := [name for name in orientations if name not in out.orientations]:
        raise MissingOrientation(f"{layout.name}: out holds {', '.join(out.orientations)}, not {', '.join(missing)}")
