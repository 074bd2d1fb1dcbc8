"""Layouts: chains of invertible steps, and a recipe's layout built from them. Pure."""
