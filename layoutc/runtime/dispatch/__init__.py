"""What each torch operator does with a quantized tensor."""
