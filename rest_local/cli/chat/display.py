"""Show an answer while it comes: with its code coloured, with its drafted tokens marked, or as it is.

A `Display` belongs to one answer. `show` is called with each piece, and `finish` once at the end, however the answer
ended; the shown text then ends with a line end. No method raises for what a model writes. Each display shows every
character of the answer, and changes nothing that it has shown.

What is on the screen can be copied into a file. Nothing is wrapped or moved: a terminal breaks long lines itself, and
joins them again when they are copied.
"""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Sequence
from io import StringIO
from typing import TYPE_CHECKING

import click

from rest_local.cli.terminal import visible, write_text

if TYPE_CHECKING:
    from rest_local.chat.tools import Delta
    from rest_local.decoding.engine import Engine, Piece

HELD = 200  # A line of code that is longer is shown as it comes, without colours.
# To colour a line of code, so many characters before it are read again. Then they are forgotten, between two tokens.
CONTEXT = 2000

_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})([^`]*)")
# The beginning of a line that may still become a fence.
_UNDECIDED = re.compile(r"[ \t]*(?:`{0,2}|~{0,2}|(?:`{3,}|~{3,})[^`]*)")


class CodeBlocks:
    """A colourer of the code blocks in a text that arrives in parts, which do not change the result.

    A line of code is held back until it ends, and so is the beginning of a line that may become a fence.
    """

    def __init__(self, colours: bool) -> None:
        self._colours = colours
        self._pending = ""
        self._fence = ""  # The marks that end the open block.
        self._code = _Code("", colours)
        self._line_begun = False

    def feed(self, text: str) -> str:
        """Return the part of the text that is certain now, with escape sequences."""
        self._pending += text
        return self._coloured(ends=False)

    def finish(self) -> str:
        """Return the rest at the end of the text."""
        return self._coloured(ends=True)

    def _coloured(self, ends: bool) -> str:
        shown = []
        while self._pending:
            line, newline, rest = self._pending.partition("\n")
            if self._line_begun or len(line) >= HELD:
                shown.append(line)
            elif newline or ends:
                shown.append(self._line(line))
            elif self._fence or _UNDECIDED.fullmatch(line):
                break
            else:
                shown.append(line)
            shown.append(newline)
            self._pending, self._line_begun = rest, not newline
        return "".join(shown)

    def _line(self, line: str) -> str:
        if not self._fence:
            fence = _FENCE.fullmatch(line)
            if fence is None:
                return line
            self._fence, self._code = fence[1], _Code(fence[2], self._colours)
        elif line.strip().startswith(self._fence) and not line.strip().strip(self._fence[0]):
            self._fence = ""
        else:
            return self._code.line(line)
        return click.style(line, dim=True)


class _Code:
    """A colourer of code, line by line. `named` is what the fence says about the language."""

    def __init__(self, named: str, colours: bool) -> None:
        from pygments.formatters import TerminalFormatter
        from pygments.lexers import get_lexer_by_name
        from pygments.util import ClassNotFound

        self._before = ""
        self._between = True  # False after a line that ended inside a token, such as a string of several lines.
        self._lexer, self._formatter = None, TerminalFormatter()
        name = (named.split() or [""])[0].strip("{}.")
        if name and colours:
            try:
                self._lexer = get_lexer_by_name(name)
            except ClassNotFound:
                return

    def line(self, line: str) -> str:
        """Colour the next line. This takes up to 5 ms."""
        from pygments.token import Token

        if self._lexer is None:
            return line
        if len(self._before) > (CONTEXT if self._between else 4 * CONTEXT):
            self._before = ""
        begin = len(self._before)
        self._before += f"{line}\n"
        tokens = [
            (token[max(begin - at, 0) :].rstrip("\n"), kind)
            for at, kind, token in self._lexer.get_tokens_unprocessed(self._before)
            if at + len(token) > begin
        ]
        self._between = bool(tokens) and tokens[-1][1][:1] == ("Text",)
        if "".join(text for text, _ in tokens) != line:  # Some lexers change the text.
            return line
        shown = StringIO()
        known = ((Token if kind in Token.Error else kind, text) for text, kind in tokens)  # The code is unfinished.
        self._formatter.format(known, shown)
        return shown.getvalue()


LONG_QUESTION = 4000  # So many characters are about a thousand tokens, which take seconds on a CPU.
COLOURS = {
    "datastore": "green", "context": "cyan", "history": "blue", "prediction": "yellow", "model": "magenta",
    "grammar": "bright_black", "edit": "bright_yellow",
}  # fmt: skip


class Display:
    """The base of the displays of one answer. It shows nothing."""

    def wait(self, n_characters: int) -> None:
        """Expect the evaluation of so many characters before the answer begins."""

    def show(self, piece: Piece, deltas: Sequence[Delta]) -> None:
        """Show a new piece, parsed into reasoning, text or calls."""

    def finish(self, deltas: Sequence[Delta]) -> None:
        """End the answer. `deltas` were held back until now."""


class Plain(Display):
    """A display of the text as it is, without reasoning."""

    def __init__(self) -> None:
        self._text = ""

    def show(self, piece: Piece, deltas: Sequence[Delta]) -> None:
        self._print(deltas)

    def finish(self, deltas: Sequence[Delta]) -> None:
        self._print(deltas)
        if self._text and not self._text.endswith("\n"):
            _write("\n")

    def _print(self, deltas: Sequence[Delta]) -> None:
        from rest_local.chat.tools import Content

        text = "".join(delta.text for delta in deltas if isinstance(delta, Content))
        if text:
            write_text(text)
            self._text = text


class TerminalDisplay(Display):
    """A display of the text after dim reasoning. `colours` are for code."""

    def __init__(self, colours: bool) -> None:
        self._blocks = CodeBlocks(colours)
        self._held_line_ends = ""
        self._reasoned = self._begun = self._waits = False
        self._last = "\n"

    def wait(self, n_characters: int) -> None:
        if n_characters >= LONG_QUESTION:
            _write(click.style(f"reading {n_characters:,} characters ...", dim=True))
            self._waits = True

    def show(self, piece: Piece, deltas: Sequence[Delta]) -> None:
        from rest_local.chat.tools import Content, Reasoning

        for delta in deltas:
            if isinstance(delta, Reasoning):
                self._reason(visible(delta.text))
            elif isinstance(delta, Content):
                self._answer(visible(delta.text))

    def finish(self, deltas: Sequence[Delta]) -> None:
        self.show(None, deltas)  # type: ignore[arg-type]
        self._print(self._blocks.finish())
        if self._last != "\n":
            self._print("\n")
        self._print("")

    def _reason(self, text: str) -> None:
        text = self._held_line_ends + text
        shown = text.rstrip("\n") if self._reasoned else text.strip("\n")
        self._held_line_ends = text[len(text.rstrip("\n")) :]
        if shown:
            self._reasoned, self._last = True, shown[-1]
            self._print(click.style(shown, dim=True, italic=True))

    def _answer(self, text: str) -> None:
        if self._reasoned and not self._begun:
            text = text.lstrip("\n")
            self._print("\n\n" if text else "")
        self._begun = self._begun or bool(text)
        self._last = text[-1:] or self._last
        self._print(self._blocks.feed(text))

    def _print(self, text: str) -> None:
        if self._waits:
            text, self._waits = f"\r\x1b[K{text}", False
        if text:
            _write(text)


class DraftsDisplay(Display):
    """A display of the raw text, in which drafted tokens are underlined and coloured by their source."""

    def __init__(self, engine: Engine, colours: bool) -> None:
        from rest_local.llama.vocabulary import Detokenizer

        self._colours = colours
        self._detokenizer = Detokenizer(engine.model.vocabulary.piece)
        self._sources: deque[tuple[int, str]] = deque()  # Lengths and sources of the tokens whose text is to come.
        self._last = "\n"

    def show(self, piece: Piece, deltas: Sequence[Delta]) -> None:
        for token, source in zip(piece.tokens, piece.sources, strict=True):
            self._sources.append((len(self._detokenizer.feed(token)), source))
        self._print(piece.text)

    def finish(self, deltas: Sequence[Delta]) -> None:
        if self._last != "\n":
            _write("\n")

    def _print(self, text: str) -> None:
        """Print text that is certain. It may come later than its tokens if it could begin a stop string."""
        shown, self._last = "", visible(text)[-1:] or self._last
        while text:
            length, source = self._sources.popleft() if self._sources else (len(text), "target")
            shown += of_source(visible(text[:length]), source, self._colours)
            if length > len(text):
                self._sources.appendleft((length - len(text), source))
            text = text[length:]
        _write(shown)


def of_source(text: str, source: str, colours: bool) -> str:
    """Style a text by its source, which is one of `drafting.sources.SOURCES` or `target`."""
    source = source.rstrip("~")
    if source == "target" or not text:
        return text
    return click.style(text, underline=True, fg=COLOURS.get(source) if colours else None)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
