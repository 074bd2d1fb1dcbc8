"""The conformance suite: does the code generated for a spec do what the spec says, to the byte?

It is run by `layoutc test`, by the pytest plugin (`pytest --layoutc-spec my.yaml`), or through
`layoutc.conformance.runner`. Importing this package imports nothing else; torch and numpy are imported by the checks.

The suite knows no recipe and no format by name. `conformance.model` reads the spec a second time, in numpy and exact
fractions, and shares no arithmetic with the compiler, the runtime or the generated code.
"""
