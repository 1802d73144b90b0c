"""`rest-local demo`: plain and drafted decoding of the same prompts, side by side, measured; ends in a line of JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from rest_local.cli import options
from rest_local.cli.load_options import load_options
from rest_local.cli.options import EngineChoice
from rest_local.cli.sections import SectionedCommand
from rest_local.errors import RestLocalError
from rest_local.llama.options import ModelOptions

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from rest_local.bench.demo import Comparison
    from rest_local.bench.prompts import Prompt
    from rest_local.decoding.engine import Engine, Piece

COLOURS = {"target": "", "datastore": "bold green", "context": "bold cyan"}
SHOWN_LINES = 18  # of each side: what fits a terminal of 24 lines, title and border counted


class Column:
    """The text of one side as it grows, each token in the colour of its source."""

    def __init__(self, engine: Engine) -> None:
        from rich.text import Text

        from rest_local.llama.detokenizer import Detokenizer

        self.text: Text = Text()
        self.tokens = self.steps = 0
        self._detokenizer = Detokenizer(engine.model.vocabulary.piece)
        self._began = self._latest = time.perf_counter()
        self._uncounted = 0

    def add(self, piece: Piece) -> None:
        if not self.steps:  # time runs from the first piece on: what came with it took none of it
            self._began, self._uncounted = time.perf_counter(), len(piece.tokens)
        self._latest = time.perf_counter()
        self.steps += 1
        self.tokens += len(piece.tokens)
        for token, source in zip(piece.tokens, piece.sources, strict=True):
            self.text.append(self._detokenizer.feed(token), COLOURS.get(source, "bold magenta"))

    def speed(self) -> float:
        """Tokens per second up to the newest token: a finished side keeps its figure while the other runs."""
        seconds = self._latest - self._began
        return (self.tokens - self._uncounted) / seconds if seconds > 0 else 0.0

    def tail(self, console: Console, width: int, height: int) -> Text:
        """The newest `height` lines as they are seen at `width`: a live display cuts off what is too high at its end,
        which is where the text grows."""
        from rich.text import Text

        return Text("\n").join(self.text.wrap(console, width, overflow="fold", tab_size=4)[-height:])


class Screen:
    """Shows the first pair of runs in two columns while they stream; the audience of `bench.demo.compare`."""

    def __init__(self, engine: Engine, console: Console) -> None:
        self._engine, self._console = engine, console
        self._live: Live | None = None
        self._columns: dict[str, Column] = {}

    def begin(self, prompt: Prompt, mode: str, sampled: bool) -> None:
        from rich.live import Live

        self.end()
        self._columns = {}
        self._console.print(f"\n[bold]{prompt.title}[/bold] · {mode} mode{_sampled(sampled)}", highlight=False)
        self._live = Live(console=self._console, refresh_per_second=12, transient=False)
        self._live.start()

    def piece(self, side: str, piece: Piece) -> None:
        if side not in self._columns:
            self._columns[side] = Column(self._engine)
        self._columns[side].add(piece)
        if self._live is not None:
            self._live.update(self._table())

    def end(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _table(self) -> Any:
        from rich.panel import Panel
        from rich.table import Table

        table = Table.grid(expand=True)
        for _ in self._columns:
            table.add_column(ratio=1)
        titles = (f"{side}: {column.speed():.0f} tokens/s" for side, column in self._columns.items())
        width = max(self._console.width // max(len(self._columns), 1) - 4, 8)  # 4: the border and its padding
        height = max(min(SHOWN_LINES, self._console.height - 4), 4)
        tails = (column.tail(self._console, width, height) for column in self._columns.values())
        panels = (Panel(tail, title=title) for title, tail in zip(titles, tails, strict=True))
        table.add_row(*panels)
        return table


class Plain:
    """The same for a pipe: no colours, one side after the other."""

    def __init__(self) -> None:
        self._side = ""

    def begin(self, prompt: Prompt, mode: str, sampled: bool) -> None:
        self._side = ""
        click.echo(f"\n== {prompt.title}, {mode} mode{_sampled(sampled)}")

    def piece(self, side: str, piece: Piece) -> None:
        if side != self._side:
            click.echo(f"\n-- {side}" if self._side else f"-- {side}")
            self._side = side
        click.echo(piece.text, nl=False)

    def end(self) -> None:
        if self._side:
            click.echo()


def _sampled(sampled: bool) -> str:
    return " (loops: sampled, one seed)" if sampled else ""


def prepare_datastore(choice: EngineChoice, quiet: bool) -> str:
    """Return the path of the demo's datastore, built from the standard library if it is not there yet."""
    from rest_local.bench.stdlib import ensure

    return str(ensure(options.model_path(choice.model), say=(lambda line: None) if quiet else _progress))


