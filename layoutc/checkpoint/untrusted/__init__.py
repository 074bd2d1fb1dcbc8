"""Reads untrusted files: up to a size limit, and checked before use."""
