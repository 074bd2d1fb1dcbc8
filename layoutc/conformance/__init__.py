"""The conformance suite: does the code generated for a spec do what the spec says, to the byte?

Three ways in: `layoutc test`, the pytest plugin (`pytest --layoutc-spec my.yaml`), and `layoutc.conformance.runner`.
Importing this package imports nothing else; torch and numpy are imported by what runs checks.

The suite knows no recipe and no format. `codes`, `model` and `placing` read the spec a second time, in numpy and exact
fractions, and share no arithmetic with the compiler, the runtime or the generated code.
"""
