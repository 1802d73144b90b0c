"""`rest-local demo`: answer a question and edit some code, each plain and drafted, side by side."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rest_local.cli import opening, options
from rest_local.cli.sections import SectionedCommand, option
from rest_local.cli.terminal import columns, counted, fitted, print_json
from rest_local.decoding.config import EngineConfig
from rest_local.llama.options import ModelOptions

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from rest_local.cli.comparing import Comparison, Prompt
    from rest_local.decoding.engine import Engine, Piece

COLOURS = {"target": "", "datastore": "bold green", "context": "bold cyan"}
LEAST_LINES, MOST_LINES = 4, 14
# The rest of the screen: a title and a border for both prompts, the result, and the command line.
OTHER_LINES = 13

# After so many seconds with a prompt no other pair of runs begins. With the loading, the demo takes less than 20 s.
SECONDS = 5.0


class Column:
    """The growing text of one side, with each token in the colour of its source."""

    def __init__(self, engine: Engine) -> None:
        from rich.text import Text

        from rest_local.llama.vocabulary import Detokenizer

        self.text: Text = Text()
        self.tokens = self.steps = 0
        self._detokenizer = Detokenizer(engine.model.vocabulary.piece)
        self._began = self._latest = time.perf_counter()
        self._uncounted = 0

    def add(self, piece: Piece) -> None:
        if not self.steps:  # The clock starts with the first piece, so that its tokens are not counted.
            self._began, self._uncounted = time.perf_counter(), len(piece.tokens)
        self._latest = time.perf_counter()
        self.steps += 1
        self.tokens += len(piece.tokens)
        for token, source in zip(piece.tokens, piece.sources, strict=True):
            self.text.append(self._detokenizer.feed(token), COLOURS.get(source, "bold magenta"))

    def speed(self) -> float:
        """Return the tokens per second up to the newest token, so that a finished side keeps its figure."""
        seconds = self._latest - self._began
        return (self.tokens - self._uncounted) / seconds if seconds > 0 else 0.0

    def tail(self, console: Console, width: int, height: int) -> Text:
        """Return the newest `height` lines at `width`, since a live display cuts off the end, where the text grows."""
        from rich.text import Text

        return Text("\n").join(self.text.wrap(console, width, overflow="fold", tab_size=4)[-height:])


class Screen:
    """The display of `cli.comparing.compare`: two columns at a terminal, and one text after the other in a pipe."""

    def __init__(self, engine: Engine, console: Console) -> None:
        self._engine, self._console = engine, console
        self._live: Live | None = None
        self._columns: dict[str, Column] = {}

    def begin(self, prompt: Prompt) -> None:
        click.echo(fitted(f"== {prompt.title}", sys.stdout))
        if self._console.is_terminal:
            from rich.live import Live

            self._live = Live(console=self._console, refresh_per_second=12, transient=False)
            self._live.start()

    def piece(self, side: str, piece: Piece) -> None:
        if side not in self._columns:
            if self._live is None:
                click.echo(f"\n-- {side}" if self._columns else f"-- {side}")
            self._columns[side] = Column(self._engine)
        self._columns[side].add(piece)
        if self._live is None:
            click.echo(piece.text, nl=False)
        else:
            self._live.update(self._table())

    def end(self) -> None:
        if self._live is not None:
            self._live.stop()
        elif self._columns:
            click.echo()
        self._live, self._columns = None, {}

    def _table(self) -> Any:
        from rich.panel import Panel
        from rich.table import Table

        table = Table.grid(expand=True)
        width = max(self._console.width // max(len(self._columns), 1) - 4, 8)  # The border and its padding take 4.
        height = max(min((self._console.height - OTHER_LINES) // 2, MOST_LINES), LEAST_LINES)
        panels = []
        for side, column in self._columns.items():
            table.add_column(ratio=1)
            title = f"{side}: {column.speed():.0f} tokens/s"
            panels.append(Panel(column.tail(self._console, width, height), title=title))
        table.add_row(*panels)
        return table


def result(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Yield the lines of the result: what was measured, and nothing that another model could contradict."""
    rows = [("", "plain", "with drafts", "", "drafted", "output")]
    for each in comparisons:
        name = "edit" if each.prompt.begun else "question"
        if not each.plain.result.tokens:
            rows.append((name, "", "", "", "", "the model ended its answer at once"))
            continue
        rows.append((
            name,
            f"{each.plain.tokens_per_second:.0f} tokens/s",
            f"{each.drafted.tokens_per_second:.0f} tokens/s",
            f"{each.speedup:.2f} x",
            f"{each.drafted.drafted_share:.0%}",
            "the same" if each.same is None else f"differs after {counted(each.same, 'token')}",
        ))  # fmt: skip
    yield from columns(rows, right=(1, 2, 3, 4))
    for row, each in zip(rows[1:], comparisons, strict=True):
        if each.repeats:
            yield f"The answer to the {row[0]} repeats itself, which is easy to draft."
    if any(each.disturbed for each in comparisons):
        yield "Other programs use the processors, so these times are not those of a quiet machine."


_threads, _gpu_layers = options.device_options(option)


@click.command(cls=SectionedCommand)
@option("-m --model MODEL", options.MODEL_HELP)
@_threads
@_gpu_layers
@option("-n --tokens N", "Generate at most N tokens for an answer.", default=160)
@option("--repeats N", f"Time up to N pairs of runs, as many as begin within {SECONDS:g} s.", default=3)
@option(
    "--code FILE",
    "Edit this file instead of one of Python's standard library.",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
)
@option("--json", "Print nothing but one line of JSON.", to="as_json")
@options.load_options
def demo(
    model: str | None,
    threads: int | None,
    n_gpu_layers: int | None,
    load: ModelOptions,
    tokens: int,
    repeats: int,
    code: Path | None,
    as_json: bool,
) -> None:
    """Show what drafting gains: the same answers plain and drafted, side by side.

    The model answers a question, and edits a passage of a file whose first lines it is given. Drafts come from the text
    so far. Answers are greedy, and the last lines say what was measured.
    """
    from rich.console import Console

    from rest_local.cli.comparing import CONTEXT, compare, prompts

    def tell(line: str) -> None:
        click.echo(fitted(line, sys.stdout))

    config = EngineConfig(model=model, n_ctx=CONTEXT, threads=threads, n_gpu_layers=n_gpu_layers, options=load)
    with ExitStack() as stack:
        engine = stack.enter_context(opening.open_engine(config))
        screen = None
        if not as_json:
            tell(f"{Path(engine.model.path).name} writes each answer twice: plain, and with drafts.")
            screen = Screen(engine, Console())
            stack.callback(screen.end)
        comparisons = [
            compare(engine, prompt, max_tokens=tokens, repeats=repeats, display=screen, seconds=SECONDS)
            for prompt in prompts(code, bool(engine.model.chat_template))
        ]
    if as_json:
        print_json({"prompts": [each.to_json() for each in comparisons]})
        return
    for line in result(comparisons):
        click.echo(line)
    tell(f"Go on: rest-local chat{f' -m {model}' if model else ''}")
