"""Converting models: quantize weights in place, as the model is built, or at each gather."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from layoutc.runtime import installed
from layoutc.runtime.bindings.fused import groups_of
from layoutc.runtime.cast.plain_state_dicts import give_plain, take_plain
from layoutc.runtime.cast.tensor import CastOnGather
from layoutc.runtime.dispatch import update_warnings
from layoutc.runtime.dispatch.broadcasts import take_sent
from layoutc.runtime.errors import check_model
from layoutc.runtime.facts import Group, Layout
from layoutc.runtime.installed import Recipe
from layoutc.runtime.quantize.amax import reduce_max
from layoutc.runtime.quantize.weights import FLOATS, as_matrix, quantize
from layoutc.runtime.sharding import meshes, registry
from layoutc.runtime.storage import initial_values
from layoutc.runtime.torch_private import local_tensor
from layoutc.runtime.train import replaced_parameters
from layoutc.runtime.train.choosing import Filter, ParamFilter, Use, check_ties, choose, foreign_class, uses
from layoutc.runtime.weight import operators
from layoutc.runtime.weight.tensor import QuantizedTensor, recipe_of

Fused = bool | Sequence[Sequence[str]]
Make = Callable[[Tensor, str, Group | None, Tensor | None], Tensor]  # of values, a name, a group and its amax
_conversions = count()


class Filters(NamedTuple):
    """The filter of modules, and that of parameters."""

    filter_fn: Filter | None
    param_filter: ParamFilter | None

    @property
    def names(self) -> str:
        """Their names, for messages."""
        return "filter_fn" if self.param_filter is None else "param_filter"

    def without(self, name: str, dims: int = 2) -> str:
        """An example that leaves a parameter out. dims: the parameter's."""
        module, _, last = name.rpartition(".")
        if self.param_filter is None and dims < 2:
            rest = "filter_fn=lambda module, name: isinstance(module, nn.Linear) and ..."
            return f"a filter_fn that chooses linear layers, such as {rest}"
        if self.param_filter is not None:
            rest = f"param_filter=lambda name, _: name.endswith({last!r}) and name != {name!r}"
            return f"a param_filter that refuses it, such as {rest}"
        rest = f"filter_fn=lambda module, name: isinstance(module, nn.Linear) and name != {module!r}"
        return f"a filter_fn that refuses its module, such as {rest}"


def quantize_(
    model: nn.Module,
    recipe: Recipe,
    filter_fn: Filter | None = None,
    *,
    param_filter: ParamFilter | None = None,
    keep_values: bool = True,
    share_amax: Fused = False,
) -> list[str]:
    """Replaces `weight` of the chosen modules, or the chosen parameters, by quantized ones; returns their names.

    recipe: a name in layoutc.recipes, in an entry point of that group, or in generated/ of the working directory; the
    folder that `layoutc build` wrote for a recipe; its spec's path; or its module.
    filter_fn(module, fully qualified name): chooses modules; default: every nn.Linear, or with param_filter every
    module.
    param_filter(fully qualified name, parameter): chooses parameters of two dims, or of three (experts, m, k), by any
    name; or a list of fnmatch patterns of names, such as ["*.experts.w?"]. Default: those named `weight`.
    `layoutc.coverage` lists what was chosen, and what was not.

    Weights have 2 dims or more, in fp32, bf16 or fp16. They keep their device, ties among chosen modules, and their
    dtype, which they dequantize to. Call it before fully_shard. If tensor parallelism has sharded a weight, call it on
    all ranks: the shards get the bytes that the whole weight would.

    keep_values: weights that require a gradient keep the values that they are quantized from, in their own dtype, until
    `MasterWeights` starts its masters from them. They also keep plain values that are written later. Each shard keeps
    its own. Without an optimizer the values stay forever: pass False for inference. Frozen weights keep none.

    share_amax: quantizes weights that engines fuse under one amax, also at each step, for recipes with an amax of the
    whole weight. Give groups of sibling modules by their own names, such as [["q_proj", "k_proj", "v_proj"],
    ["gate_proj", "up_proj"]], or True for those in the recipe's `files`. A weight that is written other than by
    `MasterWeights` or a load follows its own amax.

    Changes nothing unless all of it can be done. Raises ValueError with the parameter's name if the recipe does not
    take its shape or dtype, if FSDP2 has already sharded it, or if it is tied to a weight that is not chosen;
    ValueError for a pattern that matches no name, and if nothing plain is chosen; TypeError if model is not a module;
    ShardAlignmentError or LayoutError for tensor-parallel shards that the recipe does not support.

    Example:

        >>> model = nn.Sequential(nn.Linear(128, 128, bias=False))
        >>> layoutc.quantize_(model, "nvfp4")
        ['0.weight']
        >>> model[0].weight.shape
        torch.Size([128, 128])
    """
    check_model(model, "quantize_")
    cls = recipe_class(recipe)
    cls.LAYOUT.check_weights()
    filters = Filters(filter_fn, param_filter)
    return [use.name for use in _replace([model], cls, partial(_quantized, cls, keep_values), filters, share_amax)]


