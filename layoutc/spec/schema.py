"""The YAML surface as types: its keys and their values.

spec/checks decides whether a spec makes sense as a whole, and layout/ what it means. Names of formats are not a closed
set here, since a spec may define its own.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from layoutc.spec.bindings import FileBinding, Model, Size
from layoutc.spec.rules import RULES

LANGUAGE = 1  # version of the spec language

Code = Annotated[int, Field(ge=0, le=255)]
Order = tuple[int, ...]  # the entries of a swizzle's name, in stored order
Value = float | int | bool | str
RecordFields = Annotated[str, Field(max_length=200)]
Use = Literal["weight", "state", "wire"]
RecipeName = Annotated[str, Field(max_length=40)]
ProductName = Literal["forward", "grad_input", "grad_weight"]

# Fields that collect inline YAML keys; they are not keys themselves.
COLLECTED = frozenset({"parameters", "sizes"})


class Shape(Model):
    """What the weight's sizes must be multiples of."""

    m: Size = Field(default=1, description="rows (the product of all leading dims) come in multiples of this")
    k: Size = Field(default=1, description="columns (the contraction dim) come in multiples of this")


class FormatDef(Model):
    """A number format by definition: sign | exponent | mantissa, most significant bit first; or an integer."""

    sign: Literal[0, 1] | None = Field(default=None, description="sign bits")
    exponent: Annotated[int, Field(ge=1, le=8)] | None = Field(default=None, description="exponent bits")
    mantissa: Annotated[int, Field(ge=0, le=7)] | None = Field(default=None, description="mantissa bits")
    bias: Annotated[int, Field(ge=-126, le=253)] | None = Field(default=None, description="exponent bias")
    integer: Annotated[int, Field(ge=2, le=8)] | None = Field(
        default=None, description="bits of a two's complement integer, instead of sign, exponent, mantissa and bias"
    )
    fraction: Annotated[int, Field(ge=0, le=8)] | None = Field(
        default=None, description="an integer counts steps of two to minus this"
    )
    symmetric: bool | None = Field(default=None, description="an integer's lowest code is not used")
    offset: Annotated[int, Field(ge=-1, le=254)] | None = Field(
        default=None, description="an integer's code is its steps plus this, instead of two's complement"
    )
    values: Annotated[tuple[float | Literal["nan"], ...], Field(max_length=256)] | None = Field(
        default=None, description="a codebook: the value of each code; replaces all keys but `ties`"
    )
    ties: Literal["down", "even"] | None = Field(
        default=None, description="how a codebook rounds midpoints: to the lower value, or to the even code"
    )
    subnormals: bool = Field(default=True, description="exponent 0 holds zero and subnormals, not one more binade")
    inf: tuple[Code, ...] = Field(default=(), description="codes of infinity, without their sign bit")
    nan: tuple[Code, ...] = Field(
        default=(), description="codes that are not numbers, without their sign bit; or the sign bit alone"
    )
    torch: str | None = Field(default=None, description="the torch dtype that holds one such code in a byte")


class Element(Model):
    """The format of a stored element and how codes narrower than a byte are packed."""

    format: str = Field(description="name of a built-in format of up to 8 bits, or of one under `formats`")
    pack: Literal["low-first", "high-first"] = Field(
        "low-first", description="which code fills a byte's low bits first"
    )
    round: Literal["nearest", "stochastic"] = Field(
        default="nearest", description="how an element is rounded into its format: ties to even, or by random bits"
    )
    root: bool = Field(default=False, description="quantize square roots and square decoded values; for second moments")


class History(Model):
    """Delayed scaling: the amax comes from earlier steps."""

    length: Annotated[int, Field(ge=1, le=65536)] = Field(description="how many amaxes are kept")
    pick: Literal["max", "most-recent"] = Field(description="which of them is used")


