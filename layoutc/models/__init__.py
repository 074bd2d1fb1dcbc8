"""A model's weights: names, shapes and kinds, read from configs, file headers, modules or shapes."""
