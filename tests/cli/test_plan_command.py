"""The command that plans runs: its table, JSON, CSV and charts, how long it takes, and what it refuses."""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
import shlex
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock
from xml.etree import ElementTree

import pytest
from calls import calls_of
from click.testing import CliRunner, Result
from places import HELPERS, ROOT

import layoutc
from layoutc.charts import style
from layoutc.cli.app import main
from layoutc.report.budgets import answer, charts
from layoutc.report.budgets.figures import FIGURES, figure, label

SPECS, CONFIGS = ROOT / "specs", ROOT / "tests" / "models" / "configs"
LLAMA, DEEPSEEK = CONFIGS / "llama-3.1-8b.json", CONFIGS / "deepseek-v3.json"
needs_matplotlib = pytest.mark.skipif(
    find_spec("matplotlib") is None, reason="needs matplotlib: pip install 'layoutc[charts]'"
)


def run(*args: object) -> Result:
    return CliRunner().invoke(main, ["plan", *map(str, args), "--specs", str(SPECS)])


def data_of(*args: object) -> Any:
    result = run(*args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_table_has_a_row_for_each_world_and_recipe() -> None:
    result = run(LLAMA, "--recipe", "mxfp8,nvfp4", "--use", "both", "--world", "8,64")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines() if line.endswith("x")]
    names = ["bf16", "mxfp8", "mxfp8 cast", "nvfp4", "nvfp4 cast"]
    assert [" ".join(row[:3]) for row in rows] == [
        f"{world} {name}" if " " in name else f"{world} {name} {row[2]}"
        for (world, name), row in zip([(w, n) for w in ("8", "64") for n in names], rows, strict=True)
    ]
    assert [rows[0][-1], rows[5][-1]] == ["1.00x", "1.00x"]
    for said in ("Left plain", "an embedding", "a norm", "extrapolated", "activations"):
        assert said in result.stdout


def test_json_and_csv_have_the_same_figures() -> None:
    args = (LLAMA, "--recipe", "nvfp4", "--world", "8,512")
    data = data_of(*args)
    rows = list(csv.DictReader(io.StringIO(run(*args, "--csv").stdout)))
    assert len(rows) == len(data["budgets"]) == 4
    for row, one in zip(rows, data["budgets"], strict=True):
        assert row == {name: str(figure(one, name)) for name in FIGURES}
    plain, quantized = data["budgets"][:2]
    assert plain["resident"]["weights"] == 4 * 8_030_261_248 // 8  # fp32, and every size is a multiple of 8
    assert plain["traffic"]["forward"] == 2 * 8_030_261_248 // 8
    assert quantized["quantized"] + quantized["plain"] == data["model"]["elements"] == 8_030_261_248
    assert quantized["memory"] == sum(
        quantized["resident"][key] for key in ("weights", "masters", "moments", "left")
    ) + max(quantized["peaks"]["whole"], quantized["resident"]["gradients"])
    assert quantized["peaks"]["whole"] >= quantized["peaks"]["activations"] + quantized["peaks"]["root"]
    assert quantized["spare"] == quantized["room"] - quantized["memory"]


