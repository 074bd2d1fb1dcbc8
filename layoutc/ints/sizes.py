"""Sizes in whole units."""

from __future__ import annotations


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def up(a: int, multiple: int) -> int:
    """`a` rounded up to a multiple."""
    return cdiv(a, multiple) * multiple
