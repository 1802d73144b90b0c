"""Lines, questions and bars on stderr, in the words of the command line; the standard output is for answers.

Messages of the library name parameters of the Python API in backticks; `errors.in_options` writes the option in their
place. What a message quotes may come from a file, so control characters do not reach the terminal.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

import click

from rest_local.errors import RestLocalError, in_options, printable

if TYPE_CHECKING:
    from rest_local.decoding.engine import Engine, Result
    from rest_local.retrieval.building.build import Progress


def warn(message: str) -> None:
    """One line on stderr. What it quotes may come from a file: control characters do not reach the terminal."""
    say(f"rest-local: warning: {in_options(message)}")


def counted(number: int, what: str) -> str:
    """Such as "1 answer" or "1,234 answers"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def fail(error: RestLocalError, more: str = "") -> str:
    """The line of an error on stderr, where the command goes on. Returns its message."""
    message = in_options(str(error)) + more
    say(f"rest-local: error: {message}")
    return message


def say(text: str) -> None:
    """One line on stderr about what the command did."""
    click.echo(fitted(printable(text), sys.stderr), err=True)


def fitted(text: str, stream: TextIO) -> str:
    """A line of words, broken between them for the width of a terminal and indented further; for a pipe as it is."""
    if not stream.isatty():
        return text
    indent = text[: len(text) - len(text.lstrip())]
    width = max(shutil.get_terminal_size().columns - 1, 20)
    return textwrap.fill(
        text, width, subsequent_indent=f"{indent}  ", break_long_words=False, break_on_hyphens=False, tabsize=4
    )


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


@contextmanager
def without_messages_of_ray() -> Iterator[None]:
    """The standard streams for this program alone. Ray writes to both, from C++ and from threads of its own; its log
    files have the same."""
    ours, stderr = [os.dup(1), os.dup(2)], sys.stderr
    with open(os.devnull, "wb") as nowhere, open(ours[1], "w", encoding="utf-8", buffering=1, closefd=False) as shown:
        sys.stdout.flush()
        stderr.flush()
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
        sys.stderr = shown
        try:
            yield
        finally:
            shown.flush()
            sys.stderr = stderr
            sys.stdout.flush()  # what was printed there goes nowhere, too
            for descriptor, own in zip((1, 2), ours, strict=True):
                os.dup2(own, descriptor)
                os.close(own)


PROGRESS = "rest_local.tuning.progress"
_shows_warnings = False


def show_warnings() -> None:
    """Show what the library logs as a warning (a datastore that failed while it was read) as one of the command's own,
    and at a terminal what takes seconds; again does nothing. llama.cpp's log is not shown: it warns of much that is
    normal.
    """
    global _shows_warnings
    if _shows_warnings:
        return
    _shows_warnings = True
    import logging  # would cost --help a tenth of its time

    class Shown(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                if not f"{record.name}.".startswith("rest_local.llama."):
                    warn(record.getMessage())
            elif record.name == PROGRESS and sys.stderr.isatty():
                click.echo(f"rest-local: {record.getMessage()}", err=True)

    logging.getLogger("rest_local").addHandler(Shown())
    logging.getLogger(PROGRESS).setLevel(logging.INFO)


PLAIN = "target"  # the source of a token that was not drafted
RELAXED = "~"  # ends the name of a source where only relaxed verification let the token pass
NAMES = {
    "model": "the draft model",
    "grammar": "the grammar",
    "prediction": "the prediction",
    "logits": "recycled logits",
    "edit": "the edited text",
}


def line_of(engine: Engine, result: Result) -> str:
    """The line about an answer of this engine."""
    return statistics_line(result, [store.path.name for store in engine.datastores])


def statistics_line(result: Result, datastores: Sequence[str] = ()) -> str:
    """The line about an answer. `datastores`: names of those that were open; the name of a single one stands in the
    place of `datastore`.
    """
    parts = [f"{_number(result.timings.predicted_per_second)} tokens/s"]
    if result.speedup is not None:
        parts.append(f"{result.speedup:.1f} x plain")
    return ", ".join([*parts, drafted_share(result, datastores)])


def drafted_share(result: Result, datastores: Sequence[str] = ()) -> str:
    """`61% from mycode`, `61% from mycode 40%, context 21%`, or `nothing drafted`: of the tokens of the answer."""
    counts = Counter(source.rstrip(RELAXED) for source in result.sources)
    total = sum(counts.values())
    del counts[PLAIN]
    drafted = sum(counts.values())
    if not drafted:
        return "nothing drafted" if not result.draft.drafted else "no draft accepted"
    names = {**NAMES, "datastore": datastores[0] if len(datastores) == 1 else "datastores"}
    shares = [(names.get(source, source), count / total) for source, count in counts.most_common()]
    if len(shares) == 1:
        return f"{drafted / total:.0%} from {shares[0][0]}"
    return f"{drafted / total:.0%} from " + ", ".join(f"{name} {share:.0%}" for name, share in shares)


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"
