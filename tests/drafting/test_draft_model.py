"""A draft model predicts the same as a fresh context would, after any earlier queries. Uses tiny random models."""

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.examples import few

from rest_local.drafting.models.draft_model import DraftModel, DraftModelText
from rest_local.drafting.models.drafter import BRANCHES, INLINE, TOP_K, Likely, Query
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
    """Return the probabilities after `text`, evaluated in one batch in a context of its own."""
    with Context(drafter.model, ContextSettings(n_ctx=N_CTX, n_branches=1, threads=1)) as context:
        context.batch.fill(text, np.arange(len(text)), 0, 1, [0] * (len(text) - 1) + [1])
        assert context.decode() == 0
        row = context.logits(1)[0].astype(np.float64)
    likely = np.exp(row - row.max())
    return np.asarray(likely / likely.sum())


def ask(text: DraftModelText, path: list[int]) -> Sequence[Likely]:
    (likely,) = text.drafter.answer([Query(text, tuple(path))])
    return likely


def check(drafter: DraftModel, sequence: DraftModelText, text: list[int], path: list[int]) -> None:
    assert any(sequence.caught_up(1e9) for _ in range(1000))  # one chunk of the text for each call
    said = ask(sequence, path)
    expected = alone(drafter, [*text, *path])
    assert 1 <= len(said) <= TOP_K
    for token, probability in said:
        assert probability == pytest.approx(expected[token], abs=0.03)
    assert said[0][1] >= expected.max() - 0.03
    assert [p for _, p in said] == sorted((p for _, p in said), reverse=True)


def text_of(seed: int, n: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 256, n)]


def follow(drafter: DraftModel, text: list[int]) -> DraftModelText:
    sequence = DraftModelText(drafter)
    sequence.restart(text, 0)
    assert any(sequence.caught_up(1e9) for _ in range(1000))  # one chunk of the text for each call
    return sequence


@few(10)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 6)), min_size=1, max_size=8))
@example([(1, 1, 3), (1, 2, 2), (1, 1, 1), (1, 2, 2)])  # A path that was drafted before the text changed.
def test_queries_in_any_order(drafter: DraftModel, moves: list[tuple[int, int, int]]) -> None:
    """Three texts share two sequence ids; each is extended, cut back or queried along drafted paths."""
    texts = [text_of(7, 30 + 25 * n) for n in range(3)]  # They share a prefix.
    sequences = [follow(drafter, text) for text in texts]
    for which, move, n in moves:
        text, sequence = texts[which], sequences[which]
        if move == 0:
            text += text_of(n, n)
        elif move == 1:
            del text[len(text) - n :]
            text += [200 + n]
            sequence.restart(text, len(text) - 1)
        check(drafter, sequence, text, text_of(n, move * n))
    for sequence in sequences:
        sequence.leave()


@few(10)
@given(st.lists(st.lists(st.integers(0, BRANCHES - 1), min_size=BRANCHES, max_size=BRANCHES), min_size=1, max_size=6))
def test_every_level_of_a_tree_is_answered(drafter: DraftModel, parents: list[list[int]]) -> None:
    """A level continues any BRANCHES paths of the one before. The other paths give way."""
    text = text_of(11, 40)
    sequence = follow(drafter, text)
    sequence.begin_step()
    assert ask(sequence, [])
    level: list[tuple[int, ...]] = [(token,) for token in range(BRANCHES)]
    for number, chosen in enumerate(parents):
        answers = drafter.answer([Query(sequence, path) for path in level])
        for path, likely in zip(level, answers, strict=True):
            expected = alone(drafter, [*text, *path])
            assert likely
            assert likely[0][1] == pytest.approx(expected[likely[0][0]], abs=0.03)
        level = [(*level[parent], 10 * number + child) for child, parent in enumerate(chosen)]
    text += [*level[-1], 7]
    sequence.begin_step()
    check(drafter, sequence, text, [3])
    sequence.leave()


def test_one_path_too_many_is_not_answered_and_spoils_no_other(drafter: DraftModel) -> None:
    text = text_of(13, 40)
    sequence = follow(drafter, text)
    ask(sequence, [])
    paths = [(token,) for token in range(BRANCHES + 1)]
    *answers, unanswered = drafter.answer([Query(sequence, path) for path in paths])
    assert not unanswered
    for path, likely in zip(paths, answers, strict=False):
        assert likely[0][1] == pytest.approx(alone(drafter, [*text, *path])[likely[0][0]], abs=0.03)
    sequence.leave()


def test_a_shared_prefix_is_not_evaluated_again(drafter: DraftModel, monkeypatch: pytest.MonkeyPatch) -> None:
    system = text_of(3, 200)
    first = follow(drafter, [*system, 1])
    ask(first, [])
    evaluated: list[int] = []
    real = drafter.evaluate
    monkeypatch.setattr(drafter, "evaluate", lambda rows: evaluated.append(len(rows)) or real(rows))
    text = [*system, 2, 3]
    second = follow(drafter, text)
    check(drafter, second, text, [4])
    assert sum(evaluated) <= INLINE
    for sequence in (first, second):
        sequence.leave()


