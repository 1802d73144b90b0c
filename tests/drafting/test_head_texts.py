"""A head predicts the same as a fresh context that is fed with the same pairs, after any earlier events. Uses tiny
random models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import few
from support.heads import model_and_drafter

from rest_local.drafting.models import heads
from rest_local.drafting.models.drafter import INLINE, TOP_K, Evaluated, Likely, Query
from rest_local.drafting.models.head_kinds import kind_of, open_head
from rest_local.drafting.models.heads import KEPT, Floats, Head, HeadText
from rest_local.llama.context import MAX_OUTPUTS, Context, ContextSettings
from rest_local.llama.model import Model

N_CTX, N_TEXTS, N_IDS = 512, 3, 2
KINDS = ("mtp inside", "mtp inside hybrid", "mtp alone", "eagle3")


class Place:
    """A target, its head, and a second head that computes what a fresh one would say."""

    def __init__(self, kind: str, folder: Path, undo: ExitStack, n_batch: int = 64, n_ubatch: int = 0) -> None:
        target, head = model_and_drafter(kind, folder)
        self.model = undo.enter_context(Model.open(target, mtp=head is None))
        self.context = Context(
            self.model,
            ContextSettings(
                n_ctx=N_CTX, n_cells=N_TEXTS * N_CTX, n_slots=N_TEXTS, n_branches=N_IDS, n_batch=n_batch,
                n_ubatch=n_ubatch, threads=1,
            ),
        )  # fmt: skip
        undo.callback(self.context.close)
        self.head, self._fresh = (undo.enter_context(self._open(kind, head)) for _ in range(2))

    def _open(self, kind: str, path: Path | None) -> Head:
        return open_head(kind_of(path) if path else "mtp", path, self.context, self.model, N_TEXTS, None)

    def evaluate(self, seq: int, start: int, tokens: Sequence[int], junk: bool = False) -> tuple[Floats, list[int]]:
        """Evaluate tokens of a sequence in the target: its features, and the rows of the tokens among them. `junk`:
        with a rejected token in the second row.
        """
        rows = list(range(len(tokens)))
        token, pos, seqs = list(tokens), [start + row for row in rows], [seq] * len(tokens)
        if junk:
            token.insert(1, 5)
            pos.insert(1, start + 1)
            seqs.insert(1, seq + 1)
            rows = [row + (row > 0) for row in rows]
        self.context.batch.load(token, pos, seqs, [1] * len(token), [1] * len(token))
        assert self.context.decode() == 0
        if junk:
            assert self.context.remove(seq + 1, 0)
        return self.head.features(len(token)), rows

    def fresh(self, pairs: dict[int, Floats], tokens: Sequence[int], path: Sequence[int]) -> np.ndarray:
        """Return the probabilities after `path`. `pairs` has the feature that goes with a token, by its position."""
        head = self._fresh
        first = max(min(pairs), head.shift)
        hidden = list(head.encoded(np.stack([pairs[q] for q in range(first, len(tokens))])))
        head.context.clear()
        place, given = first - head.shift, [*tokens[first:], *path]
        for begin in range(0, len(hidden), MAX_OUTPUTS):
            part = hidden[begin : begin + MAX_OUTPUTS]
            row, state = self._decode(given[begin : begin + len(part)], place + begin, part)
        for number, token in enumerate(path):
            row, state = self._decode([token], place + len(hidden) + number, [state])
        likely = np.exp(row.astype(np.float64) - row.max())
        return np.asarray(likely / likely.sum())

    def _decode(self, tokens: list[int], place: int, hidden: Sequence[Floats]) -> tuple[Floats, Floats]:
        context, n = self._fresh.context, len(tokens)
        context.batch.load(tokens, list(range(place, place + n)), [0] * n, [1] * n, [1] * n)
        context.batch.features[:n] = hidden
        assert context.decode() == 0
        states = heads.states.nextn_rows(context, n, self._fresh.n_hidden)
        return context.logits(n)[-1].copy(), states[-1].copy()


class Followed:
    """A text that a target evaluates and a head follows, and what the head can know of it."""

    def __init__(self, place: Place, number: int, text: HeadText, tokens: list[int]) -> None:
        self.place, self.seq, self.text = place, number * N_IDS, text
        self.tokens = tokens
        self.pairs: dict[int, Floats] = {}
        self.features: dict[int, Floats] = {}
        self.n_past = 0
        text.rewind(0)
        text.restart(self.tokens, 0)
        place.context.remove(self.seq, 0)
        self.extend([])

    @property
    def _unknown(self) -> Floats:
        return np.zeros(self.place.head.width, np.float32)

    def extend(self, tokens: Sequence[int], junk: bool = False) -> None:
        """Evaluate the root and all further tokens but the last."""
        self.tokens += tokens
        while self.n_past < len(self.tokens) - 1:
            start = self.n_past
            part = self.tokens[start : min(start + 60, len(self.tokens) - 1)]
            given, rows = self.place.evaluate(self.seq, start, part, junk and len(part) > 1)
            if start and start - 1 not in self.pairs:
                self.pairs.clear()
                self.features.clear()
            for number, row in enumerate(rows):
                at = start + number
                self.features[at] = given[row].copy()
                self.pairs.setdefault(at, self.features.get(at - self.place.head.lag, self._unknown))
            self.n_past += len(part)
            self.features = {at: row for at, row in self.features.items() if at >= self.n_past - KEPT}
            self.place.head.observe([Evaluated(self.text, start, part, rows)])

    def rewind(self, n: int) -> None:
        """Go on from the first `n` tokens and another one."""
        self.text.rewind(n)
        self.pairs = {at: row for at, row in self.pairs.items() if at < n}
        self.features = {at: row for at, row in self.features.items() if at < n}
        self._follow([*self.tokens[:n], (self.tokens[n] + 1) % 256], n)

    def forget(self) -> None:
        """Load the cells of the target from elsewhere."""
        self.text.rewind(0)
        self.pairs, self.features = {}, {}
        self._follow(self.tokens, self.n_past)
        self.extend([3, 4])

    def share(self, other: Followed, n: int) -> None:
        """Take the first `n` tokens from another text."""
        self.text.rewind(0)
        self.text.share(other.text, n)
        self.pairs = {at: row for at, row in other.pairs.items() if at < n}
        self.features = {at: row for at, row in other.features.items() if at < n}
        self._follow([*other.tokens[:n], 7, 8], n)
        self.extend([9])

    def _follow(self, tokens: list[int], n_past: int) -> None:
        """Let the target hold `n_past` of these tokens, which it evaluated again without the head."""
        self.tokens, self.n_past = tokens, n_past
        self.place.context.remove(self.seq, 0)
        for start in range(0, n_past, 60):
            self.place.evaluate(self.seq, start, tokens[start : min(start + 60, n_past)])
        self.text.restart(self.tokens, n_past)

    def ask(self, path: Sequence[int]) -> Sequence[Likely]:
        (likely,) = self.place.head.answer([Query(self.text, tuple(path))])
        return likely

    def check(self, path: Sequence[int]) -> None:
        self.text.begin_step()
        assert any(self.text.caught_up(1e9) for _ in range(100))
        self.agrees(self.ask(path), path)

    def agrees(self, said: Sequence[Likely], path: Sequence[int]) -> None:
        root = len(self.tokens) - 1
        pairs = {**self.pairs, root: self.features.get(root - 1, self._unknown)}
        expected = self.place.fresh(pairs, self.tokens, path)
        assert 1 <= len(said) <= TOP_K
        for token, probability in said:
            assert probability == pytest.approx(expected[token], abs=0.02)
        assert said[0][1] >= expected.max() - 0.02


@pytest.fixture(scope="module", params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with ExitStack() as undo:
        yield Place(request.param, tmp_path_factory.mktemp("heads"), undo)


@pytest.fixture(scope="module")
def texts(place: Place) -> list[HeadText]:
    return [place.head.text() for _ in range(N_TEXTS)]


def words(seed: int, n: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 256, n)]


def followed(place: Place, texts: list[HeadText], *lengths: int) -> list[Followed]:
    for text in texts:
        text.rewind(0)
    return [Followed(place, n, texts[n], words(7 + n, length)) for n, length in enumerate(lengths)]


def test_the_first_token_alone_is_a_text(place: Place, texts: list[HeadText]) -> None:
    (one,) = followed(place, texts, 2)
    one.check([4])
    one.rewind(1)
    one.check([5, 6])
    one.rewind(0)
    assert not one.ask([])  # nothing is evaluated of it
    one.extend(words(3, 5))
    one.check([])


MOVES = st.tuples(
    st.sampled_from(["extend", "junk", "rewind", "forget", "share", "ask"]),
    st.integers(0, N_TEXTS - 1),
    st.integers(0, N_TEXTS - 1),
    st.integers(1, 30),
)


Moves = list[tuple[str, int, int, int]]


def moved(place: Place, texts: list[HeadText], moves: Moves, longest: int) -> list[Followed]:
    """Return texts that were extended, cut back, shared, loaded and queried along drafted paths of so many tokens."""
    all_texts = followed(place, texts, 12, 30, 100)
    for move, which, other, n in moves:
        one = all_texts[which]
        if move in ("extend", "junk"):
            one.extend(words(n, n), junk=move == "junk")
        elif move == "rewind":
            one.rewind(max(one.n_past - n, 1))
        elif move == "forget":
            one.forget()
        elif move == "share" and other != which:
            one.share(all_texts[other], max(all_texts[other].n_past - n + 1, 1))
        elif move == "ask":
            one.check(words(n, n % (longest + 1)))
    return all_texts


@few(15)
@given(st.lists(MOVES, min_size=1, max_size=10))
def test_events_in_any_order(place: Place, texts: list[HeadText], moves: Moves) -> None:
    for one in moved(place, texts, moves, 3):
        one.check([])
        one.check([2, 3])


def test_a_text_that_is_cut_back_far_goes_on_with_what_it_has(place: Place, texts: list[HeadText]) -> None:
    """Its newest features are not kept for ever: one pair has none."""
    (one,) = followed(place, texts, 3 * KEPT)
    one.check([1])
    one.rewind(KEPT)
    one.extend(words(5, 4))
    one.check([2])


def test_texts_share_a_pass(place: Place, texts: list[HeadText], monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows their pairs and paths take; a pass that is full leaves the rest to another."""
    all_texts = followed(place, texts, 10, 14, 12)
    decoded: list[int] = []
    decode = place.head.context.decode
    monkeypatch.setattr(
        place.head.context, "decode", lambda: (decoded.append(place.head.context.batch.n_tokens), decode())[1]
    )
    paths: list[tuple[int, ...]] = [(), (1,), (2,), (1, 3)]

    def ask() -> None:
        queries = [Query(one.text, path) for one in all_texts for path in paths]
        for query, said in zip(queries, place.head.answer(queries), strict=True):
            next(one for one in all_texts if one.text is query.text).agrees(said, query.path)

    ask()
    assert len(decoded) == 3  # one for each level of the paths
    for one in all_texts:
        one.extend([4, 5])
        one.text.begin_step()
    monkeypatch.setattr(place.head.context, "max_outputs", 4)
    ask()
    assert max(decoded[3:]) <= 4


