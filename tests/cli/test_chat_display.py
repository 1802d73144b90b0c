"""Answers on a terminal: every character of the text, coloured as in the whole, however it was cut."""

import re
from itertools import pairwise
from typing import Any

import pytest
from fake_cli_engine import FakePiece
from hypothesis import example, given
from hypothesis import strategies as st

from rest_local.chat.tools import Content, Reasoning
from rest_local.cli.chat.display import CONTEXT, HELD, CodeBlocks, Plain, TerminalDisplay
from rest_local.cli.terminal import visible

TEXTS = {
    "code without a fence": "def __init__(self, *args):\n    x = a*b*c\n    return x",
    "indented code": "Text:\n\n    if x:\n        return *y*\n\n\tif tab:\n\t\treturn 2\n",
    "fenced code": "Look:\n```python\ndef f(*a, **k):\n    '''A\n    text'''\n    return a ** 2  # done\n```\nEnd.",
    "fence in a list": "1. First:\n   ```sh\n   echo `x` *\n   ```\n2. Second",
    "fence in a fence": "````md\n```py\nx = 1\n```\n````\n~~~\n```\n~~~",
    "unknown language": "```no such language\na  b\n```",
    "open fence": "```python\nfor x in y:\n    print(x",
    "marks": "Some *text*, `code`, ``a ` b``, ```code``` and ~~~\n`",
    "long lines": f"{'word ' * 80}\n```py\nx = {'1 + ' * 80}1\ny\n```",
    "blank lines": "one\n\n\n\ntwo  \nthree\n   \nfour",
    "diff": "```diff\n-old\n+new\n @@ x\n```",
}
PIECE: Any = FakePiece("", (), ())


def styled(*parts: str, colours: bool = True) -> list[tuple[str, str]]:
    """Return each character and the escape sequences that are in force for it."""
    blocks = CodeBlocks(colours)
    text = "".join([*map(blocks.feed, parts), blocks.finish()])
    style, made = "", []
    for found in re.finditer(r"(\x1b\[[0-9;]*m)|(.)", text, re.DOTALL):
        if found[1]:
            style = "" if found[1] in ("\x1b[0m", "\x1b[39;49;00m") else style + found[1]
        else:
            made.append((found[2], style))
    assert style == "", "nothing goes on in this style"
    return made


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_text_that_comes_in_parts_looks_as_one_that_comes_at_once(text: str) -> None:
    whole = styled(text)
    assert "".join(character for character, _ in whole) == text
    for length in (1, 3, 7):
        assert styled(*(text[begin : begin + length] for begin in range(0, len(text), length))) == whole


def test_code_is_coloured_and_text_is_not() -> None:
    looks = dict(styled(TEXTS["fenced code"]))
    assert looks["L"] == ""
    assert looks["#"] != ""
    assert dict(styled("```py\n#", colours=False))["#"] == ""


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


def test_text_is_shown_at_once_and_a_line_of_code_when_it_ends() -> None:
    blocks = CodeBlocks(colours=False)
    assert blocks.feed("one ") == "one "
    assert blocks.feed("two ``` *t") == "two ``` *t"
    assert blocks.feed("\n``") == "\n"
    assert blocks.feed("x") == "``x"
    assert "x = 1" not in blocks.feed("\n```py\nx = 1")
    assert blocks.feed("\n") == "x = 1\n"
    assert blocks.feed("x" * HELD) == "x" * HELD, "a long line is not waited for"


def test_reasoning_comes_before_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    answer = TerminalDisplay(colours=True)
    for deltas in (
        [Reasoning("\none\n\ntw")],
        [Reasoning("o *more*\n")],
        [Reasoning("\n"), Content("\n\n  the answer")],
    ):
        answer.show(PIECE, deltas)
    answer.finish([])
    assert re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out) == "one\n\ntwo *more*\n\n  the answer\n"


@pytest.mark.parametrize(("text", "printed"), [("", ""), ("a", "a\n"), ("a\n", "a\n"), ("\x1b[2J", "\x1b[2J\n")])
def test_a_pipe_gets_the_text_as_it_is_and_a_line_end(
    text: str, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = Plain()
    answer.show(PIECE, [Content(text)])
    answer.finish([])
    assert capsys.readouterr().out == printed
