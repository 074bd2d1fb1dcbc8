"""Reports unknown keys, and translates pydantic's errors into a spec's words and positions.

schema.py defines what is allowed. Pydantic's errors name types and unions; authors think in keys and values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from layoutc.diagnostics.diagnostic import Diagnostic, did_you_mean, listed, nearest, quoted
from layoutc.spec.checks.rules import suggested_scale
from layoutc.spec.formats import BUILTIN, Format, aliases, make
from layoutc.spec.rules import RULES
from layoutc.spec.schema import COLLECTED, Buffer, FormatDef, GemmScale, Scale, Spec, Super, is_size
from layoutc.spec.source import Path, Source

_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
}
_PARAMETER = {"number": "a number", "integer": "a whole number", "boolean": "true or false", "choice": "text"}
_TO_TYPE = {
    ("layoutc",): "layoutc: 1",
    ("name",): "name: my_recipe",
    ("summary",): "summary: one line that says what this recipe is",
    ("element",): "element: {format: e4m3}",
    ("orientations",): "orientations: {rowwise: {block: ..., data: ..., scale: ...}}",
    ("orientations", "rowwise"): "rowwise: {block: ..., data: ..., scale: ...}",
    ("gemm", "scale"): "scale: {swizzle: ...}",
    ("gemm", "activation"): "activation: fp8_block_1d",
    ("gemm", "gradient"): "gradient: fp8_block_1d",
    ("scale", "history", "length"): "length: 1024",
    ("scale", "history", "pick"): "pick: max",
    ("tensor", "amax"): "amax: f32",
}
_TO_TYPE_BY_KEY = {
    "block": "block: {m: 1, k: 32}",
    "data": "data: {layout: m k}",
    "history": "history: {length: 1024, pick: max}",
    "record": "record: {size: 32, fields: [scale, data]}",
    "size": "size: 32",
    "fields": "fields: [scale, data]",
    "element": "element: {format: e4m3}",
    "scale": "scale: {layout: m k/32}",
    "layout": "layout: m k",
    "format": "format: e4m3",
    "m": "m: 1",
    "k": "k: 1",
}
# Other languages' keys without a counterpart here, and what to do instead.
_NO_KEY: dict[tuple[type[BaseModel] | None, str], str] = {
    (FormatDef, "signed"): "write `offset: 0` for integers that begin at 0, or delete it: they are two's complement",
    (FormatDef, "unsigned"): "write `offset: 0` for integers that begin at 0, or delete it: they are two's complement",
    (FormatDef, "bits"): "write `integer: 4`, or `sign`, `exponent`, `mantissa` and `bias`",
}
_DERIVED = {
    *("align", "alignment", "buffers", "bytes", "bytes_per_element", "checkpoint", "dispatch", "dtype", "gather"),
    *("kernel", "kernels", "layout_id", "plan", "shard", "shard_dim", "shard_rows", "shards", "stride", "tile"),
    *("tiles", "world", "world_size"),
}


def known_keys_only(source: Source) -> tuple[Source, list[Diagnostic]]:
    """Removes unknown keys from the source, with a finding for each.

    Reads a misspelled key as the known one that was probably meant, so that values below it are checked, too.
    """
    diagnostics: list[Diagnostic] = []
    keys, values, bad = {}, {}, set()

    def walk(value: Any, old: Path, new: Path) -> Any:
        if old in source.keys:
            keys[new] = source.keys[old]
        values[new] = source.values[old]
        if old in source.bad:
            bad.add(new)
        if isinstance(value, tuple):
            return tuple(walk(item, (*old, i), (*new, i)) for i, item in enumerate(value))
        if not isinstance(value, dict):
            return value
        model = _model(new)
        allowed = _known_keys(model, value) if model else list(value)
        result = {}
        for key, inner in value.items():
            name: str | None = key
            if key not in allowed and not _is_inline(model, key, value):
                missing = [other for other in allowed if other not in value and other not in result]
                name = _meant(key, inner, model, missing)
                diagnostics.append(_unknown_key((*old, key), name, model, allowed, source))
            if name is not None:
                result[name] = walk(inner, (*old, key), (*new, name))
        return result

    data = walk(source.data, (), ())
    return replace(source, data=data, keys=keys, values=values, bad=frozenset(bad)), diagnostics


def from_pydantic(error: ValidationError, source: Source) -> Iterator[Diagnostic]:
    """Yields one diagnostic per place that pydantic rejects."""
    located = [(_path(item, source.data), item) for item in error.errors(include_url=False)]
    order = sorted(located, key=lambda pair: [str(part) for part in pair[0]])
    for path, group in groupby(order, key=lambda pair: pair[0]):
        items = [item for _, item in group]
        yield _missing_key(path, source) if items[0]["type"] == "missing" else _wrong_value(path, items, source)


def _meant(key: str, value: Any, model: type[BaseModel] | None, missing: list[str]) -> str | None:
    """The known key that an unknown one was probably meant to be, if it accepts this kind of value; else None."""
    alias = aliases()["keys"].get(key.casefold())
    fitting = [name for name in missing if model is None or _takes(model, name, value)]
    if alias in fitting:
        return alias
    if key in _DERIVED or (model, key) in _NO_KEY:
        return None
    alone = model is not None and [*model.model_fields] == missing == fitting and len(fitting) == 1
    return nearest(key, fitting) or (fitting[0] if alone else None)


def _takes(model: type[BaseModel], name: str, value: Any) -> bool:
    """True if the key accepts a mapping and the value is one, or if neither holds."""
    field = model.model_fields.get(name)
    if field is None:  # a parameter
        return not isinstance(value, dict)
    mapping = _inner_model(field.annotation) is not None or getattr(field.annotation, "__origin__", None) is dict
    return mapping == isinstance(value, dict)


def _known_keys(model: type[BaseModel], data: dict[str, Any]) -> list[str]:
    """The keys that a mapping may have, in the models' order."""
    keys = [key for key in model.model_fields if key not in COLLECTED]
    if model in (Scale, Super):
        rule = data.get("rule")
        keys += RULES[rule].parameters if isinstance(rule, str) and rule in RULES else ()
    return keys


