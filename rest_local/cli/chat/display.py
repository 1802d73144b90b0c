"""Show an answer while it comes: as Markdown, with its drafted tokens marked, or as it is.

A `Display` belongs to one answer. `show` is called with each piece, and `finish` once at the end, however the answer
ended; the shown text then ends with a line end. No method raises for what a model writes. Each display shows every
character of the answer, and changes nothing that it has shown.

Marks of Markdown stay, so what is on the screen can be copied into a file, whatever the model meant by them. Nothing is
wrapped or moved: a terminal breaks long lines itself, and joins them again when they are copied. Text is only added at
the end. While a style is open, at most HELD characters are held back: a line of code, or text after a mark that may be
closed in the same line.
"""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Sequence
from io import StringIO
from typing import TYPE_CHECKING, Any

import click

from rest_local.cli.terminal import visible, write_text

if TYPE_CHECKING:
    from rest_local.chat.tools import Delta
    from rest_local.decoding.engine import Engine, Piece

HELD = 200
# To colour a line of code, so many characters before it are read again. Then they are forgotten, between two tokens.
CONTEXT = 2000

_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})([^`\n]*)(\n|\Z)")
_HEADING = re.compile(r" {0,3}#{1,6}[ \t]")
# A text that may still become a fence or a heading.
_UNDECIDED = re.compile(r"[ \t]*(?:`{0,2}|~{0,2}|#{0,6}|(?:`{3,}|~{3,})[^`\n]*)")
_MARK = re.compile(r"[`*_\n]")
_RUN = re.compile(r"(.)\1*")
_OPENING = re.compile(r"(?<![`\\])`|(?<![\w*\\])\*{1,2}(?![\s*])|(?<![\w\\])_(?![\s_])|[`*_]+\Z", re.ASCII)
_PAIR = re.compile(
    r"(?<![`\\])(?P<code>`+)(?!`)[^\n]+?(?<!`)(?P=code)(?!`)"
    r"|(?<![\w*\\])(?P<bold>\*\*)(?![\s*])[^\n]*?[^\s*]\*\*(?![\w*])"
    r"|(?<![\w*\\])(?P<italic>\*)(?![\s*])(?:[^*\n]*[^\s*])\*(?![\w*])"
    r"|(?<![\w\\])(?P<emphasis>_)(?![\s_])(?:[^_\n]*[^\s_])_(?!\w)",
    re.ASCII,
)
_STYLES: dict[str, dict[str, Any]] = {
    "code": {"bold": True}, "bold": {"bold": True}, "italic": {"italic": True}, "emphasis": {"italic": True},
}  # fmt: skip


class Markdown:
    """A styler for text that arrives in parts. The parts do not change the result. `colours` are for code."""

    def __init__(self, colours: bool) -> None:
        self._colours = colours
        self._held = ""
        self._before = "\n"
        self._fence = ""
        self._code = _Code("", colours)
        self._line_begun = False
        self._heading = False

    def feed(self, text: str) -> str:
        """Return the part of the text that is certain now, with escape sequences."""
        self._held += text
        return self._styled(ends=False)

    def finish(self) -> str:
        """Return the rest at the end of the text."""
        return self._styled(ends=True)

    def _styled(self, ends: bool) -> str:
        shown = []
        while self._held:
            length, style = self._code_line(ends) if self._fence else self._text(ends)
            if not length:
                break
            self._before = self._held[length - 1]
            self._held = self._held[length:]
            shown.append(style)
        return "".join(shown)

    def _text(self, ends: bool) -> tuple[int, str]:
        """Return how many characters are certain and how they are shown, or 0 if more text decides."""
        text = self._held[:HELD]
        certain = ends or len(text) == HELD
        if self._before == "\n":
            fence = _FENCE.match(text)
            if fence and (fence[3] or ends):
                self._fence, self._code = fence[1], _Code(fence[2], self._colours)
                return len(fence[0]), _in(fence[0], dim=True)
            if not certain and _UNDECIDED.fullmatch(text):
                return 0, ""
            self._heading = bool(_HEADING.match(text))
        found = re.search("\n", self._held) if self._heading else _MARK.search(self._held)
        before = self._held[: found.start()] if found else self._held
        if before:
            return len(before), _in(before, bold=True) if self._heading else before
        if text[0] == "\n":
            return 1, "\n"
        line, newline, _ = text.partition("\n")
        certain = certain or bool(newline)
        whole = self._before + line
        pair = _PAIR.match(whole, 1)
        if pair and (certain or pair.end() < len(whole)):
            mark = pair[pair.lastgroup or 0]
            inner = _in(pair[0][len(mark) : -len(mark)], **_STYLES[pair.lastgroup or ""])
            return len(pair[0]), f"{_in(mark, dim=True)}{inner}{_in(mark, dim=True)}"
        if not certain and _OPENING.match(whole, 1):
            return 0, ""
        run = _RUN.match(line)
        length = len(run[0]) if run else 1
        return length, line[:length]

    def _code_line(self, ends: bool) -> tuple[int, str]:
        """Do the same in a code block. A long line is shown as it comes, without colours."""
        line, newline, _ = self._held.partition("\n")
        length = len(line) + len(newline)
        if self._line_begun or len(line) >= HELD:
            self._line_begun = not newline
            return length, line + newline
        if not newline and not ends:
            return 0, ""
        if line.strip().startswith(self._fence) and not line.strip().strip(self._fence[0]):
            self._fence = ""
            return length, _in(line, dim=True) + newline
        return length, self._code.line(line) + newline


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


def _in(text: str, **style: Any) -> str:
    """Style a text, up to its line end."""
    line = text.rstrip("\n")
    return click.style(line, **style) + text[len(line) :] if line and style else text


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


class MarkdownDisplay(Display):
    """A display of styled Markdown after dim reasoning. `colours` are for code."""

    def __init__(self, colours: bool) -> None:
        self._markdown = Markdown(colours)
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
        self._print(self._markdown.finish())
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
        self._print(self._markdown.feed(text))

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
