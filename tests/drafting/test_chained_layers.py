"""Several MTP layers draft a chain: layer i predicts what it does in a fresh context with all pairs of its own."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import few
from test_head_texts import MOVES, N_TEXTS, Followed, Moves, Place, followed, moved, words

from benchmarks.tiny_heads import tiny_mtp
from rest_local import Engine, Sampling
from rest_local.decoding.request import RequestOptions
from rest_local.drafting.models.drafter import INLINE, Query
from rest_local.drafting.models.heads import Floats, HeadText
from rest_local.drafting.sources import MODEL, Lookup
from rest_local.drafting.tree import Draft, DraftTree
from rest_local.llama import features as states
from rest_local.llama.context import MAX_OUTPUTS
from rest_local.planning.policy import Policy, StepContext

N_LAYERS = 3


class ChainedPlace(Place):
    """A target with MTP layers that are chained."""

    def fresh(self, pairs: dict[int, Floats], tokens: Sequence[int], path: Sequence[int]) -> np.ndarray:
        """See `Place`. Every layer begins with an empty context, and evaluates all pairs and its part of the path."""
        first = min(pairs)
        given, hidden = [*tokens[first:], *path], [pairs[q] for q in range(first, len(tokens))]
        n = len(hidden)
        for layer in range(1 + len(path)):
            self._fresh.context.clear()
            states.use_mtp_layer(self._fresh.context, layer)
            for begin in range(0, n + layer, MAX_OUTPUTS):
                part = hidden[begin : begin + MAX_OUTPUTS]
                row, state = self._decode(given[begin : begin + len(part)], first + begin, part)
            hidden.append(state)
        states.use_mtp_layer(self._fresh.context, 0)
        likely = np.exp(row.astype(np.float64) - row.max())
        return np.asarray(likely / likely.sum())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChainedPlace]:
    with ExitStack() as undo:
        yield ChainedPlace("mtp chained", tmp_path_factory.mktemp("chained"), undo)


@pytest.fixture(scope="module")
def texts(place: ChainedPlace) -> list[HeadText]:
    return [place.head.text() for _ in range(N_TEXTS)]


@pytest.fixture
def decoded(place: ChainedPlace, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the rows of each decode of the layers."""
    rows: list[int] = []
    context, decode = place.head.context, place.head.context.decode
    monkeypatch.setattr(context, "decode", lambda: (rows.append(context.batch.n_tokens), decode())[1])
    return rows


def greedy(one: Followed) -> list[int]:
    """Return the likeliest tokens of a chain."""
    path: list[int] = []
    while likely := one.ask(path):
        path.append(likely[0][0])
    return path


def check_chain(one: Followed) -> None:
    """Check what each layer says along the likeliest tokens."""
    one.check([])
    path = greedy(one)
    assert len(path) == N_LAYERS
    for depth in range(N_LAYERS):
        one.agrees(one.ask(path[:depth]), path[:depth])


def test_a_chain_takes_a_decode_for_each_layer_and_has_no_branches(
    place: ChainedPlace, texts: list[HeadText], decoded: list[int]
) -> None:
    all_texts = followed(place, texts, 10, 14, 12)
    waiting = sum(one.text.n_waiting for one in all_texts)
    assert [all_texts[0].text.passes(path) for path in ((), (1, 2), (1, 2, 3))] == [N_LAYERS, N_LAYERS, 0]
    place.head.answer([Query(one.text, path) for one in all_texts for path in ((), (1,))])
    assert decoded == [waiting + 3 * n for n in range(1, 1 + N_LAYERS)]
    for one in all_texts:
        path = greedy(one)
        assert not one.ask([(path[0] + 1) % 256])
        assert one.text.passes([]) == 0
        for depth in range(N_LAYERS):
            one.agrees(one.ask(path[:depth]), path[:depth])
    assert len(decoded) == N_LAYERS


