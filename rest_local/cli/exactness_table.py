"""The table of `doctor --exactness`: a line for each setting, 80 columns wide."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.table import Table

    from rest_local.calibration.survey import Progress

WIDTH = 80
CASES = (("chains", False), ("chains", True), ("trees", False), ("trees", True))
EXPLANATION = """\
Rows of logits that differ in any bit from the same rows evaluated one at a
time, of those compared; + is with another sequence in the KV cache. Flips
are rows whose likeliest token changed, gap the largest distance of the two best
tokens there. Plain and x16 are the times of a step of 1 and of 16 tokens, the
fastest being 1."""


def exactness_lines(survey: Mapping[str, Any]) -> Iterator[str]:
    """Yield the report for people of `Survey.to_dict`."""
    from rich.console import Console

    yield "exactness"
    console = Console(width=WIDTH, color_system=None, highlight=False)
    with console.capture() as capture:
        console.print(exactness_table(survey["settings"]))
    yield from (line.rstrip() for line in capture.get().splitlines())
    yield from EXPLANATION.splitlines()
    if survey["drafting"] == "none":
        yield f"Nothing is drafted with this model: {survey['reason']}."
    if survey["left_out"]:
        yield f"Not measured for lack of time: {survey['left_out']} settings; give --seconds more."
    yield ""


def exactness_table(settings: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table; a setting that llama.cpp refuses has no figures."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for title in ("flash", "cache", "thr"):
        table.add_column(title, no_wrap=True)
    for title in ("chains", "chains+", "trees", "trees+", "flips", "gap", "plain", "x16"):
        table.add_column(title, justify="right", no_wrap=True)
    for setting in settings:
        table.add_row(*_row(setting))
    return table


def _row(setting: Mapping[str, Any]) -> list[str]:
    k, v = setting["cache_type_k"], setting["cache_type_v"]
    name = ["on" if setting["flash_attention"] else "off", k if k == v else f"{k}/{v}", str(setting["threads"])]
    if setting["refused"]:
        return [*name, "refused"]
    by_case = {(case["drafts"], case["neighbours"]): case for case in setting["cases"]}
    cells = [f"{by_case[c]['different']}/{by_case[c]['rows']}" if c in by_case else "" for c in CASES]
    flips = sum(case["flips"] for case in by_case.values())
    gap = max((case["largest_gap"] for case in by_case.values()), default=0.0)
    return [
        *name,
        *cells,
        str(flips),
        f"{gap:.2f}" if flips else "",
        f"{setting['plain']:.2f}",
        f"{setting['step']:.2f}",
    ]


def progress_line() -> Progress:
    """Return what shows, at a terminal, on stderr, what is being tried."""
    shown = sys.stderr.isatty()

    def show(name: str, number: int, total: int) -> None:
        if shown:
            click.echo(f"\r\x1b[K{number} of {total}: {name}", nl=False, err=True)
            if number == total:
                click.echo("\r\x1b[K", nl=False, err=True)

    return show
