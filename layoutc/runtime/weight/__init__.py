"""The quantized tensor: its planes, what is written to them, how torch sees, saves and compiles it."""
