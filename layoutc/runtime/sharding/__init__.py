"""Where a weight's shards are: what FSDP2 and DTensor know of them."""
