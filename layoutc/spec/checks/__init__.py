"""From a spec file's text to a checked `Spec`, or to everything that is wrong with it."""
