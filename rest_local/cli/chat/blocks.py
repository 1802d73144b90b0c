"""Markdown that arrives in parts, cut into blocks that later text does not change.

A block is a code block (a fence at the beginning of a line up to its end), or the text between: a paragraph, a whole
list, a table. Text is cut at a blank line that is followed by text at the beginning of a line, and before a fence.
Indented text after a blank line belongs to what came before it, such as a list. Knows nothing about terminals.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_FENCE = re.compile(r"(`{3,}|~{3,})([^`]*)$")


@dataclass(frozen=True)
class Block:
    """`language`: what a fence names; None for text. The lines of a code block are without its fences."""

    text: str
    language: str | None = None

    @property
    def is_blank(self) -> bool:
        """Whether there is nothing to show."""
        return self.language is None and not self.text.strip()


class Blocks:
    """`feed` text as it arrives and get the blocks that are complete; `open` is the one that still grows."""

    def __init__(self) -> None:
        self._lines: list[str] = []  # complete ones of the open block
        self._rest = ""  # the line that has not ended
        self._fence = ""  # of the open code block
        self._language: str | None = None

    def feed(self, text: str) -> list[Block]:
        """The blocks that this text completes."""
        *lines, self._rest = (self._rest + text).split("\n")
        return [block for line in lines for block in self._add(line)]

    def finish(self) -> list[Block]:
        """The blocks that are left at the end; a fence need not be closed."""
        rest, self._rest = self._rest, ""
        completed = self._add(rest) if rest else []
        return [*completed, *self._close()]

    @property
    def open(self) -> Block:
        """The block so far, without a line that may become a fence."""
        rest = "" if self._rest and not self._rest.strip("`~ ") else self._rest
        return Block("\n".join([*self._lines, rest] if rest else self._lines), self._language)

    def _add(self, line: str) -> list[Block]:
        if self._fence:
            if line.strip().startswith(self._fence) and not line.strip(self._fence[0] + " "):
                return self._close()
            self._lines.append(line)
            return []
        if found := _FENCE.match(line):
            completed = self._close()
            self._fence, self._language = found[1], found[2].strip()
            return completed
        begins = line[:1].strip() != "" and bool(self._lines) and not self._lines[-1].strip()
        completed = self._close() if begins else []
        self._lines.append(line)
        return completed

    def _close(self) -> list[Block]:
        block = Block("\n".join(self._lines), self._language)
        self._lines, self._fence, self._language = [], "", None
        return [] if block.is_blank else [block]