def cast_on_gather_(
    model: nn.Module,
    recipe: Recipe,
    filter_fn: Filter | None = None,
    *,
    param_filter: ParamFilter | None = None,
    share_amax: Fused = False,
) -> list[str]:
    """Makes FSDP2 quantize the chosen weights or parameters each time it gathers them; returns their names.

    The weights keep their dtype and memory, any torch optimizer trains them, and state dicts hold plain values.
    Arguments, ties and errors: as for `quantize_`, which raises the same. Call it before fully_shard. Without
    fully_shard, products quantize the weight. Weights of `share_amax` that FSDP2 does not gather together need
    `precompute_amaxes` after each step. torchao's counterpart is enable_fsdp_float8_all_gather.

    Example:

        >>> model = nn.Sequential(nn.Linear(128, 128, bias=False))
        >>> layoutc.cast_on_gather_(model, "mxfp8")
        ['0.weight']
        >>> model[0].weight.dtype
        torch.float32
    """
    check_model(model, "cast_on_gather_")
    package = installed.find(recipe)
    package.LAYOUT.check_weights()
    casts: type[CastOnGather] = package.CastTensor
    filters, made = Filters(filter_fn, param_filter), partial(_cast, casts)
    return [use.name for use in _replace([model], casts.QUANTIZED, made, filters, share_amax, "cast_on_gather_")]


def _replace(
    roots: list[nn.Module],
    cls: type[QuantizedTensor],
    make: Make,
    filters: Filters,
    fused: Fused,
    caller: str = "quantize_",
    among: set[nn.Module] | None = None,
) -> list[Use]:
    """Replaces the chosen parameters of all roots by the results of `make`. among: the only modules to look at."""
    every = choose(roots, filters.filter_fn, filters.param_filter, among)
    chosen = [use for use in every if recipe_of(use.param) is None]
    for use in chosen:
        _check_weight(cls, use.param, use.name, caller, filters)
    if not chosen:
        raise ValueError(_why_none(roots, every, filters, caller))
    check_ties(roots, chosen, cls.LAYOUT.name, filters.names, filters.without)
    tied: dict[int, list[Use]] = defaultdict(list)
    for use in chosen:
        tied[id(use.param)].append(use)
    groups = _groups(roots, chosen, cls.LAYOUT, fused, caller)
    amaxes = _amaxes(cls, groups) if caller != "cast_on_gather_" else {}
    had_some = {use.module for use in chosen if any(map(recipe_of, use.module.parameters(recurse=False)))}
    for same in tied.values():  # each weight is freed before the next one is quantized
        weight = same[0].param
        group = groups.get(same[0])
        made = make(weight, same[0].name, group, amaxes.get(group) if group else None)
        made = nn.Parameter(made, requires_grad=weight.requires_grad)
        for use in same:
            setattr(use.module, use.key, made)
        update_warnings.mark_replaced(weight, same[0].name, caller)
    module: Any
    for module in {use.module: None for use in chosen}:
        if module not in had_some:  # the hook of a module serves all of its parameters
            module.register_load_state_dict_pre_hook(take_sent)
        if caller == "cast_on_gather_":
            module.register_state_dict_post_hook(give_plain)
            module.register_load_state_dict_pre_hook(take_plain)
    replaced_parameters.record_replacements(roots)
    update_warnings.watch()
    return chosen


