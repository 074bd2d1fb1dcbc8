"""layoutc in other packages' trainers: one module per package, which imports no other one."""
