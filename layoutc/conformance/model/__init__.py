"""An independent model of a recipe, made only from the spec and the layout's data."""
