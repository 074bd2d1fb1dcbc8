"""A program that saves one checkpoint after another and is killed at random points; prints what it found as JSON lines.

Each child is a fork, so that torch is imported once. The parent, which no save runs in, then looks at every folder.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from layoutc import checkpoint
from layoutc.recipes import mxfp8, nvfp4
from layoutc.runtime.errors import LayoutError

SHAPE = (256, 256)


def state(step: int) -> dict[str, Any]:
    """What the checkpoint of a step holds."""
    generator = torch.Generator().manual_seed(step)
    values = torch.randn(SHAPE, generator=generator)
    return {"model": {"a": mxfp8.quantize(values), "b": nvfp4.quantize(2 * values)}, "master": values, "step": step}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Byte for byte."""
    pairs = [(a["master"], b["master"]), *zip(a["model"].values(), b["model"].values(), strict=True)]
    return a["step"] == b["step"] and all(torch.equal(x, y) for x, y in pairs)


def save_forever(folder: Path, first: int, overwrite: bool, pipe: int) -> None:
    """Saves step after step, asynchronously, and changes the model while it does; tells of each that is done."""
    live = state(first)
    for step in range(first, first + 1000):
        new = state(step)
        live["step"] = step
        live["master"].copy_(new["master"])
        for name, weight in live["model"].items():
            weight.copy_(new["model"][name])
        target = folder / ("latest" if overwrite else f"step_{step}")
        future = checkpoint.async_save(live, target, overwrite=overwrite)
        live["master"].zero_()
        for weight in live["model"].values():
            weight.zero_()
        future.result()
        os.write(pipe, f"{step}\n".encode())


def killed_run(folder: Path, first: int, overwrite: bool, count: int, after: float) -> list[int]:
    """Steps that a child reported as saved before it was killed: some seconds after so many were."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        try:
            save_forever(folder, first, overwrite, write)
        finally:
            os._exit(3)
    os.close(write)
    with os.fdopen(read) as told:
        lines = [told.readline() for _ in range(count)]
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return [int(line) for line in (*lines, *told.read().split())]


def look(folder: Path, first: int, saved: list[int], overwrite: bool) -> dict[str, int]:
    """Loads everything from just before step `first` on; how many folders were whole, how many torn ones refused."""
    whole = torn = 0
    for path in sorted(folder.iterdir()):
        target = state(10**6)
        if path.name.endswith(".incomplete"):
            before = state(10**6)
            try:
                checkpoint.load(target, path)
            except LayoutError:
                torn += 1
                assert same(target, before), "a refused load has changed the model"
                shutil.rmtree(path)
                continue
            raise AssertionError(f"{path} was loaded, though its save did not end")
        if not path.name.startswith(".") and int(path.name.partition("_")[2] or first) >= first - 2:
            checkpoint.load(target, path)
            assert same(target, state(target["step"])), f"{path} holds other bytes than were saved"
            whole += 1
    if overwrite and saved:
        target = state(10**6)
        checkpoint.load(target, folder / "latest")
        assert target["step"] >= saved[-1], "an older checkpoint came back"
        assert same(target, state(target["step"]))
    elif saved:
        assert all((folder / f"step_{step}").is_dir() for step in saved), "a saved folder is gone"
    return {"whole": whole, "torn": torn}


def seconds(target: Path) -> float:
    """What a save takes. The first imports, and any may wait for other processes: the quickest says how long one is."""
    start = time.monotonic()
    checkpoint.save(state(0), target)
    return time.monotonic() - start


def kill(folder: Path, times: int, overwrite: bool) -> None:
    """Kills `times` children at random points."""
    folder.mkdir()
    dice, found = random.Random(times), {"whole": 0, "torn": 0, "reported": 0}
    one = min(seconds(folder / f"warm_{number}") for number in range(4))
    (run := folder / "run").mkdir()
    first = 1
    for _ in range(times):
        saved = killed_run(run, first, overwrite, dice.randrange(4), dice.uniform(0, 2 * one))
        told = look(run, first, saved, overwrite)
        first += len(saved) + 1
        found = {
            "whole": found["whole"] + told["whole"],
            "torn": found["torn"] + told["torn"],
            "reported": found["reported"] + len(saved),
        }
    print(json.dumps(found))


def main(folder: Path, ways: list[str]) -> None:
    """Each of the ways, written as apart:20, in a folder of its name."""
    torch.set_num_threads(1)
    for way in ways:
        how, _, times = way.partition(":")
        kill(folder / how, int(times), how == "overwrite")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
