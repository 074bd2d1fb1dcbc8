"""The panels of the page that `charts.py` draws, and the colours that variants have in all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import fmean, median
from typing import Any

from chart_files import Curves, Found

PLAIN = {"bf16": "#4d4d4d", "fp32": "#a6a6a6", "torchao": "#e69f00", "torchao-rowwise": "#f3d08a"}
RECIPES = {
    **{"fp8_current": "#0072b2", "fp8_block": "#009e73", "mxfp8": "#cc79a7", "nvfp4": "#d55e00"},
    **{"fp8_rowwise": "#56b4e9", "fp8_delayed": "#8c564b"},
}
OTHERS = ("#7f3c8d", "#3969ac", "#80ba5a", "#cf1c90", "#4b4b8f", "#a5aa99")  # recipes that have no colour of their own
PARTS = {
    **{"products": "#1f4e79", "attention": "#5b8db8", "quantize": "#c8553d", "gather": "#e9b44c"},
    **{"optimizer": "#6a994e", "copies": "#b8a1c9", "other": "#bdbdbd", "idle": "#f2f2f2"},
}
Groups = dict[str, dict[str, tuple[float, float, float, list[float]]]]  # variant -> height, low, high, runs
PEERS = {"torch.compile": ("D", "#000000"), "torchao": ("s", PLAIN["torchao"])}


# -------------------------------------------------------------------------------------------------------------- colours
class Look:
    """How variants look in all panels: a colour for each recipe, paler where weights are cast on gather, and hatched
    where products are not in low precision."""

    def __init__(self, names: Iterable[str]) -> None:
        self.seen: list[str] = []  # what is drawn, by the names of recipes, in order
        self.paler = self.hatched = False
        unknown = sorted({recipe_of(name) for name in names} - RECIPES.keys() - PLAIN.keys())
        self._others = {name: OTHERS[i % len(OTHERS)] for i, name in enumerate(unknown)}

    def colour(self, variant: str) -> str:
        """As matplotlib names it. What is asked for is in the page's legend from then on."""
        name = recipe_of(variant)
        if name not in self.seen:
            self.seen.append(name)
        colour = PLAIN.get(name) or RECIPES.get(name) or self._others[name]
        if variant.startswith("cast:"):
            self.paler = True
            return paler(colour)
        return colour

    def bar(self, variant: str, products: bool) -> dict[str, Any]:
        """How its bars are drawn. products: they are of something that multiplies."""
        hatched = products and ":" in variant and not variant.endswith("+low")
        self.hatched |= hatched
        hatch = "/////" if hatched else None
        return {"facecolor": self.colour(variant), "hatch": hatch, "edgecolor": "white", "linewidth": 0.5}

    def legend(self) -> list[Any]:
        """Its entries."""
        order = [name for name in (*PLAIN, *RECIPES, *self._others) if name in self.seen]
        handles = [patch(facecolor=self.colour(name), label=name) for name in order]
        if self.paler:
            handles.append(patch(facecolor=paler("#707070"), label="paler: cast on gather"))
        if self.hatched:
            look = {"facecolor": "#707070", "edgecolor": "white", "hatch": "/////"}
            handles.append(patch(**look, label="hatched: products of dequantized weights"))
        return handles


