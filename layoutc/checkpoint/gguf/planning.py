"""Plans a load of a GGUF file: maps each parameter of a model to the tensors that hold it."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from layoutc.checkpoint.common.verdicts import Problem, noted
from layoutc.checkpoint.gguf.architectures import ARCHITECTURES, SHAPES, Names, Place
from layoutc.checkpoint.gguf.container import MOST_NUMBERS, Header, Value
from layoutc.checkpoint.gguf.kinds import Kind, installed, kinds_of
from layoutc.checkpoint.gguf.splits import read_model
from layoutc.checkpoint.gguf.values import Mapped, RecordSource, Rotated, Source, check_known
from layoutc.checkpoint.held.stored import Stored
from layoutc.checkpoint.held.undecoded import Described
from layoutc.checkpoint.safetensors.beside import OF_ACTIVATIONS, left_out_by
from layoutc.checkpoint.safetensors.planning import Entry, Rename, Step, file_name, refuse_beside, state_of
from layoutc.checkpoint.untrusted.files import short
from layoutc.runtime.bindings.gguf_types import PLAIN
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.installed import find
from layoutc.runtime.torch_private import local_tensor
from layoutc.runtime.weight.tensor import QuantizedTensor

ARCHITECTURE = "general.architecture"
_LAYER = re.compile(r"blk\.(\d+)\.")
_OF_OTHER_PARTS = re.compile(r"(v|a|mm)\.|blk\.\d+\.nextn\.")  # image and audio encoders, multi-token prediction


class LoadedGguf(NamedTuple):
    """The result of `load_gguf`: names that the file or the model lacks, and plain parameters that were dequantized."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    dequantized: tuple[str, ...]


class Plan(NamedTuple):
    """The steps in state dict order, the result of the load, and the skipped tensors that the model may lack."""

    steps: list[Step]
    loaded: LoadedGguf
    unread: list[str]


def names_of(header: Header) -> Names:
    """The names of a file's architecture. Raises LayoutError if it is unknown."""
    found = header.values.get(ARCHITECTURE)
    if not isinstance(found, str) or found not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise LayoutError(f"{header.path} is of architecture {short(found)}; names are known of {known}")
    return Names(ARCHITECTURES[found])


def beside(header: Header, names: Names, model: object = None) -> set[str]:
    """A file's tensors that a model may lack without changing its values: multi-token-prediction layers, as the file's
    keys count them, encoders, activation scales, and what the model's class declares as ignored."""
    keys = (f"{header.values[ARCHITECTURE]}.{key}" for key in ("block_count", "nextn_predict_layers"))
    count, more = (header.values.get(key) for key in keys)
    first = count - more if isinstance(count, int) and isinstance(more, int) else None
    left_out = left_out_by(model) if isinstance(model, nn.Module) else OF_ACTIVATIONS
    found = set[str]()
    for tensor in header.tensors:
        layer = _LAYER.match(tensor)
        predicts = layer is not None and first is not None and int(layer[1]) >= first
        if predicts or _OF_OTHER_PARTS.match(tensor) or left_out.search(names.parameter(tensor) or tensor):
            found.add(tensor)
    return found


def source_of(place: Place, names: Names, header: Header) -> Source:
    """The source for a place whose tensors the file has, with their row order. Raises LayoutError."""
    held, *beside = (header.tensors[tensor] for tensor in place.tensors)
    if any(one.shape != held.shape for one in beside):
        shapes = ", ".join(f"{one.name} {list(one.shape)}" for one in (held, *beside))
        raise LayoutError(f"{header.path}: tensors that are parts of one weight have different shapes: {shapes}")
    if beside and len(held.shape) < 2:
        raise LayoutError(f"{header.path}: {held.name} is a part of a weight, but has no rows")
    return Source(held, rotation_of(held.name, place.module, held.shape, names, header), tuple(beside))


def has(header: Header, place: Place | None) -> bool:
    """True if a file has all tensors of a place."""
    return place is not None and all(tensor in header.tensors for tensor in place.tensors)


