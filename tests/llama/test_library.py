"""llama.cpp's log becomes lines of `logging`, and the library describes its build."""

from __future__ import annotations

import logging

import pytest

from rest_local.llama.library import LogLines

DEBUG, INFO, WARN, ERROR, CONT = 1, 2, 3, 4, 5


@pytest.fixture
def lines() -> LogLines:
    return LogLines(logging.getLogger("rest_local.llama.test"))


def test_a_message_of_several_lines_becomes_several_records(lines: LogLines, caplog: pytest.LogCaptureFixture) -> None:
    lines.feed(WARN, b"one\ntwo\n")
    assert [(record.levelno, record.message) for record in caplog.records] == [
        (logging.WARNING, "one"),
        (logging.WARNING, "two"),
    ]


def test_a_continued_message_is_one_record_with_the_level_of_its_start(
    lines: LogLines, caplog: pytest.LogCaptureFixture
) -> None:
    for level, text in ((ERROR, b"tensor "), (CONT, b"'x' "), (CONT, b"missing"), (CONT, b"\n")):
        lines.feed(level, text)
    assert [(record.levelno, record.message) for record in caplog.records] == [(logging.ERROR, "tensor 'x' missing")]


def test_only_errors_are_collected_and_only_inside_the_block(lines: LogLines) -> None:
    with lines.collected_errors() as outer:
        lines.feed(ERROR, b"a\n")
        with lines.collected_errors() as inner:
            lines.feed(WARN, b"b\n")
            lines.feed(ERROR, b"c\n")
    lines.feed(ERROR, b"d\n")
    assert (outer, inner) == (["a", "c"], ["c"])
