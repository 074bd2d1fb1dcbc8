"""Bindings as generated code states them: the tensors of another program's files that hold a recipe's planes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

REST = 0  # the size of a dim that takes what is left
MATRICES = -1  # the size of a dim with an entry for each matrix of a weight of experts
# Experts of transformers' models, which are stacked there, gate over up.
EXPERTS = (
    (
        "{module}.experts.gate_up_proj",
        ("{module}.experts.{expert}.gate_proj.weight", "{module}.experts.{expert}.up_proj.weight"),
    ),
    ("{module}.experts.down_proj", ("{module}.experts.{expert}.down_proj.weight",)),
)
# Modules that engines join into one.
FUSED = (("q_proj", "k_proj", "v_proj"), ("q_a_proj", "kv_a_proj_with_mqa"), ("gate_proj", "up_proj"), ("w1", "w3"))


class Codes(NamedTuple):
    """What codes of a plane's values stand for, where files have quantized these: value of the code * scale of its
    block + offset, in fp32, rounded after each.

    codebook, scale: patterns of the names of tensors, as those of planes. block: codes of one scale, in the order of
    the file's tensor. offset: the key of the binding's text that has it. values: the codebook of codes that are made,
    ascending; () if none are.
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
    MATRICES are not known before the weight. order: the dims of the file's tensor, as indices of these; joined: how
    many of these make up each dim, () for one. bits: of a value, which is an entry of the plane; or, below 8, a code
    that is packed otherwise in the file than in the plane, as low_first and plane_low_first say; spread: in the plane,
    it has a byte of its own. scalar: the tensor has no dims. over, by: the file has over / x or x / by in
    place of x. codes: it has codes of x.
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


class RecordBinding(NamedTuple):
    """How one container holds a weight: in a tensor of a type of its own, whose bytes are a buffer of records.

    container: the kind of file. type, number: the type's name, and its number in files. elements, nbytes: of a record.
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
    """How the files of one program hold the planes of a recipe's first source.

    shape: the name and dtype of a tensor with the weight's two sizes, if there is one. groups: those of a tensor with
    the number of each column's block, and the columns of a block. codebook: those of a tensor with the value of each
    code, and these. text: the name of a tensor with JSON; the JSON, in which "rows" and "columns" stand for the
    weight's sizes; and its keys that may have any value. ignored: names of tensors beside
    a weight that are left alone. parts: (pattern of a parameter, patterns of those that its rows are cut into); in
    these, {expert} counts the matrices. config: the `quantization_config` of config.json; recognized: paths in it that
    tell these files from others; plain: its key for the modules that are not quantized, or "". fused:
    modules beside each other, by their own names, that engines join into one, so that their weights share the scale
    that a whole weight has.
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
    text: tuple[str, Mapping[str, Any], tuple[str, ...]] | None = None
    fused: Sequence[Sequence[str]] = ()
