"""Exceptions that layoutc raises at run time.

Each message names the recipe, the parameter if it is known, and what would work.
"""


def printable(text: str) -> str:
    """Makes text with names from files safe for a terminal: escapes unprintable characters except line breaks."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode() for char in text
    )


class LayoutError(RuntimeError):
    """A layout can't do what was requested."""

    def __str__(self) -> str:
        return printable(super().__str__())


class ShardAlignmentError(LayoutError, ValueError):
    """A cut between shards would fall inside a block, so its ranks could not agree on the block's scale."""


class UnsupportedOperator(LayoutError, NotImplementedError):
    """An operator is not exact on stored bytes, and would be wrong on a dequantized copy too."""


class ImplicitDequantize(LayoutError):
    """Under layoutc.strict(): an operator would dequantize implicitly."""


class MissingOrientation(LayoutError):
    """The tensor does not hold an orientation, nor planes to compute it from."""


class DamagedError(LayoutError, ValueError):
    """A file's bytes differ from those that were written."""


class UnsupportedTorch(LayoutError):
    """The installed torch has changed a private name that layoutc needs to find shards."""


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
