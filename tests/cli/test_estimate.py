"""The command that estimates steps: its table, its JSON, and what it refuses before any work."""

from __future__ import annotations

import json
import time

import pytest
from click.testing import CliRunner, Result
from places import ROOT

from layoutc.cli import shared
from layoutc.cli.app import main
from layoutc.estimate.machine import H200, LINKS

SPECS = ROOT / "specs"


def run(*args: object) -> Result:
    return CliRunner().invoke(main, ["estimate", *map(str, args), "--specs", str(SPECS)])


def test_bf16_is_the_first_row_of_each_world() -> None:
    result = run("nvfp4", "mxfp8", "--world", "8,64", "--world", "512", "--link", "25,50")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines() if "x" in line.split()[-1:][0:1] or line.endswith("x")]
    assert [row[:2] for row in rows] == 2 * [
        [world, name] for world in ("8", "64", "512") for name in ("bf16", "nvfp4", "mxfp8")
    ]
    assert [row[-1] for row in rows[::3]] == ["1.00x"] * 6
    assert "extrapolated" in result.stdout


def test_json_has_parts_and_constants() -> None:
    result = run("nvfp4", "--world", "8", "--json", "--graph", "--layers", "3", "--vocabulary", "0")
    data = json.loads(result.stdout)
    [link] = data["links"]
    plain, quantized = link["estimates"]
    assert (plain["name"], quantized["name"], plain["host"]) == ("bf16", "nvfp4", 0)
    assert quantized["total"] < plain["total"]
    assert quantized["undisturbed"] < quantized["total"]
    assert (data["model"]["groups"], link["link"]["bandwidth"], data["machine"]["name"]) == (3, 50e9, "H200")
    assert quantized["bytes_forward"] < 0.26 * plain["bytes_forward"]
    assert any("extrapolated" in note for note in data["notes"])


def test_gradients_that_are_exchanged() -> None:
    """Of bf16 as well; and what is said of several hosts, in the table and for machines."""
    args = ("nvfp4", "--world", "8,64,512", "--per-host", "8", "--json")
    before, after = (json.loads(run(*args, *more).stdout) for more in ((), ("--exchange",)))
    assert (before["exchange"], after["exchange"]) == (False, True)
    found = [[one for one in data["links"][0]["estimates"] if one["world"] == 8] for data in (before, after)]
    for without, with_ in zip(*found, strict=True):
        assert with_["bytes_reduced"] * 2 == without["bytes_reduced"]
        assert with_["total"] < without["total"]
    assert not any("exchange" in note for note in before["notes"])
    said = " ".join(after["notes"])
    assert "on 64, 512 ranks hosts shard together" in said
    assert "across_hosts=True" in said
    assert "layoutc plan --exchange --replicas" in said
    assert "up to 4 times what a ring does" in run(*args[:-1], "--exchange").stdout
    assert "hosts shard" not in run("nvfp4", "--world", "8", "--exchange").stdout


def test_weights_that_are_dequantized_on_gather() -> None:
    args = ("nvfp4", "--world", "8", "--json")
    before, after, default = (json.loads(run(*args, *more).stdout) for more in (("--by-layers",), ("--on-gather",), ()))
    assert (before["on_gather"], after["on_gather"]) == (False, True)
    assert default == after
    (plain, codes), (same, values) = (data["links"][0]["estimates"] for data in (before, after))
    assert plain == same
    assert values["bytes_forward"] == codes["bytes_forward"]
    assert values["host"] < codes["host"] < plain["host"]  # compiled, and gradients are reduced in few steps
    assert len(after["notes"]) == len(before["notes"]) + 2
    assert "weights are dequantized on gather" in run(*args[:-1], "--on-gather").stdout


def test_eager_models_take_more_of_the_host_in_low_precision_alone() -> None:
    args = ("fp8_current", "--low", "--world", "8", "--sequence", "512", "--json")
    compiled, eager = (json.loads(run(*args, *more).stdout) for more in ((), ("--eager",)))
    assert (compiled["runs"], eager["runs"]) == ("compiled", "eager")
    (plain, low), (same, more) = (data["links"][0]["estimates"] for data in (compiled, eager))
    assert plain == same
    layers, weights = 32, 7
    assert more["host"] - low["host"] == pytest.approx(layers * weights * H200.low_host)
    for name in ("forward", "backward", "optimizer", "bytes_forward"):
        assert more[name] == low[name]
    for command in ("estimate", "plan"):
        model = () if command == "estimate" else ("--shapes", "up=256x128")
        result = CliRunner().invoke(main, [command, *model, "--eager", "--graph"])
        assert result.exit_code == 2
        assert "leave out one of the two" in result.stderr


