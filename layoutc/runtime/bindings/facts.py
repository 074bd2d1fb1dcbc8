"""Bindings as generated code states them: the tensors of another checkpoint format that hold a recipe's planes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

REST = 0  # the size of a dim that takes the rest
MATRICES = -1  # the size of a dim with one entry per matrix of an expert weight
# transformers' stacked experts, with gate above up.
EXPERTS = (
    (
        "{module}.experts.gate_up_proj",
        ("{module}.experts.{expert}.gate_proj.weight", "{module}.experts.{expert}.up_proj.weight"),
    ),
    ("{module}.experts.down_proj", ("{module}.experts.{expert}.down_proj.weight",)),
)
# Modules that engines fuse into one.
FUSED = (("q_proj", "k_proj", "v_proj"), ("q_a_proj", "kv_a_proj_with_mqa"), ("gate_proj", "up_proj"), ("w1", "w3"))


class Codes(NamedTuple):
    """How files quantize a plane's values: codebook[code] * scale of its block + offset, each step rounded to fp32.

    codebook, scale: patterns of tensor names, like those of planes. block: codes per scale, in the order of the file's
    tensor. offset: its key in the binding's text. values: the codebook of codes that layoutc writes, ascending; () if
    it writes none.
    """

    codebook: str
    scale: str
    block: int
    offset: str
    values: tuple[float, ...] = ()


class BoundPlane(NamedTuple):
    """The tensor of a file that holds one plane.

    name: a pattern, in which {name} is the parameter's name and {module} that without its last part. dtype: as
    safetensors names it. rows, columns: the sizes that the plane's values are split into, outermost first; REST and
    MATRICES depend on the weight. order: the dims of the file's tensor, as indices of these; joined: how many of
    these make up each dim, () for one each; counted: those whose sizes make each dim, if the dims cut the order anew.
    bits: of a value. A value is an entry of the plane; or, below 8 bits, a code that the file packs differently from
    the plane, by low_first and plane_low_first. spread: the plane has one code per byte. scalar: the tensor has no
    dims. over, by: the file has over / x or x / by in place of x. codes: the file has codes of x.
    """

    name: str
    dtype: str
    bits: int
    rows: tuple[int, ...] = (MATRICES, REST)
    columns: tuple[int, ...] = (REST,)
    order: tuple[int, ...] = (0, 1, 2)
    low_first: bool = True
    plane_low_first: bool = True
    scalar: bool = False
    over: float | None = None
    by: float | None = None
    joined: tuple[int, ...] = ()
    spread: bool = False
    codes: Codes | None = None
    of_matrices: bool = False
    counted: tuple[tuple[int, ...], ...] = ()


class RecordBinding(NamedTuple):
    """How a container format holds a weight: in a tensor of a special type, whose bytes are a buffer of records.

    container: the kind of file. type, number: the type's name, and its number in files. elements, nbytes: per record.
    """

    name: str
    summary: str
    container: str
    type: str
    number: int
    buffer: str
    elements: int
    nbytes: int


class Binding(NamedTuple):
    """How one program's files hold the planes of a recipe's first source.

    shape: the name and dtype of a tensor with the weight's two sizes, if there is one. groups: the name and dtype of a
    tensor with each column's block number, and the columns per block. codebook: the name and dtype of a tensor with
    each code's value, and the values. zeros: the name and dtype of a column of zero points that are 0. text: the name
    of a JSON tensor; the JSON, with "rows" and "columns" in place of the weight's sizes; and its keys that may have any
    value. ignored: names of a weight's other tensors, which are left alone. parts: (pattern of a parameter, patterns of
    the parameters that its rows are cut into, in which {expert} is the matrix's number). config: the
    `quantization_config` of config.json; recognized: its paths that identify these files; plain: its key for the
    modules that are not quantized, or "". fused: names of sibling modules that engines fuse into one, so their weights
    share the scale of a whole weight. read_only: exports don't write such files.
    """

    name: str
    summary: str
    planes: Mapping[str, BoundPlane]
    config: Mapping[str, Any]
    recognized: Sequence[str]
    plain: str = ""
    shape: tuple[str, str] | None = None
    ignored: Sequence[str] = ()
    parts: Sequence[tuple[str, Sequence[str]]] = ()
    groups: tuple[str, str, int] | None = None
    codebook: tuple[str, str, tuple[float, ...]] | None = None
    zeros: tuple[str, str] | None = None
    text: tuple[str, Mapping[str, Any], tuple[str, ...]] | None = None
    fused: Sequence[Sequence[str]] = ()
    read_only: bool = False
