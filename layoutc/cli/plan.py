"""The command that plans a run: plan. As in app.py: arguments, streams and exit codes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from layoutc.build.lookup import Command, completed, spec_of, specs_option
from layoutc.cli.charts import chart_option, check_chart, draw_chart, shown_again
from layoutc.cli.progress import tracked
from layoutc.cli.shared import (
    LINKS_HELP,
    MOST_RANKS,
    WORLDS,
    card_option,
    check_host,
    eager_option,
    graph_option,
    host_option,
    link_of_word,
    on_gather_option,
    runs_of,
    together_option,
    words_of,
    worlds_of,
)
from layoutc.estimate.state import ADAMW, LEAST, MASTERS, STATES, State, Stored

if TYPE_CHECKING:
    from layoutc.budget.mesh import Mesh
    from layoutc.budget.totals import Setting
    from layoutc.estimate.work import Use
    from layoutc.models.weights import Model

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
WRITTEN = "layoutc_plan"  # the key of the JSON that this command writes
NOT_IN_TIME = (
    "time leaves out all-reduces among replicas, activations of tensor parallelism and tokens of expert parallelism"
)


def _dtype(name: str, default: str, words: str) -> Callable[[Command], Command]:
    return click.option(f"--{name}", type=click.Choice(list(BYTES)), default=default, show_default=True, help=words)


def _count(name: str, words: str, default: int = 1) -> Callable[[Command], Command]:
    kind = click.IntRange(1, MOST_RANKS)
    return click.option(f"--{name}", type=kind, default=default, show_default=True, metavar="N", help=words)


@click.command()
@click.argument("model", required=False)
@click.option(
    "--shapes",
    multiple=True,
    metavar="NAME=MxK,...",
    help="Weights, in place of MODEL; NAME*32=MxK: one in each of 32.",
)
@click.option(
    *("--recipe", "recipes"),
    multiple=True,
    metavar="RECIPE|SPEC",
    help="Side by side; can be repeated.",
    shell_complete=completed,
)
@specs_option("Where recipes are looked up.")
@click.option(
    "--use",
    type=click.Choice(["quantized", "cast", "both"]),
    default="quantized",
    show_default=True,
    help="Weights are stored as codes, or cast on gather.",
)
@click.option("--experts", is_flag=True, help="Weights of experts as well, of three dims, as param_filter picks them.")
@click.option("--only", multiple=True, metavar="PATTERN", help="What is quantized, as param_filter has it.")
@click.option("--leave", multiple=True, metavar="PATTERN", help="What stays plain.")
@click.option(
    "--world",
    "worlds",
    multiple=True,
    callback=worlds_of,
    default=(WORLDS,),
    show_default=True,
    metavar="N,...",
    help="Numbers of ranks.",
)
@_count("replicas", "Copies of the model (HSDP), each sharded over the other ranks.")
@_count("tp", "Ranks of tensor parallelism.")
@_count("ep", "Ranks of expert parallelism.")
@click.option(
    "--experts-dim", type=click.IntRange(0, 1), default=0, show_default=True, help="The dim that FSDP2 cuts of experts."
)
@_dtype("stored", "fp32", "Of parameters as the model is built, and of their gradients.")
@_dtype("gathered", "bf16", "Of plain weights, as FSDP2 gathers them (param_dtype).")
@_dtype("reduced", "fp32", "That gradients are reduced in (reduce_dtype).")
@click.option(
    "--moments",
    type=click.IntRange(0, 64),
    default=8,
    show_default=True,
    metavar="BYTES",
    help="Of the optimizer, an element, beside the master; AdamW's by default.",
)
@click.option(
    "--state",
    type=click.Choice(list(STATES)),
    default="fp32",
    show_default=True,
    help="Of the optimizer's moments, as layoutc.AdamW holds them; weights of one dim, and small ones, keep fp32.",
)
@click.option(
    "--masters",
    type=click.Choice(list(MASTERS)),
    default="fp32",
    show_default=True,
    help="Of weights that are not stored in fp32 themselves.",
)
@_count("sequence", "Tokens of a sequence.", 8192)
@_count("batch", "Sequences of a rank in a step.")
@click.option(
    "--link",
    callback=link_of_word,
    default="50",
    show_default=True,
    metavar="GB/S|NAME",
    help=f"Of a rank, {LINKS_HELP}",
)
@_count("per-host", "Ranks of a host.", 8)
@click.option("--rule", type=click.Choice(["ring", "tree"]), default="ring", show_default=True, help="Of collectives.")
@card_option
@click.option("--low", is_flag=True, help="Products in low precision where the card has a kernel.")
@click.option("--exchange", is_flag=True, help="Gradients travel as backward makes them, by exchange_gradients.")
@on_gather_option
@eager_option
@graph_option
@host_option
@together_option
@click.option("--weights", is_flag=True, help="Also a line for each weight.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object: bytes, elements and seconds.")
@click.option("--csv", "as_csv", is_flag=True, help="A line for each recipe and world.")
@chart_option
@click.option("-q", "--quiet", is_flag=True, help="No table where a chart is drawn, and no progress.")
def plan(
    model: str | None,
    shapes: tuple[str, ...],
    as_json: bool,
    as_csv: bool,
    chart: Path | None,
    weights: bool,
    quiet: bool,
    **asked: Any,
) -> None:
    """Plan a run: what a model takes of each rank's memory and link, in recipes and on worlds side by side.

    MODEL is a config.json of Hugging Face or a folder with one; a safetensors index, file or folder, of which headers
    are read; module:factory, a function that builds the model, run on the meta device; or what --json wrote before.

    \b
    layoutc plan config.json --recipe mxfp8 --recipe nvfp4           8 to 16,384 ranks
    layoutc plan config.json --recipe nvfp4 --world 64 --weights     each weight of it
    layoutc plan config.json --recipe mxfp8 --experts --replicas 64 --ep 64 --world 16384
    layoutc plan model.safetensors.index.json --recipe fp8_block --use both
    layoutc plan config.json --recipe nvfp4 --exchange --replicas 8 --world 64
    layoutc plan config.json --recipe nvfp4 --by-layers --world 8    gathered weights are codes, which layers dequantize
    layoutc plan my_package.models:build --recipe mxfp8 --leave lm_head.weight
    layoutc plan --shapes 'up*32=14336x4096,down*32=4096x14336' --recipe nvfp4
    layoutc plan config.json --recipe mxfp8 --json > run.json
    layoutc plan run.json --chart run.svg                            drawn again, elsewhere
    """
    if as_json and as_csv:
        raise click.UsageError("--json and --csv both write to stdout; give one of them")
    check_chart(chart)
    from layoutc.report import tables
    from layoutc.report.budgets import charts, figures

    data, file = _data(model, shapes, asked, quiet)
    with shown_again(file):
        if as_json:
            click.echo(json.dumps(data))
        elif as_csv:
            click.echo(figures.as_csv(data), nl=False)
        elif not (quiet and chart):
            made = figures.tables(data, weights)
            if sys.stdout.isatty():
                tables.print_rich(made)
            else:
                click.echo(tables.plain(made), nl=False)
        draw_chart(charts.draw, data, chart)


def _data(
    model: str | None, shapes: tuple[str, ...], asked: dict[str, Any], quiet: bool
) -> tuple[dict[str, Any], str | None]:
    """The plan as JSON values: made now, or read from the file of an earlier one, whose name is the second value."""
    from layoutc.models import read
    from layoutc.models import shapes as typed
    from layoutc.models.weights import ModelError

    if (model is None) == (not shapes):
        raise click.UsageError(f"name a MODEL, or --shapes; a MODEL is {read.FORMS}")
    try:
        if model is not None and (earlier := read.written(model, WRITTEN)) is not None:
            with shown_again(model):
                return _earlier(model, earlier), model
        found = typed.read(words_of(shapes)) if model is None else read.read(model)
    except ModelError as error:
        raise click.UsageError(str(error)) from error
    return _planned(found, asked, quiet), None


def _earlier(name: str, data: dict[str, Any]) -> dict[str, Any]:
    from layoutc.report.budgets.figures import VERSION, as_csv

    params = [one for one in click.get_current_context().command.params if one.name in _ASKED]
    given = [one.opts[0] for one in params if one.name and _is_given(one.name)]
    if given:
        raise click.UsageError(f"{name} is a plan already; it is shown as it is, without {given[0]}")
    if data[WRITTEN] != VERSION:
        raise click.UsageError(f"{name} is a plan of version {data[WRITTEN]!r}; this layoutc reads version {VERSION}")
    try:
        if not data["budgets"]:
            raise KeyError("budgets")
        as_csv(data)
        _ = data["model"]["name"], data["setting"]["link"]["rule"], data["notes"], data["model"]["notes"]
    except (KeyError, TypeError) as error:
        raise click.UsageError(f"{name} is no plan that layoutc wrote: it has no {error}") from error
    return data


_ASKED = (
    *("recipes", "use", "experts", "only", "leave", "worlds", "replicas", "tp", "ep", "experts_dim", "stored"),
    *("gathered", "reduced", "moments", "sequence", "batch", "link", "per_host", "rule", "low", "exchange"),
    *("on_gather", "eager", "graph", "host"),
)


def _is_given(name: str) -> bool:
    source = click.get_current_context().get_parameter_source(name)
    return source is click.core.ParameterSource.COMMANDLINE


def _planned(model: Model, asked: dict[str, Any], quiet: bool) -> dict[str, Any]:
    from layoutc.budget.totals import budget
    from layoutc.report.budgets.figures import IN_MEMORY, data_of
    from layoutc.report.estimates import IN_TIME, in_a_row

    setting = _setting(model, asked)
    meshes = [_mesh(model, world, asked) for world in asked["worlds"]]
    uses = _uses(asked)
    runs = [(use, mesh) for mesh in meshes for use in uses]
    made = [budget(model, use, mesh, setting) for use, mesh in tracked(runs, "plans", quiet)]
    data = data_of(model, setting, made, asked["sequence"], asked["batch"])
    data["setting"]["host_factor"] = asked["host"] or 1.0
    if asked["host"] is not None:
        data["notes"].append(f"host: {asked['host']:g} times as long as on those that were measured")
    data["notes"] += in_a_row(asked["together"])
    if asked["exchange"]:
        data["notes"] += _exchange_notes(meshes, asked["per_host"])
    if data["setting"]["on_gather"]:
        data["notes"] += IN_MEMORY + IN_TIME
    if any(asked[name] > 1 for name in ("replicas", "tp", "ep")):
        data["notes"].append(NOT_IN_TIME)
    if left := _experts_left(model, made):
        data["notes"].append(left)
    return data


def _exchange_notes(meshes: Sequence[Mesh], per_host: int) -> list[str]:
    """With a number of replicas that each lie within a host, if there is one for the first mesh that needs it."""
    from layoutc.report.estimates import exchanges

    apart = [mesh for mesh in meshes if mesh.crosses(per_host)]
    within = "replicas that lie within hosts"
    if apart and apart[0].world % per_host == 0 and per_host % apart[0].tensor == 0:
        within = f"--replicas {apart[0].world // per_host} on {apart[0].world:,} ranks"
    return exchanges([mesh.world for mesh in apart], per_host, within)


def _experts_left(model: Model, made: Sequence[Any]) -> str:
    elements = sum(w.elements for layer in model.all_layers for w in layer.weights if w.kind == "experts")
    plain = any(line.kind == "experts" and line.plain for one in made if one.how != "plain" for line in one.weights)
    if not elements or not plain:
        return ""
    share = 100 * elements / model.elements
    return f"experts have {share:.0f}% of the parameters, and some stay plain, as quantize_ leaves them: see --experts"


def _mesh(model: Model, world: int, asked: dict[str, Any]) -> Mesh:
    from layoutc.budget.mesh import Mesh

    mesh = Mesh(world, asked["replicas"], asked["tp"], asked["ep"], asked["experts_dim"])
    if problem := mesh.problem():
        raise click.UsageError(problem)
    weights = [weight for layer in model.all_layers for weight in layer.weights]
    if mesh.tensor > 1 and all(weight.cut == "none" for weight in weights):
        raise click.UsageError("--tp is known for configs alone: how it cuts weights does not follow from their shapes")
    if mesh.experts > 1 and all(weight.kind != "experts" for weight in weights):
        raise click.UsageError("--ep needs weights of experts, of three dims, and this model has none")
    return mesh


def _setting(model: Model, asked: dict[str, Any]) -> Setting:
    from layoutc.budget.choice import Picks, check_patterns
    from layoutc.budget.shards import Dtypes
    from layoutc.budget.totals import Setting
    from layoutc.estimate.machine import CARDS, link_of
    from layoutc.estimate.work import Load

    picks = Picks(asked["only"], asked["leave"], asked["experts"])
    try:
        check_patterns(model, picks)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    dtypes = Dtypes(BYTES[asked["stored"]], BYTES[asked["gathered"]], BYTES[asked["reduced"]], _state(asked))
    load = Load(asked["sequence"] * asked["batch"], asked["sequence"])
    link = link_of(asked["link"], asked["per_host"], None, asked["rule"])
    check_host(asked["graph"], host=asked["host"])
    machine = CARDS[asked["card"]].with_host(asked["host"] or 1.0)
    runs = runs_of(asked["eager"], asked["graph"])
    return Setting(picks, dtypes, load, link, machine, runs, asked["together"])


def _state(asked: dict[str, Any]) -> State:
    """What the optimizer holds; in fp32, or with so many bytes of moments an element."""
    moments, state = asked["moments"], STATES[asked["state"]]
    if moments != sum(one.nbytes(1) for one in ADAMW.moments):
        if state is not ADAMW:
            raise click.UsageError(f"--state {asked['state']} says what moments take; leave out --moments")
        state = State(moments=(Stored(8 * moments),) if moments else (), counter=ADAMW.counter if moments else 0)
    masters = MASTERS[asked["masters"]]
    return state if masters == state.masters else replace(state, masters=masters, small=LEAST - 1)


def _uses(asked: dict[str, Any]) -> list[Use]:
    """The plain weights, then the recipes. Reports what is no recipe for weights."""
    from layoutc.cli.reading import plan_of
    from layoutc.estimate.state import EXCHANGED
    from layoutc.estimate.work import Use

    recipes = dict.fromkeys(words_of(asked["recipes"]))
    exchange = EXCHANGED if asked["exchange"] else None
    uses = [Use(asked["gathered"], exchange=exchange)]
    if asked["exchange"] and (BYTES[asked["gathered"]] != 2 or asked["reduced"] != "fp32"):
        raise click.UsageError(
            f"--exchange has nothing to do: gradients in {asked['gathered']} are reduced in {asked['reduced']}; it is "
            "for those that are reduced in a wider dtype: --gathered bf16 or fp16, and --reduced fp32"
        )
    for option in ("low", "only", "leave", "experts", "on_gather"):
        if (asked[option] or _is_given(option)) and not recipes:
            option = option.replace("_", "-")
            raise click.UsageError(f"--{option} says how weights of recipes are used; name a --recipe")
    for recipe in recipes:
        made = plan_of(spec_of(recipe, asked["folder"]))
        if made.not_weights:
            raise click.UsageError(f"{made.layout.name} is {made.not_weights}")
        for cast in {"quantized": (False,), "cast": (True,), "both": (False, True)}[asked["use"]]:
            uses.append(Use(made.layout.name, made, cast, asked["low"], exchange, asked["on_gather"]))
        if uses[-1].problem:
            raise click.UsageError(uses[-1].problem)
    return uses