def rotation_of(name: str, module: str, shape: tuple[int, ...], names: Names, header: Header) -> Rotated | None:
    """The row order of a tensor; None if it is the parameter's. Raises LayoutError."""
    keys = [key.format(arch=header.values[ARCHITECTURE]) for key in names.architecture.rotated.get(module, ())]
    if not keys:
        return None
    # A key in the file decides even if its value is invalid: its fallback means something else.
    key = next((key for key in keys if key in header.keys), keys[0])
    heads, rows, of_layer = header.values.get(key), shape[0], ""
    if isinstance(heads, tuple):
        layer = _LAYER.match(name)
        number = int(layer[1]) if layer is not None else -1
        if not 0 <= number < len(heads):
            raise LayoutError(f"{header.path}: {key} has an entry for each of {len(heads)} layers, and none for {name}")
        heads, of_layer = heads[number], f" of layer {number}"
    if key in header.keys and key not in header.values:
        raise LayoutError(
            f"{header.path}: {key}, the heads of {name}, must be an array of at most {MOST_NUMBERS:,} numbers"
        )
    if not isinstance(heads, int) or heads < 1 or rows % (2 * heads):
        raise LayoutError(
            f"{header.path}: the {rows} rows of {name} are not pairs in heads, of which {key} says "
            f"{short(heads)}{of_layer}"
        )
    return Rotated(rows, heads)


def config_of(header: Header) -> dict[str, object]:
    """The config.json for a file's model, from the file's keys and tensor shapes.

    Raises LayoutError, with the reason, if keys are missing, have no known config field, or contradict the tensors.
    """
    arch, values = str(header.values.get(ARCHITECTURE)), header.values
    experts = values.get(f"{arch}.expert_count", 0) != 0
    made = next((one for one in names_of(header).architecture.configs if one.experts == experts), None)
    if made is None:
        raise LayoutError(f"layoutc knows no config fields of {arch} {'with' if experts else 'without'} experts")
    of_scales = [key for key in header.keys if key.startswith(f"{arch}.rope.scal")]
    scaled = [key for key in of_scales if values.get(key) not in ("none", 1.0)]
    if scaled or "rope_freqs.weight" in header.tensors:
        which = (scaled or ["rope_freqs.weight"])[0]
        raise LayoutError(f"{which} scales rotary dims, but does not say how in full")
    config: dict[str, object] = {"architectures": [made.name], "model_type": made.model_type, **made.fixed}
    heads = f"{arch}.attention.head_count"
    keys = {f"{arch}.{key}": field for key, field in made.sizes.items()}
    keys[f"{heads}_kv" if f"{heads}_kv" in header.keys else heads] = "num_key_value_heads"
    config["num_attention_heads"] = _of_all_layers(heads, values)
    config |= {field: _of_all_layers(key, values) for key, field in keys.items()}
    config["rope_theta"] = values.get(f"{arch}.rope.freq_base", 10000.0)
    missing = [key for key, field in keys.items() if not _is_number(config[field])]
    tables = [header.tensors.get(name) for name in ("token_embd.weight", "blk.0.attn_q.weight")]
    if missing or None in tables:
        raise LayoutError(f"the file has no number {', '.join(missing) or 'and shapes of its first layer'}")
    config["vocab_size"], rows = (one.shape[0] for one in tables if one is not None)
    if made.head:
        config["head_dim"] = rows // max(1, int(str(config["num_attention_heads"])))
    config |= {field: f"{module}.bias" in header.tensors for field, module in made.biases.items()}
    config["tie_word_embeddings"] = "output.weight" not in header.tensors
    tokens = {name: values.get(f"tokenizer.ggml.{name}") for name in ("bos_token_id", "eos_token_id")}
    config |= {name: number for name, number in tokens.items() if isinstance(number, int)}
    if not _is_number(config["rope_theta"]):
        raise LayoutError(f"{arch}.rope.freq_base is not a number")
    for key, field in {heads: "num_attention_heads", **keys}.items():
        if field != "rms_norm_eps" and not (isinstance(size := config[field], int) and size > 0):
            raise LayoutError(f"{key} is {short(size)}, but must be a whole number of 1 or more")
    _check_layers(header, f"{arch}.block_count", config)
    _check_shapes(header, arch, config)
    return {field: _decimal(value) if isinstance(value, float) else value for field, value in config.items()}


def _check_layers(header: Header, key: str, config: Mapping[str, object]) -> None:
    """Raises LayoutError unless a file has exactly the layers that a config counts, all with the same tensors."""
    layers, count = dict[int, set[str]](), config["num_hidden_layers"]
    for name in header.tensors:
        if (match := _LAYER.match(name)) is not None:
            layers.setdefault(int(match[1]), set()).add(name[match.end() :])
    if len(layers) != count or max(layers) != len(layers) - 1:
        raise LayoutError(f"{key} is {count}, but the file has tensors of {len(layers)} layers, up to {max(layers)}")
    for number, found in layers.items():
        if differing := sorted(found ^ layers[0]):
            raise LayoutError(f"layers 0 and {number} differ: only one of them has {short(differing[0])}")


