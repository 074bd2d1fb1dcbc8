"""Findings about specs, their codes, and how they are printed. Imports nothing else from layoutc."""
