"""What a section of the report consists of: words, tables and figures, without any knowledge of HTML or matplotlib.

Each kind of result has one function `section(results) -> Section` next to the code that measures it. The report knows
how sections look; the measurements know what they mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

Cell = str | int | float | None
"""None is shown as a dash. A float is shown with three significant digits, at least two after the point below 10."""


@dataclass(frozen=True)
class Table:
    """`best`: the columns in which the greatest number of each row is set in bold. `note` stands below."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    best: Sequence[int] = ()


@dataclass(frozen=True)
class Series:
    """One line, or one group of bars. `low` and `high`: ends of the error bars, if there are any."""

    name: str
    y: Sequence[float | None]
    x: Sequence[float] = ()
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True)
class Figure:
    """A plot.

    name        of the file, without its ending; unique in a report
    alt         what the figure shows, in a sentence, for people who do not see it
    categories  names of the groups of bars; empty: a line plot over `Series.x`
    level       a horizontal line, such as 1.0 for plain decoding
    stacked     the bars of a group stand on each other
    """

    name: str
    title: str
    x: str
    y: str
    series: Sequence[Series]
    alt: str
    categories: Sequence[str] = ()
    log_x: bool = False
    level: float | None = None
    stacked: bool = False


@dataclass(frozen=True)
class Section:
    """One measurement. `words`: paragraphs before the tables: what was done, what won, and what lost.

    All texts are plain; `text in backticks` is shown as code. `machine`: where it was measured, if the result does not
    say that.
    """

    title: str
    command: str
    words: Sequence[str] = ()
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    machine: str = ""
    footnotes: Sequence[str] = field(default=())
