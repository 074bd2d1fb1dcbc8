"""Layouts to look at: a page for a browser, pictures for papers. All they show is exported from the compiler's maps."""