def _is_inline(model: type[BaseModel] | None, key: str, data: dict[str, Any]) -> bool:
    """True for a swizzle's sizes, and for other rules' parameters, which the checks reject with a better message."""
    if model is GemmScale:
        return type(data[key]) is int
    if model is Buffer:
        return "swizzle" in data and is_size(data[key])
    return model in (Scale, Super) and any(key in rule.parameters for rule in RULES.values())


def _model(path: Path) -> type[BaseModel] | None:
    """The model of the mapping at `path`; None if the spec chooses the keys, or there is no mapping."""
    if len(path) == 2 and path[0] == "formats":
        return FormatDef
    model: type[BaseModel] | None = Spec
    for part in path:
        field = model.model_fields.get(str(part)) if model else None
        is_free = field is None or getattr(field.annotation, "__origin__", None) is dict
        model = None if field is None or is_free else _inner_model(field.annotation)
    return model


def _inner_model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for model in map(_inner_model, get_args(annotation)) if model), None)


def _path(item: ErrorDetails, data: Any) -> Path:
    """Pydantic's location without tags of unions and keys that our validators add."""
    path: Path = ()
    for number, part in enumerate(item["loc"]):
        inside = part in data if isinstance(data, dict) else isinstance(data, tuple) and part in range(len(data))
        if inside:
            path, data = (*path, part), data[part]
        elif item["type"] == "missing" and number == len(item["loc"]) - 1:
            path = (*path, part)
    return path


def _unknown_key(
    path: Path, meant: str | None, model: type[BaseModel] | None, allowed: list[str], source: Source
) -> Diagnostic:
    key = str(path[-1])
    if key in _DERIVED and meant is None:
        why = "it follows from the layout; a second statement could only contradict it"
        help = "delete it; `layoutc show` prints what is derived"
        return source.find("LC207", f"a spec can't state {quoted(key)}", source.key(path), why=why, help=help)
    elsewhere = None if meant else _home(aliases()["keys"].get(key.casefold(), key))
    text = f"did you mean `{meant}`?" if meant else f"belongs {elsewhere}" if elsewhere else ""
    help = f"known keys here: {listed(allowed)}"
    if advice := _NO_KEY.get((model, key)):
        text, help = "is not a key", advice
    if model is GemmScale:
        help += ", and the sizes of the names in the pattern"
    return source.find("LC201", f"unknown key {quoted(key)}{_inside(path[:-1])}", source.key(path, text), help=help)