def _groups(roots: list[nn.Module], chosen: list[Use], layout: Layout, fused: Fused, caller: str) -> dict[Use, Group]:
    """The groups of weights that are quantized under one amax. Raises ValueError for recipes without one amax for a
    weight, and if no weights are joined."""
    if fused is False:
        return {}
    if not layout.shares_amax or layout.amax_columns is not None or layout.history or layout.amax_of_matrices:
        raise ValueError(
            f"{caller}: {layout.name} has no scale that follows the amax of a whole weight: leave share_amax= out"
        )
    joined = [group for files in layout.files.values() for group in files.fused] if fused is True else fused
    found = dict[Use, Group]()
    for root, number in zip(roots, _conversions, strict=False):
        modules = set(root.modules())
        own = {use.name: use for use in chosen if use.module in modules}
        for name, members in groups_of(own, joined).items():
            found |= {own[member]: (number, name, len(members)) for member in members}
    if not found:
        names = ", ".join(f"[{', '.join(group)}]" for group in dict.fromkeys(map(tuple, joined)))
        raise ValueError(
            f"{caller}: share_amax= joins none of the chosen weights: "
            + (f"none are beside each other as in {names}" if names else f"{layout.name} states no files with groups")
            + '; pass groups of names, such as share_amax=[["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]]'
        )
    return found


def _amaxes(cls: type[QuantizedTensor], groups: dict[Use, Group]) -> dict[Group, Tensor]:
    """The amax of each group, over all shards. Collective if tensor parallelism has sharded weights."""
    found = dict[Group, Tensor]()
    for use, group in groups.items():
        local = local_tensor(use.param.detach())
        if local.is_meta:
            continue
        matrix = as_matrix(local, cls.LAYOUT.check_shape(tuple(local.shape), use.name))
        amax = reduce_max(operators.shared_amax(cls, matrix), meshes.amax_groups(cls.LAYOUT, use.param, use.name))
        found[group] = torch.maximum(amax, found.get(group, amax).to(amax.device))
    return found


def _why_none(roots: list[nn.Module], every: list[Use], filters: Filters, caller: str) -> str:
    if every:
        return f"{caller} found nothing to do: {every[0].name} and all others that were chosen are quantized already"
    what = (
        f"{filters.names} chooses" if any(filters) else "none of its modules is an nn.Linear, and the default chooses"
    )
    weights = [use.name for use in uses(roots) if use.param.dim() > 1]
    shown = ", ".join(weights[:4]) + (", ..." if len(weights) > 4 else "")
    return f"{caller}: {what} no weight of the model, which has {len(weights)} of two dims or more: {shown or 'none'}"


