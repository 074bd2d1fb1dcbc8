"""What measures and what demonstrates, on the runtime alone."""
