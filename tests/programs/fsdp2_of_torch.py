"""Runs PyTorch's own tests of FSDP2 with every nn.Linear quantized, on CPUs and gloo, beside the same tests plain.

    python tests/programs/fsdp2_of_torch.py PYTORCH/test/distributed/_composable/fsdp/test_fully_shard_frozen.py ...

The files are PyTorch's (needs expecttest), of the installed version or of an older one: they are read where they are,
and where they name cuda, the CPU is meant. Debian's source package has those of 2.6.0: `apt-get source pytorch`.
Each is run plain, and with the linear layers that it builds quantized or cast on gather, in fp8_block and in a recipe
of 4x4 blocks. The table has a line for each test. A test that fails plain needs a card, or what gloo lacks: it is
listed and not looked at. A test is refused where what each rank that failed raised, or the cause that it names, is an
error of layoutc's: those are listed with its words. Exits with 1 if a test that passes plain fails quantized otherwise.

What a test compares with has the same weights: where FSDP2 gathers a weight that is cast, the reference's values are
quantized too, in fp32, as the shards' are. --exact compares to the bit what the tests compare to a tolerance.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import linecache
import os
import re
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

RANKS = 4
SQUARE = """
layoutc: 1
name: fp8_square4
summary: E4M3 weights in 4x4 blocks
element: {format: e4m3}
scale: {format: f32, rule: amax-over-max}
orientations:
  rowwise:
    block: {m: 4, k: 4}
    data: {layout: m k}
    scale: {layout: m/4 k/4}
  columnwise:
    block: {m: 4, k: 4}
    data: {layout: k m}
    scale: {layout: k/4 m/4}
