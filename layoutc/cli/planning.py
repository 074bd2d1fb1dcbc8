"""What `plan` and `estimate` share: their options, and the plan that both make of what was asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from layoutc.build.lookup import Command, is_given, spec_of, specs_option
from layoutc.cli.shared import MOST_RANKS, FiniteRange, refuse, refusing, split_list, worlds_of

if TYPE_CHECKING:
    from layoutc.budget.mesh import Mesh
    from layoutc.budget.totals import Budget, Setting
    from layoutc.estimate.machine import Machine
    from layoutc.estimate.state import State, Wire
    from layoutc.estimate.work import Use
    from layoutc.models.weights import Model

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
WORLDS = "8,64,512,4096,16384"
LINKS = ("nvlink", "host-memory", "sockets")  # those that were measured
CARDS = ("h100", "h200", "b200")


def choice(name: str, choices: Iterable[str], default: str, words: str) -> Callable[[Command], Command]:
    """An option that takes one of some words."""
    return click.option(f"--{name}", type=click.Choice(list(choices)), default=default, show_default=True, help=words)


def count(name: str, words: str, default: int | None = 1, most: int = MOST_RANKS) -> Callable[[Command], Command]:
    """An option that takes a whole number."""
    kind, shown = click.IntRange(1, most), default is not None
    return click.option(f"--{name}", type=kind, default=default, show_default=shown, metavar="N", help=words)


def _link(ctx: click.Context, param: click.Parameter, word: str | None) -> float | str | None:
    """Bytes a second of `50`, which is GB/s; the name of a link that was measured."""
    if word is None or word in LINKS:
        return word
    with suppress(ValueError):
        if 1e-3 <= float(word) <= 1e5:
            return float(word) * 1e9
    message = f"'{word}' is no link; write GB/s of a card, 0.001 to 100000, as in --link 50, or {', '.join(LINKS)}."
    raise click.BadParameter(message, ctx, param)


def _step(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, float] | None:
    """RANKS:MS -> the ranks, and seconds."""
    if value is None:
        return None
    ranks, _, ms = value.partition(":")
    with suppress(ValueError):
        if 1 <= int(ranks) <= MOST_RANKS and 0 < float(ms) <= 1e8:
            return int(ranks), float(ms) / 1e3
    message = f"'{value}' is no step; write its ranks and its milliseconds, as in --bf16-step 8:412.5."
    raise click.BadParameter(message, ctx, param)


_OPTIONS = (
    specs_option("The folder of recipes."),
    click.option(
        *("--world", "worlds"),
        multiple=True,
        callback=worlds_of,
        default=(WORLDS,),
        show_default=True,
        metavar="N,...",
        help="Numbers of cards (ranks).",
    ),
    choice("card", CARDS, "h200", "The card: its memory and speed."),
    click.option(
        "--link",
        callback=_link,
        default="50",
        show_default=True,
        metavar="GB/S|NAME",
        help="Link of each card across hosts, in each direction: its adapter, or its share of the host's.",
    ),
    click.option(
        "--within",
        callback=_link,
        metavar="GB/S|NAME",
        help=f"Link of each card within a host; measured: {', '.join(LINKS)}.  [default: its NVLink]",
    ),
    count("per-host", "Cards per host.", 8),
    click.option(
        "--latency", type=FiniteRange(0, 1e6), metavar="US", help="Latency of one hop across hosts.  [default: 9.6]"
    ),
    choice("rule", ("ring", "tree"), "ring", "Algorithm of collectives."),
    count("sequence", "Tokens per sequence.", 8192),
    count("batch", "Sequences per card and step.", 1),
    click.option("--low", is_flag=True, help="Low-precision products, where the card has a kernel."),
    click.option("--exchange", is_flag=True, help="Send gradients unquantized, by exchange_gradients."),
    click.option("--gradients", metavar="RECIPE", help="Send gradients as codes of a recipe, by exchange_gradients."),
    click.option(
        "--on-gather/--by-layers",
        default=None,
        help="Where weights are dequantized, as by set_products_.  [default: on gather, where that is free]",
    ),
    click.option("--eager", is_flag=True, help="Do not compile: more host time, more activation memory."),
    click.option("--graph", is_flag=True, help="Capture steps in a CUDA graph: no host time."),
    click.option(
        "--host",
        type=FiniteRange(0.1, 3),
        metavar="FACTOR",
        help="Host time, relative to the measured hosts.  [default: 1]",
    ),
    click.option(
        *("--bf16-step", "plain_step"),
        callback=_step,
        metavar="RANKS:MS",
        help="A measured bf16 step of FSDP2, from which --host follows.",
    ),
    count("together", "Back-to-back steps: trainers read losses every N, and the host works ahead in between.", 1, 100),
)
# Of `plan` alone, as they are where nobody states them.
USUAL: Mapping[str, Any] = {
    **{"use": "quantized", "experts": False, "only": (), "leave": (), "replicas": 1, "tp": 1, "ep": 1},
    **{"experts_dim": 0, "stored": "fp32", "gathered": "bf16", "reduced": "fp32", "moments": 8, "state": "fp32"},
    **{"masters": "fp32", "checkpointing": "none", "ranked": False, "frozen": False, "replica_gradients": None},
    "memory": None,
}


def options(command: Command) -> Command:
    """Adds what both commands take."""
    for one in reversed(_OPTIONS):
        command = one(command)
    return command


def planned(model: Model, asked: Mapping[str, Any]) -> dict[str, Any]:
    """The plan as JSON values. Raises UsageError for what can't be asked."""
    from layoutc.budget.totals import budget
    from layoutc.report.budgets.figures import data_of

    uses = _uses(asked)
    if asked["ranked"] and not asked["low"]:
        uses += _low(uses, asked["card"])
    meshes = [_mesh(model, world, asked) for world in asked["worlds"]]
    setting, factor = _setting(model, asked)
    made = [budget(model, use, mesh, setting) for mesh in meshes for use in uses]
    data = data_of(model, setting, made, asked["sequence"], asked["batch"])
    data["setting"].update({name: asked[name] for name in ("ranked", "gradients", "replica_gradients")})
    data["setting"]["host_factor"] = factor or 1.0
    data["notes"] += _notes(model, asked, factor, meshes, made)
    return data


