"""What all charts share: formats, colours, the page that they are drawn on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SUFFIXES = (".png", ".svg", ".pdf")
STYLE = {
    **{"font.size": 9, "axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left"},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.6, "svg.hashsalt": "layoutc"},
}
MARKS = "osD^vPX*"
# Told apart by people who see few colours, and in print by their marks.
COLOURS = ("#404040", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
NEEDS = "charts need matplotlib: pip install 'layoutc[charts]', or pip install matplotlib"


def check(path: Path) -> None:
    """Before any work: raises ValueError for a suffix not in SUFFIXES, for no folder, and without matplotlib."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path} should end in {', '.join(SUFFIXES)}")
    if find_spec("matplotlib") is None:
        raise ValueError(NEEDS)
    if not path.absolute().parent.is_dir():
        raise ValueError(f"can't write {path.name}: the folder {path.absolute().parent} does not exist")


@contextmanager
def page(path: Path, widths: tuple[float, ...], size: tuple[float, float]) -> Iterator[tuple[Any, list[Any]]]:
    """A figure and its panels, side by side; written to the path in the end, equal bytes for equal charts.

    size: inches. Raises ImportError without matplotlib, OSError as writing does.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(NEEDS) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot, rc_context

    with rc_context(STYLE):
        drawn, places = pyplot.subplots(
            1, len(widths), figsize=size, layout="constrained", width_ratios=widths, squeeze=False
        )
        try:
            yield drawn, list(places[0])
            dates: dict[str, dict[str, None]] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
            drawn.savefig(path, dpi=200, metadata=dates.get(path.suffix, {}))
        finally:
            pyplot.close(drawn)


def line(number: int) -> dict[str, Any]:
    """The colour and the mark of a chart's line, by its number."""
    return {"color": COLOURS[number % len(COLOURS)], "marker": MARKS[number % len(MARKS)]}