"""
MODES = ("plain", *(f"{recipe} {use}" for recipe in ("fp8_block", "fp8_square4") for use in ("quantized", "cast")))
OURS = "layoutc."  # how the names of errors of refusals begin in tracebacks
RAISED = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?::|$)")  # the last part of a traceback
CAUSE = "The above exception was the direct cause of the following exception:"
ON_CPU = (
    ("not TEST_CUDA", "False"),
    ("torch.cuda.", "torch.cpu."),
    (".cuda()", ".cpu()"),
    ('"cuda"', '"cpu"'),
    ('"cuda:0"', '"cpu"'),
)  # what tests of before 2.9 name


# ------------------------------------------------------------------------------------------------ one file, in one mode
def on_cpu(exact: bool) -> None:
    """Tells torch's helpers that there are as many devices as ranks, and forks ranks in place of starting them anew.

    exact: values are compared to the bit.
    """
    import torch.distributed
    from torch.testing._internal import common_distributed as common
    from torch.testing._internal import common_fsdp, common_utils

    torch.set_num_threads(1)
    torch.accelerator.device_count = torch.cpu.device_count = lambda: RANKS  # type: ignore[assignment]
    torch.cpu._sleep = lambda cycles: None  # type: ignore[attr-defined]
    common_fsdp.DEVICE_COUNT = RANKS
    if not hasattr(common_fsdp, "test_compiled_fsdp"):  # older files import it; they are run eagerly alone
        common_fsdp.test_compiled_fsdp = lambda **_: lambda test: test  # type: ignore[attr-defined]

    def skips(least: int, **_: Any) -> Callable[[Any], Any]:
        return unittest.skipIf(least > RANKS, f"needs {least} ranks")

    common.skip_if_lt_x_gpu = skips  # type: ignore[assignment]
    common.TIMEOUT_DEFAULT = 180
    replicas = torch.nn.parallel.DistributedDataParallel
    plain = replicas.__init__

    def on_no_device(self: Any, module: Any, device_ids: Any = None, *args: Any, **options: Any) -> None:
        plain(self, module, None, *args, **options)

    replicas.__init__ = on_no_device  # type: ignore[method-assign, assignment]
    equal = common_utils.TestCase.assertEqual

    def equal_values(self: Any, x: Any, y: Any, *args: Any, **options: Any) -> None:
        if exact:
            options |= {"rtol": 0, "atol": 0}
        if hasattr(x, "planes") and hasattr(y, "plain"):
            x, y = y, x
        if hasattr(x, "plain") and hasattr(y, "planes"):  # a weight that is cast, and one that was gathered
            expected, planes = x.quantize().planes(), y.planes()
            assert planes
            for name, plane in planes.items():
                equal(self, expected[name].view(torch.uint8), plane.view(torch.uint8), *args)
            return
        equal(self, values(x), values(y), *args, **options)

    common_utils.TestCase.assertEqual = equal_values  # type: ignore[method-assign, assignment]
    context = torch.multiprocessing.get_context("fork")
    common.MultiProcessTestCase._spawn_processes = lambda self: self._start_processes(context.Process)  # type: ignore[assignment]


def values(one: Any) -> Any:
    """Of a weight that is cast on gather, and of a wrapper that holds one: plain values, for comparing."""
    if hasattr(one, "plain"):
        return one.plain
    if not hasattr(one, "__tensor_flatten__"):
        return one
    names, context = one.__tensor_flatten__()
    inner = {name: getattr(one, name) for name in names}
    if not any(hasattr(part, "plain") for part in inner.values()):
        return one
    inner = {name: values(part) for name, part in inner.items()}
    return type(one).__tensor_unflatten__(inner, context, one.size(), one.stride())


def quantize_linears(recipe: str, use: str) -> None:
    """From now on nn.Linear has a weight in the recipe as soon as it is built; its copies have too."""
    from torch import nn

    import layoutc

    if recipe == "fp8_square4":
        sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
        unshipped = importlib.import_module("unshipped")
        unshipped.add(recipe, SQUARE)
        found: Any = importlib.import_module(f"layoutc.recipes.{recipe}")
    else:
        found = recipe
    plain = nn.Linear.__init__

    def built(self: nn.Linear, *args: Any, **options: Any) -> None:
        plain(self, *args, **options)
        if use == "quantized":
            layoutc.quantize_(self, found, keep_values=False)
        else:
            layoutc.cast_on_gather_(self, found)

    nn.Linear.__init__ = built  # type: ignore[method-assign, assignment]
    if use == "cast":
        compute_as_gathered()


def compute_as_gathered() -> None:
    """A reference's copy in 16 bits gets the weights that FSDP2 gathers in that dtype.

    Those are quantized from fp32, and their values are rounded to 16 bits. A copy by module.to(dtype) would have values
    that are rounded first and quantized then, and so it would after param.copy_(fp32 values).
    """
    import torch
    from torch import Tensor, nn

    from layoutc.runtime.cast.tensor import CastOnGather

    class Gathered(Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl

        def detach(self) -> Tensor:
            return super().detach().as_subclass(Gathered)

        def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:
            if isinstance(source, CastOnGather):
                source = source.quantize().dequantize(self.dtype)
            return super().copy_(source, non_blocking)

    convert = nn.Module.to

    def to(self: Any, *args: Any, **options: Any) -> Any:
        dtype = torch._C._nn._parse_to(*args, **options)[1]
        found = {}
        if dtype is not None and dtype.itemsize == 2:
            for name, param in self.named_parameters():
                if isinstance(param, CastOnGather) and param.dtype != dtype:
                    found[name] = param.quantize().dequantize(dtype).detach().as_subclass(Gathered)
        converted = convert(self, *args, **options)
        for name, values in found.items():
            owner, _, own = name.rpartition(".")
            setattr(converted.get_submodule(owner), own, nn.Parameter(values))
        return converted

    nn.Module.to = to  # type: ignore[method-assign, assignment]


class Lines(unittest.TestResult):
    """Writes a line of JSON for each test as soon as it is known."""

    def __init__(self, out: Any) -> None:
        super().__init__()
        self.out = out

    def tell(self, test: unittest.TestCase, outcome: str, said: str = "") -> None:
        """The test's name without its module; the last of what was said."""
        self.out.write(json.dumps([test.id().partition(".")[2], outcome, said]) + "\n")
        self.out.flush()

    def addSuccess(self, test: unittest.TestCase) -> None:
        self.tell(test, "pass")

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self.tell(test, "fail", self._exc_info_to_string(err, test))  # type: ignore[attr-defined]

    addError = addFailure

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self.tell(test, "skip", reason)


def run(file: Path, mode: str, out: Path, only: str, names: list[str], *, exact: bool, processes: bool) -> None:
    """The tests of a file, in this process and its forks. names: those to run; none: all."""
    on_cpu(exact)
    recipe, _, use = mode.partition(" ")
    if use:
        quantize_linears(recipe, use)
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    source = file.read_text(encoding="utf-8")
    for card, cpu in ON_CPU:
        source = source.replace(card, cpu)
    if processes:
        source = source.replace("FSDPTestMultiThread", "FSDPTest")
    linecache.cache[str(file)] = (len(source), None, source.splitlines(keepends=True), str(file))
    exec(compile(source, str(file), "exec"), module.__dict__)
    with out.open("a", encoding="utf-8") as lines:
        result = Lines(lines)
        for suite in unittest.defaultTestLoader.loadTestsFromModule(module):
            for test in suite:
                if only in test.id() and (not names or test.id().partition(".")[2] in names):
                    test.run(result)


