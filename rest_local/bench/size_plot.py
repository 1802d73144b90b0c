"""The report of `rest_local.bench.sizes` as a picture: SVG, speed-up and lookup time against tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from math import ceil, floor, log2
from typing import Any

WIDTH, HEIGHT = 760, 300  # of one panel
LEFT, RIGHT, TOP, BOTTOM = 70, 190, 40, 50
COLOURS = ("#1b6ca8", "#b5541c", "#2f7d3b", "#7a3e9d", "#8a6d00", "#555555")


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
        for tick in range(5):
            value = self.least + (self.greatest - self.least) * (tick + 0.5) / 5
            digits = 3 if self.greatest < 10 else 1
            yield f'<path d="M{LEFT} {self.y(value):.1f}H{right}" stroke="#ddd"/>'
            yield _text(LEFT - 8, self.y(value) + 4, f"{value:.{digits}f}", "end")

    def legend(self, row: int, colour: str, text: str, mark: str) -> Iterator[str]:
        x, y = WIDTH - RIGHT + 18, self.top + TOP + 8 + 20 * row
        yield _mark(mark, x, y, colour)
        yield _text(x + 12, y + 4, text)


def plot(report: Mapping[str, Any]) -> str:
    """The picture, as the text of an SVG file. Raises ValueError for a report without a size."""
    none, *sizes = report["points"]
    pruned = report["pruned"]
    if not sizes:
        raise ValueError("the report has no sizes")
    parts = [*_speedups(none, sizes, pruned, report), *_lookups(sizes, pruned)]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {2 * HEIGHT}" width="{WIDTH}" '
        f'height="{2 * HEIGHT}"><rect width="100%" height="100%" fill="white"/>'
    )
    return "\n".join((head, *parts, "</svg>", ""))


def _speedups(
    none: Mapping[str, Any], sizes: Sequence[Any], pruned: Sequence[Any], report: Mapping[str, Any]
) -> Iterator[str]:
    every = [row["speedup"][name][end] for row in (none, *sizes, *pruned) for name in report["curves"] for end in _ENDS]
    tokens = [row["tokens"] for row in (*sizes, *pruned)]
    panel = _Panel(0, "Speed-up (bars: least and greatest of the draws; dashed: without a datastore)", tokens, every)
    yield from panel.axes()
    for number, name in enumerate(report["curves"]):
        colour = COLOURS[number % len(COLOURS)]
        without = panel.y(none["speedup"][name]["mean"])
        yield f'<path d="M{LEFT} {without:.1f}H{WIDTH - RIGHT}" stroke="{colour}" stroke-dasharray="4 4"/>'
        yield from _line(panel, [(row["tokens"], row["speedup"][name]) for row in sizes], colour)
        for row in pruned:
            yield _mark("diamond", panel.x(row["tokens"]), panel.y(row["speedup"][name]["mean"]), colour)
        if report["enough"][name]:
            x = panel.x(report["enough"][name]["tokens"])
            yield f'<path d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="{colour}" stroke-dasharray="1 3"/>'
        yield from panel.legend(3 * number, colour, name, "dot")
        yield from panel.legend(3 * number + 1, colour, "pruned", "diamond")
        yield from panel.legend(3 * number + 2, colour, "95% of the gain: dotted line", "")


def _lookups(sizes: Sequence[Any], pruned: Sequence[Any]) -> Iterator[str]:
    rows = [(row["tokens"], row["lookup_us"]) for row in (*sizes, *pruned)]
    panel = _Panel(HEIGHT, "Lookup, median CPU time in us", [t for t, _ in rows], [us for _, us in rows])
    yield from panel.axes()
    known = [(row["tokens"], dict.fromkeys(_ENDS, row["lookup_us"])) for row in sizes]
    yield from _line(panel, known, COLOURS[0])
    for row in pruned:
        yield _mark("diamond", panel.x(row["tokens"]), panel.y(row["lookup_us"]), COLOURS[0])
    yield from panel.legend(0, COLOURS[0], "subset", "dot")
    yield from panel.legend(1, COLOURS[0], "pruned", "diamond")


_ENDS = ("mean", "least", "greatest")


def _line(panel: _Panel, rows: Sequence[tuple[float, Mapping[str, float]]], colour: str) -> Iterator[str]:
    path = "L".join(f"{panel.x(tokens):.1f} {panel.y(value['mean']):.1f}" for tokens, value in rows)
    yield f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
    for tokens, value in rows:
        x = panel.x(tokens)
        yield f'<path d="M{x:.1f} {panel.y(value["least"]):.1f}V{panel.y(value["greatest"]):.1f}" stroke="{colour}"/>'
        yield _mark("dot", x, panel.y(value["mean"]), colour)


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-family="sans-serif" font-size="12" fill="#222" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )


def _mark(kind: str, x: float, y: float, colour: str) -> str:
    if kind == "dot":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>'
    if kind == "diamond":
        return f'<path d="M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5z" fill="white" stroke="{colour}" stroke-width="1.5"/>'
    return f'<path d="M{x - 6:.1f} {y:.1f}h12" stroke="{colour}" stroke-dasharray="1 3"/>'


def _tokens(count: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.3g}"