def _notes(
    model: Model, asked: Mapping[str, Any], factor: float | None, meshes: Sequence[Mesh], made: Sequence[Budget]
) -> list[str]:
    from layoutc.estimate.machine import CARDS as MACHINES
    from layoutc.report import estimates

    notes = estimates.measured(MACHINES[asked["card"]], factor, asked["together"])
    if asked["memory"] is not None:
        notes.append(f"cards have the {asked['memory']:g} GiB of --memory, and an {asked['card'].upper()}'s speed")
    if (wire := _wire(asked)) is not None:
        notes += _exchange_notes(meshes, asked["per_host"], wire)
    if any(one.on_gather for one in made):
        notes += estimates.ON_GATHER
    if asked["tp"] > 1 or asked["ep"] > 1:
        notes.append("time leaves out activations of tensor parallelism and tokens of expert parallelism")
    if left := _experts_left(model, made):
        notes.append(left)
    return notes


def _exchange_notes(meshes: Sequence[Mesh], per_host: int, wire: Wire) -> list[str]:
    """With a number of replicas that each lie within a host, if there is one for the first mesh that needs it."""
    from layoutc.report.estimates import exchanges

    apart = [mesh for mesh in meshes if mesh.crosses(per_host)]
    within = "replicas that lie within hosts"
    if apart and apart[0].world % per_host == 0 and per_host % apart[0].tensor == 0:
        within = f"--replicas {apart[0].world // per_host} on {apart[0].world:,} ranks"
    return exchanges([mesh.world for mesh in apart], per_host, wire, within)


