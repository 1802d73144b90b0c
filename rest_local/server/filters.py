"""Text on its way to the client: cut where its indentation ends, gathered where steps must not be seen.

Knows nothing about HTTP or the engine: text in, text out.
"""

from __future__ import annotations

import time
from collections.abc import Callable

GATHERED = 64
"""Characters: some 15 tokens."""


class Indentation:
    """llama-server's `n_indent`: the text ends before the first line, behind the first, that is indented less.

    An empty line ends it too. `least` 0 lets everything through.
    """

    def __init__(self, least: int) -> None:
        self._least = least
        self.cuts = least > 0
        self._blanks: str | None = None  # of a line behind the first, until it is indented enough
        self.ended = False

    def feed(self, text: str) -> str:
        """What of `text` belongs to the answer; `ended` says whether that was all."""
        if self._least == 0:
            return text
        given: list[str] = []
        while text and not self.ended:
            if self._blanks is not None:
                text, self._blanks = self._blanks + text, None
                content = text.lstrip(" \t")
                if len(text) - len(content) < self._least:
                    self._blanks = "" if content else text
                    self.ended = bool(content)
                    break
            line, newline, text = text.partition("\n")
            given.append(line + newline)
            self._blanks = "" if newline else None
        return "".join(given)

    def finish(self) -> str:
        """What was held back and turned out to belong to the answer."""
        rest, self._blanks = self._blanks or "", None
        return rest


class TimeLimit:
    """llama-server's `t_max_predict_ms`: the text ends with the first line that is complete after so long.

    So what an editor offers is whole lines, and the first one always comes. Counted from the first text; None and what
    is not positive let everything through. `clock`: seconds, tests give their own."""

    def __init__(self, milliseconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = milliseconds / 1e3 if milliseconds and milliseconds > 0 else None
        self.cuts = self._seconds is not None
        self._clock = clock
        self._begun: float | None = None
        self.passed = False

    def feed(self, text: str) -> str:
        """What of `text` belongs to the answer; `passed` says whether that was all."""
        if self._seconds is None or not text:
            return text
        if self.passed:
            return ""
        now = self._clock()
        self._begun = now if self._begun is None else self._begun
        if "\n" in text and now - self._begun > self._seconds:
            self.passed = True
            return text[: text.index("\n") + 1]
        return text


class Gathered:
    """Gives text out in parts of `size` characters, so that where it is cut does not depend on the steps that gave it.

    `size` 0 lets everything through."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._held = ""

    def feed(self, text: str) -> str:
        """As many whole parts as there are."""
        if self._size == 0:
            return text
        self._held += text
        cut = len(self._held) - len(self._held) % self._size
        given, self._held = self._held[:cut], self._held[cut:]
        return given

    def finish(self) -> str:
        """The rest."""
        rest, self._held = self._held, ""
        return rest
