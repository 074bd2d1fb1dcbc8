"""The spec language: YAML with places, the models of its keys, notations, formats and scale rules."""