def test_lines_of_weights() -> None:
    result = run(LLAMA, "--recipe", "nvfp4", "--world", "8", "--weights")
    assert "nvfp4 on 8 ranks: bytes of rank 0, of one weight of each kind" in result.stdout
    line = next(one for one in result.stdout.splitlines() if "mlp.up_proj.weight" in one and "nvfp4" in one)
    # 1792 x 4096 codes of half a byte, a scale for 16 x 16, an amax; a master, two moments, a step, a gradient
    own = 1792 * 4096
    sent = own // 2 + own // 256
    resident = sent + 4 + (4 + 8 + 4) * own + 4
    words = line.split()
    assert words[:6] == ["model.layers.*.mlp.up_proj.weight", "32", "14336x4096", "linear", "nvfp4", f"{resident:,}"]
    assert words[6:] == [f"{sent:,}"] * 2


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "args",
    [
        (CONFIGS / "llama-3.1-405b.json", "--recipe", "mxfp8", "--recipe", "nvfp4"),
        (DEEPSEEK, "--recipe", "mxfp8", "--recipe", "nvfp4", "--experts", "--replicas", "64", "--ep", "64"),
    ],
    ids=["405B", "671B"],
)
def test_the_largest_models_on_16384_ranks_are_quick_and_take_no_torch(args: tuple[Any, ...]) -> None:
    """Less than two seconds, from the start of the process."""
    program = (
        f"import sys\nsys.path.append({str(HELPERS)!r})\nfrom calls import calls_of\n"
        "def run():\n    from layoutc.cli.app import main\n"
        f"    main(['plan', *{[str(one) for one in args]!r}, '--world', '16384', '--specs', {str(SPECS)!r}], "
        "standalone_mode=False)\n"
        "print(calls_of(run)[1], 'torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    calls, has_torch = done.stderr.split()
    assert (int(calls) < 3_000_000, has_torch) == (True, "False"), done.stderr
    assert done.stdout.count("16,384  ") >= 3


def test_all_forms_of_a_model_give_the_same_plan(tmp_path: Path) -> None:
    """A folder with a config, and its weights as shapes."""
    (tmp_path / "config.json").write_text(LLAMA.read_text(encoding="utf-8"))
    by_config, by_folder = data_of(LLAMA, "--world", "8"), data_of(tmp_path, "--world", "8")
    assert by_config["budgets"] == by_folder["budgets"]
    layer = (
        "q*32=4096x4096,k*32=1024x4096,v*32=1024x4096,o*32=4096x4096,g*32=14336x4096,u*32=14336x4096,d*32=4096x14336"
    )
    ends = "norm_a*32=4096,norm_b*32=4096,norm=4096,head.weight=128256x4096,embed=128256x4096"
    by_shapes = data_of("--shapes", layer, "--shapes", ends, "--world", "8", "--recipe", "nvfp4")
    stated = data_of(LLAMA, "--world", "8", "--recipe", "nvfp4")
    for ours, theirs in zip(by_shapes["budgets"], stated["budgets"], strict=True):
        for key in ("resident", "traffic", "quantized", "plain"):
            assert ours[key] == theirs[key], key
        for key in ("root", "layer", "forward", "backward"):  # how large activations are, shapes do not say
            assert ours["peaks"][key] == theirs["peaks"][key], key


def test_experts_that_stay_plain_are_said() -> None:
    without, with_ = (run(DEEPSEEK, "--recipe", "mxfp8", "--world", "64", *more) for more in ((), ("--experts",)))
    assert "experts have 97% of the parameters, and some stay plain" in without.stdout
    assert "stay plain" not in with_.stdout


def test_what_of_time_is_left_out_is_said() -> None:
    assert "time leaves out activations of tensor parallelism" in run(LLAMA, "--world", "16", "--tp", "2").stdout
    assert "time leaves out" not in run(LLAMA, "--world", "16", "--replicas", "2").stdout


def test_gradients_that_are_exchanged_are_in_all_outputs(tmp_path: Path) -> None:
    args = (LLAMA, "--recipe", "nvfp4", "--world", "8,64")
    before, after = data_of(*args), data_of(*args, "--exchange")
    assert (before["setting"]["exchange"], after["setting"]["exchange"]) == (False, True)
    for without, with_ in zip(before["budgets"], after["budgets"], strict=True):
        assert (without["exchange"], with_["exchange"]) == (False, True)
        assert with_["traffic"] == {**without["traffic"], "reduced": without["traffic"]["reduced"] // 2}
    rows = list(csv.DictReader(io.StringIO(run(*args, "--exchange", "--csv").stdout)))
    assert [(row["exchange"], int(row["reduced_bytes"])) for row in rows] == [
        ("True", one["traffic"]["reduced"]) for one in after["budgets"]
    ]
    table = run(*args, "--exchange").stdout
    assert "gradients exchanged, weights dequantized on gather, 1 x 8,192 tokens" in table
    assert [line.split()[15] for line in table.splitlines() if line.endswith("x")] == ["2.008"] * 2 + ["0.251"] * 2
    (tmp_path / "run.json").write_text(json.dumps(after), encoding="utf-8")
    assert run(tmp_path / "run.json").stdout == table


def test_replicas_send_codes_in_all_outputs(tmp_path: Path) -> None:
    args = (LLAMA, "--recipe", "nvfp4", "--world", "16", "--replicas", "2")
    before, after = data_of(*args), data_of(*args, "--replica-gradients", "grad_fp8")
    assert after["setting"]["replica_gradients"] == "grad_fp8"
    for without, with_ in zip(before["budgets"], after["budgets"], strict=True):
        codes = with_["traffic"]["replicated"]
        assert with_["traffic"] == {**without["traffic"], "replicated": codes}
        assert 0.257 < codes / without["traffic"]["replicated"] < 0.258  # 1 1/32 bytes in place of 4
        assert with_["step"]["all_reduce"] < without["step"]["all_reduce"]
    assert "grad_fp8 among replicas" in run(*args, "--replica-gradients", "grad_fp8").stdout
    (tmp_path / "run.json").write_text(json.dumps(after), encoding="utf-8")
    assert run(tmp_path / "run.json").stdout == run(*args, "--replica-gradients", "grad_fp8").stdout


def test_an_exchange_is_by_the_recipe_that_a_spec_names(tmp_path: Path) -> None:
    text = (SPECS / "nvfp4.yaml").read_text(encoding="utf-8").replace("name: nvfp4\n", "name: mine\n")
    (tmp_path / "mine.yaml").write_text(f"{text}reduce: grad_fp8\n", encoding="utf-8")
    args = (LLAMA, "--world", "8", "--recipe")
    stated = data_of(*args, str(tmp_path / "mine.yaml"), "--exchange")["budgets"]
    named = data_of(*args, "nvfp4", "--gradients", "grad_fp8")["budgets"]
    assert [one["traffic"]["reduced"] for one in stated[1:]] == [one["traffic"]["reduced"] for one in named[1:]]
    assert stated[0]["traffic"]["reduced"] > named[0]["traffic"]["reduced"]  # plain weights go as they are


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        (("--world", "8"), ""),
        (("--world", "64", "--replicas", 8), ""),
        (("--world", "8,64,512"), "what works there: --replicas 8 on 64 ranks"),
        (("--world", "64", "--tp", 2), "what works there: --replicas 8 on 64 ranks"),
        (("--world", "12"), "what works there: replicas that lie within hosts"),
        (("--world", "12", "--per-host", 16), ""),
    ],
)
def test_exchanges_across_hosts_are_said_to_be_refused(mesh: tuple[object, ...], said: str) -> None:
    notes = " ".join(data_of(LLAMA, *mesh, "--exchange")["notes"])
    assert ("exchange_gradients refuses without across_hosts=True" in notes) == bool(said)
    assert said in notes


