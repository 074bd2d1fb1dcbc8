"""What ranks exchange before their first gather: their card, and the mode of their products.

NCCL refuses ranks that share a card, with an unclear message. Programs that never call `torch.cuda.set_device` meet it:
FSDP2 moves shards to the current card, the first one on every rank. Ranks in different modes gather different bytes, in
collectives that hang or end in NaN.
"""

from __future__ import annotations

import json
import socket
import warnings
from collections import Counter
from collections.abc import Mapping

import torch
import torch.distributed as dist

from layoutc.runtime.errors import LayoutError, by_value, ranks_text
from layoutc.runtime.torch_private import current_card, store_of_all

LINE = 'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))'
_checked: set[tuple[str, int]] = set()  # groups whose ranks agree, by name and identity
_asked: Counter[str] = Counter()  # how often groups of a name exchanged: again after a failure
_warned: set[str] = set()


def over_nccl(group: dist.ProcessGroup) -> bool:
    """True if a group's collectives of tensors on cards are NCCL's."""
    return "cuda:nccl" in str(dist.get_backend_config(group)) or dist.get_backend(group) == "nccl"


def check_together(group: dist.ProcessGroup, device: torch.device, mode: str | None = None) -> None:
    """Raises LayoutError, on all ranks of a group, if two of them have the same card, or if their modes differ.
    Collective, once for each group, and before any collective of tensors.

    device: of this rank's collectives. NCCL does not say that ranks share a card, so this goes through the key-value
    store, with its timeout. mode: of the products of what is gathered first; None: not compared.
    """
    if (name := (group.group_name, id(group))) in _checked or group.size() < 2 or dist.get_backend(group) == "fake":
        return
    card = card_of(device) if device.type == "cuda" and over_nccl(group) else None
    if card is None and mode is None:
        return
    ranks, store = dist.get_process_group_ranks(group), store_of_all()
    key = f"layoutc/first_gather/{group.group_name}/{ranks[0]}/{_asked[group.group_name]}"
    _asked[group.group_name] += 1
    keys = {rank: f"{key}/{rank}" for rank in ranks}
    store.set(keys[dist.get_rank()], json.dumps([card, mode]))
    if dist.get_rank() == ranks[0]:
        told = {rank: json.loads(store.get(at)) for rank, at in keys.items()}
        on_cards = {rank: tuple(card) for rank, (card, _) in told.items() if card}
        wrong = shared(on_cards) or differing({rank: mode for rank, (_, mode) in told.items() if mode})
        store.set(key, wrong or "together")
    if (said := store.get(key).decode()) != "together":
        raise LayoutError(said)
    _checked.add(name)


def card_of(device: torch.device) -> tuple[str, str, int]:
    """The identity of a card: its host and its UUID; and its number."""
    index = current_card() if device.index is None else device.index
    return socket.gethostname(), str(torch.cuda.get_device_properties(index).uuid), index


def differing(modes: Mapping[int, str]) -> str:
    """What is wrong with the modes of ranks; "" if they are all the same."""
    holders = by_value(modes.items())
    if len(holders) < 2:
        return ""
    found = "; ".join(f"{mode} on {ranks_text(on)}" for mode, on in holders.items())
    most = max(holders, key=lambda mode: len(holders[mode]))
    return (
        f"ranks that gather together multiply in different modes: {found}. Put the same one around steps on all ranks, "
        f"as in: with {most}: ... A weight's own choice "
        "(layoutc.set_products_) wins, and layoutc.check_ranks(model) compares those of all weights"
    )


def shared(cards: Mapping[int, tuple[str, str, int]]) -> str:
    """What is wrong with the cards of ranks; "" if each has its own."""
    numbers = {(host, uuid): number for host, uuid, number in cards.values()}
    holders = by_value((rank, card[:2]) for rank, card in cards.items())
    wrong = [f"{ranks_text(on)} have card {numbers[one]} of {one[0]}" for one, on in holders.items() if len(on) > 1]
    if not wrong:
        return ""
    return (
        f"ranks share a card, which NCCL does not take: {'; '.join(wrong)}. fully_shard puts shards on the current "
        f"card, so make that another one on each rank, before init_process_group and the model: {LINE}"
    )


def warn_if_elsewhere(name: str, device: torch.device) -> None:
    """Warns, once in a process, of a shard that is not on the current card. name: of the parameter."""
    if device.type != "cuda" or device.index is None or device.index == (current := current_card()) or _warned:
        return
    _warned.add(name)
    warnings.warn(
        f"{name} is on {device}, but the current device is cuda:{current}, which FSDP2's streams, and torch's "
        f"collectives that name no device, use. Before fully_shard: {LINE}",
        RuntimeWarning,
        stacklevel=3,
    )
