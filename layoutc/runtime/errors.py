"""What layoutc raises at run time.

Every message names the recipe, the parameter where it is known, and what would work.
"""


def printable(text: str) -> str:
    """Text with names from files, safe for a terminal: all that is unprintable is escaped but line breaks."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode() for char in text
    )


class LayoutError(RuntimeError):
    """Something that a layout can't do."""

    def __str__(self) -> str:
        return printable(super().__str__())


class ShardAlignmentError(LayoutError, ValueError):
    """A cut between shards would fall inside a block, and ranks could not agree on its scale."""


class UnsupportedOperator(LayoutError, NotImplementedError):
    """An operator that is not exact on stored bytes, and that would be wrong on a dequantized copy too."""


class ImplicitDequantize(LayoutError):
    """Under layoutc.strict(): an operator would dequantize without being asked to."""


class MissingOrientation(LayoutError):
    """An orientation that the tensor does not hold and that does not follow from what it holds."""


class DamagedError(LayoutError, ValueError):
    """A file's bytes are not those that were written."""


class UnsupportedTorch(LayoutError):
    """The installed torch has changed a private name that layoutc needs to find shards."""


def whole_instead(recipe: str) -> str:
    """What to write in place of plain values into a shard that knows nothing of the other shards."""
    return (
        f"write the whole weight, on all ranks: weight.copy_(distribute_tensor({recipe}.quantize(values), "
        "weight.device_mesh, weight.placements, src_data_rank=None))"
    )


def made_of_one_tensor(cls: type) -> TypeError:
    """For a parameter that another package makes anew by calling the class of the old one."""
    return TypeError(
        f"{cls.__name__}(tensor, ...): a quantized weight is several planes, so its class makes none of one tensor, as "
        "accelerate's init_empty_weights, load_checkpoint_and_dispatch and cpu_offload ask for. Call quantize_ once "
        "the weights are loaded, or build the model on the meta device and call load_state_dict(values, assign=True); "
        "offload with FSDP2's CPUOffloadPolicy"
    )