def test_weights_that_are_dequantized_on_gather_are_in_all_outputs(tmp_path: Path) -> None:
    args = (LLAMA, "--recipe", "nvfp4", "--world", "8")
    before, after = data_of(*args, "--by-layers"), data_of(*args, "--on-gather")
    assert (before["setting"]["on_gather"], after["setting"]["on_gather"]) == (False, True)
    assert [one["on_gather"] for one in after["budgets"]] == [False, True]
    plain, quantized = after["budgets"]
    assert plain == before["budgets"][0]
    assert quantized["traffic"] == before["budgets"][1]["traffic"]
    assert quantized["peaks"]["layer"] == plain["peaks"]["layer"]
    assert len(after["notes"]) == len(before["notes"]) + 2
    rows = csv.DictReader(io.StringIO(run(*args, "--on-gather", "--csv").stdout))
    assert [row["on_gather"] for row in rows] == ["False", "True"]
    table = run(*args, "--on-gather").stdout
    assert "weights dequantized on gather, 1 x 8,192 tokens" in table
    (tmp_path / "run.json").write_text(json.dumps(after), encoding="utf-8")
    assert run(tmp_path / "run.json").stdout == table


def test_a_line_of_a_chart_is_a_recipe_over_worlds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drawn, without matplotlib, which draws it: in each panel a line for each recipe, by ranks."""
    panels: Any = [MagicMock(), MagicMock()]
    for axes in panels:
        axes.get_ylim.return_value = (1.0, 90.0)
        axes.get_legend_handles_labels.return_value = ([], [])
    monkeypatch.setitem(sys.modules, "matplotlib.ticker", MagicMock())
    monkeypatch.setattr(style, "page", lambda *args: nullcontext((MagicMock(), panels)))
    data = data_of(LLAMA, "--recipe", "mxfp8,nvfp4", "--world", "64,8")
    assert charts.draw(data, tmp_path / "run.svg") == ["bf16", "mxfp8", "nvfp4"]
    of = {(label(one), one["mesh"]["world"]): one for one in data["budgets"]}
    for axes, (name, scale) in zip(panels, (("step_seconds", 1e3), ("memory_bytes", 1e-9)), strict=True):
        for call, recipe in zip(axes.plot.call_args_list, ("bf16", "mxfp8", "nvfp4"), strict=True):
            values = [figure(of[recipe, world], name) * scale for world in (8, 64)]
            assert (call.args, call.kwargs["label"]) == (([8, 64], values), recipe)
        axes.set_xticks.assert_called_with([8, 64], ["8", "64"])
        axes.set_yticks.assert_called_with([1, 2, 5, 10, 20, 50])


@needs_matplotlib
def test_charts_say_how_weights_and_gradients_travel(tmp_path: Path) -> None:
    said = {"--exchange": "gradients exchanged", "--on-gather": "weights dequantized on gather"}
    for more in (("--by-layers",), ("--by-layers", "--exchange"), ("--on-gather", "--exchange")):
        args = (LLAMA, "--recipe", "nvfp4", "--world", "8,16", *more)
        assert run(*args, "--chart", tmp_path / "run.svg", "-q").exit_code == 0
        text = (tmp_path / "run.svg").read_text(encoding="utf-8")
        assert [words in text for words in said.values()] == [option in more for option in said]


@needs_matplotlib
def test_charts_are_drawn_and_drawn_again_from_the_json(tmp_path: Path) -> None:
    args = (LLAMA, "--recipe", "mxfp8", "--recipe", "nvfp4", "--world", "8,64,512")
    first = run(*args, "--chart", tmp_path / "first.svg", "--json")
    assert first.exit_code == 0, first.output
    assert f"{tmp_path / 'first.svg'}: bf16, mxfp8, nvfp4" in first.stderr
    (tmp_path / "run.json").write_text(first.stdout)
    again = run(tmp_path / "run.json", "--chart", tmp_path / "again.svg", "--quiet")
    assert (again.exit_code, again.stdout) == (0, "")
    assert (tmp_path / "first.svg").read_bytes() == (tmp_path / "again.svg").read_bytes()
    text = " ".join(ElementTree.parse(tmp_path / "first.svg").getroot().itertext())
    drawn = (tmp_path / "first.svg").read_text(encoding="utf-8")
    assert drawn.count('id="line2d_') > 6
    for said in ("Step, estimated", "Memory of a card", "mxfp8", "nvfp4", "512"):
        assert said in text or f"<!-- {said}" in drawn, said
    assert run(tmp_path / "run.json", "--chart", tmp_path / "a.png", "-q").exit_code == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_an_earlier_plan_is_shown_as_it_was(tmp_path: Path) -> None:
    args = (LLAMA, "--recipe", "nvfp4", "--world", "8")
    (tmp_path / "run.json").write_text(run(*args, "--json").stdout)
    for more in ((), ("--csv",), ("--weights",)):
        assert run(tmp_path / "run.json", *more).stdout == run(*args, *more).stdout
    refused = run(tmp_path / "run.json", "--world", "64")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "is already a plan; it is shown as it is, without --world" in refused.stderr
    (tmp_path / "old.json").write_text(json.dumps({"layoutc_plan": 99}))
    assert "is a plan of version 99" in run(tmp_path / "old.json").stderr
    (tmp_path / "cut.json").write_text(json.dumps({"layoutc_plan": 2, "budgets": [{}]}))
    assert "is no plan that layoutc wrote" in run(tmp_path / "cut.json").stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "name a MODEL, or --shapes"),
        ((LLAMA, "--shapes", "up=4x4"), "name a MODEL, or --shapes"),
        (("nothing.json",), "nothing.json does not exist; name a known name, a config.json"),
        (("--shapes", "up"), "'up' is not a shape of a weight"),
        ((LLAMA, "--recipe", "mxfp9"), "has no recipe 'mxfp9'"),
        ((LLAMA, "--recipe", "nvfp4_gradient"), "is for activations and gradients, not for weights"),
        ((LLAMA, "--world", "0"), "'0' is not a number of ranks"),
        ((LLAMA, "--world", "8", "--replicas", "3"), "8 ranks can't be divided into 3 replicas"),
        ((LLAMA, "--world", "8", "--ep", "2"), "--ep needs weights of experts"),
        (("--shapes", "up=64x64", "--world", "8", "--tp", "2"), "--tp needs a config of deepseek_v3"),
        ((LLAMA, "--recipe", "mxfp8", "--only", "*.w1"), "no weight of 2 or 3 dims has a name like '*.w1'"),
        ((LLAMA, "--experts"), "--experts says how weights of recipes are used; name a recipe"),
        (
            (LLAMA, "--exchange", "--gathered", "fp32"),
            "--exchange has nothing to do: gradients in fp32 are reduced in fp32",
        ),
        (
            (LLAMA, "--exchange", "--reduced", "bf16"),
            "--exchange has nothing to do: gradients in bf16 are reduced in bf16",
        ),
        ((LLAMA, "--replica-gradients", "grad_fp8"), "--replica-gradients says how replicas add up their sums; add"),
        (
            (LLAMA, "--world", "8", "--replicas", "2", "--replica-gradients", "mxfp8"),
            "--replica-gradients mxfp8: mxfp8 is not a recipe for gradients on the wire",
        ),
        ((LLAMA, "--on-gather"), "--on-gather says how weights of recipes are used; name a recipe"),
        (
            (LLAMA, "--recipe", "fp8_block", "--low", "--on-gather"),
            "weights that are dequantized on gather have no products in low precision; leave out one of the two",
        ),
        ((LLAMA, "--json", "--csv"), "--json and --csv both write to stdout"),
        ((LLAMA, "--chart", "x.gif"), "x.gif should end in .png, .svg, .pdf"),
        ((LLAMA, "--chart", "no/such/folder/x.svg"), "can't write x.svg: the folder "),
        ((LLAMA, "--moments", "-1"), "Invalid value for '--moments'"),
        ((LLAMA, "--link", "0"), "Invalid value for '--link'"),
        (("llama-7b",), "llama-7b does not exist; did you mean llama-70b?"),
        ((LLAMA, "--cards", "64"), "'64' are no cards; write as in --cards 64xH100, of H100, H200, B200"),
        ((LLAMA, "--cards", "64xA100"), "or for another card's memory alone as in --cards 2xH100 --memory 24"),
        ((LLAMA, "--cards", "64xH100", "--memory", "4"), "Invalid value for '--memory'"),
        ((LLAMA, "--cards", "8xH100", "--world", "8"), "--cards says what --world says; leave out one of the two"),
        ((LLAMA, "--cards", "8xH100", "--card", "h100"), "--cards says what --card says; leave out one of the two"),
        ((LLAMA, "--tokens", "9000"), "9,000 tokens are not whole sequences of 8,192; give --sequence"),
        ((LLAMA, "--tokens", "9000", "--batch", "2"), "--tokens says how many --batch are"),
    ],
)
def test_bad_input_is_a_usage_error(args: tuple[object, ...], message: str) -> None:
    if "--chart" in map(str, args) and find_spec("matplotlib") is None:
        pytest.skip("needs matplotlib: pip install 'layoutc[charts]'")
    result = run(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in " ".join(result.stderr.split())


def test_memory_of_another_card_can_be_stated() -> None:
    """A plan that takes less than an H100 has fits no card of 48 GiB where it takes more than these have."""
    asked = (LLAMA, "--cards", "4xH100", "--recipe", "nvfp4", "--checkpointing", "full", "-q")
    own, other = (json.loads(run(*asked, "--json", *more).stdout) for more in ((), ("--memory", "48")))
    for before, after in zip(own["budgets"], other["budgets"], strict=True):
        assert (after["memory"], after["spare"]) == (before["memory"], (48 - 4) * 2**30 - before["memory"])
    assert "cards have the 48 GiB of --memory, and an H100's speed" in run(*asked, "--memory", "48").stdout


def answer_of(*args: object) -> list[str]:
    result = run(*args)
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def test_the_answer_for_70b_on_64_cards_is_one_screen() -> None:
    """Whether it fits and by what margin, how fast, by what it is bound, and the recipes with their measured losses."""
    lines = answer_of("llama-70b", "--cards", "64xH100", "--link", "50", "--tokens", "8192")
    assert len(lines) <= 24
    assert "llama-70b (70.6e9 parameters) on 64 H100" in lines[0]
    assert "NVLink within hosts of 8, 50 GB/s a card across" in lines[0]
    assert re.fullmatch(
        r"  fits: .* is fastest, [\d.]+ of the 80.7 GB of a card; .* tokens/s in all, bound by products \d+%", lines[1]
    )
    steps = r'steps within layoutc\.products\("low_precision"\), each layer checkpointed'
    assert re.fullmatch(rf'  in code: layoutc\.quantize_\(model, "\w+"\) before fully_shard, {steps}', lines[2])
    rows = [line for line in lines if "x  " in line and "%" in line]
    assert rows[-1].split()[0] == "bf16"  # the slowest
    fast = [float(found[1]) for line in rows if (found := re.search(r" (\d\.\d\d)x ", line))]
    assert fast == sorted(fast, reverse=True)
    assert len(fast) == 11
    assert fast[-1] == 1.0
    assert sum("seeds" in row for row in rows) == 4  # products in low precision, where the card has kernels
    assert any("above 1 is faster than bf16" in line for line in lines)


def test_an_answer_has_twelve_rows_at_most() -> None:
    data = data_of(LLAMA, "--cards", "64xH100", "--recipe", "nvfp4")
    several = {**data, "budgets": data["budgets"] * 13}
    assert [len(answer.tables(one)[1].rows) for one in (data, several)] == [len(data["budgets"]), 12]


def test_what_is_fastest_is_said_in_code() -> None:
    fits = "llama-8b", "--cards", "8xH100", "--recipe"
    calls = {
        ("nvfp4",): 'layoutc.quantize_(model, "nvfp4") before',
        ("mxfp8", "--use", "cast", "--link", "5"): 'layoutc.cast_on_gather_(model, "mxfp8") before',
        ("nf4", "--lora-rank", "16"): 'model.requires_grad_(False), layoutc.quantize_(model, "nf4") and adapters',
    }
    for args, said in calls.items():
        assert answer_of(*fits, *args)[2].startswith(f"  in code: {said}"), args
    of_some = answer_of(*fits, "nvfp4", "--leave", "*.1.mlp.*")[2]
    assert 'quantize_(model, "nvfp4", param_filter=<those that --weights lists>) before' in of_some
    codes = "--gradients", "grad_fp8", "--replicas", "2", "--replica-gradients", "grad_int4", "--link", "5"
    for args, said in (
        (("--exchange",), "model"),
        (codes[:2], 'model, "grad_fp8"'),
        (codes[2:], 'model, replicas="grad_int4"'),
        (codes, 'model, "grad_fp8", replicas="grad_int4"'),
    ):
        assert f"layoutc.exchange_gradients({said})" in answer_of(*fits, "nvfp4", *args)[2]


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize(
    ("kind", "fields", "args"),
    [
        ("llama", {}, ()),
        ("llama", {"tie_word_embeddings": True}, ()),
        ("llama", {}, ("--leave", "lm_head.weight", "--leave", "*.up_proj.*")),
        ("llama", {}, ("--only", "*_proj.weight")),
        ("qwen3_moe", {"num_experts": 4, "mlp_only_layers": [0]}, ("--experts",)),
        ("mixtral", {"num_local_experts": 4}, ("--experts",)),
    ],
    ids=str,
)
def test_code_of_an_answer_chooses_the_weights_that_were_planned(
    kind: str, fields: dict[str, Any], args: tuple[str, ...], tmp_path: Path
) -> None:
    """The line is run on transformers' model of the config."""
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.AutoConfig.for_model(kind, **sizes, vocab_size=64, num_key_value_heads=2, **fields)
    config.save_pretrained(tmp_path)
    asked = (tmp_path, "--cards", "2xH100", "--recipe", "fp8_block", *args)
    planned = next(one for one in data_of(*asked)["budgets"] if one["how"] != "plain" and not one["low"])
    model = transformers.AutoModelForCausalLM.from_config(config)
    said = re.search(r"in code: (layoutc\..*) before fully_shard", "\n".join(answer_of(*asked)))
    assert said is not None
    done = eval(said[1], {"layoutc": layoutc, "model": model})
    counts = {one["name"]: one["count"] for one in planned["weights"] if not one["plain"]}
    assert dict(Counter(re.sub(r"layers\.\d+", "layers.*", name) for name in done)) == counts


