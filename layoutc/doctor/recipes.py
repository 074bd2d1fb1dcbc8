"""Installed recipes on this machine: which have kernels, which use the reference, and how they multiply weights."""

from __future__ import annotations

import importlib
import importlib.util

import torch

from layoutc.doctor.findings import Line, Runs
from layoutc.runtime.installed import points
from layoutc.runtime.products.choice import NAMES, Sizes, choose
from layoutc.runtime.train.convert import recipe_class
from layoutc.runtime.weight.tensor import QuantizedTensor

SIZE = 4096  # rows and columns of the weight, and tokens, of the products to choose


def look() -> tuple[list[Runs], list[Line]]:
    """How each installed recipe runs, and findings about recipes that can't be imported."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    runs, lines = [], []
    for name, package in installed():
        try:
            cls = recipe_class(name)
            runs.append(Runs(name, package, kernels(cls, device), products(cls, device)))
        except Exception as error:  # the package may be someone else's
            fix = "run `layoutc build` for its spec with this layoutc"
            lines.append(Line(f"recipe {name}", "missing", f"{package}: {type(error).__name__}: {error}", fix))
    if not runs and not lines:
        lines.append(Line("recipes", "missing", "none is installed", "run `layoutc build`, or reinstall layoutc"))
    return runs, lines


def installed() -> list[tuple[str, str]]:
    """(recipe, package) of all installed recipes."""
    try:
        own = list(importlib.import_module("layoutc.recipes").RECIPES)
    except ImportError:
        own = []
    others = [(point.name, point.value) for point in points()]
    return [*((name, "layoutc.recipes") for name in own), *others]


def kernels(cls: type[QuantizedTensor], device: torch.device) -> str:
    """What quantizes, dequantizes and lays out."""
    if not cls.KERNELS:
        return "reference: the recipe has no kernels (layoutc show says why)"
    if device.type != "cuda":
        return "reference: there is no card"
    if importlib.util.find_spec("triton") is None:
        return "reference: there is no Triton"
    return "kernels"


def products(cls: type[QuantizedTensor], device: torch.device) -> str:
    """How `layoutc.products("low_precision")` multiplies a 4096 x 4096 weight."""
    if cls.LAYOUT.products is None:
        return "dequantized"
    ways = {name: choose(cls, name, Sizes(0, SIZE, SIZE, SIZE), device, "low_precision") for name in NAMES}
    low = [name for name, chosen in ways.items() if chosen.way == "kernel"]
    reasons = list(dict.fromkeys(chosen.reason for chosen in ways.values() if chosen.way != "kernel"))
    if not low:
        return f"dequantized: {reasons[0]}"
    return "low precision" if not reasons else f"low precision: {', '.join(low)}; others dequantized: {reasons[0]}"
