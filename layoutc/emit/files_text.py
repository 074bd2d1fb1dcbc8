"""What files.py says: how files of other programs hold the recipe's planes."""

from __future__ import annotations

import json
import textwrap

from layoutc.layout.bindings import Binding, BoundPlane
from layoutc.layout.layout import Layout
from layoutc.spec.notation import AS_STORED, MATRICES

CODEBOOK = "CODEBOOK"  # the name of the elements' own
# What the runtime has a name for, as most recipes state it.
_OF_EXPERT = "{module}.experts.{expert}."
EXPERTS = (
    ("{module}.experts.gate_up_proj", (f"{_OF_EXPERT}gate_proj.weight", f"{_OF_EXPERT}up_proj.weight")),
    ("{module}.experts.down_proj", (f"{_OF_EXPERT}down_proj.weight",)),
)
FUSED = (("q_proj", "k_proj", "v_proj"), ("q_a_proj", "kv_a_proj_with_mqa"), ("gate_proj", "up_proj"), ("w1", "w3"))
LINE = 116  # characters of values


def files_lines(layout: Layout) -> list[str]:
    """The entries of FILES, a line each; none for a recipe that states no files."""
    return [line for binding in layout.files for line in _binding(binding)]


def codebook_lines(layout: Layout) -> dict[str, list[str]]:
    """The codebooks that bindings state, by name, their values in as few lines as hold them."""
    found = {CODEBOOK: next((binding.codebook[2] for binding in layout.files if binding.codebook), ())}
    found |= {_name_of(plane): plane.code_values for binding in layout.files for plane in binding.planes}
    return {
        name: textwrap.wrap(", ".join(map(repr, values)) + ",", LINE, break_on_hyphens=False)
        for name, values in found.items()
        if values
    }


def _name_of(plane: BoundPlane) -> str:
    return f"VALUES_OF_{plane.codes.values.upper()}" if plane.codes and plane.codes.values else ""


def container_lines(layout: Layout) -> list[str]:
    """The entries of CONTAINERS, a line each; none for a recipe whose records no container holds."""
    return [
        f"RecordBinding(name={one.name!r}, summary={json.dumps(one.summary)}, container={one.container!r}, "
        f"type={one.type!r}, number={one.number}, buffer={one.buffer!r}, elements={one.elements}, nbytes={one.nbytes}),"
        for one in layout.containers
    ]


def _binding(binding: Binding) -> list[str]:
    shape = f"({', '.join(map(json.dumps, binding.shape))})" if binding.shape else ""
    groups = "None" if binding.groups is None else f"({', '.join(map(json.dumps, binding.groups))})"
    codebook, text = binding.codebook, binding.text
    parts = _tuple([f"({json.dumps(whole)}, {_strings(parts)})" for whole, parts in binding.parts])
    parts = "EXPERTS" if binding.parts == EXPERTS else parts
    fused = "FUSED" if binding.fused == FUSED else _tuple([_strings(group) for group in binding.fused])
    return [
        f'"{binding.name}": Binding(',
        f'    name="{binding.name}",',
        f'    summary="{binding.summary}",',
        "    planes={",
        *(f'        "{plane.plane}": {_plane(plane)},{_comment(plane)}' for plane in binding.planes),
        "    },",
        *([f"    shape={shape},"] if shape else []),
        *([f"    groups={groups},"] if binding.groups else []),
        *([f"    codebook=({json.dumps(codebook[0])}, {json.dumps(codebook[1])}, {CODEBOOK}),"] if codebook else []),
        *([f"    text=({json.dumps(text[0])}, {json.loads(text[1])!r}, {_strings(text[2])}),"] if text else []),
        *([f"    ignored={_strings(binding.ignored)},"] if binding.ignored else []),
        *([f"    parts={parts},"] if binding.parts else []),
        f"    config={json.loads(binding.config)!r},",
        f"    recognized={_strings(binding.recognized)},",
        *([f'    plain="{binding.plain}",'] if binding.plain else []),
        *([f"    fused={fused},"] if binding.fused else []),
        "),",
    ]


def _plane(plane: BoundPlane) -> str:
    arguments = [json.dumps(plane.name), f'"{plane.dtype}"', str(plane.bits)]
    if plane.layout is None:
        arguments.append("scalar=True")
    elif plane.layout != AS_STORED:
        names = (*plane.layout.rows, *plane.layout.columns)
        sizes = {name: str(plane.sizes.get(name, "REST")) for name in names} | {MATRICES: "MATRICES"}
        for key, group in (("rows", plane.layout.rows), ("columns", plane.layout.columns)):
            arguments.append(f"{key}={_tuple([sizes[name] for name in group])}")
        arguments.append(f"order={_tuple([str(names.index(name)) for name in plane.layout.order])}")
    if plane.layout is not None and plane.layout.joined:
        arguments.append(f"joined={_tuple(list(map(str, plane.layout.joined)))}")
    arguments += [f"{key}=True" for key in ("spread", "of_matrices") if getattr(plane, key)]
    arguments += [f"{key}=False" for key in ("low_first", "plane_low_first") if not getattr(plane, key)]
    arguments += [f"{key}={value!r}" for key, value in (("over", plane.over), ("by", plane.by)) if value is not None]
    if (codes := plane.codes) is not None:
        stated = [json.dumps(codes.codebook), json.dumps(codes.scale), str(codes.block), json.dumps(codes.offset)]
        stated += [_name_of(plane)] if plane.code_values else []
        arguments.append(f"codes=Codes({', '.join(stated)})")
    return f"BoundPlane({', '.join(arguments)})"


def _comment(plane: BoundPlane) -> str:
    return f"  # {plane.layout.pattern}" if plane.layout not in (None, AS_STORED) and plane.layout else ""


def _strings(values: tuple[str, ...]) -> str:
    return _tuple([json.dumps(value) for value in values])


def _tuple(values: list[str]) -> str:
    return "()" if not values else f"({values[0]},)" if len(values) == 1 else f"({', '.join(values)})"
