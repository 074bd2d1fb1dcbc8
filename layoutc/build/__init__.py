"""The pipeline as functions, and the files that it reads and writes. No other package of the compiler writes files."""
