"""A context over llama.cpp: settings, cache types, sequence ids, checkpoints."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.tiny import ARCHITECTURES
from rest_local.errors import ModelError, OptionError
from rest_local.llama.context import Batch, Context, ContextSettings
from rest_local.llama.model import Model
from rest_local.llama.options import CACHE_TYPES, FLOAT_CACHE_TYPES

TinyModel = Callable[..., Path]
TEXT = np.random.default_rng(0).integers(40, 200, 120)
STATEFUL = ("lfm2", "mamba")


class Sequence:
    """A sequence that is evaluated by position."""

    def __init__(self, context: Context, seq: int = 0) -> None:
        self.context, self.seq = context, seq

    def evaluate(self, begin: int, end: int) -> np.ndarray:
        """Return the logits of TEXT[begin:end] at its own positions."""
        self.context.batch.fill(TEXT[begin:end], np.arange(begin, end), self.seq, 1, 1)
        assert self.context.decode() == 0
        return self.context.logits(end - begin).copy()


@contextmanager
def opened(path: Path, **settings: Any) -> Iterator[Context]:
    with (
        Model.open(path) as model,
        Context(model, ContextSettings(**{"n_ctx": 256, "threads": 1, "n_branches": 1, **settings})) as context,
    ):
        yield context


@pytest.mark.parametrize(
    "settings",
    [
        {"n_ctx": 7}, {"threads": -1}, {"threads_batch": -1}, {"n_batch": 0}, {"n_ubatch": -1}, {"n_slots": 0},
        {"n_branches": 0}, {"n_slots": 33}, {"n_slots": 257, "n_branches": 1}, {"cache_type_k": "q4_k"},
        {"cache_type_v": "f8"},
    ],
)  # fmt: skip
def test_invalid_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        ContextSettings(**settings)


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_every_cache_type_works_alone_and_with_another(tiny_model: TinyModel, cache_type: str) -> None:
    path = tiny_model("llama")
    with opened(path) as context:
        plain = Sequence(context).evaluate(0, 20)
    for k, v in ((cache_type, cache_type), (cache_type, "f16"), ("f16", cache_type)):
        with opened(path, flash_attention=True, cache_type_k=k, cache_type_v=v) as context:
            rows = Sequence(context).evaluate(0, 20)
        assert np.corrcoef(rows.ravel(), plain.ravel())[0, 1] > 0.9
    if cache_type not in FLOAT_CACHE_TYPES:
        with pytest.raises(ModelError, match="flash_attn"), opened(path, cache_type_v=cache_type):
            pass


def test_slots_have_ids_of_their_own_in_shared_cells(tiny_model: TinyModel) -> None:
    """Three slots of two branches each. The removal of one does not change the others."""
    with opened(tiny_model("llama"), n_slots=3, n_branches=2) as context:
        assert (context.n_slots, context.n_branches, context.batch.max_ids) == (3, 2, 2)
        for slot in range(3):
            context.batch.fill(TEXT[: 10 + slot], np.arange(10 + slot), 2 * slot, 2, 0)
            assert context.decode() == 0
        assert [context.end(seq) for seq in range(6)] == [10, 10, 11, 11, 12, 12]
        assert context.remove(2, 0)
        assert context.remove(3, 5)
        assert [context.end(seq) for seq in range(6)] == [10, 10, 0, 5, 12, 12]


def _settings(arch: str) -> dict[str, Any]:
    return {"n_rs_seq": 16} if arch in STATEFUL else {}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_whole_checkpoint_restores_a_sequence_to_the_bit(tiny_model: TinyModel, arch: str) -> None:
    """Over later tokens, into cleared cells, and into another context."""
    path = tiny_model(arch, quant="Q8_0")
    with opened(path, **_settings(arch)) as context:
        sequence = Sequence(context)
        sequence.evaluate(0, 50)
        state = context.save(0)
        expected = sequence.evaluate(50, 60)
        sequence.evaluate(60, 120)
        assert context.restore(0, state)
        assert context.end(0) == 50
        assert np.array_equal(sequence.evaluate(50, 60), expected)
        context.clear()
        assert context.restore(0, state)
        assert np.array_equal(sequence.evaluate(50, 60), expected)
    with opened(path, **_settings(arch)) as context:
        assert context.restore(0, state)
        assert np.array_equal(Sequence(context).evaluate(50, 60), expected)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_partial_checkpoint_restores_what_cannot_be_rolled_back(tiny_model: TinyModel, arch: str) -> None:
    """Further back than the snapshots of recurrent state reach. Then a draft is evaluated and rolled back."""
    with opened(tiny_model(arch, quant="Q8_0"), **_settings(arch)) as context:
        sequence = Sequence(context)
        sequence.evaluate(0, 50)
        state = context.save(0, partial=True)
        expected = sequence.evaluate(50, 60)
        sequence.evaluate(60, 100)
        if arch in STATEFUL:
            assert not context.remove(0, 50)
        assert context.restore(0, state, partial=True)
        assert context.remove(0, 50)
        assert context.end(0) == 50
        assert np.array_equal(sequence.evaluate(50, 60), expected)
        if arch != "mamba":
            assert context.remove(0, 53)
            assert np.abs(sequence.evaluate(53, 60) - expected[3:]).max() < 0.05 * np.abs(expected).max()


@pytest.mark.parametrize("arch", ["llama", "lfm2", "mamba"])
def test_a_state_that_does_not_fit_is_refused_and_leaves_the_sequence_empty(tiny_model: TinyModel, arch: str) -> None:
    with opened(tiny_model(arch), **_settings(arch)) as context:
        sequence = Sequence(context)
        expected = sequence.evaluate(0, 20)
        state = context.save(0)
        for damaged in (state[: len(state) // 2], state[:7], b""):
            assert not context.restore(0, damaged)
            assert context.end(0) == 0
        assert np.array_equal(sequence.evaluate(0, 20), expected)


def test_another_sequence_is_untouched_by_a_restore(tiny_model: TinyModel) -> None:
    with opened(tiny_model("llama"), n_slots=2) as context:
        first, second = Sequence(context), Sequence(context, 1)
        first.evaluate(0, 30)
        second.evaluate(0, 40)
        state = context.save(0)
        first.evaluate(30, 60)
        assert context.restore(0, state)
        assert (context.end(0), context.end(1)) == (30, 40)


@pytest.mark.parametrize(
    "settings",
    [{"n_slots": 32, "n_branches": 8}, {"n_slots": 256}, {"n_batch": 1, "n_branches": 8}, {"n_batch": 3, "n_slots": 9}],
)
def test_more_sequences_than_rows_do_not_end_the_process(tiny_model: TinyModel, settings: dict[str, Any]) -> None:
    """llama.cpp reserves a row of logits for every id, and aborts if the context has fewer outputs."""
    with opened(tiny_model("llama"), **settings) as context:
        assert context.max_outputs == min(64, context.n_batch)
        n = context.max_outputs
        context.batch.fill(TEXT[:n], np.arange(n), 0, context.n_branches, 1)
        assert context.decode() == 0
        assert np.isfinite(context.logits(n)).all()


def test_a_context_that_does_not_fit_names_its_size_and_the_remedy(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llama_cpp.llama_init_from_model", lambda *arguments: None)
    with Model.open(tiny_model("llama")) as model, pytest.raises(ModelError) as caught:
        Context(model, ContextSettings(n_ctx=12345))
    message = str(caught.value)
    assert "no context of 12345 tokens" in message
    assert "a smaller `n_ctx`" in message
    assert "ContextSettings" not in message


@st.composite
def contents(draw: st.DrawFn) -> tuple[int, int, list[tuple[int, int, int, int, int]]]:
    """Draw capacity, max_ids, and (token, pos, first id, number of ids, output) of each token, sometimes too many."""
    capacity, max_ids = draw(st.integers(1, 12)), draw(st.integers(1, 6))
    rows = st.tuples(
        st.integers(0, 200_000), st.integers(0, 5000), st.integers(0, 9), st.integers(1, max_ids), st.integers(0, 1)
    )
    return capacity, max_ids, draw(st.lists(rows, min_size=1, max_size=16))


def filled(batch: Batch, rows: list[tuple[int, int, int, int, int]]) -> None:
    token, pos, first, count, output = map(list, zip(*rows, strict=True))
    batch.fill(token, pos, first, count, output)


@given(contents(), contents())
def test_llama_cpp_sees_what_was_filled_in_or_it_is_refused(
    before: tuple[int, int, list[tuple[int, int, int, int, int]]],
    now: tuple[int, int, list[tuple[int, int, int, int, int]]],
) -> None:
    """Reads the content through the pointers of the structure. Earlier content must not remain."""
    capacity, max_ids, rows = now
    batch = Batch(capacity, max_ids)
    earlier = [(token, pos, first, min(count, max_ids), output) for token, pos, first, count, output in before[2]]
    filled(batch, earlier[:capacity])
    if len(rows) > capacity:
        with pytest.raises(ValueError, match=f"{len(rows)} tokens do not fit a batch of {capacity}"):
            filled(batch, rows)
        assert batch.struct.n_tokens == min(len(earlier), capacity)
        return
    filled(batch, rows)
    struct = batch.struct
    assert struct.n_tokens == batch.n_tokens == len(rows)
    for i, (token, pos, first, count, output) in enumerate(rows):
        assert (struct.token[i], struct.pos[i], struct.n_seq_id[i]) == (token, pos, count)
        assert bool(struct.logits[i]) == bool(output)
        assert [struct.seq_id[i][k] for k in range(count)] == list(range(first, first + count))


@pytest.mark.parametrize("n_ids", [0, -1, 3, [1, 3]])
def test_a_token_has_one_to_max_ids(n_ids: int | list[int]) -> None:
    batch = Batch(4, 2)
    with pytest.raises(ValueError, match="1 to 2 sequence ids"):
        batch.fill([1, 2], [0, 1], 0, n_ids, 1)
