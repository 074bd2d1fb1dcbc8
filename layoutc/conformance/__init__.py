"""The conformance suite: does the code generated for a spec do what the spec says, to the byte?

Run it with `layoutc test`, the pytest plugin (`pytest --layoutc-spec my.yaml`), or `layoutc.conformance.runner`.
Importing this package imports nothing else; the checks import torch and numpy.

The suite knows no recipe or format by name. `conformance.model` implements specs independently, in numpy and exact
fractions, and shares no arithmetic with the compiler, the runtime or the generated code.
"""
