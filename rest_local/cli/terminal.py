"""Print lines, questions and bars on stderr, in the words of the command line. The standard output is for answers.

Messages of the library name parameters of the Python API in backticks, and `errors.in_options` replaces them by the
options. A message may quote a file, so control characters do not reach the terminal.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

import click

from rest_local.cli.sections import option
from rest_local.errors import OptionError, RestLocalError, in_options, printable
from rest_local.stop import Closing

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

    from rest_local.decoding.engine import Engine, Result
    from rest_local.retrieval.building.build import Progress

_CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"} | {ord("\r"): ""}


def warn(message: str) -> None:
    """Print a warning on one line of stderr."""
    say(f"rest-local: warning: {in_options(message)}")


def counted(number: int, what: str) -> str:
    """Return a text such as "1 answer" or "1,234 answers"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """Return a text such as `45 s`, `12 min`, `3 h 20 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def fail(error: RestLocalError, more: str = "") -> str:
    """Print an error on one line of stderr and return its message. The command goes on."""
    message = in_options(str(error)) + more
    say(f"rest-local: error: {message}")
    return message


def say(text: str) -> None:
    """Print a line on stderr about what the command did."""
    click.echo(fitted(printable(text), sys.stderr), err=True)


def visible(text: str) -> str:
    """Return the text without control characters, since a model may write anything."""
    return text.translate(_CONTROLS)


def write_text(text: str) -> None:
    """Write a model's text to the standard output, at a terminal without control characters."""
    sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def fitted(text: str, stream: TextIO) -> str:
    """Break a line between words for the width of a terminal, and indent the rest. A pipe gets the line as it is."""
    if not stream.isatty():
        return text
    indent = text[: len(text) - len(text.lstrip())]
    width = max(shutil.get_terminal_size().columns - 1, 20)
    return textwrap.fill(
        text, width, subsequent_indent=f"{indent}  ", break_long_words=False, break_on_hyphens=False, tabsize=4
    )


def can_ask() -> bool:
    """Return True if a question reaches a person: stdin and stderr are a terminal, and Ctrl-C comes to this thread."""
    on_main = threading.current_thread() is threading.main_thread()
    return on_main and sys.stdin.isatty() and sys.stderr.isatty()


def ask(question: str, default: bool) -> bool:
    """Ask a question on stderr, and return True for yes."""
    return click.confirm(fitted(printable(question), sys.stderr), default=default, err=True)


def confirm(question: str, without: str = "") -> None:
    """Ask before something is lost. "No" ends the command with code 1. Raises OptionError(`without`)."""
    if without and not can_ask():
        raise OptionError(without)
    if not ask(question, default=False):
        click.echo("nothing was changed", err=True)
        raise click.exceptions.Exit(1)


json_option = option("--json", "Print one line of JSON instead.", to="as_json")


def print_json(fields: Any) -> None:
    """Print one line of JSON in ASCII, because file names may hold anything."""
    click.echo(json.dumps(fields))


