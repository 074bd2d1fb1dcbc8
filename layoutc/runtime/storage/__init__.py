"""What quantized tensors hold: planes, windows on them, writes that wait, initial values. It knows no tensor class."""
