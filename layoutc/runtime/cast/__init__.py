"""Cast on gather: weights that stay in high precision and are quantized each time they are gathered."""
