"""`rest-local chat`: a conversation in the terminal, or one line of a pipe at a time.

The messages are kept here; the engine keeps their evaluation, since each prompt begins with the one before. Ctrl-C
stops the answer, and what was said of it stays in the conversation; at the prompt, twice, it leaves (130).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import click

from rest_local.cli import inputs, interrupt, opening, options
from rest_local.cli.messages import in_options
from rest_local.cli.sections import SectionedCommand
from rest_local.decoding.config import EngineConfig
from rest_local.errors import PromptTooLong, RestLocalError
from rest_local.llama.sampling import Sampling

if TYPE_CHECKING:
    from rest_local.decoding.engine import Engine, Result

HELP = """/help   this text
/clear  forget the conversation
/stats  what drafting did in this session
/bye    leave (so does Ctrl-D)
Ctrl-C  stop the answer"""


@dataclass
class Totals:
    """Sums over the answers of a session."""

    answers: int = 0
    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    accepted: dict[str, int] = field(default_factory=dict)

    def add(self, result: Result) -> None:
        self.answers += 1
        self.tokens += len(result.tokens)
        self.steps += result.draft.steps
        self.seconds += result.timings.predicted_ms / 1000
        for source, counts in result.draft.by_source.items():
            self.accepted[source] = self.accepted.get(source, 0) + counts.accepted

    def line(self) -> str:
        speed = self.tokens / self.seconds if self.seconds else 0.0
        mat = self.tokens / self.steps if self.steps else 0.0
        accepted = ", ".join(f"{source} {count}" for source, count in sorted(self.accepted.items())) or "none"
        return f"{self.tokens} tokens, {speed:.1f} tokens/s, MAT {mat:.2f}, accepted: {accepted}"


@dataclass
class Conversation:
    """The state of one session and what can be done with it."""

    engine: Engine
    sampling: Sampling
    max_tokens: int
    stop: tuple[str, ...]
    system: str | None
    as_json: bool
    messages: list[dict[str, str]] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything but the system message."""
        self.messages[:] = [{"role": "system", "content": self.system}] if self.system else []

    def answer(self, text: str) -> None:
        """Stream the answer to `text`. A refused message (too long) leaves the conversation as it was."""
        stream = None
        try:
            messages = [*self.messages, {"role": "user", "content": text}]
            prompt = self.engine.chat_prompt(messages)
            stream = self.engine.generate(
                prompt,
                max_tokens=self.max_tokens,
                sampling=self.sampling,
                stop=self.stop,
                keep_tokens=self._kept_tokens(prompt, messages),
            )
            for piece in stream:
                if not self.as_json:
                    click.echo(piece.text, nl=False)
        except KeyboardInterrupt:
            interrupt.reset()
            if stream is None:  # while the message was read: there is no answer to keep
                note("stopped")
                return
            stream.cancel()
        self._keep(text, stream.result)

    def _kept_tokens(self, prompt: str, messages: list[dict[str, str]]) -> int:
        """What a context shift keeps: the tokens of the prompt up to the first message of the user."""
        from rest_local.chat.conversation import fixed_beginning

        if not self.system:
            return 0
        return len(self.engine.tokenize(fixed_beginning(messages, prompt, self.engine.chat_prompt)))

    def _keep(self, text: str, result: Result) -> None:
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": result.text}]
        self.totals.add(result)
        if self.as_json:
            click.echo(result.to_json())
            return
        this = Totals()
        this.add(result)
        click.echo()
        note(f"[{this.line()}]")

    def stats(self) -> None:
        note(f"{self.totals.answers} answers, {self.totals.line()}")


def note(text: str) -> None:
    """Print a line about the session on stderr, dim on a terminal that allows colour."""
    plain = bool(os.environ.get("NO_COLOR")) or not sys.stderr.isatty()
    click.echo(text if plain else click.style(text, dim=True), err=True)


def messages_of_user(interactive: bool) -> Iterator[str]:
    """Yield the user's lines until the end of input, /bye, or a second Ctrl-C at the prompt."""
    read: Callable[[], str | None] = _ask if interactive else _next_line
    while True:
        try:
            line = read()
        except KeyboardInterrupt:
            if not interactive:
                raise
            note("\n/bye or Ctrl-D leaves, and so does another Ctrl-C")
            continue
        interrupt.reset()
        if line is None or line.strip() == "/bye":
            return
        if line.strip():
            yield line.strip()


def _ask() -> str | None:
    import readline  # noqa: F401  gives input() line editing and a history

    try:
        return inputs.clean(input("> "), "stdin")
    except EOFError:
        return None


def _next_line() -> str | None:
    line = sys.stdin.buffer.readline()
    return inputs.decode(line, "stdin") if line else None


def converse(conversation: Conversation, interactive: bool) -> None:
    """Answer every line. At a terminal an error is shown and the conversation goes on; in a pipe it ends the run."""
    commands = {"/help": lambda: note(HELP), "/clear": conversation.clear, "/stats": conversation.stats}
    for line in messages_of_user(interactive):
        if line.startswith("/"):
            commands.get(line, lambda line=line: note(f"{line}: no such command; /help lists them"))()
            continue
        try:
            conversation.answer(line)
        except RestLocalError as error:
            if not interactive:
                raise
            note(f"rest-local: error: {in_options(str(error))}")
            if isinstance(error, PromptTooLong) and conversation.messages:
                note("the conversation is what fills the context; /clear forgets it")


@click.command(cls=SectionedCommand)
@options.engine_options
@options.history_option
@click.option(
    "-n",
    "--tokens",
    "--n-predict",
    "--predict",
    type=click.IntRange(min=1),
    default=1024,
    show_default=True,
    metavar="N",
    help="At most N tokens an answer.",
)
@click.option("--system", metavar="TEXT", help="System message that the conversation starts with.")
@options.sampling_options
@options.stop_option
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON for each answer instead.")
def chat(
    config: EngineConfig,
    sampling: Sampling,
    tokens: int,
    system: str | None,
    stop: tuple[str, ...],
    as_json: bool,
) -> None:
    """Talk to the model. Lines of a pipe are answered one after the other.

    In the conversation: /help, /clear, /stats, /bye. Ctrl-C stops the answer.
    """
    interactive = sys.stdin.isatty()
    with opening.open_engine(config, chat=True) as engine:
        if interactive and not as_json:
            note(f"{engine.model.name}: /help for help, /bye to leave")
        converse(Conversation(engine, sampling, tokens, stop, system, as_json), interactive)
