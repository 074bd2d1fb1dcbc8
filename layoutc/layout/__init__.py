"""Layouts: chains of invertible steps, and a recipe's layout made of them. Pure."""
