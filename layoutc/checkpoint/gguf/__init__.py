"""Reads, loads, converts and exports GGUF: files of tensors with the metadata that programs need to run them."""
