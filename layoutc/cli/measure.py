"""The commands that measure: bench and demo. As in app.py: arguments, streams and exit codes; torch is imported when
needed."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from layoutc.build.lookup import completed
from layoutc.cli.charts import chart_option, check_chart, draw_again, draw_chart, written
from layoutc.cli.shared import refuse, shape_of

Shape = tuple[int, int]


def _shapes(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> list[Shape]:
    return [shape for value in values if (shape := shape_of(ctx, param, value)) is not None]


@click.command()
@click.argument("recipes", nargs=-1, metavar="[RECIPE]...", shell_complete=completed)
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    callback=_shapes,
    metavar="MxK",
    help="A weight: rows x columns; can be repeated.  [default: 8192x8192]",
)
@click.option("--world", type=click.IntRange(2), default=8, show_default=True, help="Ranks that the hooks are for.")
@click.option("--peers", is_flag=True, help="Also the recipes in plain torch, compiled; torch's operators; torchao.")
@click.option("--experts", is_flag=True, help="Products of experts alone: by kernels, and dequantized.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout; what is going on, on stderr.")
@chart_option
def bench(
    recipes: tuple[str, ...],
    shapes: list[Shape],
    world: int,
    peers: bool,
    experts: bool,
    as_json: bool,
    chart: Path | None,
) -> None:
    """Time kernels against the card's bandwidth, and gather hooks.

    Without a card the hooks alone. Where only torch and Triton are installed: python -m layoutc.bench

    \b
    layoutc bench                             four recipes, at 8192x8192
    layoutc bench mxfp8 --shape 4096x14336 --shape 512x4096
    layoutc bench nvfp4 --peers               beside torch.compile and torchao
    layoutc bench --experts                   which products of experts gain by kernels
    layoutc bench --json > bench.json         for a machine
    layoutc bench bench.json --chart bench.svg   drawn again, elsewhere
    """
    check_chart(chart)
    from layoutc.charts import measured

    if len(recipes) == 1 and (before := written(recipes[0])) is not None:
        if chart is None:
            raise click.UsageError(f"give --chart FILE: {recipes[0]} has been measured")
        draw_again(measured.draw_kernels, recipes[0], before, chart)
        return
    if experts and (recipes or shapes or peers or chart):
        raise click.UsageError("--experts measures recipes and sizes of its own: give --json alone beside it")
    try:
        from layoutc.bench.measure import report, report_experts
    except ImportError as error:
        raise click.UsageError(f"`layoutc bench` needs torch: {error}") from error
    try:
        if experts:
            report_experts(as_json)
            return
        draw_chart(measured.draw_kernels, report(recipes, shapes, world, peers, as_json), chart)
    except ValueError as error:
        raise click.UsageError(str(error)) from error


@click.command()
@click.argument("result", required=False, metavar="[RESULT.json]")
@click.option(
    *("--recipe", "recipes"),
    multiple=True,
    help="A recipe to train with; may be given several times.",
    shell_complete=completed,
)
@click.option("--steps", type=click.IntRange(1), default=60, show_default=True, help="Optimizer steps.")
@click.option(
    "--processes", type=click.IntRange(1), default=2, show_default=True, help="Ranks to start on this machine."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout; what is going on, on stderr.")
@chart_option
def demo(
    result: str | None, recipes: tuple[str, ...], steps: int, processes: int, as_json: bool, chart: Path | None
) -> None:
    """Train a small transformer with quantized weights under FSDP2.

    RESULT.json: what --json wrote before, to be drawn again.

    \b
    layoutc demo                              two processes, 60 steps in bf16, mxfp8 and nvfp4
    layoutc demo --recipe mxfp8 --recipe nvfp4 --steps 50
    layoutc demo --processes 4
    layoutc demo --json > demo.json           losses of all steps, bytes
    layoutc demo demo.json --chart demo.svg   drawn again, elsewhere
    """
    check_chart(chart)
    from layoutc.charts import measured

    if result is not None:
        before = written(result)
        if before is None or chart is None:
            raise click.UsageError("to draw a result again: layoutc demo RESULT.json --chart FILE")
        draw_again(measured.draw_demo, result, before, chart)
        return
    try:
        from layoutc.bench.demo import run
    except ImportError as error:
        refuse(f"the demo needs torch with torch.distributed: {error}")
    try:
        found = run(recipes=recipes, steps=steps, processes=processes, as_json=as_json)
    except ValueError as error:
        refuse(str(error))
    draw_chart(measured.draw_demo, found, chart)
    sys.exit(0 if all(row["resumed"] for row in found["rows"]) else 1)
