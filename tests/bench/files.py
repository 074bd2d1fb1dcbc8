"""How long a folder of another program takes to load and to write, beside plain reads and writes of the same bytes.

    python tests/bench/files.py --gib 2 --folder files_bench

One process, on the CPU. The files are read once before anything is timed, so that all reads come from memory. Bytes are
compared first. Memory is the most that one more load or export holds beyond the model, without pages of files, while
the C library gives back what is freed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
from peaks import given_back_at_once, most

import layoutc
from layoutc.checkpoint import export_safetensors, load_safetensors

SIDE = 4096
CASES = (
    ("fp8_block", "deepseek"),
    ("mxfp8_frozen", "compressed_tensors"),
    ("mxfp4_gpt_oss", "gpt_oss"),
    ("int4_packed128", "compressed_tensors"),
    ("awq", "awq"),
)


class Stack(nn.Module):
    """Experts of (k, n), as many as make a size."""

    def __init__(self, count: int, side: int) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.empty(count, side, side, dtype=torch.bfloat16, device="meta"))


def model_of(recipe: str, gib: float) -> nn.Module:
    """Weights of about so many GiB, with random codes."""
    count = max(1, int(gib * 2**30 / (SIDE * SIDE * (0.53 if recipe.startswith(("mxfp4", "int4", "awq")) else 1.01))))
    if recipe.endswith("gpt_oss"):
        model: nn.Module = Stack(count, SIDE)
        layoutc.quantize_(model, recipe, param_filter=["experts"], keep_values=False)
    else:
        model = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False, device="meta") for _ in range(count)))
        layoutc.quantize_(model, recipe, keep_values=False)
    model.to_empty(device="cpu")
    for param in model.parameters():
        for name, plane in param.planes().items():  # type: ignore[attr-defined]
            plane.view(torch.uint8).random_(1, 16 if "zero" in name else 120)
    return model


def seconds(work: Callable[[], object], runs: int) -> tuple[float, float, float]:
    """Median, fastest and slowest."""
    times = []
    for _ in range(runs):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return statistics.median(times), min(times), max(times)


def main() -> None:
    """Prints a row for each recipe."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", help="one recipe")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; seconds: median (fastest to slowest)")
    for recipe, files in (case for case in CASES if options.only in (None, case[0])):
        model, root = model_of(recipe, options.gib), options.folder
        shutil.rmtree(root, ignore_errors=True)
        ours, theirs = root / "ours", root / "plain.safetensors"

        def export(model: nn.Module = model, files: str = files, ours: Path = ours) -> None:
            shutil.rmtree(ours, ignore_errors=True)
            export_safetensors(model, ours, files=files, max_shard_bytes=2**40)

        export()
        tensors = load_file(ours / "model.safetensors")
        size = sum(tensor.nbytes for tensor in tensors.values()) / 2**30
        before = {name: plane.clone() for name, plane in next(model.parameters()).planes().items()}  # type: ignore[attr-defined]
        load_safetensors(model, ours, files=files)
        after = next(model.parameters()).planes()  # type: ignore[attr-defined]
        assert all(
            torch.equal(plane.view(torch.uint8), after[name].view(torch.uint8)) for name, plane in before.items()
        )
        into = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}

        def copy(ours: Path = ours, into: dict[str, torch.Tensor] = into) -> None:
            for name, tensor in load_file(ours / "model.safetensors").items():
                into[name].copy_(tensor)

        def save(tensors: dict[str, torch.Tensor] = tensors, theirs: Path = theirs) -> None:
            theirs.unlink(missing_ok=True)
            save_file(tensors, theirs)
            with open(theirs, "rb") as file:
                os.fsync(file.fileno())

        def load(model: nn.Module = model, files: str = files, ours: Path = ours) -> None:
            load_safetensors(model, ours, files=files)

        rows = [("load", seconds(load, options.runs), seconds(copy, options.runs))]
        rows.append(("export", seconds(export, options.runs), seconds(save, options.runs)))
        del tensors, into, copy, save
        held = list[int]()
        with given_back_at_once():
            for work in (load, export):
                with most(held):
                    work()
        for (what, mine, plain), memory in zip(rows, held, strict=True):
            shown = "  ".join(f"{a:.2f} ({b:.2f} to {c:.2f})" for a, b, c in (mine, plain))
            beside = f"{plain[0] / mine[0]:.2f} of plain  {memory / 2**20:.0f} MiB"
            print(f"{recipe}/{files}  {size:.2f} GiB  {what:6}  {shown}  {beside}")
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