def paler(colour: str) -> str:
    """Half way to white."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * 0.55):02x}" for part in parts)


def recipe_of(variant: str) -> str:
    """`layoutc:fp8_block+low` -> fp8_block; others as they are."""
    return variant.partition(":")[2].removesuffix("+low") or variant


def named(variant: str) -> str:
    """A variant in words."""
    use, _, rest = variant.partition(":")
    if not rest:
        return variant
    return recipe_of(variant) + (", cast" if use == "cast" else "") + ("" if rest.endswith("+low") else ", dequantized")


# --------------------------------------------------------------------------------------------------------------- panels
def clusters(steps: list[dict[str, Any]]) -> dict[tuple[int, str], dict[str, list[dict[str, Any]]]]:
    """(batch, mode) -> variant -> its runs."""
    found: dict[tuple[int, str], dict[str, list[dict[str, Any]]]] = {}
    for row in sorted(steps, key=lambda row: (row["mode"], row["batch"])):
        found.setdefault((row["batch"], row["mode"]), {}).setdefault(row["variant"], []).append(row)
    return found


def _line(row: dict[str, Any]) -> tuple[float, float]:
    """The fastest and the slowest step."""
    low = row.get("fastest_ms", row["median_ms"] - row["spread_ms"] / 2)
    return low, low + row["spread_ms"]


def _bars(axes: Any, look: Look, groups: Groups, products: bool = False) -> None:
    """Groups of bars."""
    at, ticks, top = 0.0, [], max(high for group in groups.values() for _, _, high, _ in group.values())
    for group in groups.values():
        for i, (variant, (height, low, high, runs)) in enumerate(group.items()):
            axes.bar(at + i, height, 0.86, **look.bar(variant, products))
            if high > low:
                axes.plot([at + i] * 2, [low, high], color="black", linewidth=0.8, solid_capstyle="butt")
            if len(runs) > 1:
                axes.scatter([at + i] * len(runs), runs, s=5, color="black", zorder=3, linewidths=0)
            label = f"{height:.0f}" if top >= 100 else f"{height:.1f}"
            axes.annotate(label, (at + i, max(high, height)), (0, 1.5), textcoords="offset points", ha="center", size=6)
        ticks.append(at + (len(group) - 1) / 2)
        at += len(group) + 0.9
    axes.set_xticks(ticks, list(groups))
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.9, at - 0.9)
    axes.set_ylim(0, top * 1.1)


def _of_steps(found: Found, look: Look, axes: Any, value: Callable[[dict[str, Any]], float], spread: bool) -> None:
    groups: Groups = {}
    for (batch, mode), variants in clusters(found.steps).items():
        group = groups.setdefault(f"batch {batch}\n{mode}", {})
        for variant, runs in variants.items():
            values = [value(row) for row in runs]
            ends = [end for row in runs for end in _line(row)] if spread else values
            group[variant] = median(values), min(ends), max(ends), values
    _bars(axes, look, groups, products=True)


def draw_steps(found: Found, look: Look, axes: Any) -> None:
    """Bars of step times, with their spread."""
    _of_steps(found, look, axes, lambda row: float(row["median_ms"]), True)
    axes.set_ylabel("ms")


def draw_memory(found: Found, look: Look, axes: Any) -> None:
    """Bars of the allocator's peaks."""
    _of_steps(found, look, axes, lambda row: row["peak_bytes"] / 2**30, False)
    axes.set_ylabel("GiB")


def draw_parts(found: Found, look: Look, axes: Any) -> None:
    """Stacked bars of kinds of kernels."""
    at, ticks, labels = 0.0, [], []
    for (batch, mode), variants in clusters([row for row in found.steps if row["parts_ms"]]).items():
        axes.annotate(
            f"batch {batch}, {mode}", (0, at - 0.85), size=6.5, weight="bold", va="center", annotation_clip=False
        )
        for variant, runs in variants.items():
            left = 0.0
            for part, colour in PARTS.items():
                width = median(row["parts_ms"].get(part, 0.0) for row in runs)
                axes.barh(at, width, 0.8, left=left, color=colour, edgecolor="#808080", linewidth=0.3)
                left += width
            ticks.append(at)
            labels.append(named(variant))
            at += 1
        at += 1.2
    handles = [
        patch(facecolor=colour, edgecolor="#808080", linewidth=0.3, label=part) for part, colour in PARTS.items()
    ]
    axes.legend(handles=handles, ncols=1, loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0, frameon=False)
    axes.set_yticks(ticks, labels, size=6.5)
    axes.set_ylim(at - 1.5, -1.6)
    axes.set_xlabel("ms of one step; kinds overlap, and idle is what none of them covers")


def draw_host(found: Found, look: Look, axes: Any) -> None:
    """Bars of what a gather takes on the host, and of the hooks in it."""
    groups: Groups = {}
    for column, label in (("gather", "gather"), ("pre", "of it: pre hooks"), ("post", "of it: post hooks")):
        for form, runs in found.host.items():
            values = [run[column] for run in runs if column in run]
            if values:
                groups.setdefault(label, {})[form] = fmean(values), min(values), max(values), []
    _bars(axes, look, groups)
    axes.set_ylabel("µs a parameter")


def draw_gathers(found: Found, look: Look, axes: Any) -> None:
    """Bars of gathers on the card."""
    groups: Groups = {}
    runs: dict[tuple[int, str], list[float]] = {}
    for row in found.gathers:
        if row["form"] in ("plain", "planes"):
            runs.setdefault((row["world"], row["recipe"]), []).append(row["card_us"])
    for (world, recipe), us in runs.items():
        groups.setdefault(f"{world} ranks", {})[recipe] = median(us), min(us), max(us), us
    _bars(axes, look, groups)
    axes.set_ylabel("µs")


def kernel_rows(rows: list[dict[str, Any]]) -> tuple[str, dict[tuple[str, str], dict[str, float]]]:
    """The clock that all rows have, and (recipe, what is quantized) -> maker -> share, of the shape with most rows.

    Compiled references, which old files have as peers, are left out; so is what no peer does of a recipe with peers,
    except buffers.
    """
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    shape = _shape(rows)
    for row in rows:
        work, recipe = row["work"], row["recipe"]
        if tuple(row["shape"]) != shape or not recipe or not work.startswith("quantize") or " weights of " in work:
            continue
        maker = next((peer for peer in PEERS if peer in work), "kernel")
        if maker == "torch.compile" and not work.endswith(maker):
            continue
        if maker != "kernel":
            turned = "x and x.t()" in work
            work = "quantize to buffers" if turned else work.partition(",")[0]
            if maker == "torchao" and not turned:
                work = "quantize rowwise"
        what = work.removeprefix("quantize ").replace("rowwise+columnwise", "both")
        found.setdefault((recipe, what), {})[maker] = row
    beside = {recipe for (recipe, _), makers in found.items() if makers.keys() - {"kernel"}}
    kept = {
        key: makers
        for key, makers in found.items()
        if "kernel" in makers and (len(makers) > 1 or key[0] not in beside or key[1] == "to buffers")
    }
    in_graphs = all(row["share"] is not None for makers in kept.values() for row in makers.values())
    clock = "share" if in_graphs else "flushed_share"
    return clock, {key: {maker: row[clock] for maker, row in makers.items()} for key, makers in kept.items()}


