"""The pipeline as functions, and the files that it reads and writes: the only room that writes."""
