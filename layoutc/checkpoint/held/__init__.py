"""What files of other programs hold for a weight: permuted values, codes of values, what a shape says."""