def _check_shapes(header: Header, arch: str, config: Mapping[str, object]) -> None:
    """Raises LayoutError unless all tensors have the shapes that a config implies."""
    sizes = {field: size for field, size in config.items() if isinstance(size, int)}
    heads, of_keys = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    if heads % of_keys:
        raise LayoutError(f"{arch} has {heads} query heads, which is not a multiple of its {of_keys} key heads")
    sizes.setdefault("head_dim", sizes["hidden_size"] // heads)
    sizes |= {"query_rows": heads * sizes["head_dim"], "key_rows": of_keys * sizes["head_dim"]}
    experts = sizes.get("num_local_experts", sizes.get("num_experts"))
    if experts is not None:
        sizes |= {"experts": experts, "expert_rows": sizes.get("moe_intermediate_size", sizes["intermediate_size"])}
        if (used := sizes["num_experts_per_tok"]) > experts:
            raise LayoutError(f"{arch}.expert_used_count is {used}, but there are {experts} experts")
    for name, held in header.tensors.items():
        module, _, last = _LAYER.sub("", name).rpartition(".")
        dims = SHAPES[module] if last == "weight" else SHAPES[module][:1]
        if any(dim not in sizes for dim in dims):
            raise LayoutError(f"{name} is a weight of experts, but {arch}.expert_count says that there are none")
        if held.shape != (shape := tuple(sizes[dim] for dim in dims)):
            raise LayoutError(f"{name} has shape {list(held.shape)}, but the file's keys make it {list(shape)}")


def _of_all_layers(key: str, values: Mapping[str, Value]) -> object:
    """The value of a key, which may have an entry per layer. Raises LayoutError if the entries differ."""
    value = values.get(key)
    if not isinstance(value, tuple):
        return value
    if len({*value}) > 1:
        raise LayoutError(f"{key} differs from layer to layer, {short(value)}, but a field of a config is one number")
    return next(iter(value), None)


def _is_number(value: object) -> bool:
    """True for a number in fp32's range."""
    return isinstance(value, int | float) and abs(value) < 2.0**127  # False for NaN


def _decimal(value: float) -> float:
    """The shortest decimal number that rounds to a value in fp32, the dtype that files store it in."""
    made = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next((one for one in made if struct.pack("<f", one) == struct.pack("<f", value)), value)


def plan(
    model: nn.Module, header: Header, rename: Rename | None, strict: bool, convert: bool, problems: list[Problem]
) -> tuple[Plan, Mapped]:
    """Plans a load; returns the plan and the mapped file. Raises LayoutError if the architecture is unknown."""
    names, sources = names_of(header), dict[str, Source]()
    file, steps, missing, expected = Mapped(header, sources), list[Step](), list[str](), set[str]()
    state, aliases = state_of(model)
    kinds, decoded = list[Kind](), list[str]()
    with noted(problems):
        local = (local_tensor(value) for value in state.values())
        kinds = [*kinds_of({type(one): None for one in local if isinstance(one, QuantizedTensor)}), *installed()]
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    for tied in aliases:
        in_files = {name: names.in_files(file_name(name, rename)) for name in tied}
        there = {name: one for name, one in in_files.items() if one is not None and has(header, one)}
        expected |= {tensor for one in there.values() for tensor in one.tensors}
        with noted(problems):
            if len({one.tensors for one in there.values()}) > 1:
                both = " and ".join(", ".join(one.tensors) for one in there.values())
                raise LayoutError(f"{header.path} holds {both}, which are one parameter of the model: untie {tied[0]}")
            if there:
                name, place = next(iter(there.items()))
                sources[place.tensors[0]] = source = source_of(place, names, header)
                steps.append(Step(name, state[name], entry(name, state[name], source, file, kinds, convert)))
                if not source.plain and not isinstance(local_tensor(state[name]), QuantizedTensor):
                    decoded.append(name)
            elif tied[0] not in buffers or any(in_files.values()):
                missing.append(tied[0])
    with noted(problems):
        refuse_beside({name: Described(held.type, held.shape) for name, held in header.tensors.items()}, expected)
    unread = sorted((header.tensors.keys() & beside(header, names, model)) - expected)
    unexpected = sorted(header.tensors.keys() - expected - {*names.architecture.ignored, *unread})
    if strict:
        problems += [_absent(name, names, rename) for name in missing]
        problems += [Problem("LayoutError", f"{name} is in the file, but not in the model") for name in unexpected]
    return Plan(steps, LoadedGguf(tuple(missing), tuple(unexpected), tuple(decoded)), unread), file


def _absent(name: str, names: Names, rename: Rename | None) -> Problem:
    renamed = file_name(name, rename)
    found = names.in_files(renamed)
    why = (
        f"not in the file, as {', '.join(found.tensors)}"
        if found
        else f"none of its architecture's names (as {renamed}): pass rename="
    )
    return Problem("LayoutError", f"{name} is {why}")


def entry(name: str, param: Tensor, source: Source, file: Mapped, kinds: list[Kind], convert: bool) -> Stored | Entry:
    """The source of a parameter's values: plain values, a recipe's records, or another type, dequantized by gguf.

    kinds: the types that recipes define. Raises LayoutError if no recipe defines the type of a quantized weight, unless
    `convert`, or if the package gguf can't dequantize the type; ImportError without that package.
    """
    local, path = local_tensor(param), file.path
    if source.plain:
        return source.stored(path)
    alike = len(source.types) == 1
    of_type = [kind for kind in kinds if alike and kind.binding.number == source.held.number]
    own = local.LAYOUT.layout_id if isinstance(local, QuantizedTensor) else ""
    for cls, binding in sorted(of_type, key=lambda kind: kind.cls.LAYOUT.layout_id != own):
        layout = cls.LAYOUT
        try:
            m, k = layout.check_shape(source.shape, name)
        except ValueError:
            break  # the recipe does not support the shape (e.g. 1-D): use dequantized values
        first = next(iter(layout.sources.values()))
        orientations = tuple(one for one, planes in layout.sources.items() if planes == first)
        records, facts = source.records(path), layout.planes(m, k)
        planes = {one: RecordSource(one, cls, binding, records, facts[one], file) for one in first}
        return Entry(cls, source.shape, orientations, planes)
    if isinstance(local, QuantizedTensor) and not convert:
        why = "which no installed recipe states" if alike else "a part in each, which is no recipe"
        raise LayoutError(
            f"{name} is {' and '.join(source.types)} in the file, {why}, and {local.LAYOUT.name} in the model: leave "
            "it plain, as quantize_as_stored does, or pass convert=True, which dequantizes it"
        )
    for one in source.parts:
        if one.type not in PLAIN:
            check_known(one)
    return source.stored(path)


def classes_in(
    path: Path, model: nn.Module, files: str | None, rename: Rename | None
) -> dict[str, type[QuantizedTensor]]:
    """Parameter -> the class of the recipe that defines its type in the file. Embedding tables stay plain, even if they
    are tied: they are looked up, not multiplied. Raises like `layoutc.checkpoint.quantize_as_stored`.

    files: `recipe/binding`, needed if several recipes define a type.
    """
    header = read_model(path)
    names, by_number = names_of(header), dict[int, list[Kind]]()
    every = installed()
    if files is not None and "/" in files:  # a recipe in the working directory, perhaps
        with suppress(ValueError):
            every += [kind for kind in kinds_of([find(files.partition("/")[0]).Tensor]) if kind not in every]
    if files is not None and not any(files in (kind.label, kind.binding.name) for kind in every):
        there = ", ".join(sorted(kind.label for kind in every))
        raise LayoutError(f"no installed recipe has files {files!r} of GGUF; there are {there}")
    for kind in every:
        by_number.setdefault(kind.binding.number, []).append(kind)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    chosen = dict[str, type[QuantizedTensor]]()
    for name, value in model.named_parameters():
        found = names.in_files(file_name(name, rename))
        if found is None or not has(header, found) or id(value) in tables:
            continue
        numbers = {header.tensors[tensor].number for tensor in found.tensors}
        free = value.dim() >= 2 and value.is_floating_point() and not isinstance(value, DTensor | QuantizedTensor)
        of_type = by_number.get(min(numbers), []) if len(numbers) == 1 else []
        named = [kind for kind in of_type if files in (kind.label, kind.binding.name)] or of_type
        if len({kind.cls.LAYOUT.layout_id for kind in named}) > 1:
            labels = ", ".join(sorted(kind.label for kind in named))
            raise LayoutError(f"{name}: several recipes state its type: pass files= one of {labels}")
        if free and named:
            chosen[name] = named[-1].cls
    if not chosen:
        types = ", ".join(sorted({one.type for one in header.tensors.values()}))
        raise LayoutError(
            f"{header.path} holds no parameter of the model in a type that a recipe states (it has {types})"
        )
    return chosen
