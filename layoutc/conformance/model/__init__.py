"""An independent model of a recipe, from the spec and the layout's data alone."""
