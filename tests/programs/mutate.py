"""Puts faults into modules, one at a time, runs their tests, and lists the faults that no test noticed.

    python tests/programs/mutate.py layoutc/runtime/weight/pending_writes.py              20 faults, chosen at random
    python tests/programs/mutate.py layoutc/checkpoint --count 60 --seed 3  60 faults in the modules of a folder
    python tests/programs/mutate.py layoutc/layout/chain.py --tests tests/layout/test_layout.py
    python tests/programs/mutate.py layoutc/layout/chain.py --only 3f2a91c  one fault again, once there is a test

A fault that survives is a test to write, or changes nothing: read its diff. The faults of a seed are the same while the
module is. Nothing is written into the checkout: tests run in copies of it, each fault in a process of its own.

First those tests run that call the faulty function, a few cases of each, fastest first, up to the first that fails.
Where none does, the others follow of all files with a test that calls any function of the module, and of those that
start programs. --quick leaves those out, and with them what shows only in certain cases, in programs that tests start,
or in results that are kept from test to test. Which test calls what is noted when a test file is new, and kept in the
user's cache folder: of the module's area (AREAS), of all tests with --everywhere. Tests beyond the area are asked where
they have been noted before and call the module. Nothing runs on a GPU.

A test has noticed a fault if it fails with it again, alone, and passes without it. Counted apart: tests that take ten
times as long as they did ("late in"; alone, thirty times), and runs that end with their process ("ended by").

Exit codes: 0 all faults were noticed, 1 some survived, 2 usage, or no test passes without a fault.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

from mutation.choosing import choose, modules
from mutation.fault import Fault
from mutation.finding import faults_in
from mutation.workers import Run, Workers, preload

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "layoutc-mutation"
KERNELS = tuple(f"runtime/test_{name}*" for name in ("kernels", "b", "d", "con", "comp", "four", "q"))
# Modules and their tests; the first pattern that fits.
AREAS: tuple[tuple[str, tuple[str, ...]], ...] = (
    *((f"layoutc/{room}/bindings/*", ("bindings/*", "checkpoint/*")) for room in ("checkpoint", "runtime")),
    (
        "layoutc/checkpoint/*",
        (
            *(
                "checkpoint/*",
                "report/test_show_checkpoint.py",
                "distributed/test_async*",
                "distributed/test_checkpoint*",
            ),
            *("distributed/test_safetensors*", "distributed/test_state.py", "integrations/test_gguf*"),
        ),
    ),
    *((f"layoutc/runtime/{room}/*", KERNELS) for room in ("kernels", "triton")),
    ("layoutc/runtime/*", ("runtime/*", "ints/*", "distributed/*")),
    ("layoutc/conformance/*", ("conformance/*",)),
    ("layoutc/charts/*", ("cli/test_measured_charts.py", "cli/test_plan_command.py")),
    ("layoutc/ints/*", ("ints/*", "report/test_describe.py", "runtime/test_hooks.py")),
    ("layoutc/explorer/*", ("explorer/*", "cli/*")),
    ("layoutc/estimate/*", ("estimate/*", "cli/test_estimate.py", "budget/*")),
    ("layoutc/models/*", ("models/*", "cli/test_plan_command.py")),
    ("layoutc/budget/*", ("budget/*", "cli/test_plan_command.py", "distributed/test_planned_bytes.py")),
    ("layoutc/doctor/*", ("cli/test_doctor.py",)),
    ("layoutc/bench/*", ("bench/*", "cli/*")),
    ("layoutc/integrations/*", ("integrations/*",)),
    (
        "layoutc/*",
        ("spec/*", "layout/*", "plan/*", "emit/*", "report/*", "build/*", "cli/*", "estimate/*", "runtime/test_[fmn]*"),
    ),
    ("*", ("*",)),
)
NEVER = ("runtime/test_torchao_oracle.py", "programs/test_mutate.py", "programs/test_fsdp2_of_torch.py")
# Triton's interpreter takes minutes under a profiler, and compiles for cards in another process: what these call is not
# noted, and kernels' modules alone ask them, last.
UNTRACED = tuple(f"runtime/test_{name}.py" for name in ("kernels", "batches", "compiled_kernels"))
CASES = 3  # of those cases of a test that call the same functions of the module, so many run first, or a few more
FILES = 3  # that are asked first: to collect the tests of all takes longer than to run some
Record = dict[str, dict[str, Any]]  # test -> {"seconds": its time, "calls": [[module, function], ...]}


def area_of(module: str, root: Path) -> list[str]:
    """Test files that are asked about a module, as paths below the root."""
    globs = next(globs for pattern, globs in AREAS if fnmatch(module, pattern))
    tests, without = root / "tests", NEVER if globs == KERNELS else (*NEVER, *UNTRACED)
    found = {path for glob in globs for path in tests.glob(glob) if fnmatch(path.name, "test_*.py")}
    return sorted(path.relative_to(root).as_posix() for path in found - {tests / name for name in without})


def every_test(root: Path) -> list[str]:
    """All test files that can be asked, as paths below the root."""
    found = (path.relative_to(root).as_posix() for path in (root / "tests").rglob("test_*.py"))
    return sorted(
        file for file in found if file.removeprefix("tests/") not in (*NEVER, *UNTRACED) and "/gpu/" not in file
    )


def starts_programs(file: str, root: Path) -> bool:
    """True for a test file that starts processes, or imports a helper that does: what runs there is not noted."""
    text = (root / file).read_text(encoding="utf-8")
    imported = {
        name for line in re.findall(r"^(?:from|import) ([\w, ]+)", text, re.M) for name in re.split(r"\W+", line)
    }
    helpers = [path for path in (root / "tests").rglob("*.py") if path.stem in imported and path.stem != "harness"]
    texts = [text, *(path.read_text(encoding="utf-8") for path in helpers)]
    return any(re.search(r"\b(subprocess|multiprocessing|ProcessPoolExecutor)\b", one) for one in texts)


def _place_of(file: str, root: Path) -> Path:
    digest = hashlib.sha256(file.encode() + (root / file).read_bytes()).hexdigest()
    return CACHE / f"{digest[:24]}.json"


def recorded(workers: Workers, files: Iterable[str], others: Iterable[str] = ()) -> Record:
    """What each test calls: kept from earlier, or noted now. Tests that fail are not among them.

    others: files of which only what was kept is taken.
    """
    from mutation.running import Recorder

    def note(file: str, place: Path) -> Run:
        def done(how: str, result: Any, took: float) -> None:
            print(
                f"  {file}: {'' if result is None else f'{len(result)} tests, '}{how}, {took:.0f} s",
                file=sys.stderr,
                flush=True,
            )
            if result:  # or it is asked again: what stopped all of its tests may have passed by
                place.write_text(json.dumps(result), encoding="utf-8")

        is_traced = file.removeprefix("tests/") not in UNTRACED
        return Run([file], lambda copy, path: Recorder(str(copy), path, is_traced), done, 1200.0, stops=False)

    CACHE.mkdir(parents=True, exist_ok=True)
    places = {file: _place_of(file, workers.root) for file in files}
    if missing := [(file, place) for file, place in places.items() if not place.is_file()]:
        print(f"{len(missing)} test files are new; noting what their tests call", file=sys.stderr, flush=True)
        workers.run([note(file, place) for file, place in missing])
    found: Record = {}
    for place in (*places.values(), *(_place_of(file, workers.root) for file in others)):
        found |= json.loads(place.read_text(encoding="utf-8")) if place.is_file() else {}
    return found


def ordered(record: Record, names: Iterable[str]) -> list[str]:
    """Tests by the time that they take, those of a file together; those that start ranks last."""
    files: dict[str, list[str]] = {}
    for name in names:
        files.setdefault(name.partition("::")[0], []).append(name)

    def seconds(name: str) -> float:
        return float(record[name]["seconds"])

    def cost(file: str) -> tuple[bool, float]:
        return "/distributed/" in file, sum(map(seconds, files[file]))

    return [name for file in sorted(files, key=cost) for name in sorted(files[file], key=seconds)]


@dataclass
class Trial:
    """A fault, and what noticed it: a test, or how its process ended; "" where nothing did. `how` it was noticed."""

    fault: Fault
    noticed: str = ""
    how: str = ""
    seconds: float = 0.0
    doubted: set[str] = field(default_factory=set)


class Mutation:
    """Tries faults on the tests of their modules."""

    def __init__(
        self, workers: Workers, record: Record, areas: Mapping[str, set[str]], is_quick: bool, patience: float
    ) -> None:
        self.workers, self.record, self.areas, self.is_quick = workers, record, areas, is_quick
        self.patience = patience
        self._starts_programs = cache(lambda file: starts_programs(file, workers.root))

    def run(self, trials: list[Trial]) -> None:
        """All of them. A test that fails without a fault has noticed nothing, so those are tried again without it."""
        again = trials
        while again:
            self.workers.run([self._first(trial) for trial in again])
            blamed = {trial.noticed for trial in again if trial.noticed in self.record}
            wrong = self._fail_without(blamed)
            again = [trial for trial in trials if trial.noticed in wrong]
            for trial in again:
                print(f"{trial.fault.key}  again: {trial.noticed} fails without it, too", flush=True)
                trial.doubted, trial.noticed = trial.doubted | wrong, ""

    def _first(self, trial: Trial) -> Run:
        """Tests of the files that are most about the faulty function, then all that call it, then others.

        Others: of files with a test that calls the module, and of those that start programs.
        What a module runs when it is imported is asked of all tests that call any function of it.
        """
        module, scope = trial.fault.module, trial.fault.scope
        files, calling, others = self.areas[module], defaultdict[Any, list[str]](list), list[str]()
        share: dict[str, list[bool]] = defaultdict(list)
        about = {file for file in files if file.removeprefix("tests/") in UNTRACED or self._starts_programs(file)}
        for name, test in self.record.items():
            if (file := name.partition("::")[0]) in files and name not in trial.doubted:
                called = frozenset(function for place, function in test["calls"] if place == module)
                is_called = scope in called if scope else bool(called)
                (calling[name.partition("[")[0], called] if is_called else others).append(name)
                share[file].append(is_called)
                about |= {file} if called else set()
        others = [name for name in others if name.partition("::")[0] in about]
        few = {name for cases in calling.values() for name in cases[:: max(1, len(cases) // CASES)]}
        near = sorted(share, key=lambda file: ("/distributed/" in file, -sum(share[file]) / len(share[file])))[:FILES]
        stages = [
            [name for name in few if name.partition("::")[0] in near],
            [name for name in few if name.partition("::")[0] not in near],
            [*others, *(name for cases in calling.values() for name in cases if name not in few)],
        ]
        if self.is_quick and few:
            stages.pop()
        then = None
        for names in reversed([names for names in stages if names] or [[]]):
            then = self._run(trial, names, then)
        assert then is not None
        return then

    def _run(self, trial: Trial, names: Iterable[str], then: Run | None) -> Run:
        from mutation.running import Chooser

        def done(how: str, failed: dict[str, bool] | None, took: float) -> Run | None:
            trial.seconds += took
            first = next(iter(failed or ()), "")
            if first in self.record:
                return self._alone(trial, first)
            if first or how not in ("exit 0", "exit 5"):
                return self._verdict(trial, first or how, "noticed by" if first else "ended by")
            return self._verdict(trial, "", "SURVIVED") if then is None else then

        limits = {name: self._limit(name) for name in ordered(self.record, names)}
        files = list(dict.fromkeys(name.partition("::")[0] for name in limits))
        seconds = 3 * self.patience + sum(limits.values()) / 4
        return Run(files, lambda _, path: Chooser(limits, path), done, seconds, trial.fault)

    def _alone(self, trial: Trial, name: str) -> Run:
        """The test that failed, again. Where it passes, the others are asked."""
        from mutation.running import Chooser

        def done(how: str, failed: dict[str, bool] | None, took: float) -> Run | None:
            trial.seconds += took
            if failed is None or name in failed:
                is_late = failed is None or failed[name]
                return self._verdict(trial, name, "late in" if is_late else "noticed by")
            print(f"{trial.fault.key}  again: {name} passes alone", flush=True)
            trial.doubted.add(name)
            return self._first(trial)

        limits, file = {name: 3 * self._limit(name)}, name.partition("::")[0]
        return Run([file], lambda _, path: Chooser(limits, path), done, 2 * limits[name], trial.fault)

    def _verdict(self, trial: Trial, noticed: str, how: str) -> None:
        trial.noticed, trial.how, fault = noticed, how, trial.fault
        verdict = f"{how} {noticed}".strip()
        print(f"{fault.key}  {fault.module}:{fault.line}  {fault.kind}  {verdict}  {trial.seconds:.0f} s", flush=True)

    def _limit(self, name: str) -> float:
        return self.patience + 10 * float(self.record[name]["seconds"])

    def _fail_without(self, names: set[str]) -> set[str]:
        """Of these tests, those that fail without a fault."""
        from mutation.running import Chooser

        found: set[str] = set()
        limits = {name: 3 * self._limit(name) for name in ordered(self.record, names)}
        files = list(dict.fromkeys(name.partition("::")[0] for name in limits))

        def done(how: str, failed: dict[str, bool] | None, _: float) -> None:
            found.update(failed if failed is not None else limits)

        if limits:
            self.workers.run(
                [Run(files, lambda _, path: Chooser(limits, path), done, sum(limits.values()), stops=False)]
            )
        return found


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="+", help="modules or folders of them, below the root")
    parser.add_argument("--count", type=int, default=20, help="how many faults (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="which faults are chosen (default 0)")
    parser.add_argument("--by-lines", action="store_true", help="choose modules by their lines, not each as often")
    parser.add_argument(
        "--only", action="append", default=[], metavar="KEY", help="these faults alone, of all there are"
    )
    parser.add_argument(
        "--tests", nargs="+", default=[], metavar="PATH", help="test files, in place of the module's area"
    )
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time (default 2)")
    parser.add_argument(
        "--quick", action="store_true", help="only tests that call the faulty function, a few cases of each"
    )
    parser.add_argument(
        "--everywhere", action="store_true", help="note what all tests call, and ask those of all areas"
    )
    parser.add_argument("--patience", type=float, default=20, metavar="S", help="seconds that each test has at least")
    parser.add_argument("--list", action="store_true", help="print the faults, and run nothing")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout (default: this one)")
    asked = parser.parse_args(arguments)
    root, start = asked.root.resolve(), time.monotonic()
    names = list(modules([os.path.relpath(Path(root, place), root) for place in asked.modules], root))
    if absent := [name for name in (*names, *asked.tests) if not (root / name).is_file()]:
        parser.error(f"no such file below {root}: {', '.join(absent)}")
    sources = {name: (root / name).read_text(encoding="utf-8") for name in names}
    found = {name: faults_in(source, name) for name, source in sources.items()}
    every = [fault for faults in found.values() for fault in faults]
    if unknown := set(asked.only) - {fault.key for fault in every}:
        parser.error(f"no such fault in these modules, as they are: {', '.join(sorted(unknown))}")
    chosen = [fault for fault in every if fault.key in asked.only] or choose(
        found, sources, asked.count, asked.seed, asked.by_lines
    )
    if asked.list or not chosen:
        for fault in chosen:
            print(f"{fault.key}  {fault.module}:{fault.line}  {fault.kind}\n{fault.diff(sources[fault.module])}")
        return 0 if chosen else 2
    areas = {fault.module: set(asked.tests or area_of(fault.module, root)) for fault in chosen}
    if (root / "layoutc").is_dir():
        preload()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))  # so that what was started is ended
    with tempfile.TemporaryDirectory(prefix="mutate-", ignore_cleanup_errors=True) as folder:
        workers = Workers(root, Path(folder), max(1, min(asked.jobs, len(chosen))))
        noted = {file for files in areas.values() for file in files}
        rest = set() if asked.tests else set(every_test(root)) - noted
        record = recorded(workers, *((sorted(noted | rest),) if asked.everywhere else (sorted(noted), sorted(rest))))
        if not record:
            print("no test passes without a fault", file=sys.stderr)
            return 2
        for name, test in record.items():
            for module in {place for place, _ in test["calls"]} & set(areas):
                areas[module].add(name.partition("::")[0])
        trials = [Trial(fault) for fault in chosen]
        Mutation(workers, record, areas, asked.quick, asked.patience).run(trials)
    survived = [trial.fault for trial in trials if not trial.noticed]
    for fault in survived:
        print(f"\n{fault.key}  {fault.module}:{fault.line}  {fault.kind}\n{fault.diff(sources[fault.module])}")
    minutes = (time.monotonic() - start) / 60
    noticed = sum(trial.how == "noticed by" for trial in trials)
    late = len(trials) - noticed - len(survived)
    counts = f"{noticed} noticed, {late} late or ended, {len(survived)} survived, {noticed / len(trials):.0%}"
    print(f"\n{len(trials)} faults of {len(every)} in {len(found)} modules: {counts}; {minutes:.1f} min")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
