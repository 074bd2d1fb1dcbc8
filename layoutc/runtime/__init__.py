"""The runtime: everything about quantized weights that is the same for all recipes. Needs only torch.

Generated code imports its modules, and checks `INTERFACE` when it is imported.
"""

INTERFACE = 15

#: Raised when traced graphs change: those that torch has kept on disk are compiled anew.
GRAPHS = 8


def require(interface: int, recipe: str) -> None:
    """Raises ImportError if generated code was written for another version of this runtime's interface."""
    if interface != INTERFACE:
        raise ImportError(
            f"recipe {recipe} was generated for runtime interface {interface}, but this runtime has {INTERFACE}: "
            "run `layoutc build` with the installed layoutc"
        )
