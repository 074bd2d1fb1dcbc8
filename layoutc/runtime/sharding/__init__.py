"""Where FSDP2 and DTensor place a weight's shards."""
