"""Launching Triton kernels with the tile functions that are generated for each recipe."""
