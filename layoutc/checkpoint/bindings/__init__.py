"""Other formats' files, as bindings describe them: names of tensors, sizes in them, and configs of folders."""
