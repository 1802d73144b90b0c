"""How an answer is shown while it comes: as Markdown, with its drafted tokens marked, or as it is.

Contract: a `Display` belongs to one answer. `show` is called with each piece, `finish` once at the end, however the
answer ended; what was shown then ends with a line end. None of them raises for what a model writes. Each shows every
character of the answer, and changes nothing that was shown.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import click

from rest_local.cli.chat.markdown import Markdown, visible

if TYPE_CHECKING:
    from rest_local.chat.tools import Delta
    from rest_local.decoding.engine import Engine, Piece

LONG_QUESTION = 4000  # characters, about a thousand tokens: seconds on a CPU
COLOURS = {
    "datastore": "green", "context": "cyan", "history": "blue", "prediction": "yellow", "model": "magenta",
    "grammar": "bright_black", "logits": "bright_cyan", "edit": "bright_yellow",
}  # fmt: skip


class Display(Protocol):
    """Shows one answer."""

    def wait(self, n_characters: int) -> None:
        """So many characters are evaluated before the answer begins."""

    def show(self, piece: Piece, deltas: Sequence[Delta]) -> None:
        """A piece has come, and what it is: reasoning, text or calls."""

    def finish(self, deltas: Sequence[Delta]) -> None:
        """The answer has ended; `deltas`: what was held back."""


class Silent:
    """Shows nothing."""

    def wait(self, n_characters: int) -> None: ...

    def show(self, piece: Piece, deltas: Sequence[Delta]) -> None: ...

    def finish(self, deltas: Sequence[Delta]) -> None: ...


class Plain:
    """The text of the answer as it is, without reasoning: for a pipe. `at_terminal`: without what would control it."""

    def __init__(self, at_terminal: bool = False) -> None:
        self._at_terminal = at_terminal
        self._text = ""  # the newest part

    def wait(self, n_characters: int) -> None: ...

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
            _write(visible(text) if self._at_terminal else text)
            self._text = text


class MarkdownDisplay:
    """Styled Markdown after dim reasoning. `colours`: of code."""

    def __init__(self, colours: bool) -> None:
        self._markdown = Markdown(colours)
        self._reasoning = ""  # line ends of it that are not shown yet
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
        text = self._reasoning + text
        shown = text.rstrip("\n") if self._reasoned else text.strip("\n")
        self._reasoning = text[len(text.rstrip("\n")) :]
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


class DraftsDisplay:
    """The text as the model writes it, drafted tokens underlined, and with `colours` in the one of their source."""

    def __init__(self, engine: Engine, colours: bool) -> None:
        from rest_local.llama.vocabulary import Detokenizer

        self._colours = colours
        self._detokenizer = Detokenizer(engine.model.vocabulary.piece)
        self._sources: deque[tuple[int, str]] = deque()  # of the characters to come: how many, and their source
        self._last = "\n"

    def wait(self, n_characters: int) -> None: ...

    def show(self, piece: Piece, deltas: Sequence[Delta]) -> None:
        for token, source in zip(piece.tokens, piece.sources, strict=True):
            self._sources.append((len(self._detokenizer.feed(token)), source))
        self._print(piece.text)

    def finish(self, deltas: Sequence[Delta]) -> None:
        if self._last != "\n":
            _write("\n")

    def _print(self, text: str) -> None:
        """Print text that is certain. It may come later than its tokens, where it could begin a stop string."""
        shown, self._last = "", visible(text)[-1:] or self._last
        while text:
            length, source = self._sources.popleft() if self._sources else (len(text), "target")
            shown += of_source(visible(text[:length]), source, self._colours)
            if length > len(text):
                self._sources.appendleft((length - len(text), source))
            text = text[length:]
        _write(shown)


def of_source(text: str, source: str, colours: bool) -> str:
    """Text of this source (`rest_local.drafting.candidates.SOURCES`, `target` for none), in its style."""
    source = source.rstrip("~")
    if source == "target" or not text:
        return text
    return click.style(text, underline=True, fg=COLOURS.get(source) if colours else None)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
