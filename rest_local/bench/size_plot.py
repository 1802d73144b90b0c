"""The report of `rest_local.bench.sizes` as a picture: SVG, speed-up and lookup time against tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from math import ceil, floor, log2, log10
from typing import Any

WIDTH, HEIGHT = 760, 300  # of one panel
LEFT, RIGHT, TOP, BOTTOM = 70, 190, 40, 50
COLOUR = "#1b6ca8"


class _Panel:
    """One pair of axes: tokens, logarithmic, and a value, linear."""

    def __init__(self, top: int, title: str, tokens: Sequence[float], values: Sequence[float]) -> None:
        self.top, self.title = top, title
        self.first, self.last = floor(log2(min(tokens))), max(ceil(log2(max(tokens))), floor(log2(min(tokens))) + 1)
        least, greatest = min(values), max(values)
        room = max(greatest - least, 1e-3) * 0.08
        self.least, self.greatest = least - room, greatest + room

    def x(self, tokens: float) -> float:
        share = (log2(tokens) - self.first) / (self.last - self.first)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.least) / (self.greatest - self.least)
        return self.top + HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def axes(self) -> Iterator[str]:
        low, high, right = self.top + HEIGHT - BOTTOM, self.top + TOP, WIDTH - RIGHT
        yield _text(LEFT, self.top + 22, self.title)
        yield f'<path d="M{LEFT} {high}V{low}H{right}" fill="none" stroke="#222"/>'
        step = max(1, ceil((self.last - self.first) / 8))
        for power in range(self.first, self.last + 1, step):
            x = self.x(2**power)
            yield f'<path d="M{x:.1f} {low}v5" stroke="#222"/>'
            yield _text(x, low + 19, _tokens(2**power), "middle")
        yield _text((LEFT + right) / 2, low + 38, "tokens in the datastore", "middle")
        apart = _round(self.greatest - self.least)
        for tick in range(ceil(self.least / apart), floor(self.greatest / apart) + 1):
            value, digits = tick * apart, max(0, -floor(log10(apart)))
            yield f'<path d="M{LEFT} {self.y(value):.1f}H{right}" stroke="#ddd"/>'
            yield _text(LEFT - 8, self.y(value) + 4, f"{value:.{digits}f}", "end")

    def legend(self, row: int, text: str, mark: str) -> Iterator[str]:
        x, y = WIDTH - RIGHT + 18, self.top + TOP + 8 + 20 * row
        if mark:
            yield _mark(mark, x, y)
        yield _text(x + 12, y + 4, text)


def plot(report: Mapping[str, Any]) -> str:
    """The picture, as the text of an SVG file: a panel for each curve, and one for the lookups. Raises ValueError for a
    report without a size.
    """
    if len(report["points"]) < 2:
        raise ValueError("the report has no sizes")
    parts = [line for number, name in enumerate(report["curves"]) for line in _speedups(report, name, number * HEIGHT)]
    height = HEIGHT * (len(report["curves"]) + 1)
    parts += _lookups(report, height - HEIGHT)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">'
        '<rect width="100%" height="100%" fill="white"/>'
    )
    return "\n".join((head, *parts, "</svg>", ""))


def _speedups(report: Mapping[str, Any], name: str, top: int) -> Iterator[str]:
    none, *rows = [(row["tokens"], row["speedup"][name]) for row in report["points"]]
    pruned = [(row["tokens"], row["speedup"][name]) for row in report["pruned"]]
    values = [value[end] for _, value in (none, *rows, *pruned) for end in _ENDS]
    title = f"Speed-up by {name} (bars: least and greatest draw)"
    panel = _Panel(top, title, [tokens for tokens, _ in (*rows, *pruned)], values)
    yield from panel.axes()
    without = panel.y(none[1]["mean"])
    yield f'<path d="M{LEFT} {without:.1f}H{WIDTH - RIGHT}" stroke="{COLOUR}" stroke-dasharray="6 4"/>'
    if report["enough"][name]:
        x = panel.x(report["enough"][name]["tokens"])
        yield f'<path d="M{x:.1f} {top + TOP}V{top + HEIGHT - BOTTOM}" stroke="#222" stroke-dasharray="1 3"/>'
    yield from _points(panel, rows, pruned)
    yield from panel.legend(2, "without: dashed", "")
    yield from panel.legend(3, "95% of the gain: dotted", "")


def _lookups(report: Mapping[str, Any], top: int) -> Iterator[str]:
    rows, pruned = (
        [(row["tokens"], dict.fromkeys(_ENDS, row["lookup_us"])) for row in report[key] if row["tokens"]]
        for key in ("points", "pruned")
    )
    every = [*rows, *pruned]
    title = "Lookup, median CPU time in us"
    panel = _Panel(top, title, [tokens for tokens, _ in every], [value["mean"] for _, value in every])
    yield from panel.axes()
    yield from _points(panel, rows, pruned)


_ENDS = ("mean", "least", "greatest")


_Values = Sequence[tuple[float, Mapping[str, float]]]


def _points(panel: _Panel, rows: _Values, pruned: _Values) -> Iterator[str]:
    """The subsets, joined by a line, the pruned variants, and the legend of both."""
    path = "L".join(f"{panel.x(tokens):.1f} {panel.y(value['mean']):.1f}" for tokens, value in rows)
    yield f'<path d="M{path}" fill="none" stroke="{COLOUR}" stroke-width="1.5"/>'
    for tokens, value in rows:
        x = panel.x(tokens)
        yield f'<path d="M{x:.1f} {panel.y(value["least"]):.1f}V{panel.y(value["greatest"]):.1f}" stroke="{COLOUR}"/>'
        yield _mark("dot", x, panel.y(value["mean"]))
    for tokens, value in pruned:
        yield _mark("diamond", panel.x(tokens), panel.y(value["mean"]))
    yield from panel.legend(0, "random documents", "dot")
    yield from panel.legend(1, "pruned", "diamond")


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-family="sans-serif" font-size="12" fill="#222" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )


def _mark(kind: str, x: float, y: float) -> str:
    if kind == "dot":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{COLOUR}"/>'
    return f'<path d="M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5z" fill="white" stroke="{COLOUR}" stroke-width="1.5"/>'


def _round(room: float) -> float:
    """A round step that divides `room` into four to ten."""
    power: float = 10.0 ** floor(log10(room))
    return next(step for step in (power / 10, power / 5, power / 2, power) if room / step <= 10)


def _tokens(count: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.3g}"
