"""Texts and numbers of a report, before they become HTML, Markdown or a picture.

Everything that a result holds may come from a damaged or hostile file. A text becomes one line of bounded length
without control characters, and without the characters that turn the direction of a line (U+202E and others).
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterator, Sequence

from rest_local.errors import printable

LONGEST = 2000  # characters of a paragraph; longer ones come from no measurement
DASH = "\u2013"
_CODE = re.compile(r"`([^`]+)`")


def clean(text: object, longest: int = LONGEST) -> str:
    """One line that any page and any picture can show."""
    line = printable(" ".join(str(text)[: 4 * longest].split()))
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


def spans(text: object) -> Iterator[tuple[str, bool]]:
    """The parts of a cleaned text; true for those in backticks, which are code."""
    for number, part in enumerate(_CODE.split(clean(text))):
        if part:
            yield part, number % 2 == 1


def shown(cell: object) -> str:
    """A cell of a table as text: a dash for no number; three significant digits, two after the point below 10."""
    if cell is None:
        return DASH
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int):
        return f"{cell:,}" if abs(cell) < 10**15 else f"{cell:.3g}" if abs(cell) < 10**300 else DASH
    if not isinstance(cell, float):
        return clean(cell, 300)
    if not math.isfinite(cell):
        return DASH
    size = abs(cell)
    if size >= 1e15 or 0 < size < 1e-4:
        return f"{cell:.3g}"
    if size >= 100:
        return f"{cell:,.0f}"
    if size >= 10:
        return f"{cell:.1f}"
    if size >= 1 or not size:
        return f"{cell:.2f}"
    return f"{cell:.{2 - math.floor(math.log10(size))}f}"


def number(value: object) -> float | None:
    """A number that can be drawn, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e15:
        return None
    return float(value)


def greatest(row: Sequence[object], columns: Sequence[int]) -> set[int]:
    """Of these columns, those with the greatest number of the row as it is shown; none if there is only one number."""
    numbers = {at: value for at in columns if at < len(row) and (value := number(row[at])) is not None}
    if len(numbers) < 2:
        return set()
    best = shown(row[max(numbers, key=lambda at: numbers[at])])
    return {at for at in numbers if shown(row[at]) == best}


def is_numeric(rows: Sequence[Sequence[object]], column: int) -> bool:
    """Whether a column holds nothing but numbers, and at least one."""
    cells = [row[column] for row in rows if column < len(row) and row[column] is not None]
    return bool(cells) and all(isinstance(cell, (int, float)) for cell in cells)


def slug(text: object) -> str:
    """A name for a file or an anchor: small letters, digits and hyphens; "x" if nothing is left."""
    plain = unicodedata.normalize("NFKD", str(text)[:300]).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")[:80].rstrip("-") or "x"


class Names:
    """Gives each thing a name of its own: "a", "a-2", "a-3"."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def take(self, text: object) -> str:
        base = name = slug(text)
        number = 1
        while name in self._taken:
            number += 1
            name = f"{base}-{number}"
        self._taken.add(name)
        return name


def duration(seconds: float) -> str:
    """ "12 s", "3 min 5 s", "1 h 2 min"; a dash for what is no time."""
    if not 0 <= seconds < 1e9:
        return DASH
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
