"""Checks of `files`: each plane has one tensor, whose dtype, order and form keep every value."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from layoutc.diagnostics.diagnostic import Diagnostic, listed
from layoutc.spec import formats
from layoutc.spec.bindings import FileBinding, FileTensor
from layoutc.spec.checks.parts import sides
from layoutc.spec.formats import Format
from layoutc.spec.notation import NotationError, parse_file_layout, parse_form
from layoutc.spec.rules import RULES
from layoutc.spec.schema import Spec
from layoutc.spec.source import Path, Source

FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
BYTES = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"}
POWERS_OF_TWO = Format("", sign=0, exponent=8, bias=127, subnormals=False, nan=(0xFF,))
# Tensors that the recipe and a weight's shape determine: their allowed dtypes, and messages.
STATED = {
    "shape": (("I64", "I32"), "the sizes of a weight are I64 or I32"),
    "groups": (("I64", "I32"), "the numbers of blocks are I64 or I32"),
    "codebook": (("F32",), "the values of codes are F32"),
    "zeros": (("I8", "I32", "I64"), "zero points that are 0 are integers"),
    "text": (("U8",), "a text is bytes, U8"),
}
INTEGERS = {f"{sign}{bits}": bits for sign in "UI" for bits in (8, 16, 32, 64)}


def files_are_named(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """A binding's name is usable: users pass it to exports, and generated code contains it."""
    for name in spec.files:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            help = "lower-case letters, digits and underscores, a letter first: `compressed_tensors`"
            yield source.find("LC360", f"`{name}` can't name files", source.key(("files", name)), help=help)
        if not (summary := spec.files[name].summary).isprintable() or {*summary} & {'"', "\\"}:
            message, help = (
                "the summary can't be part of generated code",
                "write one plain line; single quotes are fine",
            )
            yield source.find("LC360", message, ("files", name, "summary"), help=help)


