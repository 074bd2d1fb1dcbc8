"""A name in pickles of layoutc 0.1."""

from layoutc.pickled import rebuild_cast as rebuild

__all__ = ["rebuild"]
