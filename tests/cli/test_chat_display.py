"""Answers on a terminal: every character of the text in its place, styled as in the whole, however it was cut."""

import re
import unicodedata
from itertools import pairwise
from typing import Any

import pyte
import pytest
from fake_cli_engine import FakePiece
from hypothesis import example, given
from hypothesis import strategies as st

from rest_local.chat.tools import Content, Reasoning
from rest_local.cli.chat import display
from rest_local.cli.chat.display import CONTEXT, HELD, Markdown, MarkdownDisplay, Plain
from rest_local.cli.terminal import visible

TEXTS = {
    "code without a fence": "def __init__(self, *args):\n    x = a*b*c\n    return x",
    "dunder names": "__name__ == '__main__', __a__b__, and __init__(self, __x) or __all__\n__slots__ = ()",
    "tags": "Write <your name> in <b>bold</b>, <br/> and <!-- a comment --> & <T extends U<V>>.\n<div>\n  text\n</div>",
    "operators": "x = a*b*c, y = 2 * 3 * 4, z = a **b, w = 2**3**4, f(*args, **kwargs), *p, &*q, a * *b*c",
    "table": "| name | value |\n|------|:-----:|\n| a\\|b | `x|y` |\n| *c*  | 1 * 2 |",
    "nested list": "- one\n  - two\n    * three\n      + four\n\n        and its text\n1) five\n   1. six",
    "long line": "word " * 60 + "end",
    "long word": "x" * 300,
    "link": "[a link](https://example.org/a_b_c?d=*e*&f=_g_) and <https://example.org> [ref][1]\n\n[1]: http://x.y",
    "backslashes": "C:\\new\\table \\* \\_ \\` \\\\ \\n \\[x\\] $\\alpha_1 * \\beta_2$",
    "indented code": "Text:\n\n    if x:\n        return *y*\n\n\tif tab:\n\t\treturn 2\n",
    "fenced code": "Look:\n```python\ndef f(*a, **k):\n    '''A\n    text'''\n    return a ** 2  # done\n```\nEnd.",
    "fence in a list": "1. First:\n   ```sh\n   echo `x` *\n   ```\n2. Second",
    "fence in a fence": "````md\n```py\nx = 1\n```\n````\n~~~\n```\n~~~",
    "unknown language": "```no such language\na  b\n```",
    "open fence": "```python\nfor x in y:\n    print(x",
    "marks": "# Head *one*\n\nSome *text*, _text_, `code`, ``a ` b``, **bold**, ***both***.\n\n> quote\n\n---\n***\n",
    "unclosed marks": "an *open mark, **another, `a third, _one more\n*and* the next line",
    "long marks": f"**{'bold ' * 80}** and `{'code ' * 80}`",
    "blank lines": "one\n\n\n\ntwo  \nthree\n   \nfour",
    "wide characters": "日本語 *強調* テスト `コード` " + "漢字" * 50,
    "headings": "#no heading\n# one\n  ## two\n####### seven\n#\n# ",
    "diff": "```diff\n-old\n+new\n @@ x\n```",
}
PIECE: Any = FakePiece("", (), ())
ROWS = 24
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


