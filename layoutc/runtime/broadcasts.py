"""A name in pickles of layoutc 0.1."""

from layoutc.pickled import take_sent as take

__all__ = ["take"]
