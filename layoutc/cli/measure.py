"""The commands that measure: bench and demo. As in app.py: arguments, streams, exit codes; torch comes late."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from layoutc.cli.charts import chart_option, check_chart, draw_chart, drawn_again
from layoutc.cli.shared import comparing, refuse, refusing, shape_option

_json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object on stdout, and progress on stderr."
)


@click.command()
@comparing("[RECIPE|RESULT.json]...")
@shape_option("A weight's shape: rows x columns; can be repeated.  [default: 8192x8192]", many=True)
@click.option(
    "--world", type=click.IntRange(2), default=8, show_default=True, help="Ranks to time the gather hooks for."
)
@click.option(
    "--peers",
    is_flag=True,
    help="Also time torch.compile of the recipes in plain torch, torch's operators, and torchao.",
)
@click.option("--experts", is_flag=True, help="Time only products of experts: low-precision kernels, and dequantized.")
@_json_option
@chart_option
def bench(
    recipes: tuple[str, ...],
    shapes: list[tuple[int, int]],
    world: int,
    peers: bool,
    experts: bool,
    as_json: bool,
    chart: Path | None,
) -> None:
    """Time kernels against the card's bandwidth, and gather hooks.

    Without a card it times the hooks alone. With only torch and Triton installed, run: python -m layoutc.bench

    \b
    layoutc bench                             four recipes, at 8192x8192
    layoutc bench mxfp8 --shape 4096x14336 --shape 512x4096
    layoutc bench nvfp4 --peers               beside torch.compile and torchao
    layoutc bench --experts                   which products of experts kernels speed up
    layoutc bench --json > bench.json         as JSON
    layoutc bench bench.json --chart bench.svg   draw an earlier result
    """
    check_chart(chart)
    from layoutc.charts import measured

    if drawn_again(measured.draw_kernels, recipes, chart):
        return
    if experts and (recipes or shapes or peers or chart):
        refuse("--experts measures its own recipes and sizes: give --json alone beside it")
    with refusing(ImportError, words="`layoutc bench` needs torch: "):
        from layoutc.bench.measure import report, report_experts
    with refusing(ValueError):
        if experts:
            report_experts(as_json)
        else:
            draw_chart(measured.draw_kernels, report(recipes, shapes, world, peers, as_json), chart)


@click.command()
@comparing("[RECIPE|RESULT.json]...")
@click.option("--steps", type=click.IntRange(1), default=40, show_default=True, help="Optimizer steps.")
@click.option(
    "--processes", type=click.IntRange(1), default=2, show_default=True, help="Ranks to start on this machine."
)
@_json_option
@chart_option
def demo(recipes: tuple[str, ...], steps: int, processes: int, as_json: bool, chart: Path | None) -> None:
    """Train a small transformer with quantized weights under FSDP2.

    RESULT.json is an earlier result of --json, for --chart.

    \b
    layoutc demo                              two processes, 40 steps in bf16, mxfp8 and nvfp4
    layoutc demo mxfp8 nvfp4 --steps 50
    layoutc demo --processes 4
    layoutc demo --json > demo.json           the losses of all steps, and bytes
    layoutc demo demo.json --chart demo.svg   draw an earlier result
    """
    check_chart(chart)
    from layoutc.charts import measured

    if drawn_again(measured.draw_demo, recipes, chart):
        return
    with refusing(ImportError, words="the demo needs torch with torch.distributed: "):
        from layoutc.bench.demo import run
    with refusing(ValueError):
        found = run(recipes=recipes, steps=steps, processes=processes, as_json=as_json)
    draw_chart(measured.draw_demo, found, chart)
    sys.exit(0 if all(row["resumed"] for row in found["rows"]) else 1)