def test_a_long_prompt_waits_until_evaluating_it_would_have_paid(drafter: DraftModel) -> None:
    """A short answer does not pay for the evaluation. Once it begins, it runs to the end in chunks."""
    text = text_of(5, 400)
    drafter.token_ms = 1.0  # instead of the measured time
    sequence = DraftModelText(drafter)
    sequence.restart(text, 0)
    price = 400 * drafter.token_ms
    waited = 0
    while sequence.n_missing == 400:
        assert not ask(sequence, [])
        assert not sequence.caught_up(price / 10 + 1e-9)
        waited += 1
        assert waited <= 11
    assert waited >= 9
    chunks = 0
    while not sequence.caught_up(0.0):
        chunks += 1
    assert 3 <= chunks <= 4  # A chunk is 100 ms, so 100 tokens.
    assert sequence.step_ms > 0
    assert sequence.query_ms == 0
    check(drafter, sequence, text, [1])
    text += text_of(6, 40)  # the tokens since the last query wait again
    assert not sequence.caught_up(10.0)
    assert sequence.n_missing >= 40
    sequence.leave()


def test_an_interrupted_query_leaves_a_consistent_state(drafter: DraftModel, monkeypatch: pytest.MonkeyPatch) -> None:
    text = text_of(8, 30)
    sequence = follow(drafter, text)
    ask(sequence, [])

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for path in ([], [1, 2]):
        with monkeypatch.context() as patch:
            patch.setattr(drafter, "evaluate", interrupt)
            with pytest.raises(KeyboardInterrupt):
                ask(sequence, path)
        check(drafter, sequence, text, [3])
    with monkeypatch.context() as patch:
        patch.setattr(drafter.context, "decode", lambda: 2)  # aborted, which is no failure
        assert not ask(sequence, [5])
    assert sequence.can_ask
    check(drafter, sequence, text, [5])
    sequence.leave()


def test_a_failing_decode_ends_the_drafting_with_one_warning(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tiny_model("llama", quant="Q8_0")
    with Model.open(path, vocab_only=True) as target, DraftModel.open(path, target.vocabulary, 64, 1) as drafter:
        sequence = follow(drafter, [1, 2, 3])
        assert ask(sequence, [4])
        monkeypatch.setattr(drafter.context, "decode", lambda: -3)
        with caplog.at_level(logging.WARNING, "rest_local.drafting"):
            assert not ask(sequence, [5])
            assert not ask(sequence, [6])
        assert not sequence.can_ask
        assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


def test_a_text_longer_than_the_context_gets_no_predictions(tiny_model: TinyModel) -> None:
    path = tiny_model("llama", quant="Q8_0")
    with Model.open(path, vocab_only=True) as target, DraftModel.open(path, target.vocabulary, 32, 1) as drafter:
        text = text_of(1, 20)
        sequence = follow(drafter, text)
        assert ask(sequence, [1] * 12)
        assert not ask(sequence, [1] * 13)
        text += text_of(2, 12)
        assert not sequence.can_ask


@pytest.mark.parametrize("arch", ["mamba", "lfm2"])
def test_a_model_that_cannot_remove_tokens_is_refused(arch: str, tiny_model: TinyModel) -> None:
    with (
        Model.open(tiny_model("llama"), vocab_only=True) as target,
        pytest.raises(OptionError, match="cannot roll back"),
    ):
        DraftModel.open(tiny_model(arch), target.vocabulary, 64, 1)


def test_another_vocabulary_and_a_missing_file_are_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    from support.toy import demo_model

    with Model.open(tiny_model("llama"), vocab_only=True) as target:
        with pytest.raises(OptionError, match="same family"):
            DraftModel.open(demo_model(), target.vocabulary, 64, 1)
        with pytest.raises(ModelNotFound):
            DraftModel.open(tmp_path / "none.gguf", target.vocabulary, 64, 1)


def test_no_id_is_drafted_that_only_the_padding_of_the_draft_model_has(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp refuses a batch with an id that the target does not have."""
    padded = tiny_model("llama", n_layers=1, vocab=540)
    with (
        Model.open(tiny_model("llama"), vocab_only=True) as target,
        DraftModel.open(padded, target.vocabulary, 64, 1) as drafter,
    ):
        assert (target.n_vocab, drafter.model.n_vocab) == (384, 540)
        rising = np.arange(540, dtype=np.float32)[np.newaxis] / 100.0
        monkeypatch.setattr(drafter.context, "logits", lambda n: rising)
        assert [token for token, _ in ask(follow(drafter, [1, 2, 3]), [])] == [383, 382, 381]
