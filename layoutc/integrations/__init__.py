"""Other packages' trainers with layoutc in them: a module for each, which needs that package and no other."""
