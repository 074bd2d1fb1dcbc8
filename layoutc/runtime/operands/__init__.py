"""What products in low precision multiply: activations, gradients and weights as scaled_mm reads them."""
