"""What the weights of a model are: names, shapes and kinds, from configs, files' headers, modules or shapes."""
