"""Visualizes layouts: a page for browsers, pictures for papers. They show only what the compiler's maps export."""
