"""Operands of products in low precision: activations, gradients and weights as scaled_mm reads them."""
