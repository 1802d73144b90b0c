'''The command `rest-local chat`, and what the user types.

- A question on the command line, or a pipe, or both: one answer. The pipe is one text, whatever its lines; with a
  question it is attached to it. Ctrl-C ends it with 130.
- A terminal: a conversation, until `/bye`, Ctrl-D, or Ctrl-C twice at an empty line (130). Ctrl-C stops an answer.

Enter sends. Alt-Enter begins another line; in a message that begins with `"""` Enter does so as well, up to the next
`"""`. A pasted text of many lines is one message, with its indentation (bracketed paste).
The lines typed before are kept in `chat_history` of the data directory, for the arrow keys and Ctrl-R. Where there is a
terminal that cannot move its cursor (`TERM=dumb`), lines are read as they are.
'''

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rest_local.cli import indexer, inputs, interrupt, opening, options
from rest_local.cli import indexer as live_options
from rest_local.cli.indexer import Live
from rest_local.cli.sections import SectionedCommand
from rest_local.cli.terminal import warn
from rest_local.decoding.config import EngineConfig
from rest_local.llama.sampling import Sampling

if TYPE_CHECKING:
    from prompt_toolkit.history import History

    from rest_local.cli.chat.talk import Talk
    from rest_local.decoding.engine import Engine

QUOTES = '"""'
_QUOTED = re.compile(rf"\s*(/[a-z]+\s+)?{QUOTES}")
PROMPT, CONTINUATION = "> ", "  "
HISTORY_BYTES = 1 << 20  # where the file of typed messages is longer, its older half goes

Complete = Callable[[str], Iterator[tuple[str, int]]]  # the text before the cursor -> completions, and their starts


class Prompt:
    """Asks for messages. `complete`: completions of the text before the cursor. `keep`: whether what is typed is kept
    on disk.
    """

    def __init__(self, complete: Complete, keep: bool) -> None:
        self._dumb = is_dumb()
        self._session = None if self._dumb else _session(complete, _history(keep))

    def ask(self) -> str | None:
        """The next message, None at the end of input (Ctrl-D). Raises KeyboardInterrupt for Ctrl-C at an empty line;
        a line that was begun is dropped by it.
        """
        while True:
            try:
                text = self._read()
            except EOFError:
                return None
            finally:
                interrupt.watch_again()  # the library watches signals in its own way while it reads
            if text is not None:
                return unquoted(inputs.clean(text, "stdin"))

    def _read(self) -> str | None:
        if self._session is None:
            return read_lines(_read_line)
        begun = self._session.default_buffer
        try:
            text: str = self._session.prompt()
            return text
        except KeyboardInterrupt:
            if begun.text.strip():
                return None
            raise


def is_dumb() -> bool:
    """Whether the terminal cannot move its cursor."""
    return os.environ.get("TERM", "").lower() in ("dumb", "unknown") or not (sys.stdout.isatty() or sys.stderr.isatty())


def is_open(text: str) -> bool:
    """Whether the message, or what follows a command, begins with quotes that have not ended."""
    return bool(_QUOTED.match(text)) and text.count(QUOTES) % 2 == 1


def unquoted(text: str) -> str:
    """A message without the quotes around it."""
    inner = text.strip()
    if len(inner) >= 2 * len(QUOTES) and inner.startswith(QUOTES) and inner.endswith(QUOTES):
        return inner[len(QUOTES) : -len(QUOTES)].strip("\n")
    return text.rstrip().lstrip("\n")


def read_lines(read: Callable[[], str]) -> str:
    """A message from lines: one, or those up to the end of a quoted text. Raises EOFError where there is none."""
    lines = [read()]
    while is_open("\n".join(lines)):
        try:
            lines.append(read())
        except EOFError:
            break
    return "\n".join(lines)


def _read_line() -> str:
    """A line of the standard input, asked for on stderr. Raises EOFError."""
    sys.stderr.write(PROMPT)
    sys.stderr.flush()
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\r\n")


