"""Each fault that is put into generated code, or into what it stands on, is caught by its checks, which say where."""

from __future__ import annotations

import re
import time
import warnings
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any, Literal

import pytest
import torch
from injected_faults import IN_PROCESSES, MUTANTS, PATCHES, edit
from places import ROOT

from layoutc.conformance.checks.codecs import search_disagrees
from layoutc.conformance.checks.state import kinds
from layoutc.conformance.material import expect, expect_same
from layoutc.conformance.registry import Check, all_checks
from layoutc.conformance.report import explanation
from layoutc.conformance.runner import Outcome, run_check
from layoutc.conformance.subject import Subject, compile_subject
from layoutc.runtime.weight.tensor import QuantizedTensor

CHECKS = {check.name: check for check in all_checks()}
torch.set_num_threads(1)


@pytest.mark.sample(8)
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


def test_writes_that_write_nothing_are_caught() -> None:
    recipe, file, pattern, replacement, _ = MUTANTS["bytes are not copied"]
    subject = compile_subject(ROOT / "specs" / f"{recipe}.yaml", edit=edit(file, pattern, replacement))
    try:
        assert run_check(subject, CHECKS["writes"]).status == "fail"
    finally:
        subject.close()


def test_dequantize_has_a_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the right values and shape, in another one."""
    dequantize = QuantizedTensor.dequantize
    subject = compile_subject(ROOT / "specs" / "mxfp8.yaml")
    monkeypatch.setattr(QuantizedTensor, "dequantize", lambda self: dequantize(self).double())
    try:
        outcome = run_check(subject, CHECKS["dequantize"])
    finally:
        subject.close()
    assert (outcome.status, outcome.message[:23]) == ("fail", "dequantize gives Tensor")
    assert outcome.message.endswith("torch.float64")


def test_what_a_check_raises_is_told_with_the_end_of_its_traceback() -> None:
    def raises(subject: Subject, depth: int = 9) -> None:
        if depth:
            raises(subject, depth - 1)
        raise KeyError("on purpose")

    subject = compile_subject(ROOT / "specs" / "mxfp8.yaml", seed=7)
    try:
        filters, start = warnings.filters[:], time.perf_counter()
        outcome = run_check(subject, replace(CHECKS["decode"], run=raises))
        assert 0 < outcome.seconds < time.perf_counter() - start
        assert warnings.filters == filters
    finally:
        subject.close()
    assert not subject.folder.exists()
    assert (outcome.status, outcome.message, outcome.details["seed"]) == ("fail", "KeyError: 'on purpose'", 7)
    told = str(outcome.details["traceback"])
    assert told.splitlines()[-1] == "KeyError: 'on purpose'"
    assert 1 <= told.count("in raises") <= 4
    assert "in run_check" not in told


def test_kinds_of_tensors_that_are_saved_have_the_shapes_of_their_names() -> None:
    subject = compile_subject(ROOT / "specs" / "mxfp8.yaml")
    try:
        found: dict[str, Any] = dict(kinds(subject))
    finally:
        subject.close()
    m, k = found["whole"].shape
    assert found["rows"].shape == (m - subject.plan.shard_rows, k)
    assert found["columns"].shape == (m, k - subject.plan.column_multiple)
    assert found["without rows"].shape == (0, k)
    assert (found["transposed"].shape, found["flat"].shape) == ((k, m), (m * k,))
    assert [name for name, one in found.items() if one.transposed] == ["transposed"]  # m is k here


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
    assert "actual 0x01, expected 0x00" in text
    recipe, file, pattern, replacement, _ = MUTANTS["nibbles swapped in a buffer"]
    subject = compile_subject(ROOT / "specs" / f"{recipe}.yaml", edit=edit(file, pattern, replacement))
    outcome = run_check(subject, CHECKS["buffers"])
    subject.close()
    assert re.search(r"plane columnwise_data, .*\(i, j\) \(0, 0\)", explanation(outcome)), explanation(outcome)
    recipe, file, pattern, replacement, _ = MUTANTS["backward sends its codes in reverse"]
    subject = compile_subject(ROOT / "specs" / f"{recipe}.yaml", edit=edit(file, pattern, replacement))
    outcome = run_check(subject, CHECKS["gather"])
    subject.close()
    assert (outcome.details["world"], outcome.details["pass"]) == (1, "backward")
