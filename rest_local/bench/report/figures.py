"""Figures as SVG, drawn by matplotlib: the same figure and the same version of matplotlib give the same bytes.

- Colours are told apart by readers with any colour vision; each series also has its own marker, dash or hatch.
- Text stays text, in the reader's own font, so that it can be read out and searched.
- `as_file` is white, for a document; `inline` takes its colours from the page's style sheet (`--ink`, `--paper`,
  `--grid`, `--s1` to `--s8`), so that it is light or dark as the page is.
"""

from __future__ import annotations

import io
import re
import textwrap
from html import escape
from typing import TYPE_CHECKING, Any

from rest_local.bench.report.shapes import Figure
from rest_local.bench.report.text import clean, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LIGHT = ("#0072b2", "#d55e00", "#117733", "#aa4499", "#a67c00", "#2e96d0", "#666667", "#882255")
DARK = ("#56b4e9", "#ff8a3d", "#2fbf94", "#e08cc8", "#e6b800", "#9ad5f5", "#b0b0b0", "#e8799a")
INK, PAPER, GRID = "#1a1a1b", "#fefeff", "#d4d4d8"  # as nothing else in the picture is
MARKERS = "os^DvPXd"
DASHES = ("-", "--", "-.", ":")
HATCHES = ("", "//", "--", "\\\\", "||", "xx", "++", "////")  # of lines: circles make a file five times as large
WIDTH = 6.4  # inches of 72 points
MOST_SERIES = 8
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "rest-local",
    "text.parse_math": False,  # a name may hold "$"
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "legend.facecolor": PAPER,
    "legend.edgecolor": GRID,
    "legend.frameon": False,
    "grid.color": GRID,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "hatch.linewidth": 0.6,
    "lines.linewidth": 1.5,
    "lines.markersize": 5,
    "path.simplify": False,
}


def why_none() -> str | None:
    """Why no figure can be drawn; None if matplotlib is here."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return "figures need matplotlib: `pip install 'rest-local[report]'`"
    return None


def version() -> str:
    """Of matplotlib, as `as_file` records it."""
    import matplotlib

    return f"matplotlib {matplotlib.__version__}"


def as_file(figure: Figure) -> str:
    """A whole SVG file. Raises ImportError, ValueError for a figure without any number."""
    drawn = _drawn(figure)
    return f"<!-- {version()} -->\n{drawn.replace(PAPER, '#ffffff')}\n"


def inline(figure: Figure, name: str) -> str:
    """An `svg` element for a page. `name`: unique in the page. Raises as `as_file`."""
    drawn = re.sub(r' (?:width|height)="[\d.]+pt"', "", _drawn(figure), count=2)
    drawn = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>\s*", "", drawn, flags=re.DOTALL)  # would be the whole page's
    drawn = re.sub(r'((?:\bid|href)="#?|url\(#)', rf"\g<1>{name}-", drawn)
    for colour, variable in ((INK, "ink"), (PAPER, "paper"), (GRID, "grid")):
        drawn = drawn.replace(colour, f"var(--{variable})")
    for index, colour in enumerate(LIGHT, 1):
        drawn = drawn.replace(colour, f"var(--s{index})")
    return drawn


def _drawn(figure: Figure) -> str:
    """The `svg` element, with the colours of LIGHT."""
    import warnings

    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # only for the width: the reader's font has it
        matplotlib.rcdefaults()  # not the user's own style
        matplotlib.rcParams.update(_STYLE)
        return _labelled(_picture(figure), figure)


def _picture(figure: Figure) -> str:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure as Canvas

    if not any(number(value) is not None for series in figure.series for value in series.y):
        raise ValueError(f"figure {figure.name} has no number")
    canvas = Canvas(layout="constrained")
    FigureCanvasSVG(canvas)
    axes = canvas.add_subplot()
    if figure.categories:
        _bars(axes, figure)
    else:
        canvas.set_size_inches(WIDTH, 4.0)
        _lines(axes, figure)
    names = [series for series in figure.series if series.name]
    if len(names) > 1:
        canvas.legend(loc="outside lower center", ncols=_columns(figure))
    out = io.StringIO()
    canvas.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return out.getvalue()


def _columns(figure: Figure) -> int:
    longest = max(len(_label(series.name)) for series in figure.series)
    return max(1, min(len(figure.series), 4, 72 // (longest + 6)))


def _label(text: str) -> str:
    return clean(text, 40)


def _lines(axes: Axes, figure: Figure) -> None:
    values = []
    for index, series in enumerate(figure.series):
        points = sorted(
            (at, float("nan") if value is None else value, place)
            for place, (at, value) in enumerate(zip(map(number, series.x), map(number, series.y), strict=False))
            if at is not None and (at > 0 or not figure.log_x)
        )
        x, y = [at for at, _, _ in points], [value for _, value, _ in points]
        values += x
        style: dict[str, Any] = {
            "color": LIGHT[index % len(LIGHT)],
            "marker": MARKERS[index % len(MARKERS)],
            "linestyle": DASHES[index % len(DASHES)],
            "label": _label(series.name),
        }
        if series.low and series.high:
            places = [place for _, _, place in points]
            axes.errorbar(x, y, yerr=_errors(series.y, series.low, series.high, places), capsize=3, **style)
        else:
            axes.plot(x, y, **style)
    if figure.log_x and values:
        _ticks(axes, values)
    if figure.level is not None:
        axes.axhline(figure.level, color=INK, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    axes.set_xlabel(_label_of_axis(figure.x))
    axes.set_ylabel(_label_of_axis(figure.y))


def _ticks(axes: Axes, values: list[float]) -> None:
    """A logarithmic axis with ticks at powers of 2; at 1, 2 and 5 times powers of 10 if its numbers are large."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    large = max(values) > 1000 or min(values) < 1
    subs = (1.0, 2.0, 5.0) if max(values) / min(values) <= 300 else (1.0,)
    axes.set_xscale("log", base=10 if large else 2)
    axes.xaxis.set_major_locator(LogLocator(10, subs, numticks=12) if large else LogLocator(2, numticks=12))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))


