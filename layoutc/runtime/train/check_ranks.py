"""check_ranks: whether all ranks hold the same model, before a gather hangs or trains on a difference.

FSDP2 exchanges nothing when it shards, so ranks that differ end up in collectives of unequal sizes, or wait forever.
Here each rank makes *claims*: what it holds, and how many ranks must hold the same. All ranks see the hashes of all
claims, and so reach the same verdict; texts are exchanged only if claims differ.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from layoutc.runtime import product_mode
from layoutc.runtime.cast.tensor import CastOnGather
from layoutc.runtime.errors import LayoutError, by_value, check_model, few, ranks_text
from layoutc.runtime.sharding import cards, meshes, registry, shards
from layoutc.runtime.sharding.meeting import meet
from layoutc.runtime.torch_private import current_card, local_tensor
from layoutc.runtime.weight.tensor import QuantizedTensor

SHOWN = 8  # disagreements that a message spells out


class Claim(NamedTuple):
    """What a rank holds of a subject (a parameter, or their order), and how many ranks must hold the same."""

    subject: str
    facts: Mapping[str, str]
    ranks: int


@torch.no_grad()
def check_ranks(model: nn.Module) -> int:
    """Checks that all ranks hold the same model; returns the number of sharded parameters that were checked.

    Collective: every rank of the default process group calls it. The ranks of a parameter's device mesh compare:

    - names and order of parameters; shape, dtype and placements;
    - recipe, layout id, orientations and current product modes of quantized weights;
    - the bytes of scales, amaxes and histories that shards share, including those of blocks that a cut splits;
    - all bytes of replicas (HSDP).

    Weights that are cast on gather are checked too. Gathered weights are checked by their shards. Parameters that are
    not DTensors are skipped. The check takes two small all-gathers, however many parameters there are; the host hashes
    bytes. Over NCCL, it first checks that each rank has a card of its own, and warns of shards that are not on the
    current card.

    Raises LayoutError on all ranks if ranks share a card or anything differs, with the parameters, what, and ranks.

    Example:

        >>> model = nn.Sequential(nn.Linear(128, 128, bias=False))
        >>> layoutc.quantize_(model, "nvfp4")
        ['0.weight']
        >>> fully_shard(model) and layoutc.check_ranks(model)
        1
    """
    check_model(model, "check_ranks")
    if several := dist.is_initialized() and dist.get_world_size() > 1:
        meet()
    _check_cards(model)
    claims: dict[int, Claim] = {}
    named: dict[str, list[str]] = defaultdict(list)
    whole = registry.sharded_parameters()
    for name, parameter in model.named_parameters():
        param = whole.get(id(parameter), parameter)
        if isinstance(param, DTensor):
            named[_ranks(param)].append(name)
            for what, claim in _claims(name, param):
                claims[_number(what, name)] = claim
    for ranks, names in named.items():
        positions = {str(position): name for position, name in enumerate(names)}
        claims[_number(ranks, "")] = Claim("the order of parameters", positions, len(ranks.split()))
    if several:
        _compare(claims)
    return sum(map(len, named.values()))


def _check_cards(model: nn.Module) -> None:
    """Raises LayoutError, on all ranks, if ranks share a card; warns of shards that are not on the current one."""
    if not dist.is_initialized():
        return
    world: Any = dist.group.WORLD
    if cards.over_nccl(world):
        cards.check_together(world, torch.device("cuda", current_card()))
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            cards.warn_if_elsewhere(name, local_tensor(parameter).device)


# --------------------------------------------------------------------------------------------------- what a rank claims
def _claims(name: str, param: DTensor) -> Iterator[tuple[str, Claim]]:
    """(kind, claim) pairs: claims of the same kind about the same parameter are compared."""
    local, ranks = local_tensor(param), _ranks(param)
    facts = {
        "shape": str(tuple(param.shape)),
        "dtype": str(param.dtype),
        "placements": str(tuple(param.placements)),
        "recipe": "none",
    }
    if isinstance(local, QuantizedTensor | CastOnGather):
        kind = "cast on gather to " if isinstance(local, CastOnGather) else ""
        facts["recipe"] = f"{kind}{local.LAYOUT.name}, layout {local.LAYOUT.layout_id}"
        facts["orientations"] = "+".join(local.orientations) or "none"
        group = local._agreed.fused if isinstance(local, CastOnGather) else local.fused
        facts["weights under one amax"] = group[1] if group else "itself"
        by = "" if local.own_products is None else ", by set_products_"
        facts["products"] = f"{product_mode.in_effect(local.own_products)}{by}"
    yield f"facts {ranks}", Claim(name, facts, param.device_mesh.size())
    if local.is_meta:
        return
    cut = {mesh_dim for mesh_dim, _ in meshes.cuts(param)}
    replicas = _along(param, set(range(param.device_mesh.ndim)) - cut)
    if len(replicas) > 1:
        stored = {f"bytes of {part}": _digest(tensor) for part, tensor in _stored(local).items()}
        yield f"replicas {replicas}", Claim(name, stored, len(replicas))
    if isinstance(local, QuantizedTensor | CastOnGather):
        yield from _shared(name, param, local)
    if isinstance(local, QuantizedTensor):
        yield from _halved(name, param, local)


def _stored(local: Tensor) -> dict[str, Tensor]:
    if isinstance(local, QuantizedTensor):
        return local.planes()
    return {"values": local.plain if isinstance(local, CastOnGather) else local}


def _shared(name: str, param: DTensor, local: QuantizedTensor | CastOnGather) -> Iterator[tuple[str, Claim]]:
    """Claims of what all shards share; shards of columns differ in planes of columns."""
    layout, last = local.LAYOUT, param.dim() - 1
    of_columns = {mesh_dim for mesh_dim, dim in meshes.cuts(param) if dim == last > 0}
    by_columns = set(layout.shared_by_columns)
    if isinstance(local, QuantizedTensor):
        planes = {plane: tensor for plane, tensor in local.planes().items() if plane in layout.shared}
    else:
        agreed = {"amax": local._agreed.amax, "history of amaxes": local._agreed.plane}
        planes = {plane: tensor for plane, tensor in agreed.items() if tensor is not None}
        by_columns = set(planes) if layout.amax_columns is not None else set()
    for plane, tensor in planes.items():
        dims = set(range(param.device_mesh.ndim)) - (of_columns if plane in by_columns else set())
        ranks = _along(param, dims)
        yield f"{plane} {ranks}", Claim(name, {plane: f"{_shown(tensor)} ({_digest(tensor)})"}, len(ranks))


def _halved(name: str, param: DTensor, local: QuantizedTensor) -> Iterator[tuple[str, Claim]]:
    """Claims of the scales of blocks that a cut splits, which several ranks hold."""
    row_sharding = shards.row_sharding_of(param, local)
    if row_sharding is None or not row_sharding.splits_blocks(local.LAYOUT) or not local.store.rows:
        return
    (first, last), cuts = row_sharding.cuts.bounds(row_sharding.rank), row_sharding.cuts
    group = dist.get_process_group_ranks(row_sharding.group)
    for plane, tensor in local.planes().items():
        rows = local.LAYOUT.stored[plane].rows_per_value or 1
        for block in sorted({first // rows, (last - 1) // rows} if rows > 1 else ()):
            holders = sum(a <= block < b for a, b in (cuts.touched(rank, rows) for rank in range(cuts.world)))
            if holders > 1:
                entry = tensor[block - (first - local.store.halo.before) // rows :][:1]
                what = f"{plane} of rows {block * rows} to {min((block + 1) * rows, cuts.rows)}"
                yield f"{what} {group}", Claim(name, {what: _digest(entry)}, holders)


def _along(param: DTensor, dims: set[int]) -> list[int]:
    """The ranks whose mesh coordinates differ from this one's in these dims only."""
    mesh = param.device_mesh
    here: Any = mesh.get_coordinate() or [0] * mesh.ndim
    ranks: Tensor = mesh.mesh[tuple(slice(None) if dim in dims else here[dim] for dim in range(mesh.ndim))]
    return [int(rank) for rank in ranks.flatten().tolist()]


