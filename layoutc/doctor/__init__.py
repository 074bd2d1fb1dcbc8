"""The checks of `layoutc doctor`: packages, cards, the parts of FSDP2 that the runtime reads, and how recipes run."""
