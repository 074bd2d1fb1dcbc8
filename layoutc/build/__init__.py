"""The pipeline as functions, and the files that it reads and writes. No other room writes files."""
