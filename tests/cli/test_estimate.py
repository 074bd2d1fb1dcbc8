"""The command that estimates steps: its table, its JSON, and what it refuses before any work."""

from __future__ import annotations

import json

import pytest
from calls import calls_of
from click.testing import CliRunner, Result
from places import ROOT

from layoutc.cli import planning
from layoutc.cli.app import main
from layoutc.estimate.machine import H200, LINKS

SPECS = ROOT / "specs"


def run(*args: object) -> Result:
    return CliRunner().invoke(main, ["estimate", *map(str, args), "--specs", str(SPECS)])


def test_bf16_is_the_first_row_of_each_world() -> None:
    result = run("nvfp4", "mxfp8", "--world", "8,64", "--world", "512", "--link", "25")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines() if "x" in line.split()[-1:][0:1] or line.endswith("x")]
    assert [row[:2] for row in rows] == [
        [world, name] for world in ("8", "64", "512") for name in ("bf16", "nvfp4", "mxfp8")
    ]
    assert [row[-1] for row in rows[::3]] == ["1.00x"] * 3
    assert "as fast as bf16" in result.stdout
    assert "extrapolated" in result.stdout


def test_json_is_that_of_the_plan() -> None:
    """Of the same model and cards, all of it."""
    args = ("--world", "8", "--json", "--graph")
    data = json.loads(run("nvfp4", *args).stdout)
    plain, quantized = data["budgets"]
    assert (plain["recipe"], quantized["recipe"], plain["step"]["host"]) == ("bf16", "nvfp4", 0)
    assert quantized["step"]["total"] < plain["step"]["total"]
    assert quantized["step"]["undisturbed"] < quantized["step"]["total"]
    assert (data["model"]["layers"], data["setting"]["machine"]["name"]) == (32, "H200")
    assert quantized["traffic"]["forward"] < 0.31 * plain["traffic"]["forward"]
    assert any("extrapolated" in note for note in data["notes"])
    planned = CliRunner().invoke(
        main, ["plan", "llama-8b", "--recipe", "nvfp4", *args, "--checkpointing", "none", "--specs", str(SPECS)]
    )
    assert json.loads(planned.stdout) == data


def test_sizes_in_place_of_the_models() -> None:
    sizes = ("--layers", "3", "--dim", "512", "--ffn", "1024", "--heads", "8", "--kv-heads", "2", "--vocabulary", "99")
    model = json.loads(run("--world", "8", "--json", *sizes).stdout)["model"]
    assert (model["layers"], model["name"]) == (3, "llama-8b with other sizes")
    layer = 2 * 512 * 512 + 2 * 128 * 512 + 3 * 1024 * 512 + 2 * 512
    assert model["elements"] == 3 * layer + 2 * 99 * 512 + 512


def test_gradients_that_are_exchanged() -> None:
    """Of bf16 as well; and what is said of several hosts, in the table and for machines."""
    args = ("nvfp4", "--world", "8,64,512", "--per-host", "8", "--json")
    before, after = (json.loads(run(*args, *more).stdout) for more in ((), ("--exchange",)))
    assert (before["setting"]["exchange"], after["setting"]["exchange"]) == (False, True)
    found = [[one for one in data["budgets"] if one["mesh"]["world"] == 8] for data in (before, after)]
    for without, with_ in zip(*found, strict=True):
        assert with_["traffic"]["reduced"] * 2 == without["traffic"]["reduced"]
        assert with_["step"]["total"] < without["step"]["total"]
    assert not any("exchange" in note for note in before["notes"])
    said = " ".join(after["notes"])
    assert "on 64, 512 cards hosts shard together" in said
    assert "across_hosts=True" in said
    assert "--replicas 8 on 64 ranks" in said
    assert "up to 4 times what a ring does" in run(*args[:-1], "--exchange").stdout
    assert "hosts shard" not in run("nvfp4", "--world", "8", "--exchange").stdout
    coded = json.loads(run(*args, "--gradients", "grad_fp8").stdout)
    assert coded["setting"]["exchange"]
    assert "up to 2 times what a ring does" in run(*args[:-1], "--gradients", "grad_fp8").stdout
    for said, *more in (
        ("leave out one of the two", "--exchange", "--gradients", "grad_fp8"),
        ("nvfp4 is not a recipe for gradients on the wire", "--gradients", "nvfp4"),
    ):
        refused = run(*args, *more)
        assert (refused.exit_code, said in refused.stderr) == (2, True)


