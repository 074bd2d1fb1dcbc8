"""Integer arithmetic that the compiler and the runtime share: sizes, cuts and rectangles. Imports nothing."""
