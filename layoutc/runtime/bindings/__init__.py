"""How files of other programs hold a recipe's planes: as generated code states it, and by name and index."""
