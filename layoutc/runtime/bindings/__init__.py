"""Bindings: how other checkpoint formats hold a recipe's planes, by tensor names and indices."""
