"""Quantizing weights: amaxes that shards share, blocks that cuts go through, many weights in one launch."""