def _progress(line: str) -> None:
    click.echo(line, err=True)


def measure(
    choice: EngineChoice, tokens: int, repeats: int, audience_of: Callable[[Engine], Any] | None
) -> Iterator[Comparison]:
    """Yield every prompt in exact mode, then every prompt in fast mode."""
    from rest_local.bench.demo import MODES, compare
    from rest_local.bench.prompts import demo_prompts

    for mode in MODES:
        if audience_of is not None:
            _progress(f"{mode} mode: loading")
        with options.load_engine(replace(choice, exact=mode == "exact")) as engine:
            audience = audience_of(engine) if audience_of else None
            for prompt in demo_prompts():
                with _ended(audience):
                    comparison = compare(engine, prompt, mode, max_tokens=tokens, repeats=repeats, audience=audience)
                if audience is not None:
                    click.echo(describe(comparison))
                yield comparison


@contextmanager
def _ended(audience: Any) -> Iterator[None]:
    """A live display must give the terminal back whatever happens, Ctrl-C included."""
    try:
        yield
    finally:
        if audience is not None:
            audience.end()


def describe(comparison: Comparison) -> str:
    """Return the lines of figures under a prompt, each at most 80 wide."""
    plain, drafted = comparison.plain, comparison.drafted
    accepted = ", ".join(f"{name} {n['accepted']}" for name, n in drafted.result.draft["by_source"].items()) or "none"
    return (
        f"plain {plain.tokens_per_second:.1f} tokens/s · drafted {drafted.tokens_per_second:.1f} tokens/s"
        f" · {comparison.speedup:.2f} times · MAT {drafted.result.draft['mat']:.2f}"
        f"\naccepted: {accepted} · {'identical' if comparison.identical else 'NOT identical'}"
        f" · repeated 8-grams {plain.repeated:.0%} / {drafted.repeated:.0%}"
    )


def table(comparisons: Sequence[Comparison]) -> list[str]:
    """Return the summary, one line a comparison."""
    head = f"{'prompt':<8}{'mode':<7}{'sampling':<9}{'plain':>8}{'drafted':>9}{'speedup':>9}{'MAT':>6}  identical"
    return [head] + [
        f"{c.prompt.kind:<8}{c.mode:<7}{'seeded' if c.sampled else 'greedy':<9}{c.plain.tokens_per_second:>8.1f}"
        f"{c.drafted.tokens_per_second:>9.1f}{c.speedup:>9.2f}{c.drafted.result.draft['mat']:>6.2f}"
        f"  {'yes' if c.identical else 'no'}"
        for c in comparisons
    ]


def audience_for(as_json: bool) -> Callable[[Engine], Any] | None:
    """Return who watches: nobody with --json, two columns at a terminal, plain text in a pipe."""
    if as_json:
        return None
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        return lambda engine: Plain()
    return lambda engine: Screen(engine, console)


_threads, _gpu_layers = options.device_options(click.option)


@click.command(cls=SectionedCommand)
@click.option("-m", "--model", metavar="MODEL", help="GGUF file. Default: the demo model.")
@_threads
@_gpu_layers
@click.option(
    "-n", "--tokens", type=click.IntRange(min=1), default=200, show_default=True, metavar="N", help="Tokens a run."
)
@click.option(
    "--repeats", type=click.IntRange(min=1), default=3, show_default=True, metavar="N", help="Timed pairs of runs."
)
@click.option("--json", "as_json", is_flag=True, help="Print nothing but the last line.")
@load_options
def demo(
    model: str | None,
    threads: int | None,
    gpu_layers: int | None,
    load: ModelOptions,
    tokens: int,
    repeats: int,
    as_json: bool,
) -> None:
    """Complete real Python plain and drafted, side by side, and measure both.

    Builds a datastore of this interpreter's standard library first ("demo-stdlib-" and the vocabulary's hash). The
    last line is JSON. Exit code 1 if an output of exact mode differs from plain decoding.
    """
    from rest_local.bench.demo import CONTEXT, to_json

    choice = EngineChoice(model=model, ctx=CONTEXT, threads=threads, gpu_layers=gpu_layers, options=load)
    choice = replace(choice, datastore=(prepare_datastore(choice, as_json),))
    comparisons = list(measure(choice, tokens, repeats, audience_for(as_json)))
    if not as_json:
        click.echo("\n" + "\n".join(table(comparisons)) + "\n")
    click.echo(json.dumps(to_json(comparisons), ensure_ascii=False))
    broken = [c.prompt.kind for c in comparisons if c.mode == "exact" and not c.identical]
    if broken:
        raise RestLocalError(f"exact mode: drafted output differs from plain decoding ({', '.join(broken)})")