def _session(complete: Complete, history: History) -> Any:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion
    from prompt_toolkit.document import Document
    from prompt_toolkit.output import create_output
    from prompt_toolkit.output.color_depth import ColorDepth
    from prompt_toolkit.shortcuts import CompleteStyle

    os.environ.setdefault("PROMPT_TOOLKIT_NO_CPR", "1")  # needed for menus only, and slow terminals answer late

    class Completions(Completer):
        def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
            for text, start in complete(document.text_before_cursor):
                yield Completion(text, start_position=start)

    return PromptSession(
        PROMPT,
        multiline=True,
        key_bindings=_keys(),
        completer=Completions(),
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,
        prompt_continuation=CONTINUATION,
        history=history,
        enable_open_in_editor=True,
        enable_suspend=True,
        tempfile_suffix=".md",
        output=create_output(always_prefer_tty=True),
        color_depth=ColorDepth.DEPTH_1_BIT if os.environ.get("NO_COLOR") else None,
    )


def _keys() -> Any:
    from prompt_toolkit.enums import DEFAULT_BUFFER
    from prompt_toolkit.filters import has_focus
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()
    typing = has_focus(DEFAULT_BUFFER)  # not a search

    @keys.add("enter", filter=typing)
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_open(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=typing)
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _history(keep: bool) -> History:
    """What was typed before: kept in a file that only the user can read, or nowhere."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    from rest_local.paths import data_dir, write_atomically

    if not keep:
        return InMemoryHistory()
    try:
        path = data_dir() / "chat_history"
        content = path.read_bytes() if path.exists() else b""
        if len(content) > HISTORY_BYTES or not path.exists():
            write_atomically(path, _newer_half(content))
        os.close(os.open(path, os.O_RDWR))
    except OSError as error:
        warn(f"what you type is not kept: {error.filename}: {error.strerror}")
        return InMemoryHistory()
    return FileHistory(str(path))


def _newer_half(content: bytes) -> bytes:
    """The entries of the newer half of a history file; an entry begins with a comment after an empty line."""
    begin = content.find(b"\n\n#", len(content) // 2)
    return content[begin + 1 :] if begin >= 0 else b""


@contextlib.contextmanager
def quiet_keyboard() -> Iterator[None]:
    """What is typed meanwhile is not shown in the middle of the answer, and waits for the next prompt. Ctrl-C works.
    Changes nothing in the background, where the system would stop the process for it.
    """
    try:
        import termios
    except ImportError:  # Windows
        yield
        return
    if not sys.stdin.isatty() or os.tcgetpgrp(sys.stdin.fileno()) != os.getpgrp():
        yield
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    silent = [*before]
    silent[3] = before[3] & ~termios.ECHO

    def put_back() -> None:
        termios.tcsetattr(terminal, termios.TCSANOW, before)

    interrupt.at_end.append(put_back)
    try:
        termios.tcsetattr(terminal, termios.TCSANOW, silent)
        yield
    finally:
        put_back()
        interrupt.at_end.remove(put_back)


@click.command(cls=SectionedCommand)
@click.argument("question", required=False, metavar="[QUESTION | -]")
@options.engine_options_of_chat
@options.projector_option
@options.history_option
@live_options.code_options
@options.tokens_option(-1, "At most N tokens an answer; -1: until it ends or the context is full.")
@click.option(
    "--image",
    "images",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="FILE",
    help="Image that goes with the question; may be repeated. Needs a projector (--mmproj).",
)
@click.option("--system", metavar="TEXT", help="System message that the conversation starts with.")
@click.option(
    "--session", metavar="NAME", help="Keep the conversation under this name, and go on with it where it exists."
)
@options.template_option
@options.sampling_options
@options.stop_option
@options.quiet_option
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON for each answer instead.")
def chat(
    question: str | None,
    config: EngineConfig,
    live: Live,
    sampling: Sampling,
    tokens: int,
    images: tuple[Path, ...],
    system: str | None,
    session: str | None,
    chat_template_file: Path | None,
    stop: tuple[str, ...],
    quiet: bool,
    as_json: bool,
) -> None:
    """Talk to the model, or ask it one QUESTION.

    What comes through a pipe is one text and goes with the question: git diff | rest-local chat "review this". In a
    conversation /help lists the commands, Ctrl-C stops the answer, and Ctrl-D leaves.
    """
    from rest_local.cli.chat.conversation import NamedSession
    from rest_local.cli.chat.talk import Settings, Talk

    asked = _question(question)
    pictures = [inputs.read_image(path) for path in images]
    template = None if chat_template_file is None else inputs.read_text(chat_template_file, "chat template")
    config = _conversing(config, template)  # before anything is asked about code to draft from
    open_ = partial(_open, template=template, live=live.chosen())
    with ExitStack() as stack:
        named = None if session is None else stack.enter_context(NamedSession(session))
        kept = None if named is None else named.read()  # what is wrong with it is told before the model is loaded
        settings = Settings(sampling, tokens, stop)
        talk = stack.enter_context(
            Talk(open_(config), settings, as_json=as_json, quiet=quiet, interactive=asked is None, reopen=open_)
        )
        if named is not None and kept is not None:
            talk.resume(named, kept)
        if system is not None:
            talk.conversation.system = system
        talk.attach_images(pictures)
        if asked is None:
            converse(talk, keep=config.history, greet=not as_json)
        elif talk.ask(asked):
            raise KeyboardInterrupt


def _question(argument: str | None) -> str | None:
    """The one question of the command line and of a pipe; None for a conversation. Raises click.UsageError where the
    pipe is empty and there is no question.
    """
    from rest_local.cli.chat.conversation import Attachment, with_attachments

    asked = "" if argument in (None, "-") else inputs.clean(argument or "", "question")
    if sys.stdin.isatty():
        if argument == "-":
            return inputs.decode(sys.stdin.buffer.read(), "stdin")
        return asked if asked.strip() else None
    piped = inputs.decode(sys.stdin.buffer.read(), "stdin").replace("\r\n", "\n")
    if not asked.strip() and not piped.strip():
        raise click.UsageError("the standard input is empty; give a QUESTION")
    if not asked.strip():
        return piped.rstrip()
    return with_attachments(asked, [Attachment("", piped)] if piped.strip() else [])


def _conversing(config: EngineConfig, template: str | None) -> EngineConfig:
    """As `opening.conversing`; with a template of the user's, any model will do."""
    return config if template is not None else opening.conversing(config)