def columns(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> Iterator[str]:
    """Yield the rows as lines of aligned columns, those in `right` at the right. The last is not padded."""
    widths: dict[int, int] = {}
    for row in rows:
        for at, cell in enumerate(row[:-1]):
            widths[at] = max(widths.get(at, 0), len(cell))
    for row in rows:
        cells = [f"{cell:>{widths[i]}}" if i in right else f"{cell:<{widths[i]}}" for i, cell in enumerate(row[:-1])]
        yield printable("  ".join([*cells, row[-1]]))


USUAL = 9  # So many numbers of `Sampling` are always shown, and the others if they are not the default.


def sampling_rows(options: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return each number of sampling as its value and, in parentheses, where that comes from."""
    shown = (name for at, name in enumerate(options) if at < USUAL or options[name]["from"] != "default")
    return {name: f"{_value(options[name]['value'])} ({options[name]['from']})" for name in shown}


def _value(value: float | None) -> str:
    return "random" if value is None else f"{value:.6g}"


class Bar(Closing):
    """A progress bar on stderr with a text, the share, a note, and the time left.

    It is drawn from the first `show` on, so questions can be asked before, and erased at the end. Nothing is drawn if
    it is `quiet`, or if stderr is no terminal that can move its cursor.
    """

    def __init__(self, quiet: bool = False) -> None:
        self.hidden = quiet or not sys.stderr.isatty() or os.environ.get("TERM") in ("dumb", "unknown")
        self._begun = time.monotonic()
        self._bar: RichProgress | None = None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun

    def show(self, text: str, done: float, total: float | None, note: str = "") -> None:
        """Draw the bar. A `total` of None means that it is not known."""
        if self.hidden:
            return
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

            texts = [TextColumn(f"{{task.{field}}}", markup=False) for field in ("description", "fields[note]")]
            parts = (texts[0], BarColumn(bar_width=None), TaskProgressColumn(), texts[1], TimeRemainingColumn(True))
            self._bar = Progress(*parts, console=Console(stderr=True), transient=True, expand=True)
            self._bar.add_task("", total=None, note="")
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], description=text, completed=done, total=total, note=note)

    def say(self, text: str) -> None:
        if self._bar is None:
            say(text)
        else:
            self._bar.console.print(printable(text), markup=False)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


@contextmanager
def build_bar(quiet: bool) -> Iterator[Progress]:
    """Show a bar while an index is built, with the tokens so far: how many there will be is not known."""
    with Bar(quiet) as bar:
        tokens = 0

        def advance(what: str, amount: int) -> None:
            nonlocal tokens
            tokens += amount * (what == "tokenized")
            rate = f", {tokens / bar.seconds:,.0f}/s" if bar.seconds else ""
            bar.show("indexing", tokens, None, f"{tokens:,} tokens{rate}")

        yield advance


@contextmanager
def without_messages_of_ray() -> Iterator[None]:
    """Keep the standard streams for this program. Ray also writes to them what its log files have, even from C++."""
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
            sys.stdout.flush()  # What was printed there goes nowhere, too.
            for descriptor, own in zip((1, 2), ours, strict=True):
                os.dup2(own, descriptor)
                os.close(own)


PROGRESS = "rest_local.tuning.progress"
_shows_warnings = False


def show_warnings() -> None:
    """Show the library's warnings as the command's own, and at a terminal what takes seconds. A second call does
    nothing.

    llama.cpp's log is not shown, because it warns of much that is normal.
    """
    global _shows_warnings
    if _shows_warnings:
        return
    _shows_warnings = True
    import logging  # At the top it would add a tenth to the time of --help.

    class Shown(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                if not f"{record.name}.".startswith("rest_local.llama."):
                    warn(record.getMessage())
            elif record.name == PROGRESS and sys.stderr.isatty():
                click.echo(f"rest-local: {record.getMessage()}", err=True)

    logging.getLogger("rest_local").addHandler(Shown())
    logging.getLogger(PROGRESS).setLevel(logging.INFO)


PLAIN = "target"  # The source of tokens that were not drafted.
RELAXED = "~"  # The name of a source ends with it if only relaxed verification let the token pass.
NAMES = {
    "model": "the draft model",
    "grammar": "the grammar",
    "prediction": "the prediction",
    "edit": "the edited text",
}


REPEATS = "the answer repeats itself"


def line_of(engine: Engine, result: Result) -> str:
    """Return the line about an answer. A single open datastore is named in place of "datastores"."""
    speed = result.timings.predicted_per_second
    parts = [f"{speed:.{0 if speed >= 10 else 1}f} tokens/s"]
    if result.speedup is not None:
        parts.append(f"{result.speedup:.1f} x plain")
    return ", ".join([*parts, drafted_share(result, [store.path.name for store in engine.datastores.in_use])])


def drafted_share(result: Result, datastores: Sequence[str] = ()) -> str:
    """Return such as `61% from mycode`, `61% from mycode 40%, context 21%`, or `nothing drafted`."""
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
