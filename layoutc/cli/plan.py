"""The command that plans a run: plan. As in app.py: arguments, streams and exit codes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from layoutc.build.lookup import is_given
from layoutc.cli.charts import chart_option, check_chart, draw_chart, shown_again
from layoutc.cli.planning import BYTES, CARDS, choice, count, options, planned
from layoutc.cli.shared import (
    MOST_RANKS,
    FiniteRange,
    grouped,
    print_tables,
    recipe_option,
    refuse,
    refusing,
    split_list,
)
from layoutc.estimate.state import MASTERS, STATES

if TYPE_CHECKING:
    from layoutc.models.weights import Model

WRITTEN = "layoutc_plan"  # the key of the JSON that this command writes
_FREE = ("model", "shapes", "as_json", "as_csv", "chart", "weights", "quiet", "folder")  # also of an earlier plan
GROUPS = {
    "The run": ("shapes", "named", "use", "cards", "tokens", "sequence", "batch", "checkpointing"),
    "What is quantized": ("experts", "only", "leave", "frozen", "lora_rank", "low", "folder"),
    "How ranks share it": ("worlds", "card", "memory", "replicas", "tp", "ep", "experts_dim"),
    "What travels": ("exchange", "gradients", "replica_gradients", "on_gather"),
    "Links": ("link", "within", "per_host", "latency", "rule"),
    "What is stored": ("stored", "gathered", "reduced", "moments", "state", "masters"),
    "The host": ("eager", "graph", "host", "plain_step", "together"),
    "Output": ("weights", "as_json", "as_csv", "chart", "quiet", "help"),
}


def _cards(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, str] | None:
    """`64xH100` -> (64, "h100")."""
    if value is None:
        return None
    found = re.fullmatch(r"([1-9][0-9]{0,6})\s*[xX*]\s*(\w+)", value, re.ASCII)
    if found is None or int(found[1]) > MOST_RANKS or found[2].lower() not in CARDS:
        cards = ", ".join(name.upper() for name in CARDS)
        message = f"'{value}' are no cards; write as in --cards 64xH100, of {cards}, or for another card's memory alone"
        raise click.BadParameter(f"{message} as in --cards 2xH100 --memory 24.", ctx, param)
    return int(found[1]), found[2].lower()


@click.command(cls=grouped(GROUPS))
@click.argument("model", required=False)
@click.option(
    "--shapes",
    multiple=True,
    metavar="NAME=MxK,...",
    help="Weights, in place of MODEL; NAME*32=MxK is one in each of 32 layers.",
)
@recipe_option
@click.option(
    "--cards",
    callback=_cards,
    metavar="NxCARD",
    help="Plan one run, such as 64xH100, and rank recipes; in place of --world and --card.",
)
@click.option(
    "--tokens", type=click.IntRange(1, 2**30), metavar="N", help="Tokens per card and step, in place of --batch."
)
@choice("use", ("quantized", "cast", "both"), "quantized", "Store weights quantized, or cast them on gather.")
@click.option("--experts", is_flag=True, help="Also quantize three-dim weights of experts, as param_filter does.")
@click.option("--only", multiple=True, metavar="PATTERN", help="Weights to quantize, as for param_filter.")
@click.option("--leave", multiple=True, metavar="PATTERN", help="Weights to leave plain.")
@click.option("--frozen", is_flag=True, help="Train only adapters of linear layers, on a frozen base.")
@count("lora-rank", "Rank of those adapters; implies --frozen.  [default: 16]", None, 2**20)
@click.option(
    "--checkpointing",
    type=click.Choice(["none", "half", "full"]),
    help="Layers that backward recomputes: none, every second, or all.  [default: as few as fit]",
)
@options
@click.option(
    "--memory", type=FiniteRange(5, 1e4), metavar="GIB", help="A card's memory, of any card.  [default: the card's]"
)
@count("replicas", "Replicas of the model (HSDP), each sharded over the other ranks.")
@click.option(
    "--replica-gradients", metavar="RECIPE", help="Send replicas' sums as codes of a recipe, by exchange_gradients."
)
@count("tp", "Ranks of tensor parallelism.")
@count("ep", "Ranks of expert parallelism.")
@click.option(
    "--experts-dim",
    type=click.IntRange(0, 1),
    default=0,
    show_default=True,
    help="The dim of experts that FSDP2 shards.",
)
@choice("stored", BYTES, "fp32", "Dtype of plain parameters as built, and of their gradients.")
@choice("gathered", BYTES, "bf16", "Dtype in which FSDP2 gathers plain weights (param_dtype).")
@choice("reduced", BYTES, "fp32", "Dtype in which gradients are reduced (reduce_dtype).")
@click.option(
    "--moments",
    type=click.IntRange(0, 64),
    default=8,
    show_default=True,
    metavar="BYTES",
    help="Optimizer state per element, beside the master; the default is AdamW's.",
)
@choice(
    *("state", STATES, "fp32"), "Form of the moments in layoutc.AdamW. Small weights, and those of one dim, keep fp32."
)
@choice("masters", MASTERS, "fp32", "Form of the masters of weights that are not fp32.")
@click.option("--weights", is_flag=True, help="Also print a line for each weight.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: bytes, elements and seconds.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV: a line for each recipe and number of cards.")
@chart_option
@click.option("-q", "--quiet", is_flag=True, help="Print no table beside a chart.")
def plan(
    model: str | None,
    shapes: tuple[str, ...],
    as_json: bool,
    as_csv: bool,
    chart: Path | None,
    weights: bool,
    quiet: bool,
    named: tuple[str, ...],
    **asked: Any,
) -> None:
    """Plan a run: does a model fit, how fast is it, in which recipe.

    MODEL is one of these: a known name (llama-70b); a Hugging Face config.json, or its folder; a safetensors index,
    file or folder, of which only headers are read; module:factory, a function that builds the model, run on the meta
    device; or an earlier result of --json. With --cards, plans one run; without, a table of runs.

    \b
    layoutc plan llama-70b --cards 64xH100 --link 50 --tokens 8192   the measured recipes, ranked
    layoutc plan llama-70b --cards 64xH100 --link 12 --replicas 8 --exchange --recipe nvfp4
    layoutc plan llama-70b --cards 2xH100 --lora-rank 16 --recipe nf4,bf16
    layoutc plan config.json --recipe mxfp8 --recipe nvfp4           8 to 16,384 cards
    layoutc plan config.json --recipe nvfp4 --world 64 --weights     each weight
    layoutc plan config.json --recipe mxfp8 --experts --replicas 64 --ep 64 --world 16384
    layoutc plan model.safetensors.index.json --recipe fp8_block --use both
    layoutc plan config.json --recipe nvfp4 --by-layers --world 8    gather codes, dequantize in the layer
    layoutc plan my_package.models:build --recipe mxfp8 --leave lm_head.weight
    layoutc plan --shapes 'up*32=14336x4096,down*32=4096x14336' --recipe nvfp4
    layoutc plan config.json --recipe mxfp8 --json > run.json
    layoutc plan run.json --chart run.svg                            draw an earlier result
    """
    if as_json and as_csv:
        refuse("--json and --csv both write to stdout; give one of them")
    check_chart(chart)
    from layoutc.report.budgets import answer, charts, figures

    data, file = _data(model, shapes, {**asked, "recipes": named})
    with shown_again(file):
        if as_json:
            click.echo(json.dumps(data))
        elif as_csv:
            click.echo(figures.as_csv(data), nl=False)
        elif not (quiet and chart):
            print_tables(answer.tables(data) if data["setting"]["ranked"] else figures.tables(data, weights))
        draw_chart(charts.draw, data, chart)


def _data(model: str | None, shapes: tuple[str, ...], asked: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """The plan as JSON values: made now, or read from the file of an earlier one, whose name is the second value."""
    from layoutc.models import read
    from layoutc.models import shapes as typed
    from layoutc.models.weights import ModelError, adapted

    if (model is None) == (not shapes):
        refuse(f"name a MODEL, or --shapes; a MODEL is {read.FORMS}")
    with refusing(ModelError):
        if model is not None and (earlier := read.written(model, WRITTEN)) is not None:
            with shown_again(model):
                return _earlier(model, earlier), model
        found = typed.read(split_list(shapes)) if model is None else read.read(model)
    asked = _settled(asked)
    run = adapted(found, asked["lora_rank"]) if asked["frozen"] else found
    data = planned(run, asked)
    if asked["ranked"] and all(one["spare"] < 0 for one in data["budgets"]):
        lightest = [one["recipe"] for one in sorted(data["budgets"], key=_memory) if one["how"] != "plain"]
        data["instead"] = list(_instead(found, {**asked, "recipes": tuple(lightest[:1]) or asked["recipes"]}))
    return data, None


def _memory(one: dict[str, Any]) -> float:
    return float(one["memory"])


def _instead(model: Model, asked: dict[str, Any]) -> Iterator[str]:
    """What fits where nothing does, as options and what they take: no replicas, smaller states of the optimizer, a
    frozen base, and the fewest cards, by doubling them."""
    from layoutc.models.weights import adapted

    base = adapted(model, asked["lora_rank"])
    alone = {"replicas": 1, "replica_gradients": None}
    if asked["replicas"] > 1:
        yield from _fitting("--replicas 1", base if asked["frozen"] else model, {**asked, **alone})
    if not asked["frozen"]:
        if not any(map(is_given, ("state", "masters", "moments"))):
            yield from _fitting("--state 8bit --masters bf16", model, {**asked, "state": "8bit", "masters": "bf16"})
        yield from _fitting(f"--lora-rank {asked['lora_rank']}", base, {**asked, "frozen": True})
    world = asked["worlds"][0]
    while (world := 2 * world) <= MOST_RANKS:
        words = f"--cards {world}x{asked['card'].upper()}"
        if found := _fitting(words, base if asked["frozen"] else model, {**asked, "worlds": [world]}):
            yield from found
            return


def _fitting(words: str, model: Model, asked: dict[str, Any]) -> list[str]:
    """The options, with the recipe that takes least of a card and what it takes; [] if none fits."""
    least = min(planned(model, asked)["budgets"], key=_memory)
    gb = least["memory"] / 1e9
    return [f"{words} ({least['recipe']}: {gb:,.1f} GB)"] if least["spare"] >= 0 else []


def _settled(asked: dict[str, Any]) -> dict[str, Any]:
    """What --cards, --tokens and --lora-rank say, as the options that they stand for."""
    made = {**asked, "ranked": asked["cards"] is not None}
    if asked["cards"] is not None:
        for name in ("worlds", "card"):
            if is_given(name):
                refuse(f"--cards says what --{name.rstrip('s')} says; leave out one of the two")
        world, made["card"] = asked["cards"]
        made["worlds"] = [world]
    if (tokens := asked["tokens"]) is not None:
        if is_given("batch"):
            refuse("--tokens says how many --batch are; leave out one of the two")
        made["sequence"] = asked["sequence"] if is_given("sequence") else min(tokens, asked["sequence"])
        made["batch"], left = divmod(tokens, made["sequence"])
        if left:
            refuse(f"{tokens:,} tokens are not whole sequences of {made['sequence']:,}; give --sequence")
    made["frozen"] = asked["frozen"] or asked["lora_rank"] is not None
    made["lora_rank"] = asked["lora_rank"] or 16
    return made


def _earlier(name: str, data: dict[str, Any]) -> dict[str, Any]:
    from layoutc.report.budgets.figures import VERSION, as_csv

    params = [one for one in click.get_current_context().command.params if one.name not in _FREE]
    given = [one.opts[0] for one in params if one.name and is_given(one.name)]
    if given:
        refuse(f"{name} is already a plan; it is shown as it is, without {given[0]}")
    if data[WRITTEN] != VERSION:
        refuse(f"{name} is a plan of version {data[WRITTEN]!r}; this layoutc reads version {VERSION}")
    with refusing(KeyError, TypeError, words=f"{name} is no plan that layoutc wrote: it has no "):
        if not data["budgets"]:
            raise KeyError("budgets")
        as_csv(data)
        _ = data["model"]["name"], data["setting"]["links"]["rule"], data["notes"], data["model"]["notes"]
    return data
