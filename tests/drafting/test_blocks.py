"""A block drafter drafts what it does in an empty context with the same features, after any earlier events."""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import few
from support.heads import BLOCKS, draft_whatever_it_costs, model_and_drafter
from test_head_texts import MOVES, N_CTX, N_TEXTS, Followed, Moves, Place, followed, moved, words

from benchmarks.peer_drafts import opened
from benchmarks.tiny_heads import tiny_dflash, tiny_predictable
from rest_local import Engine
from rest_local.drafting.models import heads
from rest_local.drafting.models.blocks import BlockText
from rest_local.drafting.models.drafter import Drafter, Query
from rest_local.drafting.models.heads import KEPT, Floats, HeadText

SIZE = 9


class BlockPlace(Place):
    """A target with a block drafter."""

    def __init__(self, kind: str, folder: Path, undo: ExitStack) -> None:
        super().__init__(kind, folder, undo)
        text = self._fresh.text()
        assert isinstance(text, BlockText)
        self._empty = text

    def drafted(self, features: dict[int, Floats], tokens: Sequence[int]) -> BlockText:
        """Return an empty text after it has drafted after these tokens, of which the newest features are known."""
        text, first = self._empty, len(tokens) - 1 - len(features)
        text.rewind(0)
        text.reset(forget=True)
        text.restart(tokens, 0)
        rows = [features[at] for at in range(first, len(tokens) - 1)]
        text.take(first, tokens[first:-1], np.array(rows, np.float32).reshape(-1, self._fresh.width))
        while not text.caught_up(math.inf):
            pass
        self._fresh.answer([Query(text, ())])
        return text

    def fresh(self, pairs: dict[int, Floats], tokens: Sequence[int], path: Sequence[int]) -> np.ndarray:
        """See `Place`."""
        features = {at: row for at, row in pairs.items() if at < len(tokens) - 1}
        likely = self.drafted(features, tokens).likely(tuple(path))
        row = np.zeros(self.model.n_vocab)
        for token, probability in likely:
            row[token] = probability
        return row


@pytest.fixture(scope="module", params=BLOCKS)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlockPlace]:
    with ExitStack() as undo:
        yield BlockPlace(request.param, tmp_path_factory.mktemp("blocks"), undo)


@pytest.fixture(scope="module")
def texts(place: BlockPlace) -> list[HeadText]:
    return [place.head.text() for _ in range(N_TEXTS)]


def greedy(one: Followed) -> list[int]:
    """Return the likeliest tokens of a block."""
    path: list[int] = []
    while likely := one.ask(path):
        path.append(likely[0][0])
    return path


def check_all_depths(one: Followed) -> None:
    """Check the whole block along its likeliest tokens."""
    one.check([])
    path = greedy(one)
    assert len(path) == one.place.head.depths
    for depth in range(len(path)):
        one.agrees(one.ask(path[:depth]), path[:depth])


@few(15)
@given(st.lists(MOVES, min_size=1, max_size=10))
def test_events_in_any_order(place: BlockPlace, texts: list[HeadText], moves: Moves) -> None:
    for one in moved(place, texts, moves, 0):
        check_all_depths(one)


def test_one_decode_drafts_for_all_texts_and_depths(
    place: BlockPlace, texts: list[HeadText], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that is too small for all blocks takes several."""
    all_texts = followed(place, texts, 10, 14, 12)
    rows: list[int] = []
    context, decode = place.head.context, place.head.context.decode
    monkeypatch.setattr(context, "decode", lambda: (rows.append(context.batch.n_tokens), decode())[1])
    for most, decodes in ((64, [3 * SIZE]), (2 * SIZE + 1, [2 * SIZE, SIZE])):
        monkeypatch.setattr(context, "max_outputs", most)
        rows.clear()
        assert [all_texts[0].text.passes(path) for path in ((), (1, 2), (1,) * SIZE)] == [1, 1, 0]
        place.head.answer([Query(one.text, path) for one in all_texts for path in ((), (1,), (1, 2))])
        assert rows == decodes
        for one in all_texts:
            path = greedy(one)
            for depth in range(len(path)):
                one.agrees(one.ask(path[:depth]), path[:depth])
            assert one.text.passes(path) == 0
            one.extend([4, 5])
            one.text.begin_step()
        assert rows == decodes


def test_a_path_off_the_candidates_or_beyond_the_block_has_no_answer(place: BlockPlace, texts: list[HeadText]) -> None:
    (one,) = followed(place, texts, 20)
    one.check([])
    path = greedy(one)
    assert not one.ask(path)
    likely = {token for token, _ in one.ask(path[:1])} | {token for token, _ in one.ask([])}
    never = next(token for token in range(380) if token not in likely)
    assert not one.ask([never])
    assert not one.ask([path[0], never, path[2]])
    assert not one.ask([*path[:-1], never])


def test_a_block_sees_all_of_a_text_whose_features_take_too_much_memory(
    place: BlockPlace, texts: list[HeadText], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "KEPT_BYTES", 0)
    (one,) = followed(place, texts, 4 * KEPT)
    assert one.text.n_waiting <= 2 * KEPT
    monkeypatch.undo()
    check_all_depths(one)


def test_a_block_has_to_fit_the_context(place: BlockPlace, texts: list[HeadText]) -> None:
    (one,) = followed(place, texts, N_CTX - SIZE + 1)
    assert one.text.can_ask
    check_all_depths(one)
    one.extend([1])
    assert not one.text.can_ask
    assert not one.ask([])


@pytest.mark.parametrize("kind", ["plain", "markov"])
def test_a_drafter_of_few_tokens_drafts_no_others(kind: Literal["plain", "markov"], tmp_path: Path) -> None:
    tokens = range(20, 120)
    target = tiny_predictable(tmp_path / "target.gguf", marked=True)
    head = tiny_dflash(tmp_path / "drafter.gguf", kind, drafts=tokens)
    with opened(target, head) as chain:
        chain.begin(words(1, 30))
        drafted = chain.draft(words(2, 1)[0], SIZE)
    assert len(drafted) >= SIZE - 1
    assert {token for token, _ in drafted} <= {*tokens}


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_step_asks_once_and_drafts_several_tokens(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner needs no further pass for deeper tokens, and asks at most one question of a request."""
    draft_whatever_it_costs(monkeypatch)
    target, drafter = model_and_drafter(kind, tmp_path)
    with Engine.load(target, n_ctx=512, threads=1, draft_model=drafter) as engine:
        used = engine.decoder.context.drafter
        assert isinstance(used, Drafter)
        asked: list[int] = []
        answer = used.answer
        monkeypatch.setattr(used, "answer", lambda queries: (asked.append(len(queries)), answer(queries))[1])
        result = engine.generate("for number in range(10): print(number)\n", max_tokens=60).wait()
    assert result.draft.of_source("model").drafted > 1.5 * len(asked)
    assert len(asked) <= result.draft.steps
    assert set(asked) == {1}