def test_what_does_not_fit_is_said_first() -> None:
    lines = answer_of("llama-70b", "--cards", "64xH100", "--replicas", "8", "--recipe", "nvfp4")
    assert "does not fit: bf16 takes least" in lines[1]
    took = r" \(\w+: [\d.]+ GB\)"
    ways = rf"  would fit: --replicas 1{took}; --lora-rank 16{took}; (--cards \d+xH100){took}"
    found = re.fullmatch(ways, lines[2])
    assert found is not None, lines[2]
    again = answer_of("llama-70b", *found[1].split(), "--replicas", "8", "--recipe", "nvfp4")
    assert again[1].startswith("  fits: ")
    planned = data_of("llama-70b", *found[1].split(), "--replicas", "8", "--recipe", "nvfp4")["budgets"]
    assert lines[2].endswith(f" {min(one['memory'] for one in planned) / 1e9:,.1f} GB)")
    assert sum("no: -" in line for line in lines) == 2
    table = run("llama-70b", "--card", "h100", "--world", "64,512", "--replicas", "8", "--recipe", "nvfp4").stdout
    assert "2 of 4 do not fit an H100 (80.7 GB): nvfp4 on 64 takes" in table


def test_gathers_of_replicas_within_hosts_go_by_nvlink() -> None:
    """A link of 12 GB/s across hosts slows the all-reduce among replicas alone."""
    args = ("llama-70b", "--cards", "64xH200", "--replicas", "8", "--exchange", "--recipe", "nvfp4", "--json")
    made = {link: json.loads(run(*args, "--link", link).stdout)["budgets"] for link in ("12", "400")}
    for slow, fast in zip(made["12"], made["400"], strict=True):
        assert (slow["step"]["gather_forward"], slow["step"]["within"]) == (
            fast["step"]["gather_forward"],
            fast["step"]["within"],
        )
        assert slow["step"]["all_reduce"] > 10 * fast["step"]["all_reduce"] > 0
    plain, quantized = made["12"]
    assert plain["step"]["total"] / quantized["step"]["total"] < 1.2


