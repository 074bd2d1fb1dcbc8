"""Every decision that follows from a layout: what is stored, gathered, derived and cut. Pure."""
