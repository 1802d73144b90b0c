"""`rest-local demo`: one prompt decoded plain and drafted, side by side, then three lines of result."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rest_local.cli import inputs, opening, options
from rest_local.cli.sections import SectionedCommand, option
from rest_local.cli.terminal import fitted, print_json
from rest_local.decoding.config import EngineConfig
from rest_local.errors import RestLocalError
from rest_local.llama.options import ModelOptions

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from rest_local.bench.demo import Comparison, Prompt
    from rest_local.decoding.engine import Engine, Piece

COLOURS = {"target": "", "datastore": "bold green", "context": "bold cyan"}
SHOWN_LINES = 14  # of each side: with two lines before, the border and five lines of result they fill 24 lines

SECONDS = 8.0  # for a prompt, after which no pair of runs begins
SELF_TEST_SECONDS = 20.0  # that the demo waits for exact settings to be confirmed
REPEATS = 1.05  # times plain speed: more than noise
FREE = 0.97  # of plain speed: what the project promises at least where nothing can be drafted


class Column:
    """The text of one side as it grows, each token in the colour of its source."""

    def __init__(self, engine: Engine) -> None:
        from rich.text import Text

        from rest_local.llama.vocabulary import Detokenizer

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
        """The newest `height` lines at `width`: a live display cuts off the end, which is where the text grows."""
        from rich.text import Text

        return Text("\n").join(self.text.wrap(console, width, overflow="fold", tab_size=4)[-height:])


class Screen:
    """The display of `bench.demo.compare`: two columns at a terminal, in a pipe one text after the other."""

    def __init__(self, engine: Engine, console: Console) -> None:
        self._engine, self._console = engine, console
        self._live: Live | None = None
        self._columns: dict[str, Column] = {}

    def begin(self, prompt: Prompt, mode: str) -> None:
        if not self._console.is_terminal:
            return click.echo(f"== {prompt.title}, {mode} mode")
        from rich.live import Live

        self._live = Live(console=self._console, refresh_per_second=12, transient=False)
        return self._live.start()

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
        width = max(self._console.width // max(len(self._columns), 1) - 4, 8)  # 4: the border and its padding
        height = max(min(SHOWN_LINES, self._console.height - 4), 4)
        panels = []
        for side, column in self._columns.items():
            table.add_column(ratio=1)
            title = f"{side}: {column.speed():.0f} tokens/s"
            panels.append(Panel(column.tail(self._console, width, height), title=title))
        table.add_row(*panels)
        return table


@contextmanager
def _datastore(config: EngineConfig, code: Path | None, say: Callable[[str], None]) -> Iterator[tuple[str, str]]:
    """The path of the datastore to draft from, and what it holds: of `code` for as long as the demo runs, else of this
    interpreter's standard library, which is kept for the next time.
    """
    from tempfile import TemporaryDirectory

    from rest_local.bench.demo import ensure
    from rest_local.llama.model import Model
    from rest_local.retrieval.building.indexing import build_datastore

    path = inputs.model_path(config.model)
    if code is None:
        yield str(ensure(path, report=say)), "Python's standard library"
        return
    with TemporaryDirectory() as folder:
        say(f"indexing {code} ...")
        with Model.open(path, vocab_only=True) as model:
            built = build_datastore(Path(folder) / "code", [code], vocabulary=model.vocabulary)
        yield str(built.path), f"{code} ({built.tokens:,} tokens)"


@contextmanager
def _engine(config: EngineConfig, fast: bool, say: Callable[[str], None]) -> Iterator[tuple[Engine, str]]:
    """The engine and its mode: exact, unless `fast` or where this backend has no exact settings."""
    if not fast:
        with opening.open_engine(replace(config, exact=True)) as engine:
            engine.compare(SELF_TEST_SECONDS)
            if engine.capability.kind != "none":
                yield engine, "exact"
                return
            reason = engine.capability.reason
        say(f"the demo runs in fast mode ({reason})")
    with opening.open_engine(config) as engine:
        yield engine, "fast"


def demo_prompts(engine: Engine, code: Path | None) -> list[Prompt]:
    """Where drafting gains (an edit, or a changed copy for a model that cannot chat), and where nothing is found."""
    from rest_local.bench.demo import copy_prompt, edit_prompt, unseen_prompt
    from rest_local.paths import demo_model

    chat = bool(engine.model.chat_template) and engine.model.path != demo_model()
    return [edit_prompt(code) if chat else copy_prompt(code), unseen_prompt(chat)]


def describe(comparison: Comparison) -> str:
    """One line of result, within 80 columns for the demo model. The ratio is the median over pairs of runs, so it is
    not that of two speeds, of which only the drafted one is shown.
    """
    speed = f"{comparison.drafted.tokens_per_second:.0f} tokens/s"
    same = "same output" if comparison.identical else "output differs at near-ties"
    if comparison.prompt.kind != "unseen":
        accepted, tokens = comparison.drafted.result.draft.accepted, len(comparison.drafted.result.tokens)
        what = f"{accepted / max(tokens, 1):.0%} drafted"
    elif comparison.speedup >= REPEATS:  # the answer repeats itself
        what = "not stored: repeats its own text"
    else:
        costs = "costs nothing" if comparison.speedup >= FREE else f"costs {1 - comparison.speedup:.0%}"
        what = f"nothing to find: {costs}"
    return f"{comparison.speedup:5.2f} x  {speed}, {same}: {comparison.prompt.title}, {what}"


_threads, _gpu_layers = options.device_options(option)


@click.command(cls=SectionedCommand)
@option("-m --model MODEL", options.MODEL_HELP)
@_threads
@_gpu_layers
@option("-n --tokens N", "Tokens a run.", default=160)
@option("--repeats N", f"Timed pairs of runs, as many as begin within {SECONDS:g} s.", default=3)
@option(
    "--code PATH",
    "Edit this file, or one of this folder, and draft from it instead of Python's standard library.",
    type=click.Path(exists=True, path_type=Path),
)
@option("--fast", "Measure fast mode: output can differ at near-ties.")
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
    fast: bool,
    as_json: bool,
) -> None:
    """Show what drafting gains: the same prompt plain and drafted, side by side.

    Without -m, a player edits a file: a model as slow as one of 1B, which writes a text that is known before. A model
    with a chat template edits a file, too; any other one writes a changed copy of a function. A second prompt has
    nothing to draft from. Exit code 1 if an output of exact mode differs from plain decoding.
    """
    from tempfile import TemporaryDirectory

    from rich.console import Console

    from rest_local.bench.demo import CONTEXT, compare, to_json, written

    def say(line: str) -> None:
        if not as_json:
            click.echo(fitted(line, sys.stderr), err=True)

    config = EngineConfig(model=model, n_ctx=CONTEXT, threads=threads, n_gpu_layers=n_gpu_layers, options=load)
    plays = model is None
    with ExitStack() as stack:
        if plays:
            path, prompts = written(Path(stack.enter_context(TemporaryDirectory())), code, tokens)
        else:
            path, prompts = inputs.model_path(model), []
        config = replace(config, model=path)
        store, held = stack.enter_context(_datastore(config, code, say))
        engine, mode = stack.enter_context(_engine(replace(config, datastores=(store,)), fast or plays, say))
        first, unseen = prompts or demo_prompts(engine, code)
        if not as_json:
            name = "A player, at the pace of a model of 1B," if plays else f"{path.name}, in {mode} mode,"
            tell(f"{name} writes the same answer twice: plain,")
            tell(f"and drafted from {held} and the text so far.")
        audience = None if as_json else Screen(engine, Console())
        if audience is not None:
            stack.callback(audience.end)  # a live display gives the terminal back whatever happens
        measured = partial(compare, engine, mode=mode, max_tokens=tokens, repeats=repeats, seconds=SECONDS)
        comparisons = [measured(first, display=audience)]
        if audience is not None:
            audience.end()
            tell(describe(comparisons[0]))
        comparisons.append(measured(unseen))
    if as_json:
        print_json(to_json(comparisons))
    else:
        tell(describe(comparisons[1]))
        if any(comparison.disturbed for comparison in comparisons):
            tell("Other programs use the processors, so these times are not those of a quiet machine.")
        if plays:
            tell("A player's text is given, its times are real. Yours: rest-local demo -m MODEL")
        else:
            tell("Go on: rest-local chat -m MODEL, or rest-local serve -m MODEL for an editor")
    broken = [c.prompt.kind for c in comparisons if c.mode == "exact" and not c.identical]
    if broken:
        raise RestLocalError(f"exact mode: drafted output differs from plain decoding ({', '.join(broken)})")


def tell(line: str) -> None:
    click.echo(fitted(line, sys.stdout))