def test_a_host_as_a_step_in_bf16_shows_it() -> None:
    """The step that was given comes out; `--host` with the factor that was found gives the same, in both commands."""
    sizes = ("--layers", "8", "--vocabulary", "0", "--sequence", "512", "--link", "256", "--world", "2,8")
    shown = json.loads(run("nvfp4", *sizes, "--json", "--bf16-step", "2:61.5").stdout)
    factor, rows = shown["host_factor"], shown["links"][0]["estimates"]
    assert rows[0]["total"] == pytest.approx(61.5e-3)
    assert f"host: {factor:.2f} times as long" in " ".join(shown["notes"])
    stated = json.loads(run("nvfp4", *sizes, "--json", "--host", factor).stdout)
    assert stated["links"] == shown["links"]
    exchanged = json.loads(run("nvfp4", *sizes, "--json", "--bf16-step", "2:61.5", "--exchange").stdout)
    assert exchanged["host_factor"] == factor
    usual = json.loads(run("nvfp4", *sizes, "--json").stdout)
    assert usual["host_factor"] == 1
    for one, other in zip(rows, usual["links"][0]["estimates"], strict=True):
        assert one["host"] == pytest.approx(factor * other["host"])
        assert one["forward"] == other["forward"]

    plan = ("plan", "--shapes", "up=4096x4096", "--world", "2", "--sequence", "16", "--json")
    plans = [json.loads(CliRunner().invoke(main, [*plan, *more]).stdout) for more in ((), ("--host", "2"))]
    assert [one["setting"]["host_factor"] for one in plans] == [1, 2]
    steps = [one["budgets"][0]["step"] for one in plans]
    assert steps[1]["host"] == pytest.approx(2 * steps[0]["host"])
    assert steps[1]["total"] > steps[0]["total"]
    assert any("host: 2 times as long" in note for note in plans[1]["notes"])


def test_steps_in_a_row_hide_the_host_behind_the_card() -> None:
    """Of short steps, whose time is the host's, in both commands. A measured step in bf16 is the mean of as many."""
    sizes = ("--layers", "8", "--vocabulary", "0", "--sequence", "512", "--link", "256", "--world", "2")
    alone, row = (json.loads(run("nvfp4", *sizes, "--json", *more).stdout) for more in ((), ("--together", "10")))
    assert (alone["together"], row["together"]) == (1, 10)
    for one, other in zip(alone["links"][0]["estimates"], row["links"][0]["estimates"], strict=True):
        assert other["host"] == one["host"] < other["total"] < one["total"]
    assert not any("in a row" in note for note in alone["notes"])
    assert any("the mean of 10 in a row" in note for note in row["notes"])
    shown = json.loads(run("nvfp4", *sizes, "--json", "--together", "10", "--bf16-step", "2:50.3").stdout)
    assert shown["links"][0]["estimates"][0]["total"] == pytest.approx(50.3e-3)
    assert run("nvfp4", "--together", "0").exit_code == 2

    plan = ("plan", "--shapes", "up*8=4096x4096", "--world", "2", "--sequence", "16", "--json")
    plans = [json.loads(CliRunner().invoke(main, [*plan, *more]).stdout) for more in ((), ("--together", "10"))]
    assert [one["setting"]["together"] for one in plans] == [1, 10]
    steps = [one["budgets"][0]["step"] for one in plans]
    assert steps[1]["host"] == steps[0]["host"] < steps[1]["total"] < steps[0]["total"]
    assert any("the mean of 10 in a row" in note for note in plans[1]["notes"])


