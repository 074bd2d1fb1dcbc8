"""Exceptions that layoutc raises at run time.

Each message names the recipe, the parameter if it is known, and what would work.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from torch import nn

V = TypeVar("V", bound=Hashable)
SHOWN = 6  # names that a message lists


def printable(text: str) -> str:
    """Makes text with names from files safe for a terminal: escapes unprintable characters except line breaks."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode() for char in text
    )


def few(names: Sequence[str], most: int = SHOWN, between: str = ", ") -> str:
    """The first names of a list, and the number of the others."""
    more = len(names) - most
    return between.join(names[:most]) + (f"{' ' if between == ', ' else between}and {more} more" if more > 0 else "")


def by_value(told: Iterable[tuple[int, V]]) -> dict[V, list[int]]:
    """The ranks that tell each value, of (rank, value) pairs."""
    ranks: dict[V, list[int]] = defaultdict(list)
    for rank, value in told:
        ranks[value].append(rank)
    return ranks


def ranks_text(ranks: Sequence[int]) -> str:
    """As in "rank 3" and "ranks 1, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


class LayoutError(RuntimeError):
    """A layout can't do what was requested."""

    def __str__(self) -> str:
        return printable(super().__str__())


class ShardAlignmentError(LayoutError, ValueError):
    """A cut between shards would fall inside a block, so its ranks could not agree on the block's scale."""


class UnsupportedOperator(LayoutError, NotImplementedError):
    """An operator is not exact on stored bytes, and would be wrong on a dequantized copy too."""


class ValuesAlone(UnsupportedOperator):
    """A hook of saved tensors keeps the values of a weight, and backward needs the weight."""

    def __init__(self, label: str) -> None:
        super().__init__(
            f"a hook of torch.autograd.graph.saved_tensors_hooks keeps values of {label}, and backward multiplies the "
            "quantized weight: have the hook move the tensor, as torch's save_on_cpu() does without pin_memory, or "
            'return it as it is where hasattr(tensor, "LAYOUT")'
        )


class ImplicitDequantize(LayoutError):
    """Under layoutc.strict(): an operator would dequantize implicitly."""


class MissingOrientation(LayoutError):
    """The tensor does not hold an orientation, nor planes to compute it from."""


class DamagedError(LayoutError, ValueError):
    """A file's bytes differ from those that were written."""


class UnsupportedTorch(LayoutError):
    """The installed torch has changed a private name that layoutc needs to find shards."""


def check_model(given: object, caller: str, or_state: bool = False) -> None:
    """Raises TypeError unless a model is given; or, with or_state, its state dict."""
    if not isinstance(given, (nn.Module, Mapping) if or_state else nn.Module):
        what = "a model (nn.Module) or its state dict" if or_state else "a model (nn.Module)"
        raise TypeError(f"{caller} takes {what}, and got {type(given).__name__}: pass the module, and several in turn")


def check_state(given: object, caller: str) -> None:
    """Raises TypeError unless a dict of what is saved, or loaded, is given."""
    if not isinstance(given, Mapping):
        call = f"checkpoint.{caller}({{'model': model.state_dict()}}, folder)"
        raise TypeError(f"{caller} takes a dict, and got {type(given).__name__}: call {call}")


def whole_instead(recipe: str) -> str:
    """Advice for writes of plain values into a shard that knows nothing of the other shards."""
    return (
        f"write the whole weight, on all ranks: weight.copy_(distribute_tensor({recipe}.quantize(values), "
        "weight.device_mesh, weight.placements, src_data_rank=None))"
    )


def made_of_one_tensor(cls: type) -> TypeError:
    """The error for packages that recreate a parameter by calling its class with one tensor."""
    return TypeError(
        f"{cls.__name__}(tensor, ...): a quantized weight is several planes, so its class makes none of one tensor, as "
        "accelerate's init_empty_weights, load_checkpoint_and_dispatch and cpu_offload ask for. Call quantize_ once "
        "the weights are loaded, or build the model on the meta device and call load_state_dict(values, assign=True); "
        "offload with FSDP2's CPUOffloadPolicy"
    )