class _Ruled(Model):
    """A format, and the rule that makes its values; the rule's parameters stand inline in YAML."""

    format: str = Field(description="f32, a built-in format of 8 bits, or one under `formats`")
    rule: str = Field(description="name of a scale rule")
    round: Literal["nearest", "up", "down"] = Field(
        default="nearest", description="how a scale is rounded into its format"
    )
    parameters: dict[str, Value] = Field(default={}, description="every parameter of the rule, defaults filled in")

    @model_validator(mode="before")
    @classmethod
    def _collect_parameters(cls, data: Any) -> Any:
        """Collects inline keys that the rule knows as `parameters`; any other key is unknown."""
        if not isinstance(data, dict) or "parameters" in data:
            return data
        name = data.get("rule")
        rule = RULES.get(name) if isinstance(name, str) else None
        own = set(rule.parameters) if rule else set()
        # The checks report another rule's parameter, since they can name that rule.
        elsewhere = {key for other in RULES.values() for key in other.parameters}
        parameters = {key: value for key, value in data.items() if key in own | elsewhere}
        if rule:
            numbers = {key for key, parameter in rule.parameters.items() if parameter.type == "number"}
            parameters = rule.defaults | {
                key: float(value) if key in numbers and type(value) is int else value
                for key, value in parameters.items()
            }
        rest = {key: value for key, value in data.items() if key not in own | elsewhere}
        return rest | {"parameters": parameters}


class Block(Model):
    """The elements that share one scale."""

    m: Size | Literal["all"] = Field(description="rows of a block, or `all`")
    k: Size | Literal["all"] = Field(description="columns of a block, or `all`")


class Super(_Ruled):
    """Scales of scales: what the scales, and the zero points, of a super-block share."""

    block: Block = Field(description="elements of a super-block, which holds whole blocks")
    offset: Literal["mean"] | None = Field(
        default=None, description="subtracted from a super-block's scales before they are quantized; stored in f32"
    )


class Scale(_Ruled):
    """The format of a scale and the rule that makes it from an amax; the rule's parameters stand inline in YAML."""

    zero: str | None = Field(
        default=None, description="format of the zero points, for a rule that makes them: an integer, f16 or bf16"
    )
    history: History | None = Field(
        default=None, description="take the amax from earlier steps (whole-tensor scales only)"
    )
    super: Super | None = Field(default=None, description="quantize the scales, with a scale for each super-block")


class TensorLevel(Model):
    """One more scale level, for the whole weight, or for each matrix of a stack."""

    amax: Literal["f32"] = Field(description="format of the weight's amax, the maximum over all shards")
    per: Literal["weight", "matrix"] = Field(
        default="weight", description="what an amax covers: the weight, or each matrix of a weight of experts"
    )


class Buffer(Model):
    """How a GEMM reads one buffer: the order of its dims and what each is padded to."""

    layout: str = Field(description="axes, outermost first: `m k`, `k m`, `m k/16`, `scalar`", max_length=40)
    pad: Annotated[tuple[Size, ...], Field(max_length=2)] = Field(
        default=(), description="padding multiple of each dim"
    )
    swizzle: str | None = Field(
        default=None, description="einops-style pattern of the padded dims: how they are stored", max_length=200
    )
    sizes: dict[str, Size | Order] = Field(
        default={}, description="size of each name of the swizzle but one per group, or the order of its entries"
    )
    words: Literal[16, 32, 64] | None = Field(
        default=None, description="bits of a word: the last dim counts int16, int32 or int64; first code lowest"
    )

    @model_validator(mode="before")
    @classmethod
    def _collect_sizes(cls, data: Any) -> Any:
        """Collects inline integers and lists as sizes if there is a swizzle; any other key is unknown."""
        if not isinstance(data, dict) or "sizes" in data or "swizzle" not in data:
            return data
        own = {key: value for key, value in data.items() if key not in cls.model_fields and is_size(value)}
        return {key: value for key, value in data.items() if key not in own} | {"sizes": own}


def is_size(value: object) -> bool:
    """True for the size of a swizzle's name: a number, or a list of numbers."""
    return type(value) is int or (isinstance(value, tuple) and all(type(one) is int for one in value))