def test_weights_that_are_dequantized_on_gather() -> None:
    args = ("nvfp4", "--world", "8", "--json")
    before, after, default = (json.loads(run(*args, *more).stdout) for more in (("--by-layers",), ("--on-gather",), ()))
    assert (before["setting"]["on_gather"], after["setting"]["on_gather"]) == (False, True)
    assert default["setting"]["on_gather"]
    (plain, codes), (same, values) = (data["budgets"] for data in (before, after))
    assert plain == same
    assert values["traffic"] == codes["traffic"]
    assert values["step"]["host"] < codes["step"]["host"] < plain["step"]["host"]  # gradients reduce in few steps
    assert len(after["notes"]) == len(before["notes"]) + 2
    assert "weights are dequantized on gather" in run(*args[:-1], "--on-gather").stdout


def test_eager_models_take_more_of_the_host_in_low_precision_alone() -> None:
    args = ("fp8_current", "--low", "--world", "8", "--sequence", "512", "--json")
    compiled, eager = (json.loads(run(*args, *more).stdout) for more in ((), ("--eager",)))
    assert (compiled["setting"]["runs"], eager["setting"]["runs"]) == ("compiled", "eager")
    (plain, low), (same, more) = ([one["step"] for one in data["budgets"]] for data in (compiled, eager))
    assert plain == same
    layers, weights = 32, 7
    assert more["host"] - low["host"] == pytest.approx(layers * weights * H200.low_host)
    for name in ("forward", "backward", "optimizer", "gather_forward"):
        assert more[name] == low[name]
    for command in ("estimate", "plan"):
        model = () if command == "estimate" else ("--shapes", "up=256x128")
        result = CliRunner().invoke(main, [command, *model, "--eager", "--graph"])
        assert result.exit_code == 2
        assert "leave out one of the two" in result.stderr


def test_a_host_as_a_step_in_bf16_shows_it() -> None:
    """The step that was given comes out; `--host` with the factor that was found gives the same, in both commands."""
    sizes = ("--layers", "8", "--vocabulary", "1", "--sequence", "512", "--world", "2,8")
    shown = json.loads(run("nvfp4", *sizes, "--json", "--bf16-step", "2:61.5").stdout)
    factor, rows = shown["setting"]["host_factor"], shown["budgets"]
    assert rows[0]["step"]["total"] == pytest.approx(61.5e-3)
    assert f"host: {factor:.2f} times as long" in " ".join(shown["notes"])
    stated = json.loads(run("nvfp4", *sizes, "--json", "--host", factor).stdout)
    assert stated["budgets"] == rows
    exchanged = json.loads(run("nvfp4", *sizes, "--json", "--bf16-step", "2:61.5", "--exchange").stdout)
    assert exchanged["setting"]["host_factor"] == factor
    usual = json.loads(run("nvfp4", *sizes, "--json").stdout)
    assert usual["setting"]["host_factor"] == 1
    for one, other in zip(rows, usual["budgets"], strict=True):
        assert one["step"]["host"] == pytest.approx(factor * other["step"]["host"])
        assert one["step"]["forward"] == other["step"]["forward"]