def _home(key: str) -> str | None:
    """Where a key that is unknown here belongs, in words; None if nowhere."""
    if key in Spec.model_fields and key not in ("scale", "element"):
        return "at the top level"
    todo: list[tuple[Path, type[BaseModel]]] = [((), Spec)]
    for path, model in todo:
        if path and key in model.model_fields and key not in COLLECTED:
            return f"in `{'.'.join(map(str, path))}`"
        fields = ((name, field.annotation) for name, field in model.model_fields.items() if name != "formats")
        todo += [((*path, name), inner) for name, annotation in fields if (inner := _inner_model(annotation))]
    return "in `scale`" if any(key in rule.parameters for rule in RULES.values()) else None


def _missing_key(path: Path, source: Source) -> Diagnostic:
    key, parent = path[-1], path[:-1]
    example = _TO_TYPE.get(tuple(map(str, path))) or _TO_TYPE_BY_KEY.get(str(key), f"{key}: ...")
    help = f"add `{example}`"
    if path == ("scale",):
        help = f"add `scale: {{format: f32, rule: {_rule_for(path, source)}}}`"
    elif path == ("scale", "super"):
        help = "add `super: {format: f32, rule: scale-first, block: {m: 1, k: 256}}`"
    elif key == "rule" and parent and parent[-1] == "super":
        help = "add `rule: scale-first`"
    elif key == "rule":
        rule = _rule_for(parent, source)
        level = RULES[rule.partition(",")[0]].needs_tensor_amax and "tensor" not in source.data
        help = f"add `rule: {rule}`" + (", and `tensor: {amax: f32}` at the top level" if level else "")
    label = source.key(parent, f"has no `{key}`" if parent else "the spec begins here")
    return source.find("LC202", f"missing key `{key}`{_inside(parent)}", label, help=help)


def _rule_for(path: Path, source: Source) -> str:
    """A rule to suggest for a scale, which fits its format and the elements."""
    around: Any = source.data
    for part in path[:-1]:
        around = around[part]
    element = around.get("element", source.data.get("element"))
    return suggested_scale(*(_format(part, source) for part in (around.get("scale"), element)))


def _format(part: Any, source: Source) -> Format | None:
    """The format that an unchecked `element` or `scale` names; None if invalid."""
    name = part.get("format") if isinstance(part, dict) else None
    own = source.data.get("formats")
    entry = own.get(name) if isinstance(own, dict) and isinstance(name, str) else None
    try:
        fmt = make(str(name), FormatDef.model_validate(entry).model_dump()) if entry else BUILTIN.get(str(name))
        return fmt if fmt is None or fmt.is_f32 or name in BUILTIN or (fmt.bits <= 8 and fmt.magnitudes) else None
    except (ValueError, TypeError, OverflowError, ArithmeticError):  # other checks report that
        return None