def test_recomputing_takes_time_and_saves_memory() -> None:
    args = (LLAMA, "--cards", "8xH200", "--recipe", "bf16", "--json", "--checkpointing")
    none, half, full = (json.loads(run(*args, policy).stdout)["budgets"][0] for policy in ("none", "half", "full"))
    assert [one["policy"] for one in (none, half, full)] == ["none", "half", "full"]
    assert none["memory"] > half["memory"] > full["memory"]
    assert none["step"]["total"] < half["step"]["total"] < full["step"]["total"]
    assert none["peaks"]["backward"] == full["peaks"]["backward"]
    assert full["step"]["backward"] - none["step"]["backward"] == pytest.approx(full["step"]["forward"], rel=0.1)
    usual = json.loads(run(*args[:-1]).stdout)["budgets"][0]
    assert usual == none  # the first that fits


def test_frozen_bases_have_no_masters_and_no_moments() -> None:
    args = ("llama-8b", "--recipe", "nf4", "--world", "2", "--json", "--lora-rank")
    base, half = (json.loads(run(*args, rank).stdout)["budgets"] for rank in (16, 8))
    layer = 2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336)  # rows and columns that adapters have
    adapters = 32 * layer * 16 // 2  # a rank's
    for plain, quantized in (base,):
        for one in (plain, quantized):
            assert one["resident"]["masters"] == 0  # adapters are fp32
            assert one["resident"]["moments"] == 8 * adapters + 4 * 2 * 7 * 32  # and a counter of each
            assert one["resident"]["gradients"] == 4 * adapters
        assert quantized["resident"]["weights"] < 0.25 * plain["resident"]["weights"]
        assert {line["plain"] for line in quantized["weights"] if "lora" in line["name"]} == {"an adapter"}
    assert half[1]["resident"]["gradients"] * 2 == base[1]["resident"]["gradients"]
    trained = json.loads(run("llama-8b", "--world", "2", "--json").stdout)["budgets"][0]
    assert base[0]["step"]["backward"] < 0.75 * trained["step"]["backward"]  # no gradients of weights
    assert base[0]["traffic"]["reduced"] < 0.01 * trained["traffic"]["reduced"]


