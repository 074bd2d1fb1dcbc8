"""Shared by all checkpoint formats: folders, agreement between ranks, and the part of a weight that a rank holds."""
