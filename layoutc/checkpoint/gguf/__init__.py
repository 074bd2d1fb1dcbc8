"""GGUF, one file of tensors and of what a program needs to run them: read, filled into models, and written."""