def _experts_left(model: Model, made: Sequence[Budget]) -> str:
    elements = sum(w.elements for layer in model.all_layers for w in layer.weights if w.kind == "experts")
    plain = any(line.kind == "experts" and line.plain for one in made if one.how != "plain" for line in one.weights)
    if not elements or not plain:
        return ""
    share = 100 * elements / model.elements
    return f"experts have {share:.0f}% of the parameters, and some stay plain, as quantize_ leaves them: see --experts"


def _mesh(model: Model, world: int, asked: Mapping[str, Any]) -> Mesh:
    from layoutc.budget.mesh import Mesh
    from layoutc.models.config import known

    mesh = Mesh(world, asked["replicas"], asked["tp"], asked["ep"], asked["experts_dim"])
    if problem := mesh.problem():
        refuse(problem)
    weights = [weight for layer in model.all_layers for weight in layer.weights]
    if mesh.tensor > 1 and all(weight.cut == "none" for weight in weights):
        kinds = ", ".join(known())
        refuse(f"--tp needs a config of {kinds}: how it cuts other models' weights does not follow from their shapes")
    if mesh.experts > 1 and all(weight.kind != "experts" for weight in weights):
        refuse("--ep needs weights of experts, of three dims, and this model has none")
    return mesh


def _setting(model: Model, asked: Mapping[str, Any]) -> tuple[Setting, float | None]:
    """With how many times as long as those that were measured the host takes, if it is known."""
    from layoutc.budget.choice import Picks, check_patterns
    from layoutc.budget.shards import Dtypes
    from layoutc.budget.totals import Setting
    from layoutc.estimate.machine import CARDS as MACHINES
    from layoutc.estimate.machine import links_of
    from layoutc.estimate.work import Load, Runs

    picks = Picks(asked["only"], asked["leave"], asked["experts"])
    with refusing(ValueError):
        check_patterns(model, picks)
    dtypes = Dtypes(BYTES[asked["stored"]], BYTES[asked["gathered"]], BYTES[asked["reduced"]], _state(asked))
    load = Load(asked["sequence"] * asked["batch"], asked["sequence"])
    machine, latency = MACHINES[asked["card"]], asked["latency"]
    if asked["memory"] is not None:
        machine = replace(machine, holds=int(asked["memory"] * 2**30))
    within, far_hop = asked["within"] or machine.within, None if latency is None else latency * 1e-6
    links = links_of(asked["link"], within, asked["per_host"], far_hop, asked["rule"])
    has_host, has_step = asked["host"] is not None, asked["plain_step"] is not None
    for given, clash in (
        (asked["graph"] and asked["eager"], "--graph leaves out the host's time, which --eager adds to"),
        (asked["graph"] and has_host, "--graph leaves out the host's time, which --host is about"),
        (asked["graph"] and has_step, "--graph leaves out the host's time, which --bf16-step is about"),
        (has_host and has_step, "--bf16-step finds what --host states"),
    ):
        if given:
            refuse(f"{clash}; leave out one of the two")
    runs: Runs = "eager" if asked["eager"] else "graph" if asked["graph"] else "compiled"
    setting = Setting(picks, dtypes, load, links, machine, runs, asked["together"], asked["checkpointing"])
    factor = asked["host"] if asked["plain_step"] is None else _host(model, setting, asked["plain_step"])
    return setting.on(machine.with_host(factor or 1.0)), factor


def _host(model: Model, setting: Setting, measured: tuple[int, float]) -> float:
    """How many times as long the host takes on which a step in bf16 was measured: ranks, and seconds."""
    from layoutc.budget.mesh import Mesh
    from layoutc.budget.totals import estimated
    from layoutc.estimate.machine import factor_of
    from layoutc.estimate.work import Use

    ranks, seconds = measured

    def step(machine: Machine) -> float:
        return estimated(model, Use("bf16"), Mesh(ranks), setting.on(machine)).total

    with refusing(ValueError, words=f"--bf16-step {ranks}:{seconds * 1e3:g}: "):
        return factor_of(seconds, setting.machine, step)


