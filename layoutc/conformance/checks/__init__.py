"""The checks of the conformance suite."""
