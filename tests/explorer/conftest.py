"""One browser, and the pages that it opens, for all tests of the explorer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import browser as browsers
import pytest
from browser import Browser


@pytest.fixture(scope="session")
def window() -> Iterator[Browser]:
    with browsers.browser() as one:
        yield one


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")
