"""All decisions that follow from a layout: what is gathered, derived and cut, and how kernels work. Pure functions."""
