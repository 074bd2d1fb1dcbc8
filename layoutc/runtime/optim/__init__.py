"""AdamW with state in recipes: one launch from a gradient's shard to masters, moments, and the weight's codes."""
