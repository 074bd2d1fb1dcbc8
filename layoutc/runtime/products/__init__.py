"""What multiplies quantized weights: products in low precision, and who chooses between them and dequantizing."""