def test_rows_of_a_batch_in_several_parts(tmp_path: Path) -> None:
    """llama.cpp computes a batch in parts, and features come for all of it."""
    for kind in ("mtp inside hybrid", "eagle3"):
        with ExitStack() as undo:
            place = Place(kind, tmp_path, undo, n_batch=64, n_ubatch=16)
            whole, _ = place.evaluate(0, 0, words(2, 60))
            whole = whole.copy()
            place.context.clear()
            for start in range(0, 60, 10):
                part, _ = place.evaluate(0, start, words(2, 60)[start : start + 10])
                np.testing.assert_allclose(part, whole[start : start + 10], atol=1e-3)


def test_an_interrupt_leaves_a_consistent_state(
    place: Place, texts: list[HeadText], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes in a query, while waiting pairs are evaluated, or while features are taken, once the pass is done."""
    context = place.head.context
    decode = context.decode

    def interrupted() -> int:
        decode()
        raise KeyboardInterrupt

    (one,) = followed(place, texts, 30 + INLINE)
    with monkeypatch.context() as patch:
        patch.setattr(context, "decode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            one.text.caught_up(1e9)
    recovers(one)
    for path in ([], [1], [1, 2]):
        one.text.begin_step()
        with monkeypatch.context() as patch:
            patch.setattr(context, "decode", interrupted)
            with pytest.raises(KeyboardInterrupt):
                one.ask(path)
        recovers(one)
    for owner, name in ((place.head, "features"), (HeadText, "_drop_drafted")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                one.place.head.observe([Evaluated(one.text, one.n_past, [1], [0])])
        recovers(one)


def recovers(one: Followed) -> None:
    """Check that the text begins anew or has lost nothing, and predicts what a fresh context does."""
    if one.text._seen == 0:
        one.forget()
    one.check([3])
    one.check([])


def test_an_aborted_pass_is_no_failure(place: Place, texts: list[HeadText], monkeypatch: pytest.MonkeyPatch) -> None:
    (one,) = followed(place, texts, 12)
    for code in (2, 1):
        one.text.begin_step()
        with monkeypatch.context() as patch:
            patch.setattr(place.head.context, "decode", lambda code=code: code)
            assert not one.ask([5])
        assert not place.head.failed
        one.forget()
        one.check([5])


def test_all_sequence_ids_are_given_out_once(place: Place, texts: list[HeadText]) -> None:
    ids = {text.seq + branch for text in texts for branch in range(heads.BRANCHES)}
    assert len(ids) == N_TEXTS * heads.BRANCHES
    with pytest.raises(ValueError, match="no sequence ids"):
        place.head.text()


def test_waiting_features_take_no_more_memory_than_their_rows(place: Place, texts: list[HeadText]) -> None:
    """One token at a time, and nothing is asked: each pair waits with its own feature alone."""
    (one,) = followed(place, texts, 4)
    for token in words(1, 100):
        one.extend([token])
    arrays = {id(owner): owner for _, row in one.text._pending for owner in [row if row.base is None else row.base]}
    waiting = len(one.text._pending) * 4 * place.head.width
    assert sum(array.nbytes for array in arrays.values()) <= 2 * waiting + 4 * KEPT * place.head.width
