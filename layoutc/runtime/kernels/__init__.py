"""Launching the generated Triton kernels."""
