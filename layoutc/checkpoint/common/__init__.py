"""What all kinds of checkpoints share: folders, ranks that agree, and which part of a weight a rank holds."""
