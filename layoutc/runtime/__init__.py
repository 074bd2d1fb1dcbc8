"""The part of a quantized weight that is the same for all recipes. Imports torch, and nothing else.

Generated code leans on it through the modules here and checks `INTERFACE` at import.
"""

INTERFACE = 5


def require(interface: int, recipe: str) -> None:
    """Raises ImportError when generated code was written for another interface of this runtime."""
    if interface != INTERFACE:
        raise ImportError(
            f"recipe {recipe} was generated for runtime interface {interface}, but this is {INTERFACE}: "
            "run `layoutc build` with the installed layoutc"
        )
