"""Filters between an answer and its client: end the text early, or send it in groups of fixed size.

Knows nothing about HTTP or the engine: text in, text out. Every filter has `feed` for text as it arrives, `finish` for
what it held back, and `ended`: the answer is complete although the model would go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable

GROUP_CHARACTERS = 64  # about 15 tokens


class TextFilters:
    """The filters of one answer, in order. See the classes below for what the arguments mean."""

    def __init__(self, n_indent: int = 0, milliseconds: float | None = None, group: int = 0) -> None:
        self._ending: list[Indentation | TimeLimit] = []
        if n_indent > 0:
            self._ending.append(Indentation(n_indent))
        if milliseconds is not None and milliseconds > 0:
            self._ending.append(TimeLimit(milliseconds))
        self._all = [*self._ending, *([Groups(group)] if group > 0 else [])]

    @property
    def can_end(self) -> bool:
        """Whether any filter may end the answer."""
        return bool(self._ending)

    @property
    def ended(self) -> bool:
        """Whether a filter has ended the answer."""
        return any(each.ended for each in self._ending)

    def feed(self, text: str) -> str:
        """What can be sent now."""
        for each in self._all:
            text = each.feed(text)
        return text

    def finish(self) -> str:
        """What was held back."""
        rest = ""
        for each in self._all:
            rest = each.feed(rest) + each.finish()
        return rest


class Indentation:
    """llama-server's `n_indent`: ends the text before the first line, after the first, that is indented less.

    An empty line ends it as well.
    """

    def __init__(self, least: int) -> None:
        self._least = least
        self._blanks: str | None = None  # of a line after the first, until it is indented enough
        self.ended = False

    def feed(self, text: str) -> str:
        """What of `text` belongs to the answer."""
        kept: list[str] = []
        while text and not self.ended:
            if self._blanks is not None:
                text, self._blanks = self._blanks + text, None
                content = text.lstrip(" \t")
                if len(text) - len(content) < self._least:
                    self._blanks = "" if content else text
                    self.ended = bool(content)
                    break
            line, newline, text = text.partition("\n")
            kept.append(line + newline)
            self._blanks = "" if newline else None
        return "".join(kept)

    def finish(self) -> str:
        """The blanks that were held back, which belong to the answer."""
        rest, self._blanks = self._blanks or "", None
        return rest


class TimeLimit:
    """llama-server's `t_max_predict_ms`: ends the text after the first line that is complete when the time is over.

    So an editor offers whole lines, and always at least one. The time counts from the first text. `clock`: seconds;
    tests replace it.
    """

    def __init__(self, milliseconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = milliseconds / 1e3
        self._clock = clock
        self._begun: float | None = None
        self.ended = False

    def feed(self, text: str) -> str:
        """What of `text` belongs to the answer."""
        if self.ended or not text:
            return ""
        now = self._clock()
        self._begun = now if self._begun is None else self._begun
        if "\n" in text and now - self._begun > self._seconds:
            self.ended = True
            return text[: text.index("\n") + 1]
        return text

    def finish(self) -> str:
        """Nothing is held back."""
        return ""


class Groups:
    """Releases text in groups of `size` characters, so that a client cannot see which step gave which text."""

    ended = False

    def __init__(self, size: int) -> None:
        self._size = size
        self._held = ""

    def feed(self, text: str) -> str:
        """As many whole groups as there are."""
        self._held += text
        cut = len(self._held) - len(self._held) % self._size
        released, self._held = self._held[:cut], self._held[cut:]
        return released

    def finish(self) -> str:
        """The rest."""
        rest, self._held = self._held, ""
        return rest
