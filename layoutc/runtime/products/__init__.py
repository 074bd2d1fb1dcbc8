"""Products of quantized weights in low precision, and the choice between them and dequantizing."""
