"""Every decision that follows from a layout: what is gathered, derived, cut, and how kernels work. Pure functions."""
