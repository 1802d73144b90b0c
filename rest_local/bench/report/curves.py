"""Cost curves by machine: what a batch of n tokens costs, on the curves that ship with the package."""

from __future__ import annotations

from rest_local.bench.report.shapes import Cell, Figure, Section, Series, Table
from rest_local.calibration.cost import LARGEST
from rest_local.calibration.curves import facts, load_curve, shipped

SIZES = (2, 4, 8, 16, 32, 64)
POINTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
CONTEXT = 512  # tokens, which most curves were measured with


def section() -> Section:
    """Reads the shipped files, no result."""
    rows: list[list[Cell]] = []
    lines: list[Series] = []
    for name in shipped():
        ms = load_curve(name).expected(CONTEXT)
        relative = [float(ms[n - 1] / ms[0]) for n in range(1, LARGEST + 1)]
        known = facts(name)
        rows.append(
            [
                name,
                known.get("machine", ""),
                *(relative[n - 1] for n in SIZES),
                known.get("what", ""),
                known.get("source", ""),
            ]
        )
        lines.append(Series(name, [relative[n - 1] for n in POINTS], POINTS))
    return Section(
        title="Cost curves by machine",
        command="rest-local bench report DIR",
        machine="named in the table; `rest-local tune` measures the curve of yours",
        words=[
            "The time of one forward pass with n tokens, divided by the time of a pass with one token. Where the line "
            "is flat, drafts are nearly free. Where it rises as steeply as n, they gain nothing. Replays pay for their "
            "passes by these curves.",
            "Sizes that were assumed and not measured are named in the last columns.",
        ],
        tables=[
            Table(
                f"t(n)/t(1) at {CONTEXT} tokens of context",
                ["curve", "machine", *(f"n = {n}" for n in SIZES), "how it was measured", "source"],
                rows,
            )
        ],
        figures=[
            Figure(
                "cost-curves", "Cost of a forward pass with n tokens", "tokens in the pass, n", "t(n) / t(1)", lines,
                alt="The relative cost of a forward pass against the number of its tokens, a line for each machine.",
                log_x=True, level=1.0,
            )
        ],
    )  # fmt: skip
