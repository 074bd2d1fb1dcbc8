"""The YAML surface as JSON Schema, for editors: completion, hover texts, underlined typos.

Derived from the models in schema.py, and from the known formats and rules. It is weaker than `layoutc check`: it checks
keys, types and names, but not whether they fit together.
"""

from __future__ import annotations

from typing import Any

from layoutc.spec.formats import BUILTIN
from layoutc.spec.rules import RULES, Parameter
from layoutc.spec.schema import Spec

_TYPES = {"number": "number", "integer": "integer", "boolean": "boolean", "choice": "string"}


def json_schema() -> dict[str, Any]:
    """The schema of a spec file (draft 2020-12)."""
    schema = Spec.model_json_schema()
    parts: dict[str, Any] = schema["$defs"]
    own = {"type": "string", "pattern": "^[a-z][a-z0-9_]*$", "description": "one of the spec's own formats"}
    elements = [name for name, fmt in BUILTIN.items() if fmt.bits <= 8 and (fmt.sign or fmt.values)]
    scales = [name for name, fmt in BUILTIN.items() if fmt.bits >= 8]
    parts["Element"]["properties"]["format"] |= {"anyOf": [{"enum": elements}, own]}
    for name in ("Scale", "Super"):
        scale = parts[name]
        scale["properties"]["format"] |= {"anyOf": [{"enum": scales}, own]}
        scale["properties"]["rule"] |= {"enum": list(RULES)}
        del scale["properties"]["parameters"]
        for rule in RULES.values():
            scale["properties"] |= {key: _parameter(parameter) for key, parameter in rule.parameters.items()}
        scale["allOf"] = [_only_its_parameters(rule.name) for rule in RULES.values()]
    gemm = parts["GemmScale"]
    gemm["additionalProperties"] = gemm["properties"].pop("sizes")["additionalProperties"]
    buffer = parts["Buffer"]
    sizes = buffer["properties"].pop("sizes")["additionalProperties"]
    buffer |= {
        "additionalProperties": sizes,
        "if": {"required": ["swizzle"]},
        "else": {"propertyNames": {"enum": list(buffer["properties"])}},
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema | {"title": "layoutc spec"}


def _parameter(parameter: Parameter) -> dict[str, Any]:
    """The schema of a scale rule's inline parameter."""
    entry: dict[str, Any] = {"type": _TYPES[parameter.type], "default": parameter.default, "description": parameter.doc}
    return entry | ({"enum": list(parameter.choices)} if parameter.choices else {})


def _only_its_parameters(name: str) -> dict[str, Any]:
    """Forbids other rules' parameters under a rule."""
    others = {key for rule in RULES.values() for key in rule.parameters} - set(RULES[name].parameters)
    return {
        "if": {"properties": {"rule": {"const": name}}, "required": ["rule"]},
        "then": {"properties": dict.fromkeys(sorted(others), False)},
    }
