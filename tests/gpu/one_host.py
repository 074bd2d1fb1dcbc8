"""All that programs of this folder and of tests/bench say of one host's cards: to the bit first, then times.

    python tests/gpu/one_host.py [--only exact|gathers|steps|slowed ...] [--minutes 10] [--json FILE]

Every card is a rank. The estimates of the steps are made before anything runs, and stand beside what was measured, with
the distance in percent. A program that fails or takes more than what is left of the time is named; the others still
run. Exits with 1 if a program failed, or if a step is more than 15% away from its estimate.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
BENCH = HERE.parent / "bench"
sys.path.insert(0, str(BENCH))
EXACT = ("train_nccl", "exchange_nccl", "on_gather_nccl", "checkpoints_nccl", "replicas_nccl", "dtensor_nccl")
VARIANTS = ("bf16", "torchao", "layoutc:nvfp4", "layoutc:fp8_current+low")
EXCHANGED = ("layoutc:nvfp4+exchange", "layoutc:nvfp4+grad_fp8", "layoutc:nvfp4+grad_int4")
SLOWED = {
    "24 GB/s": {"NCCL_P2P_DISABLE": "1"},
    "9.5 GB/s": {
        **{"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"},
        **{"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"},
    },
}
NEAR = 15  # percent that a step may be away from its estimate


@dataclass(frozen=True)
class Program:
    """A program that torchrun starts on all cards. sequence, eager: of its steps; link: what is between its ranks."""

    label: str
    command: tuple[str, ...]
    settings: Mapping[str, str] = field(default_factory=dict)
    sequence: int = 0
    eager: bool = False
    link: str = "NVLink"


def steps(sequence: int, eager: bool, variants: Sequence[str], link: str = "NVLink") -> Program:
    """Steps of 8 Llama blocks, all variants by turns."""
    label = f"sequence {sequence}, {'eager' if eager else 'compiled'}, {link}"
    turns = ("--turns", "3", "--steps", "6", "--warm", "3", *(["--eager"] if eager else []))
    command = (str(BENCH / "step.py"), "--sequence", str(sequence), "--batch", "1", *turns, "--variants", *variants)
    return Program(label, command, SLOWED.get(link, {}), sequence, eager, link)


def programs(which: Sequence[str]) -> list[Program]:
    """In the order in which they run."""
    every = {
        "exact": [Program(name, (str(HERE / f"{name}.py"),)) for name in EXACT],
        "gathers": [Program("gathers", (str(BENCH / "gather.py"),))],
        "steps": [steps(at, eager, (*VARIANTS, *EXCHANGED)) for at in (512, 4096) for eager in (True, False)],
        "slowed": [steps(4096, False, ("bf16", "layoutc:nvfp4", *EXCHANGED[1:]), link) for link in SLOWED],
    }
    return [program for name in which for program in every[name]]


def words_of(variant: str) -> str:
    """What fit_steps.py calls a variant of step.py: there, layers dequantize unless gathers are said to."""
    words, exchange, _ = variant.removeprefix("layoutc:").partition("+exchange")
    gathers = "" if words in ("bf16", "torchao") or words.endswith("+low") else "+on_gather"
    return words + gathers + exchange


def estimates(made: Sequence[Program], world: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each variant of each program that takes steps, where `layoutc estimate` knows it."""
    import fit_steps as fits

    card = fits.H200 if "H200" in torch.cuda.get_device_name() else fits.H100
    told: dict[str, dict[str, float]] = {}
    for program in made:
        if not program.sequence or program.link == "24 GB/s":
            continue
        link, how = "NVLink" if program.link == "NVLink" else "sockets", "eager" if program.eager else "compiled"
        variants = program.command[program.command.index("--variants") + 1 :]
        known = {variant: words_of(variant) for variant in variants if "+grad_" not in variant}
        model = fits.blocks(program.sequence, 1)
        told[program.label] = {
            variant: 1e3 * fits.total(words, model, world, link, how, card)(fits.Constants())
            for variant, words in known.items()
        }
    return told


def run(program: Program, world: int, seconds: float, estimated: Mapping[str, float]) -> dict[str, Any]:
    """What one program gave: its status, seconds and last lines, and its JSON beside the estimates."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world), *program.command]
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "run.json"
        with_json = [*torchrun, *(["--json", str(written)] if str(BENCH) in program.command[0] else [])]
        start = time.monotonic()
        try:
            environment = {**os.environ, **program.settings}
            done = subprocess.run(
                with_json, capture_output=True, text=True, timeout=seconds, env=environment, check=False
            )
            status, told = str(done.returncode), done.stdout + (done.stderr if done.returncode else "")
        except subprocess.TimeoutExpired as cut:
            status, told = "out of time", (cut.stdout or b"").decode(errors="replace")
        found = json.loads(written.read_text()) if written.exists() else {}
    rows = {row["variant"]: row["median_ms"] for row in found.get("rows", ()) if "variant" in row}
    away = {name: 100 * (rows[name] / ms - 1) for name, ms in estimated.items() if name in rows}
    took = round(time.monotonic() - start, 1)
    return {**asdict(program), "status": status, "seconds": took, "away": away, "found": found, "tail": told[-3000:]}


def main(arguments: Sequence[str]) -> int:
    """Prints a line for each program, and for each step how far it is from its estimate."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", default=["exact", "gathers", "steps", "slowed"])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    end, world, made = time.monotonic() + 60 * given.minutes, torch.cuda.device_count(), programs(given.only)
    before = estimates(made, world)
    card, results, wrong = torch.cuda.get_device_name(), list[dict[str, Any]](), False
    print(f"{world} x {card}, torch {torch.__version__}; estimates: {json.dumps(before)}", flush=True)
    for program in made:
        result = run(program, world, max(end - time.monotonic(), 1), before.get(program.label, {}))
        far = {name: away for name, away in result["away"].items() if abs(away) > NEAR}
        wrong |= result["status"] != "0" or bool(far)
        print(f"{program.label}: {result['status']}, {result['seconds']} s", flush=True)
        if result["status"] != "0":
            print(result["tail"], flush=True)
        for row in result["found"].get("rows", ()):
            distance = f", {result['away'][row['variant']]:+.1f}%" if row.get("variant") in result["away"] else ""
            if "variant" in row:
                print(f"    {row['variant']}: {row['median_ms']:.1f} ms ({row['spread_ms']:.1f}){distance}", flush=True)
        results.append(result)
        if given.json:
            head = {"card": card, "world": world, "torch": torch.__version__, "estimates": before}
            given.json.write_text(json.dumps({**head, "programs": results}, indent=1) + "\n")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