class Screen:
    """A terminal of 80 columns as pyte sees it, with room for every line of a test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch | None = None, columns: int = 80) -> None:
        self.screen = pyte.Screen(columns, ROWS)
        self.screen.set_mode(pyte.modes.LNM)  # a line feed begins the next line, as the driver of a terminal does it
        self.stream = pyte.Stream(self.screen)
        self.writes: list[str] = []
        if monkeypatch is not None:
            monkeypatch.setattr(display, "_write", self.write)

    def write(self, text: str) -> None:
        self.writes.append(text)
        self.stream.feed(text)

    @property
    def lines(self) -> list[str]:
        """Return all rows, without blanks at their ends and blank ones at the end."""
        return "\n".join(row.rstrip() for row in self.screen.display).rstrip("\n").split("\n")

    @property
    def cells(self) -> list[Any]:
        """Return every cell: its character and how it looks."""
        return [self.screen.buffer[row][column] for row in range(ROWS) for column in range(self.screen.columns)]


def shown(screen: Screen, parts: list[str]) -> Screen:
    """Show an answer that comes in these parts, and return the screen."""
    answer = MarkdownDisplay(colours=True)
    for part in parts:
        answer.show(PIECE, [Content(part)])
    answer.finish([])
    return screen


def rows(text: str, columns: int = 80) -> list[str]:
    """Split a text into the rows of a terminal: its lines, cut where they are full."""
    made = []
    for line in text.rstrip("\n").expandtabs(8).split("\n"):
        row, width = "", 0
        for character in line:
            wide = 2 if unicodedata.east_asian_width(character) in "WF" else 1
            if width + wide > columns:
                made.append(row)
                row, width = "", 0
            row, width = row + character, width + wide
        made.append(row)
    return [row.rstrip() for row in made]


@pytest.mark.parametrize("name", TEXTS)
def test_every_character_of_a_text_is_on_the_screen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(Screen(monkeypatch), [TEXTS[name]]).lines == rows(TEXTS[name])


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_that_comes_in_parts_looks_as_one_that_comes_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = TEXTS[name]
    at_once = shown(Screen(monkeypatch), [text]).cells
    for length in (1, 3, 7):
        parts = [text[begin : begin + length] for begin in range(0, len(text), length)]
        assert shown(Screen(monkeypatch), parts).cells == at_once, length


def styled(*parts: str, colours: bool = True) -> list[tuple[str, str]]:
    """Return each character and the escape sequences that are in force for it."""
    markdown = Markdown(colours)
    text = "".join([*map(markdown.feed, parts), markdown.finish()])
    style, made = "", []
    for found in re.finditer(r"(\x1b\[[0-9;]*m)|(.)", text, re.DOTALL):
        if found[1]:
            style = "" if found[1] in ("\x1b[0m", "\x1b[39;49;00m") else style + found[1]
        else:
            made.append((found[2], style))
    assert style == "", "nothing goes on in this style"
    return made


marks = st.sampled_from(
    ["a", " ", "\n", "*", "**", "_", "`", "```", "\n```py\n", "\n```\n", "# ", "\\", "'", "é", "x" * 60]
)


@given(st.lists(marks, max_size=40), st.data())
@example(["```py\n", "'''", "\n", "aaaa\n" * (CONTEXT // 4), "```", "\n"], None)
def test_nothing_is_lost_and_the_parts_change_nothing(texts: list[str], data: st.DataObject | None) -> None:
    text = "".join(texts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8))) if data else list(range(len(text)))
    whole = styled(text)
    assert "".join(character for character, _ in whole) == text
    assert styled(*(text[begin:end] for begin, end in pairwise([0, *cuts, len(text)]))) == whole


@given(st.text(max_size=60))
def test_no_text_controls_the_terminal(text: str) -> None:
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", visible(text))
    fenced = f"```python\n{visible(text)}\n```"
    assert "".join(character for character, _ in styled(fenced)) == fenced


def looks(text: str) -> dict[str, str]:
    """Return each stretch of a text in one style, and that style."""
    found: dict[str, str] = {}
    run = ""
    for (character, style), (_, after) in pairwise([*styled(text), ("", "end")]):
        run += character
        if style != after:
            found[run] = style
            run = ""
    return found


def test_text_is_shown_as_soon_as_its_style_is_certain() -> None:
    markdown = Markdown(colours=True)
    assert markdown.feed("one ") == "one "
    assert markdown.feed("two *t") == "two "
    assert ESCAPES.sub("", markdown.feed("hree*, ")) == "*three*, "
    assert markdown.feed("a*b 2 * 3 _ ") == "a*b 2 * 3 _ "
    assert markdown.feed("`open") == ""
    assert markdown.feed("x" * HELD) == "`open" + "x" * HELD, "what is not closed is not waited for"
    assert markdown.feed("\n```py\nx = 1").count("x") == 0
    assert ESCAPES.sub("", markdown.feed("\n")) == "x = 1\n"


def test_reasoning_comes_before_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(monkeypatch)
    answer = MarkdownDisplay(colours=True)
    for deltas in (
        [Reasoning("\none\n\ntw")],
        [Reasoning("o *more*\n")],
        [Reasoning("\n"), Content("\n\n  the answer")],
    ):
        answer.show(PIECE, deltas)
    answer.finish([])
    assert screen.lines == ["one", "", "two *more*", "", "  the answer"]


@pytest.mark.parametrize(("text", "printed"), [("", ""), ("a", "a\n"), ("a\n", "a\n"), ("\x1b[2J", "\x1b[2J\n")])
def test_a_pipe_gets_the_text_as_it_is_and_a_line_end(
    text: str, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = Plain()
    answer.show(PIECE, [Content(text)])
    answer.finish([])
    assert capsys.readouterr().out == printed
