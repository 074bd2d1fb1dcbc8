"""Padding: which step a tensor is in when FSDP2 and DTensor pad short shards and cut the padding off.

Both keep every shard in a tensor of the longest shard's shape, and assume that it has bytes for the padding. A
quantized shard that begins or ends inside a block has none: where in a block its rows begin, and which rows share the
last scales, is known only from its planes. So a tensor records which of these calls made it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Padding(NamedTuple):
    """One step of the patterns below; at most one field is set. NOT_PADDED: in none of them.

    FSDP2, when it makes a shard and when one is loaded or converted::

        padded = shard.new_zeros(padded_size)      # is_new
        first = padded.narrow(0, 0, rows)          # first_rows_of=padded
        first.copy_(shard)                         # `padded` takes over the shard's planes: rows=rows
        padded.narrow(0, 0, rows)                  # NOT_PADDED: all that `padded` holds

    DTensor, around a collective on shards of unequal size::

        padded = constant_pad_nd(shard, ...)       # rows: of the shard; no plane grows
        whole = all_gather_into_tensor(padded)     # rows: of all shards; ends_where_cut if shards are whole blocks
        whole.narrow(0, 0, rows)                   # NOT_PADDED

    Optimizers, DDP and checkpoint stagers also call new_zeros, new_empty and narrow. They write the new tensor as a
    whole or cut it at other rows. A tensor that has been cut at other rows is no longer new: its pieces are parts of a
    weight, which share scales, and writing one of them waits for the rest (`pending_writes`).
    """

    is_new: bool = False  # from new_zeros or new_empty, and cut at its first rows at most
    first_rows_of: Callable[[], Any] | None = None  # a weak reference to the new tensor
    rows: int | None = None  # entries of dim 0 that planes cover; pieces of such a tensor keep it
    ends_where_cut: bool = False  # what is cut off its end is padding: the rest has no halo

    def of_copy(self) -> Padding:
        """The padding of a tensor of the same shape with its own planes."""
        return self if self.is_new or self.rows is not None else NOT_PADDED

    def of_piece(self) -> Padding:
        """The padding of a piece other than the first rows."""
        return self if self.rows is not None else NOT_PADDED


NOT_PADDED = Padding()
NEW = Padding(is_new=True)
ENDS_WHERE_CUT = Padding(ends_where_cut=True)
