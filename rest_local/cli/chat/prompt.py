'''Read what the user types: one message at a time, of one line or many.

- Enter sends, and Alt-Enter begins another line. In a message that begins with `"""`, Enter does so as well, up to the
  next `"""`.
- A pasted text of many lines is one message, with its indentation (bracketed paste). Windows line ends become `\\n`.
- The lines typed before are kept in `chat_history` of the data directory, for the arrow keys and Ctrl-R.
- Tab completes commands and their arguments.
- Ctrl-X Ctrl-E opens the editor.

On a terminal that cannot move its cursor (`TERM=dumb`), lines are read as they are.
'''

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rest_local.cli import inputs, interrupt
from rest_local.cli.terminal import warn

if TYPE_CHECKING:
    from prompt_toolkit.history import History

QUOTES = '"""'
_QUOTED = re.compile(rf"\s*(/[a-z]+\s+)?{QUOTES}")
PROMPT, CONTINUATION = "> ", "  "

# Maps the text before the cursor to completions and their starts.
Complete = Callable[[str], Iterator[tuple[str, int]]]


class Prompt:
    """The prompt of a chat. `complete` completes the text before the cursor, and `keep` keeps on disk what is typed."""

    def __init__(self, complete: Complete, keep: bool) -> None:
        self._session = None if is_dumb() else _session(complete, _history(keep))
        self.interrupted = False  # Ctrl-C came right after the newest message was sent.

    def ask(self) -> str | None:
        """Return the next message, or None at the end of input (Ctrl-D).

        Ctrl-C drops a line that was begun. At an empty line it raises KeyboardInterrupt.
        """
        while True:
            try:
                text = self._read()
            except EOFError:
                return None
            finally:
                interrupt.watch_again()  # The library watches signals in its own way while it reads.
            if text is not None:
                return unquoted(inputs.clean(text, "stdin"))

    def _read(self) -> str | None:
        if self._session is None:
            return _read_lines()
        begun = self._session.default_buffer
        begun.reset()  # A Ctrl-C before the library reads is one at an empty line.
        try:
            text: str = self._session.prompt()
        except KeyboardInterrupt:
            if begun.text.strip():
                return None
            raise
        self.interrupted = _interrupted(self._session.input)
        return text


def is_dumb() -> bool:
    """Return True if the terminal cannot move its cursor."""
    return os.environ.get("TERM", "").lower() in ("dumb", "unknown") or not (sys.stdout.isatty() or sys.stderr.isatty())


def is_open(text: str) -> bool:
    """Return True if the message, or the text after a command, begins with quotes that have not ended."""
    return bool(_QUOTED.match(text)) and text.count(QUOTES) % 2 == 1


def unquoted(text: str) -> str:
    """Remove the quotes around a message."""
    inner = text.strip()
    if len(inner) >= 2 * len(QUOTES) and inner.startswith(QUOTES) and inner.endswith(QUOTES):
        return inner[len(QUOTES) : -len(QUOTES)].strip("\n")
    return text.rstrip().lstrip("\n")


def _read_lines() -> str:
    """Read a message from stdin after a prompt on stderr: a line, or all up to the end of a quote. Raises EOFError."""
    text = ""
    while not text or is_open(text):
        sys.stderr.write(PROMPT)
        sys.stderr.flush()
        line = sys.stdin.readline()
        if not line and not text:
            raise EOFError
        if not line:
            break
        text += line.rstrip("\r\n") + "\n"
    return text


def _session(complete: Complete, history: History) -> Any:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion
    from prompt_toolkit.document import Document
    from prompt_toolkit.output import create_output
    from prompt_toolkit.output.color_depth import ColorDepth
    from prompt_toolkit.shortcuts import CompleteStyle

    os.environ.setdefault("PROMPT_TOOLKIT_NO_CPR", "1")  # Only menus need it, and slow terminals answer late.

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


def _interrupted(keyboard: Any) -> bool:
    """Return True if Ctrl-C came after Enter as a key, because the terminal was not back in its usual mode."""
    from prompt_toolkit.input.typeahead import get_typeahead, store_typeahead
    from prompt_toolkit.keys import Keys

    with keyboard.raw_mode():
        keys = [*get_typeahead(keyboard), *keyboard.read_keys()]
    if any(key.key == Keys.ControlC for key in keys):
        return True
    store_typeahead(keyboard, keys)
    return False


def _keys() -> Any:
    from prompt_toolkit.enums import DEFAULT_BUFFER
    from prompt_toolkit.filters import has_focus
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()
    typing = has_focus(DEFAULT_BUFFER)  # A search has another focus.

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
    """Open the history of typed messages, in a file that only the user can read, or in memory."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    from rest_local.paths import data_dir

    if not keep:
        return InMemoryHistory()
    try:
        path = data_dir() / "chat_history"
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError as error:
        warn(f"what you type is not kept: {error.filename}: {error.strerror}")
        return InMemoryHistory()
    return FileHistory(str(path))


@contextlib.contextmanager
def quiet_keyboard(prompts: bool = False) -> Iterator[None]:
    """Keep typed keys for what reads next, without showing them in the answer. Do nothing in the background.

    If a prompt reads next (`prompts`), the terminal marks a pasted text, so that it is one message there.
    """
    import termios

    if not sys.stdin.isatty() or os.tcgetpgrp(sys.stdin.fileno()) != os.getpgrp():
        yield
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    silent = [*before]
    silent[3] = before[3] & ~termios.ECHO
    screen, mark, unmark = 1 if os.isatty(1) else 2, b"", b""
    if prompts and not is_dumb():
        silent[3] &= ~termios.ICANON  # The system would cut a line of more than 4,095 bytes.
        mark, unmark = b"\x1b[?2004h", b"\x1b[?2004l"

    def put_back() -> None:
        os.write(screen, unmark)
        termios.tcsetattr(terminal, termios.TCSANOW, before)

    interrupt.at_end.append(put_back)
    try:
        os.write(screen, mark)
        termios.tcsetattr(terminal, termios.TCSANOW, silent)
        yield
    finally:
        put_back()
        interrupt.at_end.remove(put_back)