def _wrong_value(path: Path, items: list[ErrorDetails], source: Source) -> Diagnostic:
    """The most helpful error at one path: first a range, then a closed set, then a type."""
    types = {item["type"]: item for item in items}
    name, value = ".".join(map(str, path)) or "the spec", items[0]["input"]
    if diagnostic := _out_of_range(path, name, types, source):
        return diagnostic
    if path == ("layoutc",) and type(value) is int:
        label = source.value(path, "this layoutc reads version 1")
        message = f"version {value} of the spec language is not known"
        return source.find("LC206", message, label, help="write `layoutc: 1`")
    expected = [words for kind, words in _EXPECTED.items() if kind in types]
    ruled = Super if "super" in path[:-1] else Scale
    if len(path) > 1 and path[-2] in ("scale", "super") and path[0] == "scale" and path[-1] not in ruled.model_fields:
        expected = [_PARAMETER[parameter.type] for parameter in _parameters(path[1])][:1]
    allowed: list[str] = []
    if literal := types.get("literal_error"):
        allowed = [text or number for text, number in re.findall(r"'([^']*)'|(\d+)", literal["ctx"]["expected"])]
    # If words or numbers are allowed, a word is misspelled; any other value has the wrong type.
    if allowed and not isinstance(value, (dict, tuple)) and (isinstance(value, str) or not expected):
        words = " or ".join(f"`{word}`" for word in allowed)
        help = f"write {expected[0]}, or {words}" if expected else f"one of: {listed(allowed)}"
        label = source.value(path, did_you_mean(str(value), allowed))
        if (alias := aliases()["words"].get(str(value).casefold())) in allowed:
            label, help = source.value(path), f"write `{alias}`"
        return source.find("LC203", f"{quoted(value)} is not a valid `{name}`", label, help=help)
    wanted = " or ".join([*expected, *(f"`{word}`" for word in allowed)]) or "another kind of value"
    label = source.value(path, f"is {_kind(value)}")
    return source.find("LC204", f"`{name}` must be {wanted}", label, help=_type_help(value, wanted, name))


def _out_of_range(path: Path, name: str, types: dict[str, ErrorDetails], source: Source) -> Diagnostic | None:
    """A diagnostic for a number, text or list out of its range; None if it is within."""
    for kind, key, words, wrong, right in (
        ("greater_than_equal", "ge", "at least", "less", "more"),
        ("less_than_equal", "le", "at most", "more", "less"),
    ):
        if kind in types:
            limit = types[kind]["ctx"][key]
            help = f"write {limit} or {right}"
            if len(path) > 1 and path[-2] == "block" and kind == "greater_than_equal":
                help = f"write `all` for one block along {path[-1]}, or a number from {limit}"
            label = source.value(path, f"is {wrong} than {limit}")
            return source.find("LC205", f"`{name}` must be {words} {limit}", label, help=help)
    for kind, key, words, things in (
        ("string_too_long", "max_length", "at most", "characters"),
        ("string_too_short", "min_length", "at least", "character"),
        ("too_long", "max_length", "at most", "values"),
    ):
        if kind in types:
            message = f"`{name}` must have {words} {types[kind]['ctx'][key]} {things}"
            help = "write something there" if kind == "string_too_short" else f"shorten it to {types[kind]['ctx'][key]}"
            return source.find("LC205", message, path, help=help)
    return None


def _parameters(name: str | int) -> Iterator[Any]:
    return (rule.parameters[str(name)] for rule in RULES.values() if name in rule.parameters)


def _kind(value: object) -> str:
    """A value's type, in an author's words."""
    kinds = ((bool, "a boolean"), (int, "a whole number"), (float, "a fraction"), (str, "text"), (tuple, "a list"))
    return next((words for kind, words in kinds if isinstance(value, kind)), "a mapping")


def _type_help(value: object, wanted: str, name: str) -> str:
    if isinstance(value, str) and "number" in wanted and re.fullmatch(r"[-+]?\d{1,18}", value):
        return f"write `{value}` without quotes"
    if wanted == "text" and isinstance(value, (bool, int, float)):
        return f"quote it, if {quoted(value)} is what you mean"
    if name.endswith("history") and isinstance(value, int) and value > 0:
        return f"write `history: {{length: {value}, pick: max}}`"
    if name.endswith(".block") and type(value) is int and value > 0:
        return f"write `block: {{m: 1, k: {value}}}`, or `block: {{m: {value}, k: {value}}}`"
    if name.endswith(".block") and isinstance(value, tuple) and len(value) == 2:
        return f"write `block: {{m: {value[0]}, k: {value[1]}}}`"
    if wanted == "a list" and isinstance(value, int):
        return f"write `[{value}, {value}]`: one number for each dim"
    example = _TO_TYPE_BY_KEY.get(name.rpartition(".")[2]) if wanted == "a mapping" else None
    return f"write `{example}`" if example else f"write {wanted} for `{name}`"


def _inside(parent: Path) -> str:
    return f" in `{'.'.join(map(str, parent))}`" if parent else ""
