"""The storage of quantized tensors: planes, windows on them, pending writes, initial values. It knows no tensor
class."""
