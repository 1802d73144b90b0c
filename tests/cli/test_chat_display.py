"""Markdown in parts: blocks that do not depend on where the text was cut, and lines that are changed in place."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from fake_cli_engine import FakePiece
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from rest_local.chat.tools import Content, Reasoning
from rest_local.cli.chat import display
from rest_local.cli.chat.blocks import Block, Blocks
from rest_local.cli.chat.display import MarkdownDisplay, Plain
from rest_local.cli.chat.region import Region
from rest_local.cli.chat.rendering import ESCAPES, lines_of, visible

TEXT = """Before:
```py
x = 1

y = 2
```
After.

1. one

2. two

   of two
```
open"""


def blocks_of(*parts: str) -> list[Block]:
    blocks = Blocks()
    return [block for part in parts for block in blocks.feed(part)] + blocks.finish()


def test_a_text_is_cut_into_blocks() -> None:
    assert blocks_of(TEXT) == [
        Block("Before:"),
        Block("x = 1\n\ny = 2", "py"),
        Block("After.\n"),
        Block("1. one\n"),
        Block("2. two\n\n   of two"),
        Block("open", ""),
    ]


@given(
    st.lists(st.sampled_from(["a", "\n", "\n\n", "```", "~~~~", " ", "```py", "- x", "    y"]), max_size=30), st.data()
)
def test_blocks_do_not_depend_on_where_the_text_was_cut(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert blocks_of(*pieces) == blocks_of(text)


@pytest.mark.parametrize("text", ["~~~\n```\n~~~", "````\n```\n````", "```\n``` x\n```"])
def test_only_its_own_fence_ends_a_code_block(text: str) -> None:
    (block,) = blocks_of(text)
    assert block.text == text.split("\n")[1]


def test_what_may_become_a_fence_is_not_shown() -> None:
    blocks = Blocks()
    blocks.feed("text\n``")
    assert blocks.open == Block("text")


class Screen:
    """What a terminal of this size shows: as much of one as `Region` uses."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.scrolled: list[str] = []
        self.rows = [""] * height
        self.row = self.column = 0

    def write(self, text: str) -> None:
        for found in re.finditer(r"\x1b\[(\??[0-9]*)([A-Za-z])|\n|[^\x1b\n]", text):
            if found[0] == "\n":
                self._down()
                self.column = 0
            elif found[2] == "A":
                self.row = max(self.row - int(found[1]), 0)
            elif found[2] == "K":
                self.rows[self.row] = self.rows[self.row][: self.column]
            elif found[2] == "J":
                self.rows[self.row :] = [self.rows[self.row][: self.column], *[""] * (self.height - self.row - 1)]
            elif found[2] is None:
                self._put(found[0])
            else:
                assert found[1] == "?2026", found[0]

    def _put(self, character: str) -> None:
        if self.column == self.width:
            self._down()
            self.column = 0
        row = self.rows[self.row].ljust(self.column)
        self.rows[self.row] = row[: self.column] + character + row[self.column + 1 :]
        self.column += 1

    def _down(self) -> None:
        self.row += 1
        if self.row == self.height:
            self.scrolled.append(self.rows.pop(0))
            self.rows.append("")
            self.row -= 1

    @property
    def lines(self) -> list[str]:
        """All rows ever shown, without blank ones at the end."""
        return "\n".join([*self.scrolled, *self.rows]).rstrip("\n").split("\n")


def wrapped(line: str, width: int) -> list[str]:
    return [line[begin : begin + width] for begin in range(0, max(len(line), 1), width)]


growing = st.lists(st.lists(st.text("ab", max_size=9), max_size=6), max_size=6)


@given(growing, st.integers(3, 9))
@example([["aaa", "b"], ["aaa"], ["aaab", "", "a"]], 3)
@example([["aaaaaaa"], ["aaab"]], 3)
def test_a_region_shows_its_newest_lines(updates: list[list[str]], width: int) -> None:
    screen = Screen(width, 40)
    region = Region(screen.write, lambda: (width, 40))
    screen.write("before\n")
    for lines in updates:
        region.update(lines)
        expected = [row for line in ["before", *lines] for row in wrapped(line, width)]
        assert screen.lines == "\n".join(expected).rstrip("\n").split("\n")


@given(st.lists(st.text("ab", min_size=1, max_size=9), min_size=1, max_size=30), st.integers(3, 6))
def test_a_growing_text_higher_than_the_screen_is_complete(lines: list[str], height: int) -> None:
    screen = Screen(10, height)
    region = Region(screen.write, lambda: (10, height))
    for end in range(1, len(lines) + 1):
        region.update([*lines[: end - 1], lines[end - 1][:1]])
        region.update(lines[:end])
    assert screen.lines == lines


def test_only_the_changed_line_is_written() -> None:
    written: list[str] = []
    region = Region(written.append, lambda: (80, 24))
    region.update(["first", "sec"])
    region.update(["first", "second"])
    region.update(["first", "second"])
    assert len(written) == 2
    assert "first" not in written[1]
    region.finish()
    region.update(["next"])
    assert "A" not in ESCAPES.sub("", written[2]).replace("next", ""), "a finished region is not touched again"


def console(width: int = 40) -> Console:
    return Console(width=width, height=24, file=io.StringIO(), force_terminal=True, color_system="standard")


def plain(block: Block, width: int = 40) -> list[str]:
    return [ESCAPES.sub("", line) for line in lines_of(block, console(width))]


def test_code_keeps_its_lines_and_blanks() -> None:
    code = Block("if x:\n\n\treturn " + "1 + " * 20 + "1", "py")
    assert plain(code) == ["if x:", "", "    return " + "1 + " * 20 + "1"]


def test_an_unknown_language_is_plain_text() -> None:
    assert plain(Block("a  b", "no such language")) == ["a  b"]


def test_headings_stand_on_the_left_without_a_frame() -> None:
    assert plain(Block("# One\n\n## Two\ntext")) == ["One", "", "Two", "", "text"]


@given(st.text(max_size=60))
def test_no_text_controls_the_terminal(text: str) -> None:
    shown = visible(text)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)
    for block in blocks_of(shown):
        for line in lines_of(block, console()):
            assert not re.search(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]", ESCAPES.sub("", line))


class Clock:
    """A clock that the test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


