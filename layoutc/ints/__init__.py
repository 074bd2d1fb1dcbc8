"""Integers that the compiler and the runtime both need: sizes, and where rows are cut. Imports nothing."""
