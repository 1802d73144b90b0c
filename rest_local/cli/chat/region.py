"""The newest lines on a terminal, changed in place without flicker: only what differs is written again.

- Lines are written from the first that changed on, each over the old one; nothing is erased before. Most updates of a
  growing text touch its last line alone.
- What has left the screen at the top is final, so the cost of an update is bounded by the screen.
- A line longer than the terminal is wide takes several rows there; after a change of the width the terminal has wrapped
  what it shows anew, and the rows are counted by the new width. In the moment before the program is told of it, a part
  of a line can be left over.
- Terminals that know synchronized updates show each update at once (`?2026`); others ignore these marks.

The cursor stands at the beginning of the row below the last line between updates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rest_local.cli.chat.rendering import ESCAPES

_BEGIN, _END = "\x1b[?2026h", "\x1b[?2026l"


class Region:
    """`write`: text to the terminal. `size`: its columns and rows now."""

    def __init__(self, write: Callable[[str], None], size: Callable[[], tuple[int, int]]) -> None:
        self._write, self._size = write, size
        self._lines: list[str] = []

    def update(self, lines: Sequence[str]) -> None:
        """Show these lines in the place of those before. They hold no control characters but colours."""
        width, height = self._size()
        same = next((i for i, (old, new) in enumerate(zip(self._lines, lines, strict=False)) if old != new), None)
        first = min(len(self._lines), len(lines)) if same is None else same
        first, rows = self._reachable(first, width, height)
        if first == len(self._lines) == len(lines):
            return
        up = f"\x1b[{rows}A" if rows else ""
        fresh = "".join(f"{line}{_erase_rest(line, width)}\n" for line in lines[first:])
        below = "\x1b[J" if rows else ""
        self._write(f"{_BEGIN}{up}{fresh}{below}{_END}")
        self._lines = [*self._lines[:first], *lines[first:]]

    def finish(self) -> None:
        """What is shown is final; the next update begins below it."""
        self._lines = []

    def _reachable(self, first: int, width: int, height: int) -> tuple[int, int]:
        """The first line from `first` on that is still on the screen, and how many rows above the cursor it begins."""
        rows, begin = 0, len(self._lines)
        for number in range(len(self._lines) - 1, first - 1, -1):
            more = rows_of(self._lines[number], width)
            if rows + more > height - 1:
                break
            rows, begin = rows + more, number
        return begin, rows


def rows_of(line: str, width: int) -> int:
    """Rows of a terminal that a line takes."""
    return max(1, -(-_columns(line) // max(width, 1)))


def _erase_rest(line: str, width: int) -> str:
    """What erases the row after the line; after a full row the cursor still stands on its last character."""
    columns = _columns(line)
    return "" if columns and columns % max(width, 1) == 0 else "\x1b[K"


def _columns(line: str) -> int:
    from rich.cells import cell_len

    return cell_len(ESCAPES.sub("", line))
