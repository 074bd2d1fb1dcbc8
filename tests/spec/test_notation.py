"""What the notation itself refuses, whoever reads it: a spec is refused earlier, with a place in its file."""

from __future__ import annotations

import pytest

from layoutc.spec.notation import NotationError, parse_swizzle


def test_a_size_without_a_name_in_the_pattern() -> None:
    with pytest.raises(NotationError, match="a size is given for `d`, which the pattern does not name"):
        parse_swizzle("(rt a) c -> rt c a", {"a": 4, "d": 2})
    assert dict(parse_swizzle("(rt a) c -> rt c a", {"a": 4}).sizes) == {"a": 4}
