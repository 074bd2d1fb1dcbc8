"""A weight's tensors in other checkpoint formats: permuted values, codes of values, tensors derived from its shape."""