def test_a_b200_says_that_it_is_extrapolated() -> None:
    lines = answer_of("llama-8b", "--cards", "8xB200")
    assert any("B200: the vendor's figures beside an H200's: no step was measured on it" in line for line in lines)
    assert any("nvfp4 low" in line for line in lines)


@pytest.mark.thorough
def test_many_layers_of_one_shape_are_quick() -> None:
    result, calls = calls_of(lambda: run("--shapes", "a*1999=1x1"))
    assert (result.exit_code, calls < 5_000_000) == (0, True), calls


def test_help_has_groups() -> None:
    text = CliRunner().invoke(main, ["plan", "--help"]).output
    titles = [
        "The run:",
        "What is quantized:",
        "How ranks share it:",
        "Links:",
        "What is stored:",
        "The host:",
        "Output:",
    ]
    assert [line for line in text.splitlines() if line in titles] == titles
    assert [line.split()[0] for line in text.partition("Options:")[2].partition("The run:")[0].split("\n") if line] == [
        "[MODEL]",
        "-h,",
    ]


@pytest.mark.thorough
def test_a_plan_of_seven_worlds_in_four_recipes_is_quick() -> None:
    recipes = ("--recipe", "mxfp8,nvfp4,fp8_block,fp8_current", "--use", "both")
    args = (CONFIGS / "gpt-oss-120b.json", *recipes, "--experts", "--world", "8,16,32,64,128")
    result, calls = calls_of(lambda: run(*args))
    assert (result.exit_code, calls < 10_000_000) == (0, True), calls


