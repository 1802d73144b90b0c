"""How an answer is shown while it comes: as Markdown, with its drafted tokens marked, or as it is.

Contract: a `Display` belongs to one answer. `show` is called with each piece, `finish` once at the end, however the
answer ended; what was shown then ends with a line end. None of them raises for what a model writes.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from rest_local.cli.chat.blocks import Block, Blocks
from rest_local.cli.chat.region import Region
from rest_local.cli.chat.rendering import dim_lines, lines_of, visible

if TYPE_CHECKING:
    from rich.console import Console

    from rest_local.chat.tools import Delta
    from rest_local.decoding.engine import Engine, Piece

SHORTEST_S = 0.03  # between two updates of the screen
RENDERING_SHARE = 0.1  # of the time that may go into rendering: it takes the processor that decodes
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
    """The text of the answer as it is, without reasoning: for a pipe. At a terminal, `dumb`, without what would control
    it.
    """

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
        text = _content(deltas)
        if text:
            _write(visible(text) if self._at_terminal else text)
            self._text = text


class MarkdownDisplay:
    """Markdown in place as it grows. Complete blocks are final; of the open one only changed lines are written again,
    and less often the longer rendering takes. Reasoning is dim.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.perf_counter) -> None:
        self._console, self._clock = console, clock
        self._region = Region(_write, lambda: _size(console))
        self._blocks = Blocks()
        self._reasoning = ""
        self._begun = False  # whether a block was written before
        self._next = 0.0
        self._waits = False

    def wait(self, n_characters: int) -> None:
        if n_characters >= LONG_QUESTION:
            self._update(dim_lines(f"reading {n_characters:,} characters ...", self._console))
            self._waits = True

    def show(self, piece: Piece, deltas: Sequence[Delta]) -> None:
        self._take(deltas)
        begun = self._clock()
        if begun < self._next:
            return
        self._draw()
        now = self._clock()
        self._next = now + max(SHORTEST_S, (now - begun) / RENDERING_SHARE)

    def finish(self, deltas: Sequence[Delta]) -> None:
        self._take(deltas)
        self._end_reasoning()
        for block in self._blocks.finish():
            self._complete(lines_of(block, self._console))
        if self._waits:
            self._region.update([])

    def _take(self, deltas: Sequence[Delta]) -> None:
        from rest_local.chat.tools import Content, Reasoning

        for delta in deltas:
            if isinstance(delta, Reasoning):
                self._reasoning += visible(delta.text)
                *paragraphs, self._reasoning = self._reasoning.split("\n\n")
                for paragraph in paragraphs:
                    self._complete(dim_lines(paragraph, self._console))
            elif isinstance(delta, Content):
                self._end_reasoning()
                for block in self._blocks.feed(visible(delta.text)):
                    self._complete(lines_of(block, self._console))

    def _draw(self) -> None:
        """Show what is not complete."""
        open_block = self._blocks.open
        if self._reasoning.strip():
            self._update(dim_lines(self._reasoning, self._console))
        elif not _is_empty(open_block):
            self._update(lines_of(open_block, self._console))

    def _update(self, lines: Sequence[str]) -> None:
        self._region.update(["", *lines] if self._begun else lines)
        self._waits = False

    def _complete(self, lines: Sequence[str]) -> None:
        if lines:
            self._update(lines)
            self._region.finish()
            self._begun = True

    def _end_reasoning(self) -> None:
        if self._reasoning.strip():
            self._complete(dim_lines(self._reasoning, self._console))
        self._reasoning = ""


class DraftsDisplay:
    """The text as the model writes it, drafted tokens underlined in the colour of their source."""

    def __init__(self, console: Console, engine: Engine) -> None:
        from rest_local.llama.vocabulary import Detokenizer

        self._console = console
        self._detokenizer = Detokenizer(engine.model.vocabulary.piece)
        self._styles: deque[tuple[int, str]] = deque()  # of the characters to come: how many, and their style
        self._last = "\n"

    def wait(self, n_characters: int) -> None: ...

    def show(self, piece: Piece, deltas: Sequence[Delta]) -> None:
        for token, source in zip(piece.tokens, piece.sources, strict=True):
            self._styles.append((len(self._detokenizer.feed(token)), style_of(source)))
        self._print(piece.text)

    def finish(self, deltas: Sequence[Delta]) -> None:
        if self._last != "\n":
            _write("\n")

    def _print(self, text: str) -> None:
        """Print text that is certain. It may come later than its tokens, where it could begin a stop string."""
        from rich.text import Text

        shown = Text()
        while text:
            length, style = self._styles.popleft() if self._styles else (len(text), "")
            shown.append(visible(text[:length]), style)
            if length > len(text):
                self._styles.appendleft((length - len(text), style))
            text = text[length:]
        if shown:
            self._console.print(shown, end="", soft_wrap=True, highlight=False)
            self._console.file.flush()
            self._last = shown.plain[-1]


def style_of(source: str) -> str:
    """The style of a token of this source (`rest_local.drafting.candidates.SOURCES`, `target` for none)."""
    source = source.rstrip("~")
    return "" if source == "target" else f"underline {COLOURS.get(source, '')}".strip()


def _is_empty(block: Block) -> bool:
    return not block.text.strip()


def _content(deltas: Sequence[Delta]) -> str:
    from rest_local.chat.tools import Content

    return "".join(delta.text for delta in deltas if isinstance(delta, Content))


def _size(console: Console) -> tuple[int, int]:
    return console.size.width, console.size.height


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