def _shape(rows: list[dict[str, Any]]) -> tuple[int, ...]:
    """The one with most rows."""
    shapes = [tuple(row["shape"]) for row in rows]
    return max(shapes, key=shapes.count)


def draw_kernels(found: Found, look: Look, axes: Any) -> None:
    """A mark for the kernel and one for each peer."""
    clock, rows = kernel_rows(found.kernels)
    axes.axvline(1, color="#808080", linewidth=0.8, linestyle=":")
    for at, ((recipe, _), shares) in enumerate(rows.items()):
        axes.plot([min(shares.values()), max(shares.values())], [at, at], color="#d0d0d0", linewidth=1, zorder=1)
        axes.scatter(shares["kernel"], at, s=34, color=look.colour(recipe), zorder=3)
        for peer, (marker, colour) in PEERS.items():
            if peer in shares:
                axes.scatter(shares[peer], at, s=20, marker=marker, edgecolors=colour, facecolors="white", zorder=2)
    axes.set_yticks(range(len(rows)), [f"{recipe} {what}" for recipe, what in rows], size=6.5)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 1.08)
    marks = [mark("o", "#606060", "#606060", "kernel")]
    marks += [mark(m, c, "white", {"torch.compile": "plain, torch.compile"}.get(p, p)) for p, (m, c) in PEERS.items()]
    from matplotlib.transforms import ScaledTranslation  # type: ignore[import-not-found]

    below = axes.transAxes + ScaledTranslation(0, -16 / 72, axes.figure.dpi_scale_trans)  # under the numbers
    where = {"loc": "upper center", "bbox_to_anchor": (0.4, 0), "bbox_transform": below, "borderaxespad": 0}
    axes.legend(handles=marks, ncols=3, **where, frameon=False, columnspacing=1)
    how = "on the card" if clock == "share" else "with the host"
    shape = " x ".join(map(str, _shape(found.kernels)))
    axes.set_xlabel(f"share of a copy's bandwidth, {shape}, {how}", labelpad=16)


def _smooth(losses: list[float], width: int) -> tuple[list[int], list[float]]:
    sums = [0.0]
    for loss in losses:
        sums.append(sums[-1] + loss)
    ends = range(width, len(losses) + 1)
    return list(ends), [(sums[end] - sums[end - width]) / width for end in ends]


def _means(curves: Curves) -> dict[str, list[float]]:
    return {name: [fmean(step) for step in zip(*runs, strict=True)] for name, runs in curves.items()}


def draw_losses(found: Found, look: Look, axes: Any) -> None:
    """Lines: the mean over seeds."""
    for name, losses in _means(found.curves).items():
        plain = name == "bf16"
        axes.plot(
            *_smooth(losses, max(1, len(losses) // 50)),
            color=look.colour(name), linewidth=1.6 if plain else 0.9, zorder=1 if plain else 2,
        )  # fmt: skip
    axes.set_xlabel("step")
    axes.set_ylabel("nats, mean of the seeds")


def draw_distances(found: Found, look: Look, axes: Any) -> None:
    """Lines: how far each recipe is from bf16."""
    means = _means(found.curves)
    plain = means.pop("bf16")
    width = max(1, len(plain) // 20)
    axes.axhline(0, color=PLAIN["bf16"], linewidth=1)
    for name, losses in means.items():
        steps, smooth = _smooth(losses[: len(plain)], width)
        base = _smooth(plain[: len(losses)], width)[1]
        axes.plot(steps, [100 * (one / other - 1) for one, other in zip(smooth, base, strict=True)],
                  color=look.colour(name), linewidth=1)  # fmt: skip
    axes.set_xlabel("step")
    axes.set_ylabel(f"%, mean of {width} steps")


def patch(**options: Any) -> Any:
    """An entry of a legend."""
    from matplotlib.patches import Patch  # type: ignore[import-not-found]

    return Patch(**options)


def mark(marker: str, edge: str, face: str, label: str) -> Any:
    from matplotlib.lines import Line2D  # type: ignore[import-not-found]

    return Line2D(
        [], [], marker=marker, color="none", markeredgecolor=edge, markerfacecolor=face, markersize=4.5, label=label
    )