class Record(Model):
    """Codes and scales of a run of elements in one buffer, one after another."""

    size: Size = Field(description="elements of a record, along the contracted axis")
    fields: Annotated[tuple[RecordFields, ...], Field(min_length=1, max_length=64)] = Field(
        description="what a record holds, in order: `data`, `scale 0:4 bits 0:6 | scale 4:8 bits 4:6`"
    )


class Quantize(Model):
    """What one orientation quantizes differently from the rest of the recipe."""

    element: Element | None = Field(default=None, description="in place of the recipe's `element`")
    scale: Scale | None = Field(default=None, description="in place of the recipe's `scale`")


class Transform(Model):
    """What values are multiplied by before scales are found: a Hadamard matrix, in groups along the contracted axis."""

    hadamard: Size = Field(description="steps of the contracted axis that are transformed together, a power of two")
    signs: Annotated[int, Field(ge=0)] = Field(
        default=0, description="bit i flips the sign of step i of each group before the transform"
    )


class Orientation(Model):
    """One of the two ways in which a GEMM reads the weight."""

    quantize: Quantize = Field(default_factory=Quantize, description="formats and rule of this orientation alone")
    transform: Transform | None = Field(default=None, description="transforms values before scales are computed")
    block: Block
    data: Buffer
    scale: Buffer
    zero: Buffer | None = Field(default=None, description="layout of zero points, if not that of the scales")
    super: Buffer | None = Field(default=None, description="layout of scales of scales, if not that of the data")
    record: Record | None = Field(default=None, description="an extra buffer with codes and scales in records")


class Orientations(Model):
    """Rowwise serves the forward pass, columnwise the backward pass."""

    rowwise: Orientation
    columnwise: Orientation | None = None


class GemmScale(Model):
    """How a padded scale buffer becomes the bytes that a GEMM wants; sizes of the names stand inline in YAML."""

    swizzle: str = Field(description="einops-style pattern over (free axis, contraction axis)", max_length=200)
    sizes: dict[str, Size] = Field(default={}, description="size of every name but the first of each group")

    @model_validator(mode="before")
    @classmethod
    def _collect_sizes(cls, data: Any) -> Any:
        """Collects inline integers as sizes; any other key is unknown."""
        if not isinstance(data, dict) or "sizes" in data:
            return data
        sizes = {key: value for key, value in data.items() if type(value) is int and key != "swizzle"}
        return {key: value for key, value in data.items() if key not in sizes} | {"sizes": sizes}


class Gemm(Model):
    """What only a GEMM needs; planes never hold it."""

    scale: GemmScale | None = Field(default=None, description="the order in which a GEMM reads padded scales")
    activation: RecipeName | None = Field(
        default=None, description="the recipe that quantizes activations, for low-precision products"
    )
    gradient: RecipeName | None = Field(
        default=None, description="the recipe that quantizes gradients of outputs; default: `activation`"
    )
    dequantize: Annotated[tuple[ProductName, ...], Field(max_length=3)] = Field(
        default=(), description="products that dequantize the weight and multiply in the activations' dtype"
    )


class Spec(Model):
    """One recipe: where every bit of a quantized weight lies."""

    layoutc: Literal[1] = Field(description="version of the spec language")
    name: str = Field(description="the recipe's name, which is also the file's", max_length=40)
    summary: str = Field(description="one line: what this recipe is", min_length=1, max_length=100)
    use: Use = Field(
        default="weight", description="what it quantizes: weights, optimizer state (moments), or gradients on the wire"
    )
    reduce: RecipeName | None = Field(
        default=None, description="the default recipe for exchanging these weights' gradients"
    )
    shape: Shape = Field(default_factory=Shape, description="multiples that the weight's sizes must have")
    formats: dict[str, FormatDef] = Field(default={}, description="the spec's own formats, by name")
    element: Element
    scale: Scale
    tensor: TensorLevel | None = Field(default=None, description="a second scale level: the amax of the whole weight")
    orientations: Orientations
    gemm: Gemm | None = Field(default=None, description="what GEMMs need beyond the buffers' layout")
    files: dict[str, FileBinding] = Field(
        default={}, description="how other checkpoint formats hold the recipe, by name"
    )
