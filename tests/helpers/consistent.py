"""Makes a drawn spec say only what goes together: choices that others rule out give way, and the rest is kept.

What is left that the language can't combine is left out piece by piece, until the checks have no finding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from layoutc.diagnostics.diagnostic import Diagnostic
from layoutc.spec.rules import RULES

Tree = dict[str, Any]
AXES = {"rowwise": ("m", "k"), "columnwise": ("k", "m")}  # the free axis and the contracted one
WHOLE = 128  # sizes that every swizzle's tiles, transform's groups and packed codes divide


def settle(spec: Tree, formats: Tree, narrow: set[str], swizzled: bool) -> None:
    """Changes a spec in place.

    formats: those that specs define; others are built in. narrow: formats of scales and zero points that buffers pack.
    swizzled: scales are, for a GEMM.
    """
    for name, orientation in spec["orientations"].items():
        own = orientation.get("quantize", {})
        element, scale = own.get("element", spec["element"]), own.get("scale", spec["scale"])
        rule = RULES[scale["rule"]]
        _settle_element(element, scale, rule.makes_zero, bool(rule.candidates), formats)
        _settle_block(orientation, scale, rule.makes_zero, bool(rule.candidates))
        _settle_transform(orientation, AXES[name][1], bool(rule.candidates))
        if swizzled:
            _settle_pads(orientation, AXES[name])
        elif narrow & {scale["format"], scale.get("zero")}:
            for key in ("scale", "zero"):
                _fill_bytes(orientation.get(key, {"layout": "scalar"}))
        for buffer in _buffers(orientation):
            if "words" in buffer and element.get("pack") == "high-first":
                element["pack"] = "low-first"
            if "swizzle" in buffer and buffer is orientation["data"]:
                buffer.pop("pad", None)
    packed = any("pack" in part.get("element", {}) for part in _parts(spec))
    ordered = any("swizzle" in buffer for one in spec["orientations"].values() for buffer in _buffers(one))
    mixed = any("transform" in one for one in spec["orientations"].values())
    if packed or ordered or mixed:
        spec["shape"] = {"m": WHOLE, "k": WHOLE}


def _parts(spec: Tree) -> list[Tree]:
    return [spec, *(one.get("quantize", {}) for one in spec["orientations"].values())]


def _buffers(orientation: Tree) -> Iterator[Tree]:
    for key in ("data", "scale", "zero", "super"):
        if key in orientation:
            yield orientation[key]


def _settle_element(element: Tree, scale: Tree, makes_zero: bool, candidates: bool, formats: Tree) -> None:
    """An integer for zero points, a format with a sign for other rules; rounded by chance where that can be."""
    stated = formats.get(element["format"], {})
    integer = element["format"] in ("int8", "int4") or "integer" in stated
    if (makes_zero and not integer) or (
        not makes_zero and "integer" in stated and stated.get("offset", 2 ** (stated["integer"] - 1)) < 1
    ):
        element |= {"format": "int4", "pack": element.get("pack", "low-first")}
    if candidates or "values" in formats.get(element["format"], {}):
        element.pop("round", None)
    has_nan = element["format"].startswith(("e4m3", "e5m2")) or bool(stated.get("nan"))
    if scale["rule"] == "amax-over-max" and not has_nan:
        scale["nan-scale"] = True


def _fill_bytes(buffer: Tree) -> None:
    """Pads that fill bytes with codes of any size."""
    if buffer["layout"] != "scalar":
        buffer["pad"] = [32] * len(buffer["layout"].split())


def _settle_block(orientation: Tree, scale: Tree, makes_zero: bool, candidates: bool) -> None:
    """What needs rows of its own has them: zero points, super-blocks, and errors that are added up."""
    block = orientation["block"]
    if block["m"] == "all" and (makes_zero or candidates or "super" in scale):
        block["m"] = 1
        for key in ("scale", "zero"):
            if key in orientation:
                before = orientation[key]["layout"].split()
                terms = [term for term in before if term != "scalar"] + ["m"]
                orientation[key] = {"layout": " ".join(terms)}
    if "super" in scale and scale["super"]["block"]["m"] == "all":
        scale["super"]["block"]["m"] = block["m"]


def _settle_transform(orientation: Tree, along: str, candidates: bool) -> None:
    """Groups that lie in one block."""
    if "transform" not in orientation:
        return
    block = orientation["block"]
    fitting = [n for n in (32, 16, 8, 4, 2) if block[along] != "all" and block[along] % n == 0]
    if candidates or "all" in block.values() or not fitting:
        del orientation["transform"]
    elif orientation["transform"]["hadamard"] not in fitting:
        orientation["transform"]["hadamard"] = fitting[0]


def _settle_pads(orientation: Tree, axes: tuple[str, str]) -> None:
    """Scales of two dims, in tiles of 128 by 4, and zero points as they are."""
    block = orientation["block"]
    for axis in axes:
        if block[axis] == "all":
            block[axis] = 1
    pads = dict(zip(axes, (128, 4), strict=True))
    orientation["scale"] = {"layout": "m k", "pad": [pads["m"], pads["k"]]}
    for axis in axes:
        if block[axis] != 1:
            orientation["scale"]["layout"] = orientation["scale"]["layout"].replace(axis, f"{axis}/{block[axis]}")
    orientation.pop("zero", None)


def simplify(spec: Tree, finds: Callable[[Tree], tuple[Diagnostic, ...]]) -> Tree:
    """The spec without the pieces that have findings, one after another; the last try, if some are left."""
    pieces = (_nothing, _words, _own_order, _quantize, _transform, _record, _columnwise)
    for leave_out in pieces:  # one alone
        tried = copy.deepcopy(spec)
        leave_out(tried)
        if not finds(tried):
            return tried
    tried = spec
    for leave_out in pieces:
        tried = copy.deepcopy(tried)
        leave_out(tried)
        if not finds(tried):
            break
    return tried


def _nothing(spec: Tree) -> None:
    """As it is."""


def _record(spec: Tree) -> None:
    spec["orientations"]["rowwise"].pop("record", None)


def _words(spec: Tree) -> None:
    for orientation in spec["orientations"].values():
        for buffer in _buffers(orientation):
            buffer.pop("words", None)


def _own_order(spec: Tree) -> None:
    for orientation in spec["orientations"].values():
        for key in ("data", "scale", "zero"):
            if key in orientation:
                orientation[key] = {"layout": orientation[key]["layout"], "pad": orientation[key].get("pad", [])}
                if not orientation[key]["pad"]:
                    del orientation[key]["pad"]
        orientation.pop("zero", None)


def _quantize(spec: Tree) -> None:
    for orientation in spec["orientations"].values():
        if not ("super" in spec["scale"] and set(orientation.get("quantize", {})) == {"scale"}):
            orientation.pop("quantize", None)


def _transform(spec: Tree) -> None:
    for orientation in spec["orientations"].values():
        orientation.pop("transform", None)


def _columnwise(spec: Tree) -> None:
    spec["orientations"].pop("columnwise", None)
