"""Turns a spec file's text into a checked `Spec`, or into everything that is wrong with it."""
