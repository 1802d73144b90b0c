"""A draft model says what a context of its own would say, whatever was asked before; over tiny random models."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rest_local.drafting.draft_model import MOST, SHORT, DraftModel, Follower
from rest_local.errors import ModelNotFound, OptionError
from rest_local.llama.context import Context, ContextSettings
from rest_local.llama.model import Model

TinyModel = Callable[..., Path]
N_CTX = 512


@pytest.fixture(scope="module")
def drafter(tiny_model: TinyModel) -> Iterator[DraftModel]:
    path = tiny_model("llama", quant="Q8_0")
    with (
        Model.open(path, vocab_only=True) as target,
        DraftModel.open(path, target.vocabulary, N_CTX, 2, threads=1) as drafter,
    ):
        yield drafter


def alone(drafter: DraftModel, text: list[int]) -> np.ndarray:
    """The probabilities behind `text`, evaluated in a context of its own, all at once."""
    with Context(drafter.model, ContextSettings(n_ctx=N_CTX, n_branches=1, threads=1)) as context:
        context.batch.fill(text, np.arange(len(text)), 0, 1, [0] * (len(text) - 1) + [1])
        assert context.decode() == 0
        row = context.logits(1)[0].astype(np.float64)
    likely = np.exp(row - row.max())
    return np.asarray(likely / likely.sum())


def check(drafter: DraftModel, follower: Follower, text: list[int], path: list[int]) -> None:
    assert any(follower.caught_up(1e9) for _ in range(1000))  # a part of the text at a time
    said = follower.ask(path)
    expected = alone(drafter, [*text, *path])
    assert 1 <= len(said) <= MOST
    for token, probability in said:
        assert probability == pytest.approx(expected[token], abs=0.03)
    assert said[0][1] >= expected.max() - 0.03
    assert [p for _, p in said] == sorted((p for _, p in said), reverse=True)


def text_of(seed: int, n: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 256, n)]


def follow(drafter: DraftModel, text: list[int]) -> Follower:
    follower = Follower(drafter)
    follower.restart(text, 0)
    assert any(follower.caught_up(1e9) for _ in range(1000))  # a part of the text at a time
    return follower


def test_it_says_what_it_would_say_alone(drafter: DraftModel) -> None:
    text = text_of(1, 40)
    follower = follow(drafter, text)
    for path in ([], [1], [1, 2], [1, 3], [7, 8, 9], [1, 2, 4], []):
        check(drafter, follower, text, path)
    text += [1, 3, 5]
    check(drafter, follower, text, [])
    check(drafter, follower, text, [2])
    follower.leave()


@settings(max_examples=15)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 6)), min_size=1, max_size=8))
def test_whatever_is_asked_in_any_order(drafter: DraftModel, moves: list[tuple[int, int, int]]) -> None:
    """Three texts over two places, each extended, cut back or asked along drafted paths."""
    texts = [text_of(7, 30 + 25 * n) for n in range(3)]  # they begin alike
    followers = [follow(drafter, text) for text in texts]
    for which, move, n in moves:
        text, follower = texts[which], followers[which]
        if move == 0:
            text += text_of(n, n)
        elif move == 1:
            del text[len(text) - n :]
            text += [200 + n]
            follower.restart(text, len(text) - 1)
        check(drafter, follower, text, text_of(n, move * n))
    for follower in followers:
        follower.leave()


def test_a_shared_beginning_is_not_evaluated_again(drafter: DraftModel, monkeypatch: pytest.MonkeyPatch) -> None:
    system = text_of(3, 200)
    first = follow(drafter, [*system, 1])
    first.ask([])
    evaluated: list[int] = []
    real = drafter.evaluate
    monkeypatch.setattr(
        drafter, "evaluate", lambda seq, tokens, at: evaluated.append(len(tokens)) or real(seq, tokens, at)
    )
    text = [*system, 2, 3]
    second = follow(drafter, text)
    check(drafter, second, text, [4])
    assert sum(evaluated) <= SHORT
    for follower in (first, second):
        follower.leave()


def test_a_long_prompt_waits_until_it_would_have_paid(drafter: DraftModel) -> None:
    """A short answer does not pay for evaluating it; once begun, it goes to the end in parts."""
    text = text_of(5, 400)
    drafter.token_ms = 1.0  # whatever it took here
    follower = Follower(drafter)
    follower.restart(text, 0)
    price = 400 * drafter.token_ms
    waited = 0
    while follower.behind == 400:
        assert follower.ask([]) == []
        assert not follower.caught_up(price / 10 + 1e-9)
        waited += 1
        assert waited <= 11
    assert waited >= 9
    parts = 0
    while not follower.caught_up(0.0):
        parts += 1
    assert 3 <= parts <= 4  # of 100 ms, so of 100 tokens
    assert follower.step_ms > 0
    assert follower.asked_ms == 0
    check(drafter, follower, text, [1])
    text += text_of(6, 40)  # and waits as long again for what came while it was not asked
    assert not follower.caught_up(10.0)
    assert follower.behind >= 40
    follower.leave()


def test_a_question_that_was_broken_off_leaves_books_that_hold(
    drafter: DraftModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = text_of(8, 30)
    follower = follow(drafter, text)
    follower.ask([])

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for path in ([], [1, 2]):
        with monkeypatch.context() as patch:
            patch.setattr(drafter, "evaluate", interrupt)
            with pytest.raises(KeyboardInterrupt):
                follower.ask(path)
        check(drafter, follower, text, [3])
    with monkeypatch.context() as patch:
        patch.setattr(drafter.context, "decode", lambda: 2)  # aborted: nothing is wrong with it
        assert follower.ask([5]) == []
    assert follower.can_ask
    check(drafter, follower, text, [5])
    follower.leave()


def test_a_failing_decode_ends_the_drafting_with_one_warning(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tiny_model("llama", quant="Q8_0")
    with Model.open(path, vocab_only=True) as target, DraftModel.open(path, target.vocabulary, 64, 1) as drafter:
        follower = follow(drafter, [1, 2, 3])
        assert follower.ask([4])
        monkeypatch.setattr(drafter.context, "decode", lambda: -3)
        with caplog.at_level(logging.WARNING, "rest_local.drafting"):
            assert follower.ask([5]) == []
            assert follower.ask([6]) == []
        assert not follower.can_ask
        assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


def test_a_text_longer_than_its_context_is_not_followed(tiny_model: TinyModel) -> None:
    path = tiny_model("llama", quant="Q8_0")
    with Model.open(path, vocab_only=True) as target, DraftModel.open(path, target.vocabulary, 32, 1) as drafter:
        text = text_of(1, 20)
        follower = follow(drafter, text)
        assert follower.ask([1] * 12)
        assert follower.ask([1] * 13) == []
        text += text_of(2, 12)
        assert not follower.can_ask


@pytest.mark.parametrize(("arch", "said"), [("mamba", "cannot take back"), ("lfm2", "cannot take back")])
def test_memory_that_cannot_be_cut_back_is_refused(arch: str, said: str, tiny_model: TinyModel) -> None:
    with Model.open(tiny_model("llama"), vocab_only=True) as target, pytest.raises(OptionError, match=said):
        DraftModel.open(tiny_model(arch), target.vocabulary, 64, 1)


def test_another_vocabulary_and_a_missing_file_are_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    from rest_local.paths import demo_model

    with Model.open(tiny_model("llama"), vocab_only=True) as target:
        with pytest.raises(OptionError, match="same family"):
            DraftModel.open(demo_model(), target.vocabulary, 64, 1)
        with pytest.raises(ModelNotFound):
            DraftModel.open(tmp_path / "none.gguf", target.vocabulary, 64, 1)
