"""The runtime: the code for quantized weights that all recipes share. Depends only on torch.

Generated code imports its modules, and checks `INTERFACE` on import.
"""

INTERFACE = 16

#: Incremented when traced graphs change, so that graphs in torch's cache on disk are recompiled.
GRAPHS = 10


def require(interface: int, recipe: str) -> None:
    """Raises ImportError if generated code was generated for another version of this interface."""
    if interface != INTERFACE:
        raise ImportError(
            f"recipe {recipe} was generated for runtime interface {interface}, but this runtime has {INTERFACE}: "
            "run `layoutc build` with the installed layoutc"
        )
