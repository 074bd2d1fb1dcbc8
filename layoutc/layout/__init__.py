"""Where every bit of a weight lies: chains of invertible steps, and a recipe's layout made of them. Pure."""
