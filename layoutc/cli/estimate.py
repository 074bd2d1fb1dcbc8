"""The command that estimates steps: estimate. As in app.py: arguments, streams and exit codes."""

from __future__ import annotations

import json
from typing import Any

import click

from layoutc.cli.planning import USUAL, count, options, planned
from layoutc.cli.shared import comparing, print_tables, refusing

# Sizes of a model, by the fields of configs.
SIZES = {
    "dim": "hidden_size",
    "ffn": "intermediate_size",
    "heads": "num_attention_heads",
    "kv-heads": "num_key_value_heads",
    "layers": "num_hidden_layers",
    "vocabulary": "vocab_size",
}


@click.command()
@comparing("[RECIPE|SPEC]...")
@click.option("--model", default="llama-8b", show_default=True, metavar="MODEL", help="A model, as for `layoutc plan`.")
@count("dim", "Columns of activations; replaces the model's.", None, 2**31)
@count("ffn", "Columns of the feed-forward layer.", None, 2**31)
@count("heads", "Query heads.", None, 2**31)
@count("kv-heads", "Key and value heads.", None, 2**31)
@count("layers", "Layers. FSDP2 shards each as a group.", None, 1024)
@count("vocabulary", "Rows of the embedding and the head.", None, 2**31)
@click.option("--cast", is_flag=True, help="Cast weights on gather, instead of storing them quantized.")
@options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, as `layoutc plan --json` does.")
def estimate(recipes: tuple[str, ...], model: str, cast: bool, as_json: bool, **asked: Any) -> None:
    """Estimate step time on other cards and links, beside bf16.

    Prints the times of `layoutc plan`, part by part. The constants are fitted to steps on two H200s, over NVLink and
    over sockets (docs/pages/measured.md has the residuals). All else is extrapolated. tests/bench/links.py measures
    links.

    \b
    layoutc estimate mxfp8 nvfp4                              an 8B model on 8 to 16,384 cards, 50 GB/s each
    layoutc estimate nvfp4 --model llama-405b --rule tree     latency grows with the logarithm of the ranks
    layoutc estimate fp8_block --world 2 --within host-memory a measured link
    layoutc estimate fp8_current --low --graph --batch 4      products in low precision, no host time
    layoutc estimate nvfp4 --exchange --world 2,8             gradients exchanged in bf16, within a host
    layoutc estimate nvfp4 --gradients grad_fp8 --world 2,8   gradients exchanged as codes of a recipe
    layoutc estimate nvfp4 --by-layers --world 2,8            layers dequantize, not gathers
    layoutc estimate nvfp4 --sequence 512 --world 8 --bf16-step 8:310     on a host whose bf16 step takes 310 ms
    layoutc estimate nvfp4 --sequence 512 --world 8 --together 10     ten back-to-back steps
    layoutc estimate mine/my_format.yaml --dim 2048 --ffn 8192 --heads 16 --layers 24
    layoutc estimate mxfp8 --json | jq .budgets               as JSON
    """
    from layoutc.models import read
    from layoutc.models.weights import ModelError
    from layoutc.report.budgets.steps import table

    sizes = {field: size for name, field in SIZES.items() if (size := asked.pop(name.replace("-", "_")))}
    with refusing(ModelError):
        found = read.read(model, sizes)
    data = planned(found, {**USUAL, **asked, "recipes": recipes, "use": "cast" if cast else "quantized"})
    if as_json:
        click.echo(json.dumps(data))
    else:
        print_tables(table(data))
