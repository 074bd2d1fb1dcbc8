"""The keys under `files`: how other checkpoint formats hold the planes of a recipe's weights."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

PlaneKey = Literal["data", "scale", "zero", "amax", "shape", "groups", "codebook", "zeros", "text"]
FileDtype = Literal[
    "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"
]
Pattern = Annotated[str, Field(min_length=1, max_length=200)]
Size = Annotated[int, Field(ge=1, le=2**31 - 1)]


class Model(BaseModel):
    """A mapping of keys that a spec may have, and of no other."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class FileCodes(Model):
    """Values that files store as codes: value of the code * scale of its block + offset, in fp32, rounded after each
    operation."""

    codebook: Pattern = Field(description="the tensor with the value of each code, F32")
    scale: Pattern = Field(description="the tensor with the scale of each block of codes, F32")
    block: Size = Field(description="codes of a block, counted row by row over the whole tensor")
    offset: Annotated[str, Field(min_length=1, max_length=100)] = Field(
        description="the key in `text` of the number that is added to each value"
    )
    values: Annotated[str, Field(min_length=1, max_length=64)] | None = Field(
        default=None, description="the format whose values written codebooks have; without it, files are only read"
    )


class FileTensor(Model):
    """The tensor that holds one plane; sizes of the names in `layout` stand inline in YAML."""

    name: Pattern = Field(description="its name: `{name}` is the parameter's name, `{module}` its module's")
    dtype: FileDtype = Field(description="its dtype, as safetensors names it; an integer may hold several codes")
    layout: Pattern | None = Field(
        default=None,
        description="einops-style pattern from (rows, columns) to the tensor's dims; `e` counts a weight's matrices, "
        "parentheses join names into one dim; `scalar` is a single value without dims",
    )
    sizes: dict[str, Size] = Field(default={}, description="sizes of names in the layout; one name per group has none")
    pack: Literal["low-first", "high-first"] | None = Field(
        default=None, description="which code fills the low bits first, if not as in `element`"
    )
    form: Annotated[str, Field(max_length=60)] | None = Field(
        default=None, description="what the file stores instead of an fp32 value x: `2688 / x`, `x / 2688`"
    )
    codes: FileCodes | None = Field(
        default=None, description="the file stores the values as codes, so exports lose precision"
    )
    value: dict[str, Any] | None = Field(
        default=None, description="the JSON of a `text`; `rows` and `columns` stand for the weight's sizes"
    )
    any: tuple[str, ...] = Field(default=(), description="keys of `value` whose values differ between files")

    @model_validator(mode="before")
    @classmethod
    def _collect_sizes(cls, data: Any) -> Any:
        """Collects inline integers as sizes; any other key is unknown."""
        if not isinstance(data, dict) or "sizes" in data:
            return data
        sizes = {key: value for key, value in data.items() if type(value) is int}
        return {key: value for key, value in data.items() if key not in sizes} | {"sizes": sizes}


class FileRecord(Model):
    """A type of a container's tensors, whose bytes are the records of this recipe."""

    container: Literal["gguf"] = Field(description="the kind of file: `gguf`")
    type: Annotated[str, Field(min_length=1, max_length=16)] = Field(description="the type's name: `Q8_0`")
    number: Annotated[int, Field(ge=0, le=2**31 - 1)] = Field(description="the type's number in files")


class FileBinding(Model):
    """How files of one program hold this recipe: a tensor for each plane, or records of the rowwise orientation."""

    summary: str = Field(description="one line: which program's files these are", min_length=1, max_length=100)
    record: FileRecord | None = Field(
        default=None, description="a weight is one tensor of its rowwise records; replaces all other keys"
    )
    tensors: dict[PlaneKey, FileTensor] = Field(
        default={},
        description="plane -> the tensor that holds it. Other tensors: `shape`, the weight's two sizes; `groups`, the "
        "block number of each column; `codebook`, the value of each code; `zeros`, a row's zero point 0; `text`, JSON",
    )
    ignore: tuple[Pattern, ...] = Field(
        default=(), description="names of a weight's tensors to ignore, such as scales of activations"
    )
    parts: dict[Pattern, Annotated[tuple[Pattern, ...], Field(min_length=1, max_length=16)]] = Field(
        default={},
        description="parameters that files store in parts, equal shares of rows in order; "
        "`{expert}` in the name of a part counts the matrices of a weight of experts",
    )
    fused: tuple[Annotated[tuple[Pattern, ...], Field(min_length=2, max_length=16)], ...] = Field(
        default=(),
        description="sibling modules that engines fuse into one, such as `[gate_proj, up_proj]`: their weights share "
        "one tensor scale",
    )
    config: dict[str, Any] = Field(default={}, description="the `quantization_config` of config.json")
    recognize: tuple[Pattern, ...] = Field(
        default=(), description="dotted paths in `config` whose values identify these files; `*` matches any key"
    )
    plain: str | None = Field(
        default=None, description="the key of `config` that lists the modules whose weights are not quantized"
    )
    read_only: bool = Field(
        default=False, description="exports don't write such files: their program reads more than tensors and a config"
    )