def _open(config: EngineConfig, template: str | None, live: Live) -> Engine:
    """An engine of a model that can chat, with this template where it is given. Raises ModelError."""
    from rest_local.cli.chat.talk import require_template

    engine = opening.open_engine(_conversing(config, template), live)
    try:
        if template is not None:
            engine.model.chat_template = template
        require_template(engine)
    except BaseException:
        engine.close()
        raise
    return engine


def converse(talk: Talk, *, keep: bool, greet: bool) -> None:
    """Read messages and answer them, until the user leaves. Raises KeyboardInterrupt for Ctrl-C twice at an empty
    line.
    """
    from rest_local.cli.chat.command import Prompt
    from rest_local.cli.chat.commands import Leave, completions, perform
    from rest_local.cli.chat.talk import note

    if greet:
        note(f"{talk.engine.model.name}: /help for help, /bye to leave")
    prompt = Prompt(lambda text: completions(talk, text), keep)
    warned = False
    while True:
        indexer.show_news()
        try:
            text = prompt.ask()
        except KeyboardInterrupt:
            if warned:
                raise
            warned = True
            interrupt.reset()
            note("/bye or Ctrl-D leaves, and so does another Ctrl-C")
            continue
        warned = False
        if text is None:
            return
        try:
            if text.strip():
                perform(talk, text)
        except Leave:
            return
        except KeyboardInterrupt:  # in a command
            interrupt.reset()
            note("stopped")
