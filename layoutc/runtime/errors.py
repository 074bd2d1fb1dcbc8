"""What layoutc raises at run time.

Every message names the recipe, the parameter where it is known, and what would work.
"""


class LayoutError(RuntimeError):
    """Something that a layout can't do."""


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
