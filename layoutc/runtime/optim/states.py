"""How optimizer states are stored: in fp32, or as planes of a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from layoutc.ints.sizes import cdiv
from layoutc.runtime import installed
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.kernels import launch
from layoutc.runtime.sharding import meshes
from layoutc.runtime.weight.tensor import QuantizedTensor, written

FORMS = {"8bit": ("adam_m8", "adam_v8"), "fp8": ("moment_fp8", "moment_fp8_sqrt"), "4bit": ("adam_m4", "adam_v4")}
State = str | Mapping[str, str]


@dataclass(frozen=True)
class Forms:
    """The recipes of moments, by name in `optimizer.state`; a moment without a recipe is fp32.

    least: moments of weights with fewer elements, or with one dim, stay in fp32. The whole weight's elements count.
    """

    recipes: Mapping[str, type[QuantizedTensor]]
    least: int

    @classmethod
    def of(cls, state: State, least: int, moments: Sequence[str]) -> Forms:
        """Parses the `state` argument of an optimizer. Raises ValueError if it is invalid."""
        if isinstance(state, str):
            if state != "fp32" and state not in FORMS:
                raise ValueError(
                    f'state must be one of fp32, {", ".join(FORMS)}, or a dict of recipes such as {{"exp_avg": '
                    f'"adam_m8"}}, not {state!r}'
                )
            names = dict(zip(moments, FORMS.get(state, ()), strict=False))
        else:
            names = {name: recipe for name, recipe in state.items() if recipe != "fp32"}
        if unknown := sorted(names.keys() - set(moments)):
            raise ValueError(
                f"state={state!r}: this optimizer has no state {', '.join(unknown)}; it has {', '.join(moments)}"
            )
        return cls({name: _tensor_of(recipe) for name, recipe in names.items()}, least)

    def applies(self, param: Tensor) -> bool:
        """Whether a parameter is large enough for recipes. The whole size counts, however it is sharded."""
        return param.dim() >= 2 and param.numel() >= self.least

    def recipe(self, param: Tensor, name: str) -> type[QuantizedTensor] | None:
        """The recipe of a parameter's moment; None: fp32. It does not depend on the number of ranks."""
        cls = self.recipes.get(name)
        if cls is None or not self.applies(param):
            return None
        try:
            cls.LAYOUT.check_shape(tuple(param.shape))
        except ValueError:  # rows are not whole blocks
            return None
        return cls

    def check(self, param: Tensor, name: str) -> None:
        """Raises LayoutError or ValueError, on all ranks, for a parameter whose cuts split blocks of its moments."""
        for moment in self.recipes:
            if (cls := self.recipe(param, moment)) is not None and isinstance(param, DTensor):
                meshes.check_shards(cls.LAYOUT, param, f"{moment} of {name}")


def _tensor_of(recipe: str) -> type[QuantizedTensor]:
    cls: type[QuantizedTensor] = installed.find(recipe).Tensor
    layout = cls.LAYOUT
    if layout.shares_amax or layout.stochastic or layout.block_rows > 1:
        raise ValueError(
            f"{recipe} can't hold optimizer state: its scales must cover blocks along rows alone, and its elements "
            "round to nearest, so that a shard of rows equals the same rows of the whole state"
        )
    return cls


def as_matrix(x: Tensor) -> Tensor:
    """A shard as the matrix that kernels see: leading dims are flattened, and a vector is one row."""
    return x.reshape(prod(x.shape[:-1]), x.shape[-1]) if x.dim() else x.reshape(1, 1)


def zeros(like: Tensor, cls: type[QuantizedTensor] | None) -> Tensor:
    """A state of zeros with the shape of a shard."""
    if cls is None:
        return torch.zeros(like.shape, dtype=torch.float32, device=like.device)
    layout = cls.LAYOUT
    m, k = prod(like.shape[:-1]), like.shape[-1]
    planes = launch.new(layout.written(m, k, layout.orientations), like.device)
    for name, plane in planes.items():
        layout.fill_with_zeros(name, plane)
    return cls(planes, like.shape, torch.float32, matrix=(m, k))


def read(state: Tensor) -> Tensor:
    """A state's fp32 values as a matrix; a view if the state is fp32."""
    if not isinstance(state, QuantizedTensor):
        return as_matrix(state)
    return type(state).matrix_values(
        state.store.planes, *state.store.matrix, state.LAYOUT.orientations[0], torch.float32
    )


def write(state: Tensor, values: Tensor) -> None:
    """Writes a matrix of fp32 values into a state."""
    if not isinstance(state, QuantizedTensor):
        if state.data_ptr() != values.data_ptr():  # `read` copied it: it is in another order, as in channels_last
            state.copy_(values.view(state.shape))
        return
    made = type(state).quantize_matrix(values, None, state.LAYOUT.orientations, state.store.planes)
    for name, plane in made.items():
        if plane is not state.store.planes[name]:
            state.store.planes[name].copy_(plane)
    written([state])


def converted(value: Tensor, cls: type[QuantizedTensor] | None) -> Tensor:
    """A shard's loaded state, converted to the recipe `cls`, or to fp32 if it is None.

    A state in the same recipe keeps its bytes; any other is dequantized, then quantized if there is a recipe.
    """
    if isinstance(value, QuantizedTensor):
        if cls is not None and value.LAYOUT.layout_id == cls.LAYOUT.layout_id:
            return value
        value = read(value).view(value.shape)
    if cls is None:
        return value.to(torch.float32)
    made = zeros(value, cls)
    write(made, as_matrix(value.to(torch.float32)))
    return made


def refuse_bf16_masters(param: Tensor, name: str) -> None:
    """Raises LayoutError for shards that are neither rows of the whole weight nor columns cut at multiples of 8."""
    for mesh_dim, dim in meshes.cuts(param):
        assert isinstance(param, DTensor)
        each = cdiv(param.shape[dim], param.device_mesh.size(mesh_dim))
        is_last = dim % param.dim() == param.dim() - 1
        if dim == 0 or each >= param.shape[dim] or (is_last and each % 8 == 0):
            continue
        raise LayoutError(
            f"{name} of shape {tuple(param.shape)} is cut on dim {dim} every {each}. masters=bf16 rounds by "
            "random bits that eight columns of a row share: shard dim 0, cut the last dim at multiples of 8, or pass "
            'masters="fp32"'
        )
