"""Tiles of the optimizer's launch on one card: milliseconds of each, for 2^28 parameters, and whether bytes are right.

    python tests/bench/optimizer_tiles.py [--forms "8bit;fp8"] [--rounds 5] [--seconds 90]

Programs are compiled by processes beside each other first. As optimizer.py, whose models and forms these are.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from functools import partial
from typing import Any

import torch
from optimizer import COUNT, FORMS, SHAPE, UNIT, bytes_of, give_gradients, model, stepping, timed

import layoutc
from layoutc.runtime.optim import launches, rules
from layoutc.runtime.optim.launches import Tiling

SMALL = [(512, 1024), (384, 1280)]
BLOCKS = {  # of recipes with blocks of 128 x 128: they are quantized after all of their rows
    f"{rows} rows, {warps} warps, {stages} stages, {registers} registers, {'kept' if keep else 'not kept'}": (
        *(128, 256, rows, 128, 128, stages, keep, warps, registers),
    )
    for rows, warps, stages, registers, keep in [
        (8, 8, 2, 80, True),
        *[(8, 8, 3, registers, True) for registers in (72, 80, 88, 96, 112, 128)],
        (8, 8, 3, 80, False),
        (8, 8, 4, 80, True),
        (8, 8, 4, 96, True),
        (8, 8, 5, 128, True),
        (16, 16, 1, 64, True),
        (16, 16, 2, 64, True),
    ]
}
NARROW = {  # where no state has blocks of 256
    f"128 columns, {rows} rows, {warps} warps, {stages} stages, {registers} registers, kept": (
        *(128, 128, rows, 128, 128, stages, True, warps, registers),
    )
    for rows, warps, stages, registers in [(16, 8, 1, None), (16, 8, 2, None), (16, 16, 1, 64), (16, 16, 2, 64)]
}
ROWS = {  # of weights that another launch quantizes
    f"{rows} rows of {span}, {warps} warps, {stages} stages, {registers} registers": (
        *(span, 256, rows, rows, 256, stages, False, warps, registers),
    )
    for rows, span, warps, stages, registers in [
        (8, 64, 4, 1, None),
        (8, 64, 8, 1, None),
        (8, 64, 8, 1, 64),
        (8, 64, 8, 2, None),
        (8, 64, 8, 3, None),
        (8, 64, 8, 3, 64),
        (4, 32, 4, 1, None),
        (4, 32, 4, 3, None),
        (8, 8, 8, 1, None),
        (4, 4, 4, 1, None),
    ]
}


def tilings(recipe: str, form: str) -> dict[str, Tiling]:
    """What is compared."""
    if recipe != "fp8_block":
        return {name: Tiling(*one) for name, one in ROWS.items()}
    narrow = {} if "8bit" in form else NARROW
    return {name: Tiling(*one) for name, one in {**BLOCKS, **narrow}.items()}


def tiled(plan: Tiling) -> None:
    """All launches from now on."""
    launches._tiles = lambda _: plan


def stepped(recipe: str, form: str, device: str) -> dict[str, torch.Tensor]:
    """The bytes of small weights after two steps."""
    layers = model(recipe, SMALL, device)
    optimizer = layoutc.AdamW(layers.parameters(), lr=0.01, weight_decay=0.1, **FORMS[form])
    for step in range(2):
        give_gradients(layers, step, device)
        optimizer.step()
    return bytes_of(layers, optimizer)


def compile_some(recipe: str, form: str, part: int) -> None:
    """Steps small weights, for what Triton keeps on disk: every third tile, from one on."""
    for name, plan in list(tilings(recipe, form).items())[part::3]:
        tiled(plan)
        try:
            stepped(recipe, form, "cuda")
        except Exception as error:
            print(f"{recipe}, {form}, {name}: {type(error).__name__}: {error}"[:300], flush=True)


def main() -> None:
    """Prints a line for each tile."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--forms", default="8bit;bf16 masters, 8bit;fp8;bf16 masters, fp8;fp32")
    parser.add_argument("--recipes", default="fp8_block,nvfp4")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--compile", type=int)
    options = parser.parse_args()
    start, forms, recipes = time.perf_counter(), options.forms.split(";"), options.recipes.split(",")
    if options.compile is not None:
        compile_some(recipes[0], forms[0], options.compile)
        return
    both = [(recipe, form) for recipe in recipes for form in forms]
    command = [sys.executable, __file__, "--compile"]
    started = [
        subprocess.Popen([*command, str(part), "--recipes", recipe, "--forms", form])
        for recipe, form in both
        for part in range(3)
    ]
    for one in started:
        one.wait()
    print(f"compiled after {time.perf_counter() - start:.0f} s", flush=True)
    source = torch.randn(UNIT, device="cuda")
    target = torch.empty_like(source)
    ((copy_ms, *_),) = timed({"copy": partial(target.copy_, source)}, 10).values()
    rate = 8 * UNIT / copy_ms / 1e6
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {rate:.0f} GB/s", flush=True)
    del source, target
    rules.sqrt = rules.exact_sqrt
    for recipe, form in both:
        if time.perf_counter() - start > options.seconds:
            break
        right = stepped(recipe, form, "cpu")
        tiled(next(iter(tilings(recipe, form).values())))
        layers, optimizer, moved = stepping(
            lambda params, form=form: layoutc.AdamW(params, lr=1e-3, **FORMS[form]), recipe
        )
        for name, plan in tilings(recipe, form).items():
            tiled(plan)
            optimizer._updates = {}
            try:
                found = stepped(recipe, form, "cuda")
                wrong = sum(int((one != found[key]).sum()) for key, one in right.items())
                optimizer.step()
                ((median, least, most),) = timed({name: optimizer.step}, options.rounds).values()
            except Exception as error:
                print(f"{recipe}, {form}, {name}: {type(error).__name__}: {error}"[:200], flush=True)
                continue
            scale = UNIT / (SHAPE[0] * SHAPE[1] * COUNT)
            share = moved * UNIT / (median * scale * 1e6) / rate
            said = "" if not wrong else f", {wrong} BYTES DIFFER"
            print(
                f"{recipe:10} {form:18} {name:52} {median * scale:5.2f} ms ({least * scale:.2f} to "
                f"{most * scale:.2f}), {share:.2f} of the copy{said}",
                flush=True,
            )
        del layers, optimizer
        torch.cuda.empty_cache()
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    _: Any = main()
