"""The command that rewrites files of models: convert."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from layoutc.cli.shared import refuse, refusing, told

DTYPES = ("bfloat16", "float16", "float32")


@click.command()
@click.argument("source", metavar="SRC", type=click.Path(path_type=Path))
@click.argument("folder", metavar="DST", type=click.Path(path_type=Path))
@click.option(
    "--files", metavar="RECIPE/BINDING", help="The binding to write; `layoutc show RECIPE --files` lists them."
)
@click.option("--dtype", type=click.Choice(DTYPES), help="Instead: write quantized weights as plain values.")
@click.option("--match", multiple=True, metavar="PATTERN", help="Also quantize plain matrices whose names match.")
@click.option(
    "--from", "source_files", metavar="RECIPE/BINDING", help="The binding of SRC.  [default: from its config.json]"
)
@click.option(
    "--like",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Instead: write one GGUF file, with this one's types and key-values.",
)
@click.option("--json", "as_json", is_flag=True, help="Print what was written as one JSON object.")
def convert(
    source: Path,
    folder: Path,
    files: str | None,
    dtype: str | None,
    match: tuple[str, ...],
    source_files: str | None,
    like: Path | None,
    as_json: bool,
) -> None:
    """Rewrite a safetensors folder or a GGUF file in another format.

    Holds one weight in memory at a time, and needs no model. Weights of the same layout keep their bytes. `layoutc show
    RECIPE --files` prints the bindings of a recipe.

    \b
    layoutc convert DeepSeek-V3 plain --dtype bfloat16
    layoutc convert Llama-3-8B served --files mxfp8/compressed_tensors --match "*_proj.weight"
    layoutc convert DeepSeek-V3 served --files fp8_block/compressed_tensors
    layoutc convert Llama-3-8B.Q8_0.gguf plain --dtype bfloat16
    layoutc convert tuned tuned.gguf --like Llama-3-8B.Q8_0.gguf
    """
    if sum(one is not None for one in (files, dtype, like)) != 1:
        refuse("say what to write: --files RECIPE/BINDING, --dtype, or --like FILE.gguf")
    if like is not None and (match or source_files is not None or not source.is_dir()):
        refuse("--like writes a folder of plain safetensors as a GGUF file; --match and --from do not go with it")
    if dtype is not None and match:
        refuse("--match chooses what --files quantizes; --dtype quantizes nothing")
    if source.is_file() and (dtype is None or source_files is not None):
        refuse(f"{source} is a file: of GGUF files --dtype makes a plain folder, of which --files makes others")
    if not source.is_dir() and not source.is_file():
        refuse(f"{source} is no folder, and no file")
    with refusing(ImportError, words="`layoutc convert` needs torch: "):
        from layoutc.checkpoint import convert_gguf, convert_safetensors, convert_to_gguf
        from layoutc.checkpoint.inspection import LayoutError
    try:
        if like is not None:
            done = convert_to_gguf(source, folder, source=like)
        elif source.is_file():
            assert dtype is not None
            done = convert_gguf(source, folder, dtype=dtype)
        else:
            done = convert_safetensors(source, folder, files=files, dtype=dtype, match=match, source_files=source_files)
    except (LayoutError, ValueError, OSError, ImportError) as error:
        told(f"error: {error}")
        sys.exit(1)
    if as_json:
        click.echo(json.dumps(done._asdict()))
        return
    count, what = (len(done.quantized), "quantized") if files or like else (len(done.dequantized), "dequantized")
    click.echo(f"{folder}: {', '.join(done.files)}; {count} weights {what}", err=True)
    if done.copied:
        click.echo(f"copied as they are: {', '.join(done.copied)}", err=True)
    if done.no_config:
        told(f"no config.json, take the model's own: {done.no_config}")
    if done.left:
        shown = ", ".join(done.left[:4]) + (f" and {len(done.left) - 4} more" if len(done.left) > 4 else "")
        told(f"left out, since only the source's program reads them: {shown}")
