"""The spec language: YAML with positions, the models of its keys, notations, formats and scale rules."""