def test_links_that_were_measured_have_names() -> None:
    """With what reduce-scatters and exchanges reach there; both commands take them, and no others."""
    assert tuple(LINKS) == shared.LINKS
    args = ("--world", "2", "--json", "--latency", "20", "--rule", "tree")
    found = json.loads(run("nvfp4", *args, "--link", "host-memory,25.3", "--link", "sockets").stdout)["links"]
    names = [one["link"]["name"] for one in found]
    assert names == ["host memory", "25.3 GB/s", "sockets"]
    measured = {one["link"]["name"]: one["link"] for one in found}
    assert [measured[name]["exchanged"] for name in names] == [0.96, 1.0, 0.70]
    assert all((one["far_hop"], one["rule"]) == (20 * 1e-6, "tree") for one in measured.values())
    of_name, of_number, _ = (one["estimates"][1]["total"] for one in found)
    assert of_name < of_number  # it was measured that products do not slow it
    plan = ("plan", "--shapes", "up=4096x4096", "--world", "2", "--json", "--link")
    totals = []
    for link in ("host-memory", "25.3", "fast"):
        result = CliRunner().invoke(main, [*plan, link])
        totals.append(json.loads(result.stdout)["budgets"][0]["step"]["total"] if result.exit_code == 0 else result)
    assert totals[0] < totals[1]
    assert "'fast' is no link; write GB/s of a rank, 0.001 to 100000, as in --link 50, or nvlink" in totals[2].stderr


def test_without_recipes_bf16_alone() -> None:
    result = run("--world", "8", "--json")
    assert [one["name"] for one in json.loads(result.stdout)["links"][0]["estimates"]] == ["bf16"]


def test_the_largest_model_on_the_most_ranks_takes_less_than_two_seconds() -> None:
    began = time.process_time()
    assert run("nvfp4", "--model", "llama-405b", "--world", "16384").exit_code == 0
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--world", "0"), "'0' is not a number of ranks"),
        (("--world", "8,x"), "'x' is not a number of ranks"),
        (("--world", ""), "'' is not a number of ranks"),
        (("--world", "99999999"), "'99999999' is not a number of ranks"),
        (("--link", "0"), "'0' is no link"),
        (("--bf16-step", "95"), "write its ranks and its milliseconds, as in --bf16-step 8:412.5"),
        (("--bf16-step", "0:95"), "'0:95' is no step"),
        (("--bf16-step", "8:nan"), "'8:nan' is no step"),
        (("--bf16-step", "8:95"), "says nothing of the host: give a step of fewer tokens, or none"),
        (("--bf16-step", "8:95", "--graph"), "which --bf16-step is about; leave out one of the two"),
        (("--bf16-step", "8:95", "--host", "2"), "--bf16-step finds what --host states; leave out one of the two"),
        (("--host", "2", "--graph"), "which --host is about; leave out one of the two"),
        (("--host", "0"), "0.1<=x<=3"),
        (("--link", "nan"), "'nan' is no link"),
        (("--link", "fast"), "'fast' is no link"),
        (("--latency", "-1"), "Invalid value for '--latency'"),
        (("--layers", "0"), "Invalid value for '--layers' / '--groups'"),
        (("--layers", "1025"), "Invalid value for '--layers' / '--groups'"),
        (("--heads", "33"), "4096 columns can't be divided among 33 heads"),
        (("--kv-heads", "5"), "32 heads can't share 5 heads of keys and values equally"),
        (("--model", "llama-9b"), "'llama-9b' is not one of"),
        (("--low",), "--low says how weights of recipes are used; name a RECIPE"),
        (("--on-gather",), "--on-gather says how weights of recipes are used; name a RECIPE"),
        (("fp8_block", "--low", "--on-gather"), "weights that are dequantized on gather have no products in low"),
        (("mxfp9",), "has no recipe 'mxfp9'"),
        (("nvfp4_gradient",), "nvfp4_gradient is for activations and gradients, not for weights"),
    ],
)
def test_bad_input_is_a_usage_error(args: tuple[str, ...], message: str) -> None:
    result = run(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in " ".join(result.stderr.split())


def test_sizes_that_a_recipe_does_not_take_are_findings_of_all_recipes() -> None:
    result = run("nvfp4", "mxfp8", "--ffn", "8200")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "error[LC401]: nvfp4 takes rows in multiples of 16, not 8200" in result.stderr
    assert "error[LC401]: mxfp8 takes" in result.stderr
    assert "m can be 8192 or 8208" in result.stderr
