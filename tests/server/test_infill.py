"""Gaps: the prompt in the model's form, shortened where necessary; and the end of an answer by its lines."""

from collections.abc import Iterator
from typing import Any

import pytest
from fake_service import FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st
from live import Live

from rest_local.api.answers import GROUP_CHARACTERS, Choice, Indentation, TimeLimit
from rest_local.api.errors import ApiError
from rest_local.api.requests import infill_tokens, prompt_text
from rest_local.decoding.stream import Piece

PRE, SUF, MID, REP, SEP = 4090, 4091, 4092, 4094, 4095


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    engine = FakeEngine(n_ctx=200)
    yield engine
    engine.close()


def test_the_prompt_of_a_gap(engine: Any) -> None:
    text = prompt_text(engine.model.vocabulary, infill_tokens(engine, "a = ", "\nb", (), "1"))
    names = {token: engine.model.vocabulary.piece(token).decode() for token in (PRE, SUF, MID, REP, SEP)}
    assert text == f"{names[PRE]}a = {names[SUF]}\nb{names[MID]}1"
    with_files = infill_tokens(engine, "a", "b", [("x.py", "x = 1\n"), ("", "y = 2\n")])
    expected = f"{names[REP]}project\n{names[SEP]}x.py\nx = 1\n{names[SEP]}tmp\ny = 2\n{names[SEP]}filename\n"
    assert prompt_text(engine.model.vocabulary, with_files) == f"{expected}{names[PRE]}a{names[SUF]}b{names[MID]}"


def test_special_tokens_in_a_file_are_text(engine: Any) -> None:
    name = engine.model.vocabulary.piece(MID).decode()
    assert infill_tokens(engine, name, name, [("a", name)], name).count(MID) == 1


@settings(max_examples=60)
@given(st.integers(0, 300), st.integers(0, 300), st.lists(st.integers(0, 120), max_size=4), st.integers(0, 500))
def test_a_gap_always_leaves_room(engine: Any, before: int, after: int, extra: list[int], answer: int) -> None:
    prefix, suffix = " x" * before + "end", "begin" + " y" * after
    files = [(f"{n}.py", " z" * size) for n, size in enumerate(extra)]
    tokens = infill_tokens(engine, prefix, suffix, files, "", answer)
    assert len(tokens) < engine.n_ctx
    assert len(tokens) + min(answer, engine.n_ctx // 2) <= engine.n_ctx
    left, right = tokens.index(PRE), tokens.index(SUF)
    assert tokens[-1] == MID
    text = prompt_text(engine.model.vocabulary, tokens[left + 1 : right])
    assert prefix.endswith(text)
    assert suffix.startswith(prompt_text(engine.model.vocabulary, tokens[right + 1 : -1]))
    if before and left:
        assert text == prefix, "other files only take what is left over"


def test_files_far_from_the_gap_are_dropped_first(engine: Any) -> None:
    files = [(f"{name}.py", f" {name}" * 60) for name in "abc"]
    text = prompt_text(engine.model.vocabulary, infill_tokens(engine, "x", "y", files))
    assert "c.py" in text
    assert "a.py" not in text


def test_a_model_without_infill_tokens_is_501(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = engine.model.vocabulary
    monkeypatch.setattr(vocabulary, "ids", vocabulary.ids._replace(fim_middle=None))
    with pytest.raises(ApiError, match="no fill-in-the-middle") as caught:
        infill_tokens(engine, "a", "b")
    assert caught.value.status == 501


def test_extra_text_comes_first_without_file_markers(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = engine.model.vocabulary
    monkeypatch.setattr(vocabulary, "ids", vocabulary.ids._replace(fim_sep=None, fim_rep=None))
    text = prompt_text(engine.model.vocabulary, infill_tokens(engine, "a", "b", [("x.py", "x = 1")]))
    assert text.startswith("x = 1\n")
    assert "x.py" not in text


def test_indentation_ends_the_answer(hello: Live) -> None:
    hello.service.answer = ("return", " 1\n  ", "  more\n", "left", " and more")
    found = hello.post("/infill", {"input_prefix": "", "input_suffix": "", "n_indent": 4}).json()
    assert found["content"] == "return 1\n    more\n"
    assert found["stop_type"] == "limit"
    assert found["stop"] is True


# ---- The end of an answer by its lines or its time -----------------------------------------------------------------


def choice(least: int, *, shows_steps: bool) -> Choice:
    unused: Any = None
    ending = [Indentation(least)] if least else []
    return Choice(unused, None, shows_steps=shows_steps, sends_origins=False, ending=ending)


def texts_of(made: Choice, parts: list[str]) -> list[str]:
    """Return what is sent of these parts of a text."""
    fed = [made.feed([Piece(part, (), (), ())]).text for part in parts]
    return [*fed, made.finish(cut=False).text]


def oracle(text: str, least: int) -> tuple[str, bool]:
    """Apply llama-server's rule to the whole text: a line after the first that is indented less ends it."""
    first, *lines = text.split("\n")
    given = first
    for number, line in enumerate(lines):
        blank = len(line) - len(line.lstrip(" \t"))
        last = number == len(lines) - 1
        if least and blank < least and not (last and blank == len(line)):
            return given + "\n", True
        given += "\n" + line
    return given, False


@given(st.lists(st.text(" \t\na", max_size=40), max_size=12), st.integers(0, 4), st.booleans())
def test_what_is_sent_does_not_depend_on_how_the_text_is_cut(parts: list[str], least: int, shows_steps: bool) -> None:
    """If steps are hidden, the text is cut at fixed places instead."""
    made = choice(least, shows_steps=shows_steps)
    *sent, rest = texts_of(made, parts)
    assert ("".join(sent) + rest, made.ended) == oracle("".join(parts), least)
    assert shows_steps or all(len(text) % GROUP_CHARACTERS == 0 for text in sent)
    assert made.can_end == bool(least)


def test_time_ends_the_text_with_a_whole_line() -> None:
    now = [0.0]
    limit = TimeLimit(500, clock=lambda: now[0])
    assert limit.feed("first ") == "first "
    now[0] = 9.0
    assert limit.feed("line") == "line", "the first line always comes"
    assert not limit.ended
    assert limit.feed(" ends\nsecond") == " ends\n"
    assert limit.ended
    assert limit.feed("more\n") == ""
