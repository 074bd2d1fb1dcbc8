"""Estimates the time of a training step on more ranks and other links than were measured: pure functions of sizes."""
