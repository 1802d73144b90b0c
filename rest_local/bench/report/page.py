"""A report as one HTML page that holds everything: style, figures, no script and nothing from elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rest_local.bench.report import figures
from rest_local.bench.report.origin import COLUMNS, origin, quick, remarks
from rest_local.bench.report.reading import Part, Report
from rest_local.bench.report.shapes import Figure, Table
from rest_local.bench.report.text import Names, clean, greatest, is_numeric, shown, spans

if TYPE_CHECKING:
    from markupsafe import Markup

TEMPLATE = Path(__file__).with_name("page.html")
TITLE = "Benchmarks of rest-local"
LEFT_OUT = "left-out"
SENTENCE = 40  # characters


def page(report: Report) -> str:
    """The page. Jinja escapes every text; only the drawn figures are markup."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["inline"] = _inline
    environment.filters["clean"] = clean
    names = Names()
    names.take(LEFT_OUT)
    return environment.from_string(TEMPLATE.read_text("utf-8")).render(
        title=TITLE,
        colours=list(enumerate(zip(figures.LIGHT, figures.DARK, strict=True), 1)),
        remarks=list(remarks(report)),
        parts=[_part(part, names, with_figures=not report.figures) for part in report.parts],
        left_out=report.left_out,
        anchor_left_out=LEFT_OUT,
    )


def _inline(text: object) -> Markup:
    """A text with code in backticks."""
    from markupsafe import Markup

    return Markup("").join(
        Markup("<code>{}</code>").format(part) if is_code else Markup("{}").format(part)
        for part, is_code in spans(text)
    )


def _part(part: Part, names: Names, *, with_figures: bool) -> dict[str, Any]:
    section = part.section
    anchor = names.take(section.title)
    return {
        "anchor": anchor,
        "section": section,
        "quick": quick(part.results),
        "origin": [[(name, value) for name, value in zip(COLUMNS, row, strict=True) if value] for row in origin(part)],
        "figures": [_figure(figure, names) for figure in section.figures] if with_figures else [],
        "tables": [_table(table) for table in section.tables],
    }


def _figure(figure: Figure, names: Names) -> dict[str, Any]:
    from markupsafe import Markup

    name = names.take(f"figure-{figure.name}")
    try:
        drawn, why = Markup(figures.inline(figure, name)), ""  # matplotlib has escaped its texts
    except ValueError as error:
        drawn, why = Markup(""), str(error)
    return {"name": name, "title": figure.title, "drawn": drawn, "why": why}


def _table(table: Table) -> dict[str, Any]:
    rows = []
    for row in table.rows:
        bold = greatest(row, table.best)
        cells = [(shown(cell), at in bold) for at, cell in enumerate(row)]
        rows.append((cells + [("", False)] * len(table.columns))[: len(table.columns)])
    classes = ["", *(_class(table, at) for at in range(1, len(table.columns)))]
    return {"title": table.title, "columns": table.columns, "rows": rows, "classes": classes, "note": table.note}


def _class(table: Table, column: int) -> str:
    """Numbers stand on the right, names are not broken, and a column of sentences is not made narrow."""
    if is_numeric(table.rows, column):
        return "number"
    longest = max((len(shown(row[column])) for row in table.rows if column < len(row)), default=0)
    return "words" if longest > SENTENCE else "name"
