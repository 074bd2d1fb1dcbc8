"""From a model to one that trains: which weights a recipe serves, masters, and ranks that agree."""
