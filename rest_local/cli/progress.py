"""The progress of a batch on stderr: a bar at a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rest_local.batch.output import Summary

Report = Callable[["Summary"], None]

LINE_S = 60.0  # between two lines, in a log


@contextmanager
def shown(summary: Summary, *, in_terminal: bool) -> Iterator[Report]:
    """Give the function that shows the progress. The bar is drawn from its first call on, so that a model is loaded and
    questions are asked before. `in_terminal`: the answers themselves go to a terminal, where a bar would be drawn
    between them.
    """
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal or in_terminal:
        yield _lines()
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (BarColumn(bar_width=None), MofNCompleteColumn(), TextColumn("{task.description}"))
    progress = Progress(*columns, console=console, transient=True, refresh_per_second=4)
    task = progress.add_task("", total=summary.total)

    def report(summary: Summary) -> None:
        progress.update(task, completed=summary.total - summary.left, description=rates(summary))
        progress.start()

    try:
        yield report
    finally:
        progress.stop()


def _lines() -> Report:
    last = time.monotonic()

    def report(summary: Summary) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_S and summary.left:
            last = time.monotonic()
            done = summary.total - summary.left
            click.echo(f"rest-local: {done} of {summary.total} requests, {rates(summary)}", err=True)

    return report


def rates(summary: Summary) -> str:
    """Tokens per second, the share of drafted tokens, and the time left."""
    parts = [f"{summary.tokens_per_second:.0f} tokens/s", f"{summary.drafted_share:.0%} drafted"]
    if summary.seconds_left is not None and summary.left:
        parts.append(f"{duration(summary.seconds_left)} left")
    if summary.all_failed:
        parts.append(f"{summary.all_failed} failed")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """Such as `45 s`, `12 min`, `3 h 20 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
