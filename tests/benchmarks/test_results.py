"""Rows that people share: what is printed passes the check, and what is wrong with a row is named."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.command import Call, call  # noqa: F401 - a fixture

from benchmarks import results
from rest_local.cli.doctor import SHARED

ROW = [
    "AMD EPYC",
    "m",
    "90.0 to 99.0 tokens/s (1.10)",
    "90.0 to 180.0 tokens/s (2.00)",
    "2 of 2",
    "0.1.0",
    "2026-11-28",
]


def page(*rows: list[str]) -> str:
    """Return a page with a table of these rows."""
    lines = [f"| {' | '.join(cells)} |" for cells in ([*SHARED], ["---"] * len(SHARED), *rows)]
    return "\n".join(["# Rows", "", *lines, "", "More text."])


def test_a_shared_row_passes_the_check(
    call: Call,  # noqa: F811
    tiny_model: Callable[..., Path],
) -> None:
    shared = call("tune", "--share", "-m", str(tiny_model("llama")), "-c", "2048").out.strip().splitlines()[-1]
    table = results.rows(page([cell.strip() for cell in shared.strip("|").split("|")]))
    assert list(results.faults(table)) == []


def test_the_rows_of_the_documents_have_no_faults() -> None:
    table = results.rows(results.PAGE.read_text("utf-8"))
    assert table
    assert list(results.faults(table)) == []


@pytest.mark.parametrize(
    ("column", "cell", "fault"),
    [
        ("a question", "fast", "row 1, a question: not PLAIN to DRAFTED tokens/s (RATIO)"),
        ("an edit", "90.0 to 99.0 tokens/s (2.00)", "row 1, an edit: the speeds do not have this ratio"),
        ("same output", "yes", "row 1, same output: not N of 2"),
        ("date", "today", "row 1, date: not YYYY-MM-DD"),
        ("machine", "", "row 1: machine, model or version is missing"),
    ],
)
def test_a_fault_is_named(column: str, cell: str, fault: str) -> None:
    row = [cell if name == column else old for name, old in zip(SHARED, ROW, strict=True)]
    assert list(results.faults(results.rows(page(row)))) == [fault]


def test_short_rows_and_second_ones_are_faults() -> None:
    short, second = results.faults(results.rows(page(ROW, ROW[:3], ROW)))
    assert short == "row 2: 3 cells in place of 7"
    assert second == "row 3: another row has this machine, model and version"


def test_a_page_without_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="no table with the columns machine, model"):
        results.rows("# Rows\n")