def _short(value: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:g} {unit}"
    return f"{value:g}"


def _bars(axes: Axes, figure: Figure) -> None:
    """Groups of bars that lie: labels of any length fit, and each group has the height that it needs."""
    n, most = len(figure.categories), len(figure.series)
    thick = 0.8 if figure.stacked else 0.8 / most
    inches = 0.34 if figure.stacked else 0.15 * most + 0.12
    axes.figure.set_size_inches(WIDTH, min(1.4 + inches * n, 14.0))  # type: ignore[union-attr]
    ends = [0.0] * n
    for index, series in enumerate(figure.series):
        lengths = [_at(series.y, place) for place in range(n)]
        at = [place if figure.stacked else place - 0.4 + thick * (index + 0.5) for place in range(n)]
        errors = _errors(series.y, series.low, series.high, range(n)) if series.low and series.high else None
        axes.barh(
            at, lengths, thick, left=ends if figure.stacked else None, xerr=errors, label=_label(series.name),
            color=LIGHT[index % len(LIGHT)], hatch=HATCHES[index % len(HATCHES)], edgecolor=PAPER, linewidth=0.4,
            error_kw={"ecolor": INK, "elinewidth": 1},
        )  # fmt: skip
        if figure.stacked:
            ends = [end + length for end, length in zip(ends, lengths, strict=True)]
    axes.set_yticks(range(n), [textwrap.fill(_label(name), 24) for name in figure.categories])
    axes.set_ylim(n - 0.5, -0.5)  # the first on top
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    if figure.level is not None:
        axes.axvline(figure.level, color=INK, linewidth=1, linestyle=(0, (4, 3)), zorder=3)
    axes.set_xlabel(_label_of_axis(figure.y))
    if figure.x:
        axes.set_ylabel(_label_of_axis(figure.x))


def _at(values: Any, place: int) -> float:
    """A missing bar has no length."""
    return (number(values[place]) if place < len(values) else None) or 0.0


def _errors(y: Any, low: Any, high: Any, places: Any) -> list[list[float]]:
    """Lengths of the error bars below and above the values, [2][points]."""
    middle = [_at(y, place) for place in places]
    return [
        [max(value - _at(low, place), 0.0) for value, place in zip(middle, places, strict=True)],
        [max(_at(high, place) - value, 0.0) for value, place in zip(middle, places, strict=True)],
    ]


def _label_of_axis(text: str) -> str:
    return clean(text, 80)


def _labelled(svg: str, figure: Figure) -> str:
    """The element alone, with its title and description, and without what only editors of pictures read."""
    body = svg[svg.index("<svg") :].strip()
    body = re.sub(r"\s*<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'<g id="[^"]*">', "<g>", body)
    body = re.sub(r"\s*<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r">\s*\n\s*<", ">\n<", body)
    title, description = escape(clean(figure.title)), escape(clean(figure.alt))
    head, rest = body.split(">", 1)
    return f'{head} role="img" aria-label="{description}">\n<title>{title}</title>{rest}'