def _state(asked: Mapping[str, Any]) -> State:
    """What the optimizer holds; in fp32, or with so many bytes of moments an element."""
    from layoutc.estimate.state import ADAMW, LEAST, MASTERS, STATES, State, Stored

    moments, state = asked["moments"], STATES[asked["state"]]
    if moments != sum(one.nbytes(1) for one in ADAMW.moments):
        if state is not ADAMW:
            refuse(f"--state {asked['state']} already says what moments take; leave out --moments")
        state = State(moments=(Stored(8 * moments),) if moments else (), counter=ADAMW.counter if moments else 0)
    masters = MASTERS[asked["masters"]]
    return state if masters == state.masters else replace(state, masters=masters, small=LEAST - 1, writes_codes=True)


def _wire(asked: Mapping[str, Any]) -> Wire | None:
    """How gradients are exchanged; None: FSDP2 reduces them."""
    from layoutc.estimate.state import EXCHANGED

    if asked["gradients"] is None:
        return EXCHANGED if asked["exchange"] else None
    if asked["exchange"]:
        refuse("--gradients and --exchange each say how gradients travel; leave out one of the two")
    return _wire_in("gradients", asked)


def _wire_in(option: str, asked: Mapping[str, Any]) -> Wire | None:
    """The codes that an option names a recipe of, if it does."""
    from layoutc.cli.reading import plan_of
    from layoutc.estimate.state import wire_of

    if (recipe := asked[option]) is None:
        return None
    with refusing(ValueError, words=f"--{option.replace('_', '-')} {recipe}: "):
        return wire_of(plan_of(spec_of(recipe, asked["folder"])))


def _uses(asked: Mapping[str, Any]) -> list[Use]:
    """The plain weights, then the recipes. Reports what is no recipe for weights."""
    from layoutc.cli.reading import plan_of
    from layoutc.estimate.state import wire_of
    from layoutc.estimate.work import Use

    plain, stated = asked["gathered"], asked["recipes"]
    if asked["ranked"] and not stated:
        from layoutc.report.budgets.answer import losses

        stated = tuple(losses())
    recipes = [one for one in dict.fromkeys(split_list(stated)) if one != plain]
    exchange = _wire(asked)
    among = _wire_in("replica_gradients", asked)
    if among is not None and asked["replicas"] == 1:
        refuse("--replica-gradients says how replicas add up their sums; add --replicas N")
    uses = [Use(plain, exchange=exchange, among=among)]
    if asked["exchange"] and (BYTES[plain] != 2 or asked["reduced"] != "fp32"):
        refuse(
            f"--exchange has nothing to do: gradients in {plain} are reduced in {asked['reduced']}; it is "
            "for those that are reduced in a wider dtype: --gathered bf16 or fp16, and --reduced fp32"
        )
    for option in ("low", "only", "leave", "experts", "on_gather"):
        if is_given(option) and not recipes:
            refuse(f"--{option.replace('_', '-')} says how weights of recipes are used; name a recipe")
    for recipe in recipes:
        made = plan_of(spec_of(recipe, asked["folder"]))
        if made.not_weights:
            refuse(f"{made.layout.name} is for activations and gradients, not for weights: {made.not_weights}")
        wire = exchange
        if asked["exchange"] and made.layout.reduce:
            wire = wire_of(plan_of(spec_of(made.layout.reduce, asked["folder"])))
        for cast in {"quantized": (False,), "cast": (True,), "both": (False, True)}[asked["use"]]:
            uses.append(Use(made.layout.name, made, cast, asked["low"], wire, among, asked["on_gather"]))
        if uses[-1].problem:
            refuse(uses[-1].problem)
    return uses


def _low(uses: Sequence[Use], card: str) -> list[Use]:
    """The same recipes with products in low precision, where the card has kernels."""
    from layoutc.estimate.machine import CARDS as MACHINES
    from layoutc.estimate.work import is_low

    wanted = [replace(use, low=True) for use in uses if use.plan is not None and use.on_gather is not True]
    return [use for use in wanted if is_low(use, MACHINES[card])]
