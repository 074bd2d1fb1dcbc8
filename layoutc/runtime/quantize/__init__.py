"""Quantizing weights: amaxes that shards share, blocks that cuts split, many weights in one launch."""
