"""Benchmarks and the demo; they need only the runtime."""