def planes_have_tensors(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """Each plane of the rowwise orientation has a tensor, and nothing else does."""
    planes = _planes(spec)
    if spec.files and spec.scale.history is not None:
        why = "other checkpoint formats store no amax history, so a weight would be incomplete"
        message, label = "a recipe with an amax history can't have `files`", source.key(("files",))
        yield source.find("LC361", message, label, why=why, help="delete `files`")
        return
    rule, columnwise = RULES.get(spec.scale.rule), spec.orientations.columnwise
    own_codes = columnwise is not None and columnwise.block != spec.orientations.rowwise.block
    if spec.files and rule is not None and rule.tensor and own_codes:
        label, headline = source.key(("files",)), "columnwise has its own codes, which files don't store"
        why = f"quantizing them needs the weight's amax, but files store the level that {rule.name} computes"
        help = "delete `columnwise`, which is then dequantized from rowwise, or `files`"
        yield source.find("LC361", headline, label, why=why, help=help)
    for name, binding in spec.files.items():
        if binding.record is not None:
            continue
        where: Path = ("files", name, "tensors") if binding.tensors else ("files", name)
        for kind in planes.keys() - binding.tensors.keys():
            suffix = {"data": "", "amax": "_amax"}.get(kind, f"_{kind}")
            help = f'write `{kind}: {{name: "{{name}}{suffix}", dtype: {_usual(planes[kind])}}}`'
            label = source.key(where, f"has {listed(sorted(binding.tensors))}")
            yield source.find("LC361", f"files `{name}` have no tensor for a weight's {kind}", label, help=help)
        for kind in binding.tensors.keys() - planes.keys() - STATED.keys():
            why = f"the rowwise planes of this recipe are {listed(list(planes))}"
            label = source.key((*where, kind))
            yield source.find("LC361", f"the recipe has no {kind}", label, why=why, help=f"delete `{kind}`")


def names_are_patterns(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """A tensor's name follows from its parameter's, and no two tensors of a weight share a name."""
    for name, binding in spec.files.items():
        seen: dict[str, str] = {}
        for kind, pattern, where in _named(name, binding):
            if (wrong := _fields(pattern, ("name", "module"))) is not None:
                help = 'for instance `"{name}_scale"`, or `"{module}.weight_scale"`'
                yield source.find("LC362", f"the name of a tensor {wrong}", where, help=help)
            full = pattern.replace("{name}", "{module}.weight")
            if full in seen:
                message = f"{kind} and {seen[full]} have the same name"
                help = f'rename it, for instance `"{pattern}_{where[-2 if where[-1] == "name" else -1]}"`'
                yield source.find("LC362", message, where, help=help)
            seen.setdefault(full, kind)
        for i, pattern in enumerate(binding.ignore):
            if (wrong := _fields(pattern, ("name", "module"))) is not None:
                help = 'for instance `"{module}.input_scale"`'
                yield source.find("LC362", f"the name of a tensor {wrong}", ("files", name, "ignore", i), help=help)
        for whole, parts in binding.parts.items():
            if (wrong := _fields(whole, ("module",))) is not None:
                help, label = 'for instance `"{module}.qkv_proj.weight"`', source.key(("files", name, "parts", whole))
                yield source.find("LC362", f"the name of a parameter {wrong}", label, help=help)
            for i, part in enumerate(parts):
                wrong = _fields(part.replace("{expert}", ""), ("module",))
                if wrong is None and part.count("{expert}") != parts[0].count("{expert}"):
                    wrong = "must contain `{expert}` if the other parts' names do"
                if wrong is not None:
                    help, at = 'for instance `"{module}.{expert}.up_proj.weight"`', ("files", name, "parts", whole, i)
                    yield source.find("LC362", f"the name of a part {wrong}", at, help=help)


def joined_modules_share_a_scale(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """Modules that engines join share a scale, so it must be the scale of a whole weight."""
    block = spec.orientations.rowwise.block
    if spec.tensor is not None or block.m == block.k == "all":
        return
    for name in (name for name, binding in spec.files.items() if binding.fused):
        label, why = source.key(("files", name, "fused")), f"each scale covers a block of {block.m}x{block.k}"
        yield source.find("LC361", "no scale covers a whole weight", label, why=why, help="delete `fused`")


def layouts_of_files_are_readable(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """Each layout is a permutation of a plane's values, whose last dim fills whole bytes or words."""
    for where, _, tensor, fmt in _tensors(spec):
        if tensor.layout is None or (tensor.layout == "scalar" and not tensor.sizes):
            if tensor.sizes:
                label = source.key((*where, next(iter(tensor.sizes))))
                help = "delete it, or write `layout: (e m) (g b) -> e m g b`"
                yield source.find("LC363", "a size without a layout", label, help=help)
            continue
        try:
            layout = parse_file_layout(tensor.layout, tensor.sizes)
        except NotationError as error:
            label = source.value((*where, "layout"), within=(error.start, error.end))
            why = "each name appears once on each side; one name per group has no size and takes the rest"
            help = "for instance `{layout: (e m) (g b) -> e m g b, b: 32}`"
            yield source.find("LC363", f"layout: {error}", label, why=why, help=help)
            continue
        if fmt is not None and _crosses_bytes(fmt):
            bits, at = fmt.bits, (*where, "layout")
            why = f"{bits}-bit codes cross bytes, so files store the plane's bytes unchanged"
            yield source.find("LC363", f"{bits}-bit codes can't have a layout", at, why=why, help="delete `layout`")
            continue
        last, bits = layout.order[-1], fmt.bits if fmt is not None else 8
        size = prod(tensor.sizes.get(name, 0) for name in layout.dims[-1])  # 0: one name gets the rest
        word = _width(tensor.dtype)
        if size * bits % word or tensor.sizes.get(last, 0) * bits % 8:
            label = source.value((*where, last), f"{size or tensor.sizes[last]} values of {bits} bits")
            per = max(1, word // bits)
            own, rest = tensor.sizes[last], max(1, size // tensor.sizes[last])
            run = next(n for n in range(1, 8 * per + 1) if n * rest % per == 0 and n * bits % 8 == 0)
            fits = -(-own // run) * run
            help = f"write `{last}: {fits}`, or a dtype of fewer bits"
            yield source.find("LC363", f"the last dim does not fill whole {tensor.dtype} entries", label, help=help)


def dtypes_hold_values(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """A tensor's dtype holds the plane's values: it is the same format, or an integer for codes."""
    for where, kind, tensor, fmt in _tensors(spec):
        if kind in STATED or fmt is None:
            dtypes, message = STATED.get(kind, ((), ""))
            if dtypes and tensor.dtype not in dtypes:
                yield source.find("LC364", message, (*where, "dtype"), help=f"write `dtype: {dtypes[0]}`")
            continue
        if tensor.codes is not None:
            if tensor.dtype != "U8":
                yield source.find("LC364", "codes are bytes, U8", (*where, "dtype"), help="write `dtype: U8`")
            continue
        if not _holds(tensor.dtype, fmt):
            label = source.value((*where, "dtype"), f"the {kind} is {fmt.name}, of {fmt.bits} bits")
            help = f"write `dtype: {_usual(fmt)}`"
            yield source.find("LC364", f"{tensor.dtype} can't hold the {kind} of this recipe", label, help=help)
        elif _crosses_bytes(fmt) and tensor.dtype != "U8" and tensor.pack not in (None, spec.element.pack):
            message, why = (
                f"{fmt.bits}-bit codes can't be repacked into {tensor.dtype}",
                "words hold their bytes unchanged",
            )
            yield source.find("LC364", message, (*where, "pack"), why=why, help="delete `pack`, or write `dtype: U8`")


def texts_are_stated(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """A codebook tensor needs elements that have a codebook, a text needs its content, and nothing else has one."""
    for where, kind, tensor, _ in _tensors(spec):
        data = _planes(spec).get("data")
        if kind == "codebook" and data is not None and not data.values:
            message = f"{data.name} has no codebook"
            yield source.find("LC361", message, source.key(where), help="delete `codebook`")
        if kind == "text" and tensor.value is None:
            help = "add `value: {shape: [rows, columns]}`, the JSON that files have"
            yield source.find("LC361", "`text` has no `value`", source.key(where), help=help)
        for key in ("value", "any") if kind != "text" else ():
            if getattr(tensor, key):
                message = f"`{key}` is for `text`, the tensor of JSON"
                yield source.find("LC361", message, source.key((*where, key)), help=f"delete `{key}`")
        unknown = [key for key in tensor.any if key not in (tensor.value or {})] if kind == "text" else []
        for key in unknown:
            at, help = (
                (*where, "any", tensor.any.index(key)),
                f"delete it, or write one of {listed(sorted(tensor.value or {}))}",
            )
            yield source.find("LC361", f"`text` has no key `{key}`", at, help=help)


def forms_can_be_undone(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """Only a single fp32 value may be written as a quotient."""
    for where, kind, tensor, fmt in _tensors(spec):
        if tensor.form is None:
            continue
        try:
            parse_form(tensor.form)
        except NotationError as error:
            help = "write a number over x, or x over a number: `2688 / x`, `x / 2688`"
            yield source.find("LC365", f"form: {error}", (*where, "form"), help=help)
            continue
        if fmt is not None and not fmt.is_f32:
            why = "narrower formats can't represent the quotient"
            yield source.find("LC365", f"the {kind} is not fp32", (*where, "form"), why=why, help="delete `form`")


def codes_can_be_read(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """Codes stand for fp32 values, in the plane's order, and their further tensors have distinct names."""
    for where, kind, tensor, fmt in _tensors(spec):
        if (codes := tensor.codes) is None:
            continue
        label = source.key((*where, "codes"))
        if fmt is None or not fmt.is_f32 or kind == "amax":
            why = "only fp32 planes of rows and columns can be stored as codes"
            yield source.find("LC368", f"the {kind} can't be stored as codes", label, why=why, help="delete `codes`")
            continue
        if tensor.form is not None or tensor.pack is not None:
            key = "form" if tensor.form is not None else "pack"
            message = f"`{key}` can't be combined with `codes`"
            yield source.find("LC368", message, source.key((*where, key)), help=f"delete `{key}`")
        if tensor.layout is not None and not _keeps_order(tensor):
            help = f"write `layout: {'m k -> (m k)' if '(' in tensor.layout else 'm k -> m k'}`"
            message = "blocks of codes are counted row by row, but the layout has another order"
            yield source.find("LC368", message, (*where, "layout"), help=help)
        if codes.values is not None and not _is_looked_up(_known(spec).get(codes.values)):
            why, help = "exports look up codes in ascending values", "delete `values`: files are then only read"
            message = f"`{codes.values}` is not a codebook of 256 ascending values from -1 to 1"
            yield source.find("LC368", message, (*where, "codes", "values"), why=why, help=help)
        tensors = spec.files[where[1]].tensors  # type: ignore[index]
        if "text" not in tensors or codes.offset not in (tensors["text"].value or {}):
            help = f"add `text: {{..., value: {{{codes.offset}: 0}}, any: [{codes.offset}]}}` to `tensors`"
            message = f"no `text` has the key `{codes.offset}`, the offset of the values"
            yield source.find("LC368", message, (*where, "codes", "offset"), help=help)
        elif codes.offset not in tensors["text"].any:
            help = f"add `{codes.offset}` to `any` of `text`"
            message = f"`{codes.offset}` differs between files, but `text` fixes it"
            yield source.find("LC368", message, (*where, "codes", "offset"), help=help)


def _is_looked_up(fmt: Format | None) -> bool:
    """True for a codebook of 256 ascending values from -1 to 1."""
    values = fmt.values if fmt else ()
    return len(values) == 256 and list(values) == sorted(values) and max(map(abs, values)) <= 1


def _keeps_order(tensor: FileTensor) -> bool:
    """True if a tensor's values have the plane's order, or if its layout is unreadable."""
    if tensor.layout in (None, "scalar"):
        return tensor.layout is None
    try:
        layout = parse_file_layout(tensor.layout or "", tensor.sizes)
    except NotationError:
        return True  # layouts_of_files_are_readable reports it
    return layout.order == (*layout.rows, *layout.columns)


def configs_are_recognized(spec: Spec, source: Source) -> Iterator[Diagnostic]:
    """The keys that identify files are in the config that exports write."""
    for name, binding in spec.files.items():
        if binding.record is None and not binding.recognize:
            help = "add `config: {quant_method: mine}` and `recognize: [quant_method]`"
            yield source.find("LC366", f"nothing identifies files `{name}`", source.key(("files", name)), help=help)
        for i, path in enumerate(binding.recognize):
            if not _follow(binding.config, path.split(".")):
                message, at = f"`{path}` is not in the config of `{name}`", ("files", name, "recognize", i)
                help = f"write one of its keys: {listed(sorted(binding.config))}" if binding.config else "add it there"
                yield source.find("LC366", message, at, help=help)
        if binding.plain is not None and binding.plain in binding.config:
            why = "exports write its value, the list of modules that are not quantized"
            message, help = f"`{binding.plain}` is also in the config", f"delete `{binding.plain}` in `config`"
            yield source.find("LC366", message, ("files", name, "plain"), why=why, help=help)


CHECKS = (
    files_are_named,
    planes_have_tensors,
    joined_modules_share_a_scale,
    names_are_patterns,
    layouts_of_files_are_readable,
    dtypes_hold_values,
    texts_are_stated,
    forms_can_be_undone,
    codes_can_be_read,
    configs_are_recognized,
)


def _named(name: str, binding: FileBinding) -> Iterator[tuple[str, str, Path]]:
    """(kind, name pattern, the pattern's path) of each tensor that a binding names."""
    for kind, tensor in binding.tensors.items():
        where: Path = ("files", name, "tensors", kind)
        yield kind, tensor.name, (*where, "name")
        if tensor.codes is not None:
            yield f"the codebook of {kind}", tensor.codes.codebook, (*where, "codes", "codebook")
            yield f"the scale of {kind}", tensor.codes.scale, (*where, "codes", "scale")


def _tensors(spec: Spec) -> Iterator[tuple[Path, str, FileTensor, Format | None]]:
    """Each tensor with its path, what it holds, and that plane's format; None if it holds no plane."""
    planes = _planes(spec)
    for name, binding in spec.files.items():
        for kind, tensor in binding.tensors.items():
            yield ("files", name, "tensors", kind), kind, tensor, planes.get(kind)


def _planes(spec: Spec) -> dict[str, Format]:
    """The format of each plane of the rowwise orientation, without unknown ones."""
    known = _known(spec)
    rowwise = next(sides(spec))
    names = {"data": rowwise.element.format, "scale": rowwise.scale.format, "zero": rowwise.scale.zero}
    planes = {kind: known[name] for kind, name in names.items() if name in known}
    has_amax = spec.tensor is not None or spec.scale.history is not None
    return planes | ({"amax": known["f32"]} if has_amax else {})


def _known(spec: Spec) -> dict[str, Format]:
    known = dict(formats.BUILTIN)
    for name, entry in spec.formats.items():
        try:
            known[name] = formats.make(name, entry.model_dump())
        except (ValueError, KeyError, TypeError, AssertionError):
            continue  # checks of formats report it
    return known


def _fields(pattern: str, allowed: tuple[str, ...]) -> str | None:
    """What is wrong with a name's pattern; None if nothing."""
    found = re.findall(r"{([^{}]*)}", pattern)
    rest = re.sub(r"{[^{}]*}", "", pattern)
    if len(found) != 1 or found[0] not in allowed:
        return f"must contain {' or '.join(f'`{{{name}}}`' for name in allowed)} once"
    if not re.fullmatch(r"[\w.]*", rest):
        return "may otherwise have only letters, digits, underscores and dots"
    return None


def _width(dtype: str) -> int:
    return INTEGERS.get(dtype) or (8 if dtype in BYTES else 32 if dtype == "F32" else 16)


def _holds(dtype: str, fmt: Format) -> bool:
    if fmt.bits == 32 or fmt.bits == 16:
        return FLOATS.get(dtype) == ("float32" if fmt.is_f32 else fmt.torch)
    if dtype == "F8_E8M0":  # planes hold these scales as bytes, not in a torch dtype
        return fmt == POWERS_OF_TWO
    if dtype in BYTES:
        return BYTES[dtype] == fmt.torch
    return dtype in INTEGERS and (_crosses_bytes(fmt) or INTEGERS[dtype] % fmt.bits == 0)


def _crosses_bytes(fmt: Format) -> bool:
    """True for codes that may cross a byte boundary, and so two entries of any width."""
    return 8 % fmt.bits > 0 and fmt.bits < 8


def _usual(fmt: Format) -> str:
    """The dtype that files usually use for a format."""
    named = {torch: dtype for dtype, torch in {**FLOATS, **BYTES}.items()}
    if fmt.is_f32:
        return "F32"
    return named.get(fmt.torch or "", "U8") if fmt.bits >= 8 else "U8"


def _follow(config: Any, path: list[str]) -> bool:
    """True if the path leads somewhere in the config."""
    if not path:
        return True
    if not isinstance(config, Mapping):
        return False
    return any(_follow(value, path[1:]) for key, value in config.items() if path[0] in ("*", key))
