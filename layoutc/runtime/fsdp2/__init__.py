"""FSDP2's all-gather hooks, and how planes travel through them."""
