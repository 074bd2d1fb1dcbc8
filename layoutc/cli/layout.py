"""The commands that show layouts and what became of them: list, show, breaking, and the proofs of check --explain.

As in app.py: arguments, streams and exit codes. Nothing is decided here, and slow imports wait for their command.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from layoutc.build.lookup import chosen, completed, is_given, known, spec_of, specs_in, specs_option
from layoutc.cli.reading import content_of, plan_of, read_plan
from layoutc.cli.shared import meant, out_option, print_tables, refuse, refusing, report, shape_option, told
from layoutc.diagnostics.diagnostic import Diagnostic, has_errors, tidy
from layoutc.diagnostics.renderers import FORMS

if TYPE_CHECKING:
    from layoutc.plan.plan import Plan
    from layoutc.report.describe import Description

WIDTH = 120  # of a picture that is not printed on a terminal
MAP_BYTES = 2**20  # the largest index map that --json writes
# What is shown alone, and why no size goes with it.
PARTS = {"products": "products are the same", "files": "bindings are the same"}
_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command("list")
@click.argument("specs", metavar="[RECIPE|SPEC]...", nargs=-1, shell_complete=completed)
@specs_option("The folder of recipes.  Without it and RECIPE, also those of installed packages.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list.")
def list_recipes(specs: tuple[str, ...], folder: Path, as_json: bool) -> None:
    """List recipes: bits per element, and what each is for.

    Also lists where products run in low precision, and the checkpoint formats that the recipe reads. All but operands,
    states and wires are for weights that train; those for "train, freeze" have no codes of their own for backward, so
    frozen weights keep nothing that they don't need.

    \b
    layoutc list                              recipes of specs/ and of installed packages
    layoutc list mxfp8 nvfp4                  two recipes
    layoutc list --json | jq '.[] | select(.use | test("train")) | .name'
    """
    from layoutc.report.describe import as_data
    from layoutc.report.show import overview, overview_table

    rows = [overview(plan_of(path)) for path in (chosen(specs, folder) if specs else known(folder))]
    if as_json:
        click.echo(json.dumps(as_data(rows)))
    else:
        print_tables([overview_table(rows)])


@click.command()
@click.argument("recipes", metavar="[RECIPE|SPEC]...", nargs=-1, shell_complete=completed)
@specs_option("The folder of recipes.")
@shape_option("The weight's shape: rows (all leading dims) x columns.  [default: about 4096x4096]")
@click.option("--world", type=click.IntRange(1), default=8, show_default=True, help="Ranks that shard the weight.")
@click.option("--picture", metavar="BUFFER", help="Also draw the source of a buffer's first bytes.")
@click.option("--products", is_flag=True, help="Show only the products of linear layers: which kernel computes each.")
@click.option(
    "--files", "files", is_flag=True, help="Show only the bindings: how other checkpoint formats hold the recipe."
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object; with --picture, the buffer's whole index map."
)
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Instead of a spec, show a folder of a saved model, or a GGUF file.",
)
@click.option("--thorough", is_flag=True, help="With --checkpoint, read the headers of all pieces of each tensor.")
@click.option("--html", type=_FILE, metavar="FILE", help="Write a page to explore recipes in a browser.")
@click.option("--serve", is_flag=True, help="Serve that page on this machine.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="The port of --serve.  [default: any free one]")
@click.option("--svg", type=_FILE, metavar="FILE", help="Write a picture for papers; --picture names the buffer.")
@click.option("--png", type=_FILE, metavar="FILE", help="Write it as PNG; needs the package resvg-py.")
def show(
    recipes: tuple[str, ...],
    folder: Path,
    shape: tuple[int, int] | None,
    world: int,
    picture: str | None,
    products: bool,
    files: bool,
    as_json: bool,
    checkpoint: Path | None,
    thorough: bool,
    html: Path | None,
    serve: bool,
    port: int,
    svg: Path | None,
    png: Path | None,
) -> None:
    """Show what a spec means: buffers, cuts, gathers, what is exact.

    With --checkpoint, show the entries, layouts and bytes of a GGUF file, or of a folder that layoutc,
    torch.distributed.checkpoint or safetensors wrote. Loads no weights, and trusts nothing in the files.

    \b
    layoutc show mxfp8                                        a recipe of specs/, or one that layoutc ships
    layoutc show mine/my_format.yaml --shape 4096x14336       a spec, and a weight's shape
    layoutc show nvfp4 --shape 144x64 --world 8               where cuts split blocks, and what that costs
    layoutc show nvfp4 --shape 128x64 --world 1 --picture rowwise_scale
    layoutc show fp8_block --products                         the kernels of a linear layer's products, by card
    layoutc show fp8_block --files                            the tensors of a DeepSeek checkpoint
    layoutc show mxfp8 --json | jq .passes                    as JSON
    layoutc show --checkpoint runs/step-1000                  a saved model
    layoutc show nvfp4 mxfp8 --html layouts.html              a page to compare them
    layoutc show nvfp4 --serve                                the same, served on this machine
    layoutc show nvfp4 --svg nvfp4.svg --picture rowwise_scale
    """
    drawing = ("html", "serve", "port", "svg", "png")
    if checkpoint is not None:
        spec_only = ("folder", "shape", "world", "picture", *PARTS, *drawing)
        if recipes or any(map(is_given, spec_only)):
            refuse("--checkpoint shows a folder or a file; RECIPE and the options for specs do not go with it")
        if not checkpoint.exists():
            refuse(f"{checkpoint} does not exist")
        _show_checkpoint(checkpoint, thorough, as_json)
        return
    if not recipes or thorough:
        refuse("--thorough needs --checkpoint" if recipes else "name a RECIPE, or a --checkpoint")
    paths = tuple(spec_of(recipe, folder) for recipe in recipes)
    if any(map(is_given, drawing)):
        from layoutc.cli import explore

        if products or files or as_json or not (html or serve or svg or png):
            refuse("--html, --serve, --svg and --png go with --shape, --world and --picture alone")
        asked = explore.Asked(paths, shape, world if is_given("world") else None, picture)
        explore.draw(asked, html, serve, port, svg, png)
        return
    if len(paths) > 1:
        refuse("tables show one RECIPE; several go with --html or --serve")
    from layoutc.report import describe

    path = paths[0]
    plan = plan_of(path)
    if only := [part for part, given in zip(PARTS, (products, files), strict=True) if given]:
        if as_json or picture or shape or len(only) > 1:
            refuse(f"--{only[0]} goes with no other option: {PARTS[only[0]]} for every shape")
        _show_part(plan, only[0])
        return
    names = [buffer.name for buffer in plan.layout.buffers]
    if picture is not None and picture not in names:
        hint = meant(picture, names, f" It has {', '.join(names)}.")
        refuse(f"{plan.layout.name} has no buffer {picture}.{hint}")
    m, k = shape or describe.usual_shape(plan, world)
    problems = describe.problems(plan, m, k, str(path))
    if problems:
        report(problems, "full")  # the short form would leave out what to do
        sys.exit(1)
    facts = describe.describe(plan, m, k, world)
    if as_json:
        _show_json(plan, facts, picture)
    else:
        _show_text(plan, facts, picture)


def _show_part(plan: Plan, part: str) -> None:
    from layoutc.report.files import file_tables
    from layoutc.report.products import product_tables

    print_tables(product_tables(plan) if part == "products" else file_tables(plan.layout))


def _show_checkpoint(folder: Path, thorough: bool, as_json: bool) -> None:
    with refusing(ImportError, words="`layoutc show --checkpoint` needs torch: "):
        from layoutc.checkpoint import inspection
    from layoutc.report import show_checkpoint
    from layoutc.report.describe import as_data

    try:
        facts = inspection.inspect(folder, thorough)
    except (inspection.LayoutError, OSError) as error:
        told(f"error: {error}")
        sys.exit(1)
    if as_json:
        click.echo(json.dumps(as_data(facts)))
    else:
        print_tables(show_checkpoint.tables(facts))


def _show_json(plan: Plan, facts: Description, picture: str | None) -> None:
    from layoutc.report import maps
    from layoutc.report.describe import as_data

    data = as_data(facts)
    assert isinstance(data, dict)
    if picture is not None:
        nbytes = next(buffer.nbytes for buffer in facts.buffers if buffer.name == picture)
        if nbytes > MAP_BYTES:
            has = f"{picture} of {facts.m} x {facts.k} has {nbytes:,} bytes"
            refuse(f"{has}; --json maps at most {MAP_BYTES:,}. Give a smaller --shape.")
        data["index_map"] = maps.index_map(plan, picture, facts.m, facts.k)
    click.echo(json.dumps(data))


def _show_text(plan: Plan, facts: Description, picture: str | None) -> None:
    from layoutc.report import show

    print_tables(show.tables(facts))
    if picture is not None:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH
        for text in show.pictures(plan.layout, picture, facts.m, facts.k, width):
            click.echo("\n" + text, nl=False)


@click.command()
@click.option("--against", "revision", required=True, metavar="REF", help="The git revision to compare with.")
@specs_option("The folder of specs, in both revisions.")
@out_option("The folder of generated code, whose old layout ids count.")
@click.option("--format", "form", type=click.Choice(FORMS), help="How to print findings, as for check.")
@click.option("--json", "as_json", is_flag=True, help="Print what became of each recipe as one JSON list.")
def breaking(revision: str, folder: Path, out: Path, form: str | None, as_json: bool) -> None:
    """Find recipes whose bytes have changed since a git revision.

    \b
    layoutc breaking --against main                  specs/ against main
    layoutc breaking --against v1.2 --specs mine
    layoutc breaking --against HEAD~1 --json | jq '.[] | select(.status == "changed")'

    This version of layoutc reads both revisions. Generated code in the old revision shows whether layoutc itself has
    changed a recipe since. Exit code 1: bytes changed, or a recipe is gone.
    """
    from layoutc.build import revisions
    from layoutc.report import breaking
    from layoutc.report.describe import as_data

    if not folder.is_dir():
        refuse(f"{folder} is not a folder; name one with --specs")
    with refusing(revisions.RevisionError):
        old_files = revisions.specs_at(revision, folder)
    paths: dict[str, str] = {}
    findings: list[Diagnostic] = []
    before: dict[str, Plan] = {}
    recorded: dict[str, str] = {}
    for file in old_files:
        plan, problems = read_plan(file.content, str(folder / file.name))
        if plan is None:
            findings.append(breaking.unreadable(str(folder / file.name), revision, problems))
        else:
            before[plan.layout.name] = plan
            paths[plan.layout.name] = str(folder / file.name)
            code = revisions.text_at(revision, out, f"{plan.layout.name}/layout.py")
            if code and (layout_id := breaking.recorded_id(code, file.content)):
                recorded[plan.layout.name] = layout_id
    after: dict[str, Plan] = {}
    for path in specs_in(folder):
        plan, problems = read_plan(content_of(path), str(path))
        findings += [item for item in problems if plan is None]
        if plan is not None:
            after[plan.layout.name] = plan
            paths[plan.layout.name] = str(path)
    broken = {Path(item.path).stem for item in findings}  # reported already; one side is unknown
    then, now = ({name: plan for name, plan in side.items() if name not in broken} for side in (before, after))
    changes = breaking.compare(then, now, recorded)
    findings = tidy([*findings, *breaking.findings(changes, revision, paths)])
    if as_json:
        click.echo(json.dumps(as_data(changes)))
    elif form not in _MACHINES:
        for change in changes:
            ids = change.after or change.before or ""
            moved = f"{change.before} -> {change.after}" if change.status == "changed" else ids
            click.echo(f"{change.status:10}{change.name}{f' -> {change.now}' if change.now else ''}  {moved}")
    report(findings, form)
    sys.exit(1 if has_errors(findings) else 0)


_MACHINES = ("github", "json", "sarif")


def explain_specs(paths: Iterable[Path], form: str | None) -> list[Diagnostic]:
    """Prints all proofs about each sound spec; returns findings for those that do not hold."""
    from layoutc.report import proofs

    findings: list[Diagnostic] = []
    for path in paths:
        plan, _ = read_plan(content_of(path), str(path))
        if plan is None:
            continue
        shown = proofs.prove(plan)
        findings += proofs.failures(shown, str(path))
        if form == "json":
            for proof in shown:
                stated = {"file": str(path), "proof": proof.about, "statement": proof.statement, "method": proof.method}
                click.echo(json.dumps({**stated, "holds": proof.holds, "counter": proof.counter or None}))
        elif form not in _MACHINES:
            click.echo(f"{path}")
            for proof in shown:
                against = f"; against it: {proof.counter}" if proof.counter else ""
                click.echo(f"  {'proved' if proof.holds else 'FAILED'}  {proof.about}: {proof.statement}")
                click.echo(f"          by: {proof.method}{against}")
    return findings
