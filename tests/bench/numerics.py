"""What rounding weights to each recipe costs: the error of dequantized values, beside the bits of an element.

    python tests/bench/numerics.py [--recipes fp8_block,nvfp4] [--size 2048] [--json FILE]

The error is the root mean square of differences over that of the values: of normal ones, and of Student's t with three
degrees of freedom, whose tail is heavy. Bytes are the recipe's on any machine, so this runs on a CPU.
"""

from __future__ import annotations

import argparse
import json
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

RECIPES = (
    *("int8_rowwise", "fp8_current", "fp8_rowwise", "fp8_block", "mxfp8", "mxfp8_2d", "fp8_e5m2_current"),
    *("q6_k", "mxfp6_e2m3", "mxfp6_e3m2", "q4_k", "int4_group32", "nf4", "nvfp4_1d", "nvfp4_4over6", "nvfp4", "mxfp4"),
)


def values(size: int) -> dict[str, Tensor]:
    """(size, size) fp32, by what they are drawn from."""
    random = np.random.default_rng(0)
    drawn = {"normal": random.standard_normal((size, size)), "heavy tail": random.standard_t(3, (size, size))}
    return {name: torch.from_numpy(one).float() for name, one in drawn.items()}


def error(recipe: str, x: Tensor) -> float:
    """The relative error of what is read rowwise, as forward products read it."""
    tensor = import_module(f"layoutc.recipes.{recipe}").quantize(x)
    return float((tensor.dequantize().double() - x.double()).pow(2).mean().sqrt() / x.double().pow(2).mean().sqrt())


def main() -> None:
    """Prints a line for each recipe."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--size", type=int, default=2048)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    drawn, rows = values(given.size), []
    for recipe in given.recipes.split(","):
        layout = import_module(f"layoutc.recipes.{recipe}").LAYOUT
        forward = layout.gather(given.size, given.size, world=1, which="forward")
        bits = 8 * forward.bytes_per_rank / given.size**2
        cells = [f"{bits:.2f}", *(f"{100 * error(recipe, x):.2f}%" for x in drawn.values())]
        rows.append({"name": f"`{recipe}`", "cells": cells})
        print(recipe, *cells, flush=True)
    if given.json:
        columns = ["bits in a gather", *(f"error, {name} values" for name in drawn)]
        given.json.write_text(json.dumps({"kind": "table", "columns": columns, "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
