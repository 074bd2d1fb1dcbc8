"""The command that measures: bench. As in app.py: arguments, streams and exit codes; torch is imported when needed."""

from __future__ import annotations

import sys

import click

from layoutc.cli.shared import shape_of

Shape = tuple[int, int]


def _shapes(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> list[Shape]:
    return [shape for value in values if (shape := shape_of(ctx, param, value)) is not None]


@click.command()
@click.argument("recipes", nargs=-1, metavar="[RECIPE]...")
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
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout; what is going on, on stderr.")
def bench(recipes: tuple[str, ...], shapes: list[Shape], world: int, peers: bool, as_json: bool) -> None:
    """Time kernels against the bandwidth of this machine's card, and the all-gather hooks.

    Without a card the hooks alone. Where only torch and Triton are installed: python -m layoutc.bench

    \b
    layoutc bench                             four recipes, at 8192x8192
    layoutc bench mxfp8 --shape 4096x14336 --shape 512x4096
    layoutc bench nvfp4 --peers               beside torch.compile and torchao
    layoutc bench --json > bench.json         for a machine
    """
    try:
        from layoutc.bench.measure import report
    except ImportError as error:
        raise click.UsageError(f"`layoutc bench` needs torch: {error}") from error
    try:
        sys.exit(report(recipes, shapes, world, peers, as_json))
    except ValueError as error:
        raise click.UsageError(str(error)) from error
