"""A report as one Markdown document for GitHub and MkDocs, with its figures as SVG files.

Texts are escaped by character references, which no Markdown program reads as markup.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from rest_local.bench.report import figures
from rest_local.bench.report.origin import COLUMNS, origin, quick, remarks
from rest_local.bench.report.reading import Part, Report
from rest_local.bench.report.shapes import Figure, Table
from rest_local.bench.report.text import Names, clean, greatest, is_numeric, shown, spans

TITLE = "Benchmarks"
_MARKUP = re.compile(r"[&<>|*\[\]`$~\\{}!]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|://|(?<=www)\.|^[#+=-]|^(\d+)[.)](?= )")


def escaped(text: object) -> str:
    """A text without code, as it is shown."""
    return _escaped(clean(text))


def _escaped(line: str) -> str:
    return _MARKUP.sub(lambda found: "".join(c if c.isalnum() else f"&#{ord(c)};" for c in found[0]), line)


def inline(text: object) -> str:
    """A text with code in backticks."""
    return "".join(_code(part) if is_code else _escaped(part) for part, is_code in spans(text))


def _code(text: str) -> str:
    if any(mark in text for mark in "|\\<&"):  # a table or MkDocs would read it otherwise
        return f"<code>{_escaped(text)}</code>"
    return f"`{text}`"


def command(text: object) -> str:
    """A command line as code."""
    return _code(clean(text).replace("`", "'"))


def document(report: Report, folder: str) -> tuple[str, Mapping[str, str]]:
    """The text, and the SVG files by name. `folder`: of these, relative to the document, "" or ending in "/"."""
    files: dict[str, str] = {}
    names = Names()
    lines = [f"# {TITLE}", "", *_top(report)]
    for part in report.parts:
        lines += _part(part, files, names, folder, with_figures=not report.figures)
    if report.left_out:
        lines += ["## Left out", "", "These files are in the folder of results, and are not shown.", ""]
        lines += [*_table(("file", "reason"), [(name, cause) for name, cause in report.left_out]), ""]
    return "\n".join(lines).rstrip("\n") + "\n", files


def _top(report: Report) -> Iterator[str]:
    yield "This page is made by `rest-local bench report` from the files of a folder of results. Do not edit it."
    yield ""
    for remark in remarks(report):
        yield f"- {inline(remark)}"
    yield ""


def _part(part: Part, files: dict[str, str], names: Names, folder: str, *, with_figures: bool) -> Iterator[str]:
    section = part.section
    yield f"## {escaped(section.title)}{' (quick)' if quick(part.results) else ''}"
    yield ""
    rows = origin(part)
    if rows:
        yield from _table(COLUMNS, rows, commands=(0,))
        yield ""
    for paragraph in section.words:
        yield inline(paragraph)
        yield ""
    for figure in section.figures if with_figures else ():
        yield from _figure(figure, files, names, folder)
    for table in section.tables:
        yield from _titled(table)
    for footnote in section.footnotes:
        yield f"<sub>{inline(footnote)}</sub>"
        yield ""


def _figure(figure: Figure, files: dict[str, str], names: Names, folder: str) -> Iterator[str]:
    yield f"**{escaped(figure.title)}**"
    yield ""
    name = f"{names.take(figure.name)}.svg"
    try:
        files[name] = figures.as_file(figure)
    except ValueError as error:
        yield f"No figure: {escaped(error)}."
    else:
        yield f"![{escaped(figure.alt)}]({folder}{name})"
    yield ""


def _titled(table: Table) -> Iterator[str]:
    if table.title:
        yield f"**{escaped(table.title)}**"
        yield ""
    yield from _table(table.columns, table.rows, best=table.best)
    yield ""
    if table.note:
        yield inline(table.note)
        yield ""


def _table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], *, best: Sequence[int] = (), commands: Sequence[int] = ()
) -> Iterator[str]:
    """A table as GitHub has it. Every row has as many cells as there are columns."""
    yield f"| {' | '.join(inline(column) for column in columns)} |"
    yield f"|{'|'.join('---:' if at and is_numeric(rows, at) else '---' for at in range(len(columns)))}|"
    for row in rows:
        bold = greatest(row, best)
        cells = [command(cell) if at in commands and cell else inline(shown(cell)) for at, cell in enumerate(row)]
        cells = [f"**{cell}**" if at in bold else cell for at, cell in enumerate(cells)]
        yield f"| {' | '.join((cells + [''] * len(columns))[: len(columns)])} |"
