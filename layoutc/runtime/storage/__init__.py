"""The storage of quantized tensors: planes, windows, pending writes, initial values; no tensor class."""