def test_steps_in_a_row_hide_the_host_behind_the_card() -> None:
    """Of short steps, whose time is the host's. A measured step in bf16 is the mean of as many."""
    sizes = ("--layers", "8", "--vocabulary", "1", "--sequence", "512", "--world", "2")
    alone, row = (json.loads(run("nvfp4", *sizes, "--json", *more).stdout) for more in ((), ("--together", "10")))
    assert (alone["setting"]["together"], row["setting"]["together"]) == (1, 10)
    for one, other in zip(alone["budgets"], row["budgets"], strict=True):
        assert other["step"]["host"] == one["step"]["host"] < other["step"]["total"] < one["step"]["total"]
    assert not any("in a row" in note for note in alone["notes"])
    assert any("the mean of 10 in a row" in note for note in row["notes"])
    shown = json.loads(run("nvfp4", *sizes, "--json", "--together", "10", "--bf16-step", "2:50.3").stdout)
    assert shown["budgets"][0]["step"]["total"] == pytest.approx(50.3e-3)
    assert run("nvfp4", "--together", "0").exit_code == 2


def test_links_that_were_measured_have_names() -> None:
    """With what reduce-scatters and exchanges reach there; within hosts and across, and no others."""
    assert set(planning.LINKS) <= set(LINKS)
    args = ("--world", "2,16", "--json", "--latency", "20", "--rule", "tree")
    made = {}
    for within, across in (("host-memory", "25.3"), ("25.3", "sockets"), ("sockets", "host-memory")):
        data = json.loads(run("nvfp4", *args, "--within", within, "--link", across).stdout)
        made[within] = [one["step"]["total"] for one in data["budgets"]]
        links = data["setting"]["links"]
        stated = {"host-memory": ("host memory", 0.96), "sockets": ("sockets", 0.70), "25.3": ("25.3 GB/s", 1.0)}
        assert (links["within"]["name"], links["within"]["exchanged"]) == stated[within]
        assert (links["across"]["name"], links["across"]["exchanged"]) == stated[across]
        assert (links["across"]["hop"], links["rule"]) == (20 * 1e-6, "tree")
    assert made["host-memory"][1] < made["25.3"][1]  # it was measured that products do not slow it
    assert made["25.3"][2] > made["25.3"][0]  # sixteen cards are two hosts
    assert (
        "'fast' is no link; write GB/s of a card, 0.001 to 100000, as in --link 50, or nvlink"
        in run("--link", "fast").stderr
    )


def test_without_recipes_bf16_alone() -> None:
    result = run("--world", "8", "--json")
    assert [one["recipe"] for one in json.loads(result.stdout)["budgets"]] == ["bf16"]
    assert run("bf16", "--world", "8", "--json").stdout == result.stdout


def test_the_largest_model_on_the_most_ranks_is_quick() -> None:
    result, calls = calls_of(lambda: run("nvfp4", "--model", "llama-405b", "--world", "16384"))
    assert (result.exit_code, calls < 1_000_000) == (0, True), calls


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
        (("--layers", "0"), "Invalid value for '--layers'"),
        (("--layers", "1025"), "Invalid value for '--layers'"),
        (("--heads", "33"), "4096 columns can't be divided among 33 heads"),
        (("--kv-heads", "5"), "32 heads can't share 5 heads of keys and values equally"),
        (("--model", "llama-9b"), "llama-9b does not exist; did you mean llama-8b?"),
        (("--low",), "--low says how weights of recipes are used; name a recipe"),
        (("--on-gather",), "--on-gather says how weights of recipes are used; name a recipe"),
        (("fp8_block", "--low", "--on-gather"), "weights that are dequantized on gather have no products in low"),
        (("mxfp9",), "has no recipe 'mxfp9'"),
        (("nvfp4_gradient",), "nvfp4_gradient is for activations and gradients, not for weights"),
    ],
)
def test_bad_input_is_a_usage_error(args: tuple[str, ...], message: str) -> None:
    result = run(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in " ".join(result.stderr.split())


def test_sizes_that_a_recipe_does_not_take_stay_plain() -> None:
    """As `quantize_` leaves them, and the plan says which."""
    data = json.loads(run("nvfp4", "--ffn", "8200", "--world", "8", "--json").stdout)
    left = {line["plain"] for line in data["budgets"][1]["weights"] if "up_proj" in line["name"]}
    assert left == {"nvfp4 takes rows in multiples of 16, not 8200: quantize_ refuses it"}
