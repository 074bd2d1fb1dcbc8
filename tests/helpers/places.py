"""Where things are, for tests in any folder."""

from __future__ import annotations

from pathlib import Path

HELPERS = Path(__file__).parent
TESTS = HELPERS.parent
ROOT = TESTS.parent
SPECS = ROOT / "specs"
UNSHIPPED = TESTS / "unshipped"  # specs of recipes that are made where a test asks for them
EXCHANGED = UNSHIPPED / "exchanged"  # of formats in which people hand on weights
