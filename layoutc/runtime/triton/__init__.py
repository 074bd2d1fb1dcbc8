"""Triton functions that the kernels of all recipes call."""