def _ranks(param: DTensor) -> str:
    return " ".join(str(rank) for rank in param.device_mesh.mesh.flatten().tolist())


# ----------------------------------------------------------------------------------------------------- what is compared
def _compare(claims: dict[int, Claim]) -> None:
    """Raises LayoutError if claims differ, or if fewer ranks than required make one."""
    values = {number: _number(claim.subject, json.dumps(dict(claim.facts))) for number, claim in claims.items()}
    mine = torch.tensor(
        [[number, values[number], claim.ranks] for number, claim in claims.items()], dtype=torch.int64, device="cpu"
    )
    everywhere = torch.cat(_of_all_ranks(mine.view(-1, 3)))
    numbers, order = everywhere[:, 0].sort()
    found, wanted = everywhere[order, 1], everywhere[order, 2]
    _, runs, counts = torch.unique_consecutive(numbers, return_inverse=True, return_counts=True)
    follows = numbers[1:] == numbers[:-1]
    differs = follows & ((found[1:] != found[:-1]) | (wanted[1:] != wanted[:-1]))
    bad = {*numbers[1:][differs].tolist(), *numbers[counts[runs] != wanted].tolist()} if len(numbers) else set()
    if bad:
        raise LayoutError(_message([number for number in claims if number in bad], claims))


def _of_all_ranks(mine: Any) -> list[Any]:
    """`mine` of all ranks. Collective."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def _message(bad: Sequence[int], claims: Mapping[int, Claim]) -> str:
    """The error message, which is the same on all ranks. Collective."""
    by_claim: dict[int, dict[int, Claim]] = defaultdict(dict)
    for rank, claimed in enumerate(_of_all_ranks({number: claims[number] for number in bad})):
        for number, claim in claimed.items():
            by_claim[number][rank] = claim
    lines: dict[str, None] = {}
    for by_rank in by_claim.values():
        subject = next(iter(by_rank.values())).subject
        lines |= dict.fromkeys(_lines(subject, {rank: claim.facts for rank, claim in by_rank.items()}))
    what = "ranks hold different models; build, load and write them in the same way on all ranks:"
    return what + "\n  " + few([*lines], SHOWN, "\n  ")


def _lines(subject: str, facts_by_rank: Mapping[int, Mapping[str, str]]) -> Iterator[str]:
    keys = dict.fromkeys(key for facts in facts_by_rank.values() for key in facts)
    differing = [key for key in keys if len({facts.get(key) for facts in facts_by_rank.values()}) > 1]
    if subject == "the order of parameters":
        differing = differing[:1]
    for key in differing:
        ranks = by_value((rank, facts.get(key, "nothing")) for rank, facts in facts_by_rank.items())
        of = "parameter " if subject == "the order of parameters" else ""
        yield f"{subject}: {of}{key}: " + "; ".join(f"{value} on {ranks_text(on)}" for value, on in ranks.items())
    if not differing:
        said = ", ".join(f"{key} {value}" for key, value in next(iter(facts_by_rank.values())).items())
        yield f"{subject}: only on {ranks_text(list(facts_by_rank))}, of the ranks that share it: {said}"


# --------------------------------------------------------------------------------------------------------------- hashes
def _number(*words: str) -> int:
    return int.from_bytes(hashlib.blake2b("\n".join(words).encode(), digest_size=8).digest(), "little", signed=True)


def _digest(tensor: Tensor) -> str:
    """A hash of shape, dtype and bytes."""
    plain = tensor.detach().cpu().contiguous()
    digest = hashlib.blake2b(f"{tuple(plain.shape)} {plain.dtype}".encode(), digest_size=8)
    if plain.numel():
        digest.update((ctypes.c_char * plain.nbytes).from_address(plain.data_ptr()))
    return digest.hexdigest()


def _shown(tensor: Tensor) -> str:
    """The value, if there is only one; else the shape."""
    return f"{tensor.item():g}" if tensor.numel() == 1 else f"{tuple(tensor.shape)}"
