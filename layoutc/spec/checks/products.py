"""Checks of what `gemm` says about products in low precision. The build checks that the recipes it names exist."""

from __future__ import annotations

from collections.abc import Iterator

from layoutc.diagnostics.diagnostic import Diagnostic
from layoutc.spec.schema import Spec
from layoutc.spec.source import Source


def gemm_says_something(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """A `gemm` needs keys; without any, it decides nothing."""
    if spec.gemm is not None and not spec.gemm.model_fields_set:
        help = "delete it, or write `gemm: {activation: ...}` with the recipe that activations are quantized with"
        yield source.find("LC333", "`gemm` is empty", source.key(("gemm",)), help=help)


def products_have_an_activation(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """Products in low precision need `activation`: each has an activation, or a gradient, which defaults to it."""
    gemm = spec.gemm
    if gemm is None or gemm.activation is not None:
        return
    for key in ("gradient", "dequantize"):
        if key in gemm.model_fields_set:
            message, label = f"`gemm.{key}` needs `gemm.activation`", source.key(("gemm", key))
            why = "without a recipe for activations, no product runs in low precision, so this has no effect"
            help = f"add `activation: {spec.name}`, or delete it"
            yield source.find("LC333", message, label, why=why, help=help)


def products_are_named_once(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """`dequantize` names no product twice, and not all of them, which would leave none in low precision."""
    stated = spec.gemm.dequantize if spec.gemm and spec.gemm.activation else ()
    where = ("gemm", "dequantize")
    if len(set(stated)) < len(stated):
        help = f"write `dequantize: [{', '.join(dict.fromkeys(stated))}]`"
        yield source.find("LC333", "a product is named twice", where, help=help)
    elif len(stated) == 3:
        assert spec.gemm is not None
        keys = "`activation`, `gradient` and `dequantize`" if spec.gemm.scale else "`gemm`"
        help = f"delete {keys}: all products then dequantize weights"
        yield source.find("LC333", "no product is left in low precision", where, help=help)


CHECKS = (gemm_says_something, products_have_an_activation, products_are_named_once)
