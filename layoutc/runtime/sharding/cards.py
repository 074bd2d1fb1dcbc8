"""The card of each rank: that no two ranks of a group have the same one, and that it is the current one.

NCCL refuses ranks that share a card, in words that do not say why. A program that never calls `torch.cuda.set_device`
ends there: FSDP2 moves shards to the current card, which is the first one on every rank.
"""

from __future__ import annotations

import json
import socket
import warnings
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from layoutc.runtime.errors import LayoutError
from layoutc.runtime.torch_private import current_card, store_of_all

LINE = 'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))'
WAITS = timedelta(minutes=10)  # for the slowest rank
_checked: set[tuple[str, int]] = set()  # groups whose ranks have a card each, by name and identity
_warned: set[str] = set()


def over_nccl(group: dist.ProcessGroup) -> bool:
    """True if a group's collectives of tensors on cards are NCCL's."""
    return "cuda:nccl" in str(dist.get_backend_config(group)) or dist.get_backend(group) == "nccl"


def check_apart(group: dist.ProcessGroup, device: torch.device) -> None:
    """Raises LayoutError, on all ranks of a group, if two of them have the same card. Collective, once for each group.

    device: what this rank's collectives are on. Goes through the key-value store, since NCCL can't say it. Does nothing
    for other backends, and for tensors that are on no card.
    """
    if device.type != "cuda" or _name(group) in _checked or group.size() < 2 or not over_nccl(group):
        return
    ranks, store = dist.get_process_group_ranks(group), store_of_all()
    key = f"layoutc/cards/{group.group_name}"
    store.set(f"{key}/{dist.get_rank()}", json.dumps(card_of(device)))
    if dist.get_rank() == ranks[0]:
        found = [json.loads(store.get(f"{key}/{rank}")) for rank in ranks]
        store.set(key, shared(ranks, [tuple(one) for one in found]) or "apart")
    store.wait([key], WAITS)
    if (said := store.get(key).decode()) != "apart":
        raise LayoutError(said)
    _checked.add(_name(group))


def _name(group: dist.ProcessGroup) -> tuple[str, int]:
    return group.group_name, id(group)


def card_of(device: torch.device) -> tuple[str, str, int]:
    """What tells a card apart from all others: its host and its UUID; and its number."""
    index = current_card() if device.index is None else device.index
    return socket.gethostname(), str(torch.cuda.get_device_properties(index).uuid), index


def shared(ranks: Sequence[int], cards: Sequence[tuple[str, str, int]]) -> str:
    """What is wrong with the cards of ranks; "" if each has its own."""
    holders: dict[tuple[str, str], list[int]] = defaultdict(list)
    numbers = {(host, uuid): number for host, uuid, number in cards}
    for rank, (host, uuid, _) in zip(ranks, cards, strict=True):
        holders[host, uuid].append(rank)
    wrong = [
        f"ranks {', '.join(map(str, on))} have card {numbers[card]} of {card[0]}"
        for card, on in holders.items()
        if len(on) > 1
    ]
    if not wrong:
        return ""
    return (
        f"ranks share a card, which NCCL does not take: {'; '.join(wrong)}. fully_shard puts shards on the current "
        f"card, so make that another one on each rank, before init_process_group and the model: {LINE}"
    )


def warn_if_elsewhere(name: str, device: torch.device) -> None:
    """Warns, once in a process, of a shard that lies on a card that is not the current one. name: of the parameter."""
    if device.type != "cuda" or device.index is None or device.index == (current := current_card()) or _warned:
        return
    _warned.add(name)
    warnings.warn(
        f"{name} lies on {device}, and the current card is cuda:{current}: FSDP2's streams, and collectives of torch "
        f"that name no card, are on the current one. Before fully_shard: {LINE}",
        RuntimeWarning,
        stacklevel=3,
    )