@pytest.mark.checkout
def test_the_table_of_the_page_is_what_its_commands_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/pages/plan.md: each row, of the commands above it, in order."""
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "pages" / "plan.md").read_text(encoding="utf-8").partition("## Models that are known")[2]
    commands = [shlex.split(line)[1:] for line in page.splitlines() if line.startswith("layoutc plan tests/")]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("| ")
    ]
    expected = []
    for command in commands:
        result = CliRunner().invoke(main, [*command, "--json"])
        data = json.loads(result.stdout)
        for one in data["budgets"]:
            held, step = one["resident"], one["step"]
            nbytes = (
                held["weights"],
                held["masters"] + held["moments"] + held["gradients"],
                one["memory"],
                one["traffic"]["forward"] + one["traffic"]["backward"],
            )
            seconds = (step["gather_forward"] + step["gather_backward"], step["total"])
            expected.append(
                [
                    *(data["model"]["name"], f"{one['mesh']['world']:,}", one["recipe"]),
                    f"{100 * one['quantized'] / data['model']['elements']:.1f}%",
                    *(f"{n / 1e9:,.3f}" if n < 1e10 else f"{n / 1e9:,.1f}" for n in nbytes),
                    *(f"{1e3 * one:,.1f}" for one in seconds),
                    f"{data['budgets'][0]['step']['total'] / step['total']:.2f}",
                ]
            )
    assert len(commands) == 3
    assert rows[1:] == expected


def without_activations(budget: Any) -> int:
    held, most = budget["resident"], budget["peaks"]
    kept = sum(held[name] for name in ("weights", "masters", "moments", "left"))
    return int(kept + max(most["forward"], most["backward"], held["gradients"]))


@pytest.mark.checkout
def test_the_memory_of_training_is_what_its_commands_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/pages/memory.md: a row for bf16 and one for the recipe, of each command above the table, in order."""
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "pages" / "memory.md").read_text(encoding="utf-8")
    page = page.partition("## A 70B")[2].partition("\n## ")[0]
    commands = [shlex.split(line)[1:] for line in page.splitlines() if line.startswith("layoutc plan tests/")]
    cards = [int(size) for size in page.partition("card, of ")[2].partition(" GB")[0].replace(" and", ",").split(",")]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("| ")
    ]
    expected = []
    for command in commands:
        budgets = data_of(*command[1:])["budgets"]
        stated = dict(itertools.pairwise(command))
        for recipe in ("bf16", "nvfp4"):
            of = {one["mesh"]["world"]: one for one in budgets if one["recipe"] == recipe}
            held, memory = of[64]["resident"], {world: without_activations(one) / 1e9 for world, one in of.items()}
            expected.append(
                [
                    *(recipe, stated.get("--masters", "fp32"), stated.get("--state", "fp32")),
                    *(f"{held[key] / 1e9:.2f}" for key in ("weights", "masters", "moments", "gradients")),
                    *(f"{memory[64]:.1f}", f"{min(size for size in cards if 0.8 * size >= memory[64])} GB"),
                    *(f"{memory[world]:.1f}" for world in (16, 8)),
                ]
            )
    assert len(commands) == 5
    assert rows[1:] == expected


def test_state_and_masters_are_those_of_adamw() -> None:
    """Of a weight, a small one, and one of a single dim: to the byte, by hand; and an option that contradicts."""
    shapes = ("--shapes", "up=256x1024,small=16x16,norm=8192", "--world", 8, "--recipe", "mxfp8", "--only", "up")
    rest = 2 * 16 + 8192 // 8  # elements of a rank that keep fp32
    plain, quantized = data_of(*shapes, "--state", "8bit", "--masters", "bf16")["budgets"]
    for one, masters in ((plain, 0), (quantized, 2 * 32 * 1024)):  # plain weights in fp32 are masters themselves
        assert one["resident"]["moments"] == 2 * (32 * 1024 + 32 * 4 * 4) + 2 * 4 * rest + 3 * 4
        assert one["resident"]["masters"] == masters
    plain, quantized = data_of(*shapes, "--stored", "bf16", "--masters", "bf16")["budgets"]
    assert plain["resident"]["masters"] == 4 * rest
    assert quantized["resident"]["masters"] == 4 * rest + 2 * 32 * 1024
    for one in data_of(*shapes, "--stored", "bf16", "--masters", "f24")["budgets"]:  # plain weights are no masters
        assert one["resident"]["masters"] == 4 * rest + 3 * 32 * 1024
    result = run(*shapes, "--state", "8bit", "--moments", 4)
    assert result.exit_code == 2
    assert "--state 8bit already says what moments take; leave out --moments" in result.stderr


