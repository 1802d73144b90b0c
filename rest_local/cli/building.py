"""What commands that build an index or delete one share: the question and the bar."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from rest_local.cli.messages import fitted
from rest_local.errors import printable

if TYPE_CHECKING:
    from rest_local.retrieval.building.build import Progress


def can_ask() -> bool:
    """Whether a question reaches a person: input and stderr are a terminal, and this is the main thread, to which
    Ctrl-C goes (`serve` loads in another one).
    """
    on_main = threading.current_thread() is threading.main_thread()
    return on_main and sys.stdin.isatty() and sys.stderr.isatty()


def ask(question: str, default: bool) -> bool:
    """Ask on stderr. What the question quotes may come from a file."""
    return click.confirm(fitted(printable(question), sys.stderr), default=default, err=True)


def ask_or_leave(question: str) -> None:
    """Ask before something is replaced or deleted. "No" ends the command with exit code 1."""
    if not ask(question, default=False):
        click.echo("nothing was changed", err=True)
        raise click.exceptions.Exit(1)


@contextmanager
def progress(quiet: bool, total: Callable[[], int]) -> Iterator[Progress]:
    """A bar on stderr while an index is built: share of the bytes, tokens, tokens/s, time left. Without a terminal or
    with `quiet` it shows nothing. total: the bytes to read; called only for a bar.
    """
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if quiet or not console.is_terminal or console.is_dumb_terminal:
        yield lambda what, amount: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TaskProgressColumn(),
        TextColumn("{task.fields[tokens]}"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=console, transient=True, expand=True) as bar:
        task = bar.add_task("listing files", total=max(total(), 1), tokens="")
        tokens = 0

        def advance(what: str, amount: int) -> None:
            nonlocal tokens
            shown = bar.tasks[task]
            if what == "read":
                bar.update(task, advance=amount, description="tokenizing")
            elif what == "tokenized":
                tokens += amount
                rate = f", {tokens / shown.elapsed:,.0f}/s" if shown.elapsed else ""
                bar.update(task, tokens=f"{tokens:,} tokens{rate}")
            if shown.finished:  # everything was read, and is sorted and written now
                bar.update(task, description="sorting")

        yield advance
