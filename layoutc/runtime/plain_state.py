"""A name in pickles of layoutc 0.1."""

from layoutc.pickled import give_plain as give
from layoutc.pickled import take_plain as take

__all__ = ["give", "take"]