def test_chains_that_do_not_fit_one_batch_take_several(
    place: ChainedPlace, texts: list[HeadText], decoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    all_texts = followed(place, texts, 10, 14, 12)
    monkeypatch.setattr(place.head.context, "max_outputs", 2 * INLINE)
    place.head.answer([Query(one.text, ()) for one in all_texts])
    assert len(decoded) == 2 * N_LAYERS
    assert max(decoded) <= 2 * INLINE
    for round_ in range(3):
        for one in all_texts:
            check_chain(one)
        all_texts[0].rewind(all_texts[0].n_past - 4)  # frees cells below those of the others
        for number, one in enumerate(all_texts):
            one.extend(words(round_, 2 + number))


@few(15)
@given(st.lists(MOVES, min_size=1, max_size=10))
def test_events_in_any_order(place: ChainedPlace, texts: list[HeadText], moves: Moves) -> None:
    for one in moved(place, texts, moves, 0):
        check_chain(one)


def recovers_chain(one: Followed) -> None:
    """Check that the text begins anew or has lost nothing."""
    if one.text._seen == 0:
        one.forget()
    check_chain(one)


def test_an_interrupt_in_any_decode_leaves_a_consistent_state(
    place: ChainedPlace, texts: list[HeadText], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = place.head.context
    decode = context.decode

    def interrupting(after: int) -> Callable[[], int]:
        left = iter(range(after))

        def interrupted() -> int:
            code = decode()
            if next(left, None) is None:
                raise KeyboardInterrupt
            return code

        return interrupted

    layers: list[int] = []
    use = states.use_mtp_layer
    monkeypatch.setattr(states, "use_mtp_layer", lambda context, layer: (layers.append(layer), use(context, layer)))
    (one,) = followed(place, texts, 8)
    for after in range(N_LAYERS):
        one.extend([1, 2])
        one.text.begin_step()
        with monkeypatch.context() as patch:
            patch.setattr(context, "decode", interrupting(after))
            with pytest.raises(KeyboardInterrupt):
                one.ask([])
        assert layers[-1] == 0
        recovers_chain(one)
    one.extend(words(4, 2 * INLINE))
    with monkeypatch.context() as patch:
        patch.setattr(context, "decode", interrupting(1))
        with pytest.raises(KeyboardInterrupt):
            one.text.caught_up(1e9)
    recovers_chain(one)


class OnlyModel(Policy):
    name = "model"

    def draft(self, sources: Lookup, at: StepContext) -> Draft:
        tree, text = DraftTree(1), sources.draft_text
        if text is not None and text.can_ask and text.caught_up(math.inf):
            while len(tree) < min(6, at.limit) and (likely := text.drafter.answer([Query(text, tuple(tree.token))])[0]):
                tree.add(likely[0][0], len(tree) - 1, likely[0][1], MODEL)
        return Draft(tree, skipped=True)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=3)], ids=["greedy", "sampled"])
def test_several_requests_at_a_time_answer_as_without_a_head(tmp_path: Path, sampling: Sampling) -> None:
    model = tiny_mtp("mimo2", tmp_path / "mimo2.gguf", n_mtp=N_LAYERS)
    answers: list[list[list[int]]] = []
    accepted = []
    for head in ("none", None):
        with Engine.load(model, n_ctx=512, slots=3, draft_model=head) as engine:
            options: RequestOptions = {"policy": OnlyModel(), "max_tokens": 60, "sampling": sampling}
            streams = [engine.generate("for number in range(10):\n" * n, **options) for n in (1, 2, 3)]
            for _ in zip_longest(*streams):
                pass
            answers.append([stream.result.tokens for stream in streams])
            accepted.append(sum("model" in stream.result.sources for stream in streams))
    assert answers[0] == answers[1]
    assert accepted == [0, 3]


def test_without_the_symbol_the_first_layer_drafts_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It drafts as in a file of one layer, which needs no symbol."""
    monkeypatch.setitem(states._functions, states.OFFSET, None)
    said = []
    for kind in ("mtp chained", "mtp inside"):
        with ExitStack() as undo:
            place = Place(kind, tmp_path, undo)
            (one,) = followed(place, [place.head.text()], 20)
            said.append([one.ask(path) for path in ([], [1], [1, 2], [1, 2, 3], [4])])
    assert said[0] == said[1]
    assert all(said[0])
    lines = [record.message for record in caplog.records if states.OFFSET in record.message]
    assert len(lines) == 2  # one for each of the two heads of a `Place`
    assert "drafting with the first of 3 layers alone" in lines[0]
