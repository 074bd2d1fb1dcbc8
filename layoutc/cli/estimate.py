"""The command that estimates steps: estimate. As in app.py: arguments, streams and exit codes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

import click

from layoutc.build.lookup import Command, completed, spec_of, specs_option
from layoutc.cli.shared import (
    LINKS_HELP,
    MOST_RANKS,
    WORLDS,
    FiniteRange,
    card_option,
    check_host,
    eager_option,
    graph_option,
    host_option,
    link_of_word,
    on_gather_option,
    report,
    runs_of,
    together_option,
    words_of,
    worlds_of,
)

if TYPE_CHECKING:
    from layoutc.estimate.links import Rule
    from layoutc.estimate.model import Model
    from layoutc.estimate.work import Use

MODELS = ("llama-8b", "llama-70b", "llama-405b")
MOST_LAYERS, MOST_SIZE = 1024, 2**31


def _links(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> list[float | str]:
    return list(dict.fromkeys(link_of_word(ctx, param, word) for word in words_of(value)))


def _step(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, float] | None:
    """RANKS:MS -> the ranks, and seconds."""
    if value is None:
        return None
    ranks, _, ms = value.partition(":")
    try:
        found = int(ranks), float(ms) / 1e3
    except ValueError:
        found = 0, 0.0
    if not (1 <= found[0] <= MOST_RANKS and isfinite(found[1]) and 0 < found[1] <= 1e5):
        message = f"'{value}' is no step; write its ranks and its milliseconds, as in --bf16-step 8:412.5."
        raise click.BadParameter(message, ctx, param)
    return found


def _size(name: str, words: str) -> Callable[[Command], Command]:
    names = ("--layers", "--groups") if name == "layers" else (f"--{name.replace('_', '-')}",)
    least, most = int(name != "vocabulary"), MOST_LAYERS if name == "layers" else MOST_SIZE
    return click.option(*names, name, type=click.IntRange(least, most), metavar="N", help=words)


@click.command()
@click.argument("recipes", nargs=-1, metavar="[RECIPE|SPEC]...", shell_complete=completed)
@specs_option("Where recipes are looked up.")
@click.option("--model", "preset", type=click.Choice(MODELS), default=MODELS[0], show_default=True, help="Its sizes.")
@_size("dim", "Columns of activations, in place of the model's.")
@_size("ffn", "Columns of the feed-forward layer.")
@_size("heads", "Heads of queries.")
@_size("kv_heads", "Heads of keys and values.")
@_size("layers", "Layers, each of which FSDP2 shards as a group.")
@_size("sequence", "Tokens of a sequence.")
@_size("batch", "Sequences of a rank in a step.")
@_size("vocabulary", "Rows of the embedding and of the head; 0: neither.")
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
@click.option(
    "--link",
    "links",
    multiple=True,
    callback=_links,
    default=("50",),
    show_default=True,
    metavar="GB/S|NAME,...",
    help=f"Bandwidths of a rank's link, in each direction, {LINKS_HELP}",
)
@click.option(
    "--per-host",
    type=click.IntRange(1, MOST_RANKS),
    default=8,
    show_default=True,
    help="Ranks of a host, between which steps of a collective take 3.4 us.",
)
@click.option(
    "--latency", type=FiniteRange(0, 1e6), metavar="US", help="Of a step between hosts.  [default: 9.6, NCCL's]"
)
@click.option("--rule", type=click.Choice(["ring", "tree"]), default="ring", show_default=True, help="Of collectives.")
@click.option("--cast", is_flag=True, help="Weights are cast on gather, not quantized.")
@card_option
@click.option("--low", is_flag=True, help="Products in low precision where the card has a kernel.")
@click.option("--exchange", is_flag=True, help="Gradients are exchanged in bf16, as exchange_gradients does.")
@on_gather_option
@eager_option
@graph_option
@host_option
@together_option
@click.option(
    "--bf16-step",
    "plain_step",
    callback=_step,
    metavar="RANKS:MS",
    help="A step of FSDP2 in bf16 that was measured, over the first --link: finds --host.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, seconds and bytes.")
def estimate(
    recipes: tuple[str, ...],
    folder: Path,
    preset: str,
    worlds: list[int],
    links: list[float | str],
    per_host: int,
    latency: float | None,
    rule: Rule,
    card: str,
    cast: bool,
    low: bool,
    exchange: bool,
    on_gather: bool | None,
    eager: bool,
    graph: bool,
    host: float | None,
    together: int,
    plain_step: tuple[int, float] | None,
    as_json: bool,
    **sizes: int | None,
) -> None:
    """Estimate the time of a training step on more ranks and other links than were measured, beside bf16.

    Constants are fitted to steps on two H200s, by NVLink and over sockets (tests/bench/RESULTS.md has the residuals).
    All else is extrapolated. tests/bench/links.py measures the link of your ranks.

    \b
    layoutc estimate mxfp8 nvfp4                              an 8B model on 8 to 16,384 ranks, 50 GB/s a rank
    layoutc estimate nvfp4 --model llama-405b --rule tree     latency by the logarithm of the ranks
    layoutc estimate fp8_block --world 2,4 --link 12,nvlink   several links, one of those that were measured
    layoutc estimate fp8_current --low --graph --batch 4      products in low precision, no host time
    layoutc estimate nvfp4 --exchange --world 2,8             gradients exchanged in bf16, within a host
    layoutc estimate nvfp4 --by-layers --world 2,8            dequantized by layers, not by gathers
    layoutc estimate nvfp4 --sequence 512 --link 250 --world 8 --bf16-step 8:310     on a host whose bf16 takes 310 ms
    layoutc estimate nvfp4 --sequence 512 --world 8 --together 10     ten steps in a row, the host works ahead
    layoutc estimate mine/my_format.yaml --dim 2048 --ffn 8192 --heads 16 --groups 24
    layoutc estimate mxfp8 --json | jq .links                 for a machine
    """
    from layoutc.estimate.hosts import factor_of
    from layoutc.estimate.machine import CARDS, link_of
    from layoutc.estimate.state import EXCHANGED
    from layoutc.estimate.step import estimate as estimate_step
    from layoutc.estimate.step import settled
    from layoutc.estimate.work import Use
    from layoutc.report import estimates
    from layoutc.report.describe import as_data

    for option, given in (("cast", cast), ("low", low), ("on-gather", on_gather is not None)):
        if given and not recipes:
            raise click.UsageError(f"--{option} says how weights of recipes are used; name a RECIPE")
    model = _model(preset, sizes)
    uses = [
        replace(use, exchange=EXCHANGED if exchange else None, on_gather=on_gather)
        for use in _uses(recipes, folder, model, cast, low)
    ]
    if problem := next((use.problem for use in uses if use.problem), ""):
        raise click.UsageError(problem)
    made, machine, runs = [], CARDS[card], runs_of(eager, graph)
    check_host(graph, host=host, bf16_step=plain_step)
    if host is not None and plain_step is not None:
        raise click.UsageError("--bf16-step finds what --host states; leave out one of the two")
    over = [link_of(one, per_host, None if latency is None else latency * 1e-6, rule) for one in links]
    if plain_step is not None:
        ranks, seconds = plain_step
        try:
            plain = Use("bf16")  # of FSDP2's own gradients, also with --exchange
            host = factor_of(
                seconds, machine, lambda at: estimate_step(plain, model, ranks, over[0], at, runs, together).total
            )
        except ValueError as error:
            raise click.UsageError(f"--bf16-step {ranks}:{seconds * 1e3:g}: {error}") from error
    machine = machine.with_host(host or 1.0)
    for link in over:
        rows = [estimate_step(use, model, world, link, machine, runs, together) for world in worlds for use in uses]
        made.append((link, rows))
    notes = estimates.measured(machine, host, together)
    if exchange:
        apart = [world for world in worlds if world > per_host]
        notes += estimates.exchanges(apart, per_host, "shards within hosts, as in layoutc plan --exchange --replicas N")
    leave = any(settled(use, model.block.weights, world).on_gather for use in uses for world in worlds)
    notes += estimates.IN_TIME if leave else []
    if as_json:
        found = [{"link": as_data(link), "estimates": as_data(tuple(rows))} for link, rows in made]
        start = {
            "model": as_data(model),
            "machine": as_data(machine),
            "exchange": exchange,
            "on_gather": leave,
            "runs": runs,
            "together": together,
            "host_factor": host or 1.0,
        }
        click.echo(json.dumps({**start, "links": found, "notes": notes}))
        return
    from layoutc.report import tables

    drawn = estimates.tables(model, made, notes)
    if sys.stdout.isatty():
        tables.print_rich(drawn)
    else:
        click.echo(tables.plain(drawn), nl=False)


def _model(preset: str, sizes: dict[str, int | None]) -> Model:
    """The preset's model, or one with sizes of its own."""
    from layoutc.estimate.model import PRESETS, llama

    given = {name: size for name, size in sizes.items() if size is not None}
    stated = PRESETS[preset]
    if not given:
        return llama(preset, **stated)
    try:
        return llama(f"{preset} with other sizes", **{**stated, **given})
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _uses(recipes: tuple[str, ...], folder: Path, model: Model, cast: bool, low: bool) -> list[Use]:
    """bf16, then the recipes. Reports what weights can't have, for all of them, and exits with code 1."""
    from layoutc.cli.reading import plan_of
    from layoutc.estimate.work import Use
    from layoutc.report.describe import problems

    uses, findings = [Use("bf16")], []
    for recipe in dict.fromkeys(recipes):
        path = spec_of(recipe, folder)
        plan = plan_of(path)
        if plan.not_weights:
            raise click.UsageError(f"{plan.layout.name} is {plan.not_weights}")
        for m, k in dict.fromkeys(model.block.weights):
            findings += problems(plan, m, k, str(path))
        uses.append(Use(plan.layout.name, plan, cast, low))
    if findings:
        report(dict.fromkeys(findings), "full")  # the short form would leave out what to do
        sys.exit(1)
    return uses