def _check_weight(cls: type[QuantizedTensor], weight: Tensor, name: str, caller: str, filters: Filters) -> None:
    if is_lazy(weight):
        raise ValueError(f"{name} has no shape yet: run the model once, on an input, before {caller}")
    if kind := foreign_class(weight):
        raise ValueError(
            f"{name} has {kind}, and {caller} would drop what its operators do. Leave out the call that made it, or "
            f"pass {filters.without(name, weight.dim())}"
        )
    if isinstance(weight, DTensor) and (caller != "quantize_" or registry.holds(weight)):
        cut_by = "fully_shard" if registry.holds(weight) else "parallelize_module"
        raise ValueError(f"{name} is already sharded: call {caller} before {cut_by}")
    if weight.dtype not in FLOATS:
        raise ValueError(f"{name}: {cls.LAYOUT.name} quantizes float32, bfloat16 and float16, not {weight.dtype}")
    try:
        cls.LAYOUT.check_shape(tuple(weight.shape), name)
    except ValueError as error:
        raise ValueError(f"{error}. To leave it plain, pass {filters.without(name, weight.dim())}") from error
    if isinstance(weight, DTensor):
        meshes.check_shards(cls.LAYOUT, weight, name)


@contextmanager
def quantized_init(
    recipe: Recipe,
    *,
    filter_fn: Filter | None = None,
    param_filter: ParamFilter | None = None,
    keep_values: bool = True,
    share_amax: Fused = False,
) -> Iterator[None]:
    """Quantizes, at its end, the weights of modules that were built inside it. Takes the same arguments as `quantize_`.

    Weights are quantized at the end, not when they are registered, so all initializers run in high precision. On the
    meta device nothing is allocated. After an exception nothing is quantized. Raises as `quantize_`.

    Transformer Engine's counterpart is fp8_model_init, where keep_values is preserve_high_precision_init_val.

    Example:

        >>> with layoutc.quantized_init("nvfp4"):
        ...     model = nn.Linear(128, 256)
        >>> type(model.weight).__name__
        'NVFP4Tensor'
    """
    cls = recipe_class(recipe)
    cls.LAYOUT.check_weights()
    built: dict[nn.Module, None] = {}
    original = nn.Module.__init__

    def recorded(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        built[self] = None

    nn.Module.__init__ = recorded  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__init__ = original  # type: ignore[method-assign]
    children = {child for module in built for child in module.children()}
    roots = [module for module in built if module not in children]
    filters, made = Filters(filter_fn, param_filter), partial(_quantized, cls, keep_values)
    _replace(roots, cls, made, filters, share_amax, among=set(built))


def recipe_class(recipe: Recipe) -> type[QuantizedTensor]:
    """The tensor class of a recipe. Raises ValueError for an unknown recipe."""
    return installed.find(recipe).Tensor  # type: ignore[no-any-return]


def _quantized(
    cls: type[QuantizedTensor], keep_values: bool, weight: Tensor, name: str, group: Group | None, amax: Tensor | None
) -> Tensor:
    """Quantizes a weight; of a DTensor, this rank's shard, to the bytes that the whole weight would have there."""
    local = local_tensor(weight.detach())
    groups = meshes.amax_groups(cls.LAYOUT, weight, name)
    if local.is_meta:
        facts = cls.LAYOUT.planes(*cls.LAYOUT.check_shape(tuple(local.shape), name))
        planes = {plane: torch.empty(f.shape, dtype=f.dtype, device="meta") for plane, f in facts.items()}
        tensor = cls(planes, local.shape, local.dtype)
    else:
        amax = amax if amax is None else amax.to(local.device)
        tensor = quantize(cls, local, group=groups or None, amax=amax)
    tensor.weight_name, tensor.store.writes.trains, tensor.fused = name, keep_values and weight.requires_grad, group
    initial_values.keep(tensor.store, local)
    if not isinstance(weight, DTensor):
        return tensor
    tensor.peers = tuple(group.group_name for group in groups) or None
    mesh, placements = weight.device_mesh, weight.placements
    return DTensor.from_local(tensor, mesh, placements, run_check=False, shape=weight.shape, stride=weight.stride())


def _cast(
    casts: type[CastOnGather], weight: Tensor, name: str, group: Group | None, amax: Tensor | None
) -> CastOnGather:
    tensor = casts(weight.detach())
    tensor.weight_name, tensor._agreed.fused = name, group
    return tensor
