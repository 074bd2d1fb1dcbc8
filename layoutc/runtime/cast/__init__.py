"""The weight that stays in high precision and is quantized as it is gathered."""
