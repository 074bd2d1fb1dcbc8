"""What a model takes of each rank: bytes that stay, bytes that a gather adds, bytes that travel, and time. Pure."""