# ---------------------------------------------------------------------------------------------------------- all of them
def outcomes(file: Path, mode: str, options: list[str], seconds: float) -> dict[str, tuple[str, str]]:
    """Of each test of a file: pass, fail or skip, and what was said. A file that takes too long has no more tests."""
    command = [sys.executable, __file__, str(file), "--mode", mode, *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_DISTRIBUTED_DEBUG": "OFF"}
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as out:
        process = subprocess.Popen(
            [*command, "--out", out.name],
            env=environment,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            _, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            _, errors = process.communicate()
        found = {name: (outcome, said) for name, outcome, said in map(json.loads, out.read().splitlines())}
    return found or {"(the file)": ("fail", errors)}


def raised(said: str) -> list[tuple[str, str]]:
    """Of each rank that failed, or of the one process: the name of the error that it raised, and its message.

    Of a chain of causes, the first error.
    """
    parts = re.split(r"(?:Process|Thread) \d+ exited with [^\n]*exception:?\n", said)
    found = []
    for part in parts[1:] or parts:
        part = part.partition("\n\nTo execute this test")[0]
        lines = part.partition(CAUSE)[0].splitlines()
        last = [at for at, line in enumerate(lines) if RAISED.match(line) and not line.startswith("Traceback")]
        after = [at for at in last if any(line.startswith("  ") for line in lines[:at])] or last
        told = lines[first_of_message(lines, after) :] if after else lines[-1:]
        name, _, words = " ".join(line.strip() for line in told).strip().partition(": ")
        found.append((name, words))
    return found


def first_of_message(lines: list[str], candidates: list[int]) -> int:
    """Where the last error's message begins: the first candidate after the last line of a stack."""
    stack = max((at for at, line in enumerate(lines) if line.startswith('  File "')), default=-1)
    return next((at for at in candidates if at > stack), candidates[-1])


def is_refused(said: str) -> bool:
    """True where all ranks that raised something by themselves raised one of our errors."""
    own = [name for name, words in raised(said) if "onnection closed by peer" not in words]
    return bool(own) and all(name.startswith(OURS) for name in own)


def reason(said: str) -> str:
    """The error of the first rank that failed, and its words."""
    name, words = min(raised(said), key=lambda one: not one[0].startswith(OURS))
    return f"{name.rpartition('.')[2]}: {words}"[:600]


def main() -> int:
    """The table; 1 if something that passes plain is wrong quantized."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--only", default="", help="tests whose names contain this")
    parser.add_argument("--modes", default=",".join(MODES), help="separated by commas; plain is always run")
    parser.add_argument("--seconds", type=float, default=600.0, help="for one file in one mode")
    parser.add_argument("--exact", action="store_true", help="values are compared to the bit, plain ones too")
    parser.add_argument("--processes", action="store_true", help="ranks that tests have as threads are processes")
    parser.add_argument("--names", nargs="*", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--mode", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.mode:
        file, flags = asked.files[0].resolve(), {"exact": asked.exact, "processes": asked.processes}
        run(file, asked.mode, asked.out, asked.only, asked.names, **flags)
        return 0
    options = ["--only", asked.only, *["--exact"] * asked.exact, *["--processes"] * asked.processes]
    modes = ["plain", *(mode for mode in asked.modes.split(",") if mode != "plain")]
    wrong, refused, left_out = [], [], []
    passes = dict.fromkeys(modes, 0)
    for file in asked.files:
        found = {"plain": outcomes(file.resolve(), "plain", options, asked.seconds)}
        names = [name for name, (outcome, _) in found["plain"].items() if outcome == "pass"]
        for mode in modes[1:] if names else ():
            found[mode] = outcomes(file.resolve(), mode, [*options, "--names", *names], asked.seconds)
        print(f"\n{file.name}: {', '.join(modes)}")
        for name, (outcome, said) in found["plain"].items():
            if outcome != "pass":
                print(f"  {name:<72} {outcome}", flush=True)
                left_out.append(f"{name}: {reason(said)}")
                continue
            row = [found[mode].get(name, ("none", "did not end"))[0] for mode in modes]
            print(f"  {name:<72} {' '.join(f'{cell:<5}' for cell in row)}", flush=True)
            for mode, cell in zip(modes, row, strict=True):
                passes[mode] += cell == "pass"
            for mode in modes[1:]:
                cell, why = found[mode].get(name, ("none", "did not end"))
                if cell != "pass":
                    (refused if is_refused(why) else wrong).append(f"{name}, {mode}: {reason(why)}")
    print(f"\nOf {passes['plain']} that pass plain:", *(f"{passes[mode]} {mode}," for mode in modes[1:]))
    for title, lines in (("Not run plain on CPUs", left_out), ("Refused", refused), ("Wrong", wrong)):
        print(f"\n{title}: {len(lines)}", *lines, sep="\n  ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
