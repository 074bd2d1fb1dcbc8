"""The quantized tensor: its planes, writes to them, and how torch dispatches, saves and compiles it."""