def test_each_option_reaches_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without options their stated defaults, and with each another value."""
    from layoutc.budget import totals
    from layoutc.budget.choice import Picks
    from layoutc.budget.mesh import Mesh
    from layoutc.budget.shards import Dtypes
    from layoutc.estimate.machine import H200, links_of
    from layoutc.estimate.state import BF16, State, Stored
    from layoutc.estimate.work import Load

    asked: list[tuple[Any, Mesh, totals.Setting]] = []
    monkeypatch.setattr(
        totals, "budget", lambda model, *given, of=totals.budget: asked.append(given) or of(model, *given)
    )
    shapes = ("--shapes", "up*2=256x128,experts*2=8x256x128")
    data_of(*shapes)
    assert [(use.name, use.plan, use.cast, use.low) for use, _, _ in asked] == [("bf16", None, False, False)] * 5
    assert [mesh for _, mesh, _ in asked] == [Mesh(world, 1, 1, 1, 0) for world in (8, 64, 512, 4096, 16384)]
    usual = totals.Setting(Picks((), (), False), Dtypes(4, 2, 4), Load(8192, 8192), links_of(50e9), H200, "compiled")
    assert all(setting == usual for _, _, setting in asked)
    asked.clear()
    only = ("--only", "*.up", "--only", "*.experts", "--leave", "layers.0.up", "--experts")
    sizes = ("--stored", "bf16", "--gathered", "fp32", "--reduced", "fp16", "--moments", 3, "--masters", "bf16")
    mesh = ("--world", "16,32", "--replicas", 2, "--ep", 4, "--experts-dim", 1)
    rest = ("--sequence", 64, "--batch", 3, "--link", 25, "--per-host", 4, "--rule", "tree", "--low", "--graph")
    data = data_of(*shapes, "--recipe", "mxfp8,nvfp4", "--use", "both", *only, *sizes, *mesh, *rest)
    uses = [(use.name, use.plan and use.plan.layout.name, use.cast, use.low) for use, _, _ in asked]
    named = [("mxfp8", "mxfp8", cast, True) for cast in (False, True)]
    named += [("nvfp4", "nvfp4", cast, True) for cast in (False, True)]
    assert uses == 2 * [("fp32", None, False, False), *named]
    assert [mesh for _, mesh, _ in asked] == [Mesh(world, 2, 1, 4, 1) for world in (16, 32) for _ in range(5)]
    other = totals.Setting(
        Picks(("*.up", "*.experts"), ("layers.0.up",), True),
        Dtypes(2, 4, 2, State(masters=BF16, moments=(Stored(24),), small=4095, writes_codes=True)),
        Load(192, 64),
        links_of(25e9, "nvlink", 4, None, "tree"),
        H200,
        "graph",
    )
    assert all(setting == other for _, _, setting in asked)
    assert (data["setting"]["sequence"], data["setting"]["batch"], data["setting"]["host"]) == (64, 3, False)
    assert data["setting"]["runs"] == "graph"
    stated = data["setting"]["bytes"]
    assert (stated["stored"], stated["gathered"], stated["reduced"]) == (2, 4, 2)
    assert [one["bits"] for one in (stated["state"]["masters"], *stated["state"]["moments"])] == [16, 24]
    asked.clear()
    data_of(*shapes, "--recipe", "mxfp8", "--use", "cast", "--world", 8)
    assert [(use.name, use.cast) for use, _, _ in asked] == [("bf16", False), ("mxfp8", True)]
    assert not any(use.exchange for use, _, _ in asked)
    asked.clear()
    data_of(*shapes, "--recipe", "mxfp8", "--use", "both", "--world", 8, "--exchange", "--gathered", "fp16")
    assert [(use.name, use.exchange is not None) for use, _, _ in asked] == [
        ("fp16", True),
        ("mxfp8", True),
        ("mxfp8", True),
    ]
    assert all(use.on_gather is None for use, _, _ in asked)
    for option, on_gather in (("--on-gather", True), ("--by-layers", False)):
        asked.clear()
        data_of(*shapes, "--recipe", "nvfp4", "--world", 8, option)
        assert [(use.name, use.on_gather) for use, _, _ in asked] == [("bf16", None), ("nvfp4", on_gather)]


def test_an_earlier_plan_takes_no_option_that_makes_one(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(data_of("--shapes", "up=256x128", "--world", 8)), encoding="utf-8")
    texts = {"--recipe": "mxfp8", "--use": "cast", "--only": "*", "--leave": "*", "--world": "8", "--stored": "bf16"}
    texts |= {"--gathered": "fp32", "--reduced": "bf16", "--rule": "tree", "--link": "9", "--moments": "4"}
    counts = ("--replicas", "--tp", "--ep", "--experts-dim", "--sequence", "--batch", "--per-host")
    given = [*texts.items(), *((name, "1") for name in counts), *((name,) for name in FLAGS)]
    for option in given:
        result = run(path, *option)
        assert result.exit_code == 2
        assert f"is already a plan; it is shown as it is, without {option[0]}" in result.stderr
    for shown in ((), ("--weights",), ("--csv",), ("--json",)):
        assert run(path, *shown).exit_code == 0
    written = json.loads(path.read_text(encoding="utf-8"))
    for damage, said in (
        ({"layoutc_plan": 99}, "is a plan of version 99"),
        ({"budgets": []}, "it has no 'budgets'"),
        ({"model": {}}, "it has no 'name'"),
        ({"notes": ...}, "it has no 'notes'"),
        ({"setting": {"link": {}}}, "it has no "),
        ({"notes": [None]}, "run.json is not whole: "),
        ({"budgets": [{**written["budgets"][0], "memory": "much"}]}, "run.json is not whole: TypeError: "),
        ({"budgets": [{**written["budgets"][0], "memory": 10**400}]}, "run.json is not whole: OverflowError: "),
    ):
        whole = {key: value for key, value in {**written, **damage}.items() if value is not ...}
        path.write_text(json.dumps(whole), encoding="utf-8")
        result = run(path)
        assert (result.exit_code, said in result.stderr) == (2, True), (damage, result.stderr)


FLAGS = ("--experts", "--low", "--exchange", "--on-gather", "--graph")
