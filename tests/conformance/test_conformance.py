"""The conformance suite: shipped recipes pass it, and each fault put into generated code is caught by its check."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal

import numpy as np
import pytest
import torch
import yaml
from click.testing import CliRunner, Result
from places import ROOT, TESTS

from layoutc.cli.app import main
from layoutc.conformance.checks.codecs import search_disagrees
from layoutc.conformance.material import expect, expect_same
from layoutc.conformance.model.codes import codes_of, pack, unpack
from layoutc.conformance.ranks import PRELOADED, RankError, Ranks
from layoutc.conformance.registry import Check, all_checks
from layoutc.conformance.report import explanation, line
from layoutc.conformance.runner import Outcome, run_check, run_checks
from layoutc.conformance.subject import BadSpec, Edit, Subject, compile_subject
from layoutc.spec.formats import BUILTIN

SPECS = sorted((ROOT / "specs").glob("*.yaml"))
MADE_UP = sorted((TESTS / "conformance").glob("*.yaml"))
CHECKS = {check.name: check for check in all_checks()}
torch.set_num_threads(1)


def run(*args: object) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


def failures(outcomes: list[Outcome]) -> str:
    return "\n".join(line(outcome) for outcome in outcomes if outcome.status == "fail")


# ------------------------------------------------------------------------------------------------------ what is shipped
@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_shipped_recipes_pass(path: Path) -> None:
    """All kernels are in tests/runtime/test_kernels.py; here the check of them runs for three recipes that differ."""
    subject = compile_subject(path)
    checks_kernels = path.stem in ("fp8_current", "nvfp4", "int4_group32")
    try:
        wanted = run_checks(subject, lambda c: not c.needs_processes and (c.name != "kernels" or checks_kernels))
        outcomes = list(wanted)
    finally:
        subject.close()
    assert not failures(outcomes), failures(outcomes)
    assert sum(outcome.status == "pass" for outcome in outcomes) >= 30
    assert {outcome.message for outcome in outcomes if outcome.status == "skip"} <= {
        "the spec has no swizzle",
        "no rows share values",
        "the scale follows the current amax",
        "the recipe has no kernels: the reference serves it on every device",
        "no GPU on this machine; TRITON_INTERPRET=1 runs them without one",
    }


@pytest.mark.parametrize("path", MADE_UP, ids=lambda path: path.stem)
def test_recipes_that_nobody_ships_pass(path: Path) -> None:
    """Zero points, codes of six bits, odd and large blocks, scales of rows and of columns, two formats at once."""
    subject = compile_subject(path)
    try:
        outcomes = list(run_checks(subject, lambda check: not check.needs_processes))
    finally:
        subject.close()
    assert not failures(outcomes), failures(outcomes)


@pytest.mark.slow
def test_two_processes_train_and_restore_as_one_and_faults_are_caught_there_too() -> None:
    """One group of processes serves both; a rank that raises ends it, and it starts again."""
    path = ROOT / "specs" / "mxfp8.yaml"
    wanted = [check for check in CHECKS.values() if check.needs_processes]
    assert len(wanted) == 3
    with Ranks() as ranks:
        subject = compile_subject(path, ranks=ranks)
        outcomes = [run_check(subject, check) for check in wanted]
        subject.close()
        assert [outcome.status for outcome in outcomes] == ["pass"] * 3, failures(outcomes)
        assert all(outcome.compared for outcome in outcomes)
        for name, catching in IN_PROCESSES.items():
            recipe, file, pattern, replacement, _ = MUTANTS[name]
            broken = compile_subject(
                ROOT / "specs" / f"{recipe}.yaml", ranks=ranks, edit=edit(file, pattern, replacement)
            )
            found = [run_check(broken, CHECKS[check]) for check in catching]
            broken.close()
            assert [outcome.status for outcome in found] == ["fail"] * len(catching), name
            assert all("differs" in outcome.message or "loss" in outcome.message for outcome in found), failures(found)
        with pytest.raises(RankError, match=r"(?s)rank 1: .*KeyError"):
            ranks.run(fails_on_one_rank)
        assert ranks.run(int, "7") == [7, 7]


def test_what_processes_are_copied_with_asks_cuda_nothing_and_starts_no_thread() -> None:
    """A copy of a process that has asked can't ask again, and has none of its threads."""
    program = (
        "import importlib, sys, threading, torch\n"
        "def asked(*_): sys.exit('CUDA was asked')\n"
        "torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = asked\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "assert threading.active_count() == 1, threading.enumerate()\n"
        "assert not [name for name in sys.modules if name.startswith('layoutc')]"
    )
    done = subprocess.run([sys.executable, "-c", program, *PRELOADED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def fails_on_one_rank() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise KeyError("on purpose")
    dist.barrier()


# ------------------------------------------------------------------------------------------------------ faults injected
def edit(file: str, pattern: str, replacement: str) -> Edit:
    """Replaces the first match in a generated file; the fault must be there to be found."""

    def apply(package: Path) -> None:
        path = package / file
        text, count = re.subn(pattern, replacement, path.read_text(encoding="utf-8"), count=1)
        assert count == 1, f"{file} has no {pattern}"
        path.write_text(text, encoding="utf-8")

    return apply


# name: recipe, file, what is replaced, by what, the checks of which each must catch it
MUTANTS: dict[str, tuple[str, str, str, str, tuple[str, ...]]] = {
    "a tie goes to the odd code": ("nvfp4", "reference.py", r"\b0\.75,", "0.7500000596046448,", ("encode",)),
    "a threshold is one code late": ("nvfp4", "reference.py", r"\b3\.5,", "3.6,", ("encode", "quantize")),
    "a code means another number": ("nvfp4", "reference.py", r"-3\.0,", "-2.5,", ("decode",)),
    "nibbles swapped in the plane": (
        "nvfp4",
        "reference.py",
        r"(m, k\)\), 4, low_first=)True",
        r"\1False",
        ("encode", "quantize"),
    ),
    "nibbles swapped in a buffer": (
        "nvfp4",
        "reference.py",
        r"(\.t\(\), 4, low_first=)True",
        r"\1False",
        ("index-maps", "buffers"),
    ),
    "a scale rounds up too late": ("mxfp8", "reference.py", r"\(1 \+ 2\*\*-23\)", "(1 + 2**-20)", ("scales",)),
    "a constant is off": (
        "nvfp4",
        "reference.py",
        r"INVERSE_ELEMENT_MAX = [\d.]+",
        "INVERSE_ELEMENT_MAX = 0.17",
        ("scales", "quantize"),
    ),
    "NaN becomes a number": (
        "fp8_block",
        "reference.py",
        r"ELEMENT_NAN = 0x7F",
        "ELEMENT_NAN = 0x7E",
        ("nan", "all-bf16"),
    ),
    "dequantize forgets the scale": (
        "fp8_block",
        "reference.py",
        r" \* per_element\(factor, 128, 128, m, k\)",
        "",
        ("decode", "dequantize"),
    ),
    "padding is not zero": (
        "mxfp8",
        "reference.py",
        r'pad_to\((planes\["rowwise_scale"\][^\n]*)\)\n',
        r"pad_to(\1).clamp(min=1)" + "\n",
        ("index-maps", "buffers"),
    ),
    "padding to another multiple": (
        "nvfp4",
        "reference.py",
        r"up\(m, 128\), up\(k // 16, 4\)",
        "up(m, 128), up(k // 16, 8)",
        ("shapes", "buffers"),
    ),
    "a repeat is one too long": ("nvfp4", "reference.py", r", 0, 16, m\)", ", 0, 17, m)", ("index-maps", "buffers")),
    "a buffer is not transposed": (
        "fp8_block",
        "reference.py",
        r'planes\["rowwise_data"\]\.t\(\)\.contiguous\(\)',
        'planes["rowwise_data"].reshape(k, m).contiguous()',
        ("index-maps", "buffers"),
    ),
    "the swizzle swaps two sizes": (
        "mxfp8",
        "reference.py",
        r"permute\(0, 3, 2, 1, 4\)\.flatten",
        "permute(0, 3, 1, 2, 4).flatten",
        ("swizzle",),
    ),
    "products read one orientation": (
        "mxfp8",
        "tensor.py",
        r"(dequantize_reference\([^\n]*), orientation\)",
        r'\1, "rowwise")',
        ("products", "layer"),
    ),
    "the amax of shards is another": (
        "nvfp4",
        "tensor.py",
        r"return tensor_amax\(x\)",
        "return tensor_amax(x) * 2",
        ("quantize",),
    ),
    "a refresh keeps the old scale": (
        "mxfp8",
        "tensor.py",
        r"        return hooks\.finish\(",
        "        if out is not None:\n"
        '            gathered.update({n: p for n, p in out.planes().items() if "scale" in n})\n'
        "        return hooks.finish(",
        ("gather-again",),
    ),
    "the gather cuts the wrong rows": (
        "fp8_block",
        "tensor.py",
        r'(wire\.arrived\(metadata, "rowwise_data", received\[\d\])\)',
        r"\1.flip(0))",
        ("gather",),
    ),
    "backward sends its codes in reverse": (
        "mxfp8",
        "tensor.py",
        r'(wire\.wire\(self, gathering, "columnwise_data"\))',
        r"\1.flip(0)",
        ("gather",),
    ),
    "short shards are not filled up": (
        "fp8_block",
        "tensor.py",
        r'wire\.wire\(self, gathering, "rowwise_data"\)',
        'self._planes["rowwise_data"]',
        ("gather-sizes",),
    ),
    "a scale has fewer rows": (
        "nvfp4",
        "layout.py",
        r'("rowwise_scale": Plane\()16',
        r"\g<1>8",
        ("refused-views", "cut-blocks"),
    ),
    "columns may be cut anywhere": (
        "mxfp8",
        "layout.py",
        r"column_multiple=32",
        "column_multiple=1",
        ("refused-views",),
    ),
    "LAYOUT announces another shape": (
        "mxfp8",
        "layout.py",
        r'("columnwise_scale": Facts\(\(up\(m // 32, )4',
        r"\g<1>8",
        ("shapes",),
    ),
    "a cut starts at the wrong scale": (
        "nvfp4",
        "dispatch.py",
        r"r0 // 16\b",
        "r0 // 32",
        ("views", "writes"),
    ),
    "cat joins scales in reverse": (
        "fp8_block",
        "dispatch.py",
        r'torch\.cat\(\[piece\["rowwise_scale"\] for piece in pieces\]\)',
        'torch.cat([piece["rowwise_scale"] for piece in pieces[::-1]])',
        ("cat",),
    ),
    "a clone is an alias": (
        "fp8_current",
        "dispatch.py",
        r"aten\.clone\.default: common\.clone",
        "aten.clone.default: common.alias",
        ("copies",),
    ),
    "pinning is forgotten": (
        "nvfp4",
        "dispatch.py",
        r"aten\._pin_memory\.default: common\.pin_memory",
        "aten._pin_memory.default: common.alias",
        ("storage",),
    ),
    "the history picks another amax": (
        "fp8_delayed",
        "layout.py",
        r'pick="max"',
        'pick="most-recent"',
        ("history",),
    ),
    "a loaded tensor is not checked": (
        "mxfp8",
        "tensor.py",
        r"    LAYOUT = LAYOUT\n",
        "    LAYOUT = LAYOUT\n\n    def __reduce_ex__(self, protocol):\n"
        "        return type(self), (self._planes, tuple(self.shape), self.dtype)\n\n",
        ("pickle",),
    ),
    "one orientation stores both": (
        "mxfp8",
        "tensor.py",
        r"quantize_reference\(x, amax=amax, orientations=tuple\(orientations\)\)",
        "quantize_reference(x, amax=amax)",
        ("one-orientation",),
    ),
    "another layout id is taken": (
        "mxfp8",
        "tensor.py",
        r"    LAYOUT = LAYOUT\n",
        "    LAYOUT = LAYOUT\n\n    @classmethod\n"
        "    def __tensor_unflatten__(cls, inner, context, *outer):\n"
        "        return super().__tensor_unflatten__(inner, context._replace(layout_id=LAYOUT.layout_id), *outer)\n\n",
        ("flatten",),
    ),
    "bytes are not copied": (
        "nvfp4",
        "dispatch.py",
        r"aten\.copy_\.default: common\.copy_",
        "aten.copy_.default: lambda func, args, kwargs: "
        "args[0] if type(args[0]) is type(args[1]) else common.copy_(func, args, kwargs)",
        ("checkpoint", "copies", "writes"),
    ),
    "quantizing into a tensor keeps its scale": (
        "mxfp8",
        "tensor.py",
        r"    return weights\.quantize\((.*)\)\n",
        "    kept = None if out is None else out.rowwise_scale.clone()\n"
        r"    made = weights.quantize(\1)" + "\n"
        "    if kept is not None:\n"
        "        out.rowwise_scale.copy_(kept)\n"
        "    return made\n",
        ("out",),
    ),
    "the first expert stands for all": (
        "nvfp4",
        "dispatch.py",
        r"aten\.select\.int: cuts_and_joins\.select",
        "aten.select.int: lambda func, args, kwargs: cuts_and_joins.select(func, (*args[:2], 0), kwargs)",
        ("experts",),
    ),
    "zeros_like has the values": (
        "fp8_current",
        "dispatch.py",
        r"aten\.zeros_like\.default: common\.like_plain",
        "aten.zeros_like.default: lambda func, args, kwargs: args[0].dequantize()",
        ("new-tensors",),
    ),
    "a sum is not counted": (
        "fp8_current",
        "dispatch.py",
        r"HANDLERS = \{\n",
        "HANDLERS = {\n    aten.add.Tensor: lambda func, args, kwargs: args[0].dequantize() + args[1],\n",
        ("strict",),
    ),
    "a gather marks the shard": (
        "mxfp8",
        "tensor.py",
        r"gathering = hooks\.begin\(self, mesh\)",
        "gathering = hooks.begin(self, mesh)\n        self._is_new = True",
        ("shards-untouched",),
    ),
    "a refresh clears the shard": (
        "fp8_current",
        "tensor.py",
        r"        return hooks\.finish\(",
        '        if out is not None:\n            self._planes["rowwise_data"].zero_()\n        return hooks.finish(',
        ("shards-untouched",),
    ),
    "a kernel has another NaN": (
        "fp8_current",
        "kernels.py",
        r"ELEMENT_NAN = tl\.constexpr\(0x7F\)",
        "ELEMENT_NAN = tl.constexpr(0x7E)",
        ("kernels",),
    ),
    "a kernel's constant is off": (
        "nvfp4",
        "kernels.py",
        r"INVERSE_ELEMENT_MAX = tl\.constexpr\([\d.]+\)",
        "INVERSE_ELEMENT_MAX = tl.constexpr(0.17)",
        ("kernels",),
    ),
    "a shape that fits no block is taken": (
        "mxfp8",
        "layout.py",
        r"multiple_m=32",
        "multiple_m=1",
        ("refused",),
    ),
}

# Faults of what generated code stands on, and of the suite's own model: what is replaced, by what makes it of the
# original, a recipe, the checks of which each must catch it.
PATCHES: dict[str, tuple[str, Callable[[Any], Any], str, tuple[str, ...]]] = {
    "a step is taken twice": (
        "layoutc.MasterWeights.step",
        lambda step: lambda self: [step(self), step(self)][0],
        "mxfp8",
        ("master-weights",),
    ),
    "the model rounds ties up": (
        "layoutc.conformance.model.codes.Codes.encode",
        lambda encode: lambda self, x, how: encode(self, np.nextafter(x, np.float32(np.inf)), how),
        "mxfp8",
        ("rounding",),
    ),
}

# Faults that processes must find, as MUTANTS.
IN_PROCESSES: dict[str, tuple[str, ...]] = {
    "backward sends its codes in reverse": ("fsdp2",),
    "bytes are not copied": ("reshard", "fsdp2-checkpoint"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_is_caught(name: str) -> None:
    recipe, file, pattern, replacement, catching = MUTANTS[name]
    subject = compile_subject(ROOT / "specs" / f"{recipe}.yaml", edit=edit(file, pattern, replacement))
    try:
        found = [run_check(subject, CHECKS[check]) for check in catching]
    finally:
        subject.close()
    missed = [outcome.check for outcome in found if outcome.status != "fail"]
    assert not missed, f"{name}: {missed} did not see it"
    assert not any("it compared no" in outcome.message for outcome in found)


@pytest.mark.parametrize("name", PATCHES)
def test_a_fault_outside_of_generated_code_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, fault, recipe, catching = PATCHES[name]
    subject = compile_subject(ROOT / "specs" / f"{recipe}.yaml", seed=71)
    try:
        assert [run_check(subject, CHECKS[check]).status for check in catching] == ["pass"] * len(catching)
        search_disagrees.cache_clear()
        monkeypatch.setattr(place, fault(resolve_name(place)))
        found = [run_check(subject, CHECKS[check]) for check in catching]
    finally:
        search_disagrees.cache_clear()
        subject.close()
    assert [outcome.status for outcome in found] == ["fail"] * len(catching), name


def test_each_check_catches_a_fault_that_is_put_there_for_it() -> None:
    """A check that nothing has ever made fail may compare nothing."""
    named = [*(fault[-1] for fault in (*MUTANTS.values(), *PATCHES.values())), *IN_PROCESSES.values()]
    assert {name for names in named for name in names} == set(CHECKS)
    assert set(IN_PROCESSES) <= set(MUTANTS)


@pytest.mark.parametrize("kind", ["bytes", "facts"])
def test_a_check_that_compares_nothing_fails(kind: Literal["bytes", "facts"]) -> None:
    """Also one that compares arrays without entries, and expects something besides."""
    subject = compile_subject(ROOT / "specs" / "fp8_current.yaml")

    def compares(_: Subject, entries: int, facts: int) -> None:
        expect_same(subject, "a plane", torch.zeros(0), torch.zeros(0))
        if entries:
            expect_same(subject, "a plane", torch.zeros(entries), torch.zeros(entries))
        for _ in range(facts):
            expect(True, "a fact")

    def outcome_of(entries: int, facts: int) -> Outcome:
        return run_check(subject, Check("mine", "", lambda s: compares(s, entries, facts), compares=kind))

    outcomes = [outcome_of(0, 0), outcome_of(0, 1), outcome_of(3, 0), outcome_of(3, 1)]
    subject.close()
    wanted = ["fail", "fail", "pass", "pass"] if kind == "bytes" else ["fail", "pass", "fail", "pass"]
    assert [outcome.status for outcome in outcomes] == wanted
    assert outcomes[3].compared == (12 if kind == "bytes" else 1)
    assert f"compared no {kind}" in outcomes[0].message


def test_a_failure_says_where() -> None:
    """Plane, shape, seed, the first differing byte, the element that it holds, what is there and what should be."""
    recipe, file, pattern, replacement, _ = MUTANTS["padding is not zero"]
    subject = compile_subject(ROOT / "specs" / f"{recipe}.yaml", seed=5, edit=edit(file, pattern, replacement))
    outcome = run_check(subject, CHECKS["index-maps"])
    subject.close()
    assert outcome.details["plane"] == "rowwise_scale"
    assert outcome.details["seed"] == 5
    assert outcome.details["shape"] == (32, 32)
    text = explanation(outcome)
    assert re.search(r"byte 1\b", text), text
    assert "found 0x01, expected 0x00" in text
    recipe, file, pattern, replacement, _ = MUTANTS["nibbles swapped in a buffer"]
    subject = compile_subject(ROOT / "specs" / f"{recipe}.yaml", edit=edit(file, pattern, replacement))
    outcome = run_check(subject, CHECKS["buffers"])
    subject.close()
    assert re.search(r"plane columnwise_data, .*\(i, j\) \(0, 0\)", explanation(outcome)), explanation(outcome)


# --------------------------------------------------------------------------------------------------- the second reading
@pytest.mark.parametrize("name", [name for name, fmt in BUILTIN.items() if not fmt.is_f32])
def test_codes_by_definition_agree_with_the_compiler(name: str) -> None:
    """Two definitions of each built-in format, written apart."""
    fmt = BUILTIN[name]
    for code, value in enumerate(codes_of(fmt).values):
        assert np.array_equal(float(value), fmt.value(code), equal_nan=True)


@pytest.mark.parametrize("bits", range(1, 8))
@pytest.mark.parametrize("low_first", [True, False])
def test_unpack_undoes_pack(bits: int, low_first: bool) -> None:
    codes = np.random.default_rng(bits).integers(0, 2**bits, (3, 16)).astype(np.uint8)
    np.testing.assert_array_equal(unpack(pack(codes, bits, low_first), bits, low_first), codes)


def test_the_suite_knows_no_recipe_no_format_and_no_rule() -> None:
    names = {path.stem for path in SPECS}
    for file in ("formats.yaml", "rules.yaml"):
        names |= set(yaml.safe_load((ROOT / "layoutc" / "spec" / file).read_text(encoding="utf-8"))) - {"f32"}
    word = re.compile(rf"(?<![\w-])({'|'.join(sorted(map(re.escape, names)))})(?![\w-])")
    for path in sorted((ROOT / "layoutc" / "conformance").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        assert not word.search(text), (path.name, word.search(text))
        assert len(text.splitlines()) <= 400, path.name


@pytest.mark.parametrize("module", ["codes", "weights", "placing"])
def test_the_independent_model_shares_no_arithmetic(module: str) -> None:
    """It imports the types of the layout and of formats, and nothing of the runtime or the generated code."""
    text = (ROOT / "layoutc" / "conformance" / "model" / f"{module}.py").read_text(encoding="utf-8")
    imported = set(re.findall(r"^from (layoutc[\w.]*) import", text, flags=re.M))
    assert imported <= {f"layoutc.conformance.model.{name}" for name in ("codes", "weights")} | {
        "layoutc.spec.formats",
        "layoutc.layout.layout",
    }
    assert "torch" not in re.findall(r"^(?:import|from) (\w+)", text, flags=re.M)
    for line_ in re.findall(r"^from layoutc\.(?:spec\.formats|layout\.layout) import (.*)", text, flags=re.M):
        assert set(line_.split(", ")) <= {"Format", "Layout", "Plane", "Quantization", "Source", "Buffer"}


# --------------------------------------------------------------------------------------------------------- command line
def test_the_command_reports_each_check_with_its_meaning() -> None:
    result = run("test", "--specs", ROOT / "specs", "fp8_current", "--check", "encode", "--check", "history")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert re.fullmatch(r"fp8_current  \(.*fp8_current\.yaml, layout \w{12}\)", lines[0])
    assert re.fullmatch(r"  pass  encode +\d+\.\d s  elements at, beside .*", lines[1])
    assert re.fullmatch(r"  skip  history +\d+\.\d s  the scale follows the current amax", lines[2])
    assert re.fullmatch(r"  1 passed, 1 skipped in \d+\.\d s", lines[3])


def test_json_is_one_object_a_recipe() -> None:
    result = run("test", *SPECS[:2], "--json", "--check", "decode", "--seed", 3)
    items = [json.loads(text) for text in result.stdout.splitlines()]
    assert [item["recipe"] for item in items] == [path.stem for path in SPECS[:2]]
    assert all(item["passed"] and item["seed"] == 3 for item in items)
    assert items[0]["checks"][0]["check"] == "decode"
    assert items[0]["checks"][0]["status"] == "pass"


def test_exit_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 for a check that fails and for a spec with errors, 2 for what can't be asked."""
    bad = tmp_path / "bad.yaml"
    bad.write_text("layoutc: 1\nname: bad\n", encoding="utf-8")
    result = run("test", bad, "--check", "decode")
    assert result.exit_code == 1
    assert "bad.yaml:1:1: error[" in result.stderr
    with pytest.raises(BadSpec):
        compile_subject(bad)
    result = run("test", "--specs", ROOT / "specs", "nvfp44")
    assert (result.exit_code, "Did you mean nvfp4?" in result.stderr) == (2, True)
    result = run("test", SPECS[0], "--check", "decod")
    assert (result.exit_code, "Did you mean decode?" in result.stderr) == (2, True)
    assert run("test", tmp_path / "none.yaml").exit_code == 2
    assert run("test", "--specs", tmp_path / "none").exit_code == 2

    def broken(path: Path, **options: object) -> Subject:
        fault = edit(*MUTANTS["a tie goes to the odd code"][1:4])
        return compile_subject(path, seed=int(str(options["seed"])), edit=fault)

    monkeypatch.setattr("layoutc.conformance.subject.compile_subject", broken)
    result = run("test", ROOT / "specs" / "nvfp4.yaml", "--check", "encode", "--no-distributed")
    assert result.exit_code == 1
    assert re.search(
        r"  FAIL  encode .*\n +rowwise_data differs in \d+ of \d+ bytes\n +plane rowwise_data, seed 0", result.stdout
    )


def test_list_says_what_each_check_means() -> None:
    lines = run("test", "--list").stdout.splitlines()
    assert len(lines) == len(CHECKS) >= 35
    assert all(re.fullmatch(r"[a-z0-9-]+ +\S.*", text) for text in lines)


# --------------------------------------------------------------------------------------------------------------- plugin
def pytest_run(folder: Path, *args: object) -> subprocess.CompletedProcess[str]:
    """pytest as a third party runs it, in a folder of its own, and without the interpreter that tests/ asks for."""
    plugin = ["-p", "layoutc.conformance.plugin", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *plugin, *map(str, args)]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "TRITON_INTERPRET": "0"}
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=120, check=False, env=environment
    )


@pytest.mark.slow
def test_the_plugin_runs_a_spec_beside_other_tests(tmp_path: Path) -> None:
    text = (ROOT / "specs" / "mxfp8.yaml").read_text(encoding="utf-8").replace("name: mxfp8", "name: mine")
    (tmp_path / "mine.yaml").write_text(text.replace("32", "16"), encoding="utf-8")
    (tmp_path / "other.yaml").write_text("not: a spec\n", encoding="utf-8")
    (tmp_path / "test_own.py").write_text("def test_own():\n    pass\n", encoding="utf-8")
    done = pytest_run(tmp_path, "--layoutc-spec", "mine.yaml", "--layoutc-no-distributed", "-v")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mine.yaml::encode PASSED" in done.stdout
    assert "test_own.py::test_own PASSED" in done.stdout
    assert done.stdout.count("::encode") == 1
    assert "other.yaml" not in done.stdout
    assert "::fsdp2" not in done.stdout


def test_the_plugin_reports_what_was_found_and_not_its_own_frames(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("layoutc: 1\nname: bad\n", encoding="utf-8")
    done = pytest_run(tmp_path, "--layoutc-spec", "bad.yaml", "-k", "decode")
    assert done.returncode == 1, done.stdout
    assert "error[" in done.stdout
    assert "Traceback" not in done.stdout
    assert pytest_run(tmp_path, "--layoutc-spec", "none.yaml").returncode == 4


def test_the_plugin_takes_the_name_of_a_shipped_recipe(tmp_path: Path) -> None:
    done = pytest_run(tmp_path, "--layoutc-spec", "mxfp8", "--collect-only", "-q")
    assert done.stdout.count("::encode") == 1, done.stdout + done.stderr


def test_the_plugin_imports_nothing_heavy_until_it_is_asked() -> None:
    program = (
        "import sys, layoutc.conformance.plugin; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'pydantic', 'yaml')))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