PIECE: Any = FakePiece("", (), ())


def test_updates_are_rarer_than_pieces_and_the_end_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, clock = Screen(40, 24), Clock()
    writes: list[str] = []
    monkeypatch.setattr(display, "_write", lambda text: (writes.append(text), screen.write(ESCAPES.sub("", text))))
    shown = MarkdownDisplay(console(), clock)
    for word in range(100):
        shown.show(PIECE, [Content(f"{word} ")])
        clock.now += 0.001
    assert len(writes) <= 1 + 100 * 0.001 / display.SHORTEST_S + 1
    shown.finish([])
    assert " ".join(screen.lines).split() == [str(word) for word in range(100)]


def test_reasoning_comes_before_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(40, 24)
    monkeypatch.setattr(display, "_write", lambda text: screen.write(ESCAPES.sub("", text)))
    shown = MarkdownDisplay(console())
    shown.show(PIECE, [Reasoning("one\n\ntwo")])
    shown.show(PIECE, [Reasoning(" more"), Content("**the** answer")])
    shown.finish([])
    assert screen.lines == ["one", "", "two more", "", "the answer"]


@pytest.mark.parametrize("answer", ["answer", ""])
def test_the_line_about_a_long_question_gives_way(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    screen = Screen(40, 24)
    monkeypatch.setattr(display, "_write", lambda text: screen.write(ESCAPES.sub("", text)))
    shown = MarkdownDisplay(console())
    shown.wait(10)
    assert screen.lines == [""]
    shown.wait(12345)
    assert screen.lines == ["reading 12,345 characters ..."]
    shown.finish([Content(answer)] if answer else [])
    assert screen.lines == [answer]


@pytest.mark.parametrize(("text", "printed"), [("", ""), ("a", "a\n"), ("a\n", "a\n"), ("\x1b[2J", "\x1b[2J\n")])
def test_a_pipe_gets_the_text_as_it_is_and_a_line_end(
    text: str, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = Plain()
    shown.show(PIECE, [Content(text)])
    shown.finish([])
    assert capsys.readouterr().out == printed
