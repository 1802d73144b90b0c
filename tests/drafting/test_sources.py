"""The sources of one sequence stay correct through growth, rewinds and interrupts."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_sources import cell_of, grown

from rest_local.drafting.origins import Origin, origins_of
from rest_local.drafting.sources import Candidate, SourceRows, Sources
from rest_local.drafting.tree import propose
from rest_local.errors import DatastoreCorrupt
from rest_local.retrieval.building.build import build
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.format import VocabularyId
from rest_local.retrieval.growing import GrowingText
from rest_local.retrieval.rows import Rows

TEXT = list(range(100, 140))


@given(st.lists(st.sampled_from([0, 1, 256, 65536]), min_size=1, max_size=24), st.integers(1, 4))
def test_short_repeats_are_those_of_whole_tokens(tokens: list[int], n: int) -> None:
    """Ids whose bytes also match across two tokens. A search skips a few of such matches."""
    sources = Sources([], 100_000)
    sources.restart(tokens)
    newest = tokens[-n:]
    occurs = any(tokens[at : at + n] == newest for at in range(len(tokens) - n))
    if occurs and len(tokens) >= 2 * n:
        assert sources.repeats(n)
    if all(token not in (0, 256, 65536) for token in tokens):
        assert sources.repeats(n) == (occurs and len(tokens) >= 2 * n)


@given(st.lists(st.lists(st.integers(0, 5), max_size=30), min_size=1, max_size=6))
def test_a_restart_equals_a_new_object(sequences: list[list[int]]) -> None:
    kept = Sources([], 1000)
    for tokens in sequences:
        kept.restart(tokens)
        fresh = Sources([], 1000)
        fresh.restart(tokens)
        assert [(r.match, r.continuations) for r in kept.rows()] == [(r.match, r.continuations) for r in fresh.rows()]
        assert kept.repeats(8) == fresh.repeats(8)


def test_an_interrupt_during_an_update_leads_to_a_rebuild(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = Sources([], 1000)
    sources.restart(TEXT)
    extend = GrowingText.extend

    def interrupted(self: GrowingText, tokens: np.ndarray) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(GrowingText, "extend", interrupted)
    sources.extend(TEXT[:10])
    with pytest.raises(KeyboardInterrupt):
        sources.rows()
    monkeypatch.setattr(GrowingText, "extend", extend)
    sources.restart([*TEXT, *TEXT[:6]])
    assert sources.rows()[0].match[0] == 6


@pytest.mark.parametrize("foreign", [True, False], ids=["ids the model does not have", "unreadable"])
def test_a_history_that_fails_is_left_out_with_one_warning(foreign: bool, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(GrowingText):
        def rows(self, *arguments: object) -> Rows:
            if foreign:
                return super().rows(*arguments)  # type: ignore[arg-type]
            raise OSError(5, "Input/output error")

    earlier = Broken()
    earlier.extend([*TEXT[:5], 1000, 7, -1])
    sources = Sources([], 1000, earlier)
    sources.restart(TEXT[:5])
    for _ in range(2):
        assert sources.rows() == []
    (record,) = caplog.records
    assert record.message.startswith("history ")
    assert "going on without it" in record.message


# ---- Candidates ----------------------------------------------------------------------------------------------------


DEPTH = 3
TEXTS = st.lists(
    st.tuples(st.integers(1, 32), st.lists(st.integers(-1, 3), min_size=DEPTH, max_size=DEPTH)), max_size=20
)


def rows_of(texts: list[tuple[int, list[int]]]) -> Rows:
    texts = sorted(texts, key=lambda row: -row[0])
    tokens = np.array([text for _, text in texts], np.int32).reshape(-1, DEPTH)
    return Rows(tokens, np.array([match for match, _ in texts], np.int32), np.arange(len(texts), dtype=np.int64))


def expected(rows: Rows, path: list[int]) -> list[Candidate]:
    """Count all rows that continue through `path`, one by one."""
    depth = len(path)
    continuations, match = rows.continuations.tolist(), rows.match.tolist()
    continuing = [row for row, text in enumerate(continuations) if text[:depth] == path and text[depth] >= 0]
    found = []
    for token in dict.fromkeys(continuations[row][depth] for row in continuing):
        through = [row for row in continuing if continuations[row][depth] == token]
        length = max(match[row] for row in through)
        reaching = sum(match[row] >= length for row in continuing)
        agreeing = sum(match[row] >= length for row in through)
        found.append((token, cell_of(1, length + depth, reaching, agreeing), through))
    return found


@given(TEXTS)
def test_candidates_are_those_of_a_naive_count(texts: list[tuple[int, list[int]]]) -> None:
    rows = rows_of(texts)
    source = SourceRows(1, rows)
    assert source.continuations == rows.continuations.tolist()
    unseen: list[tuple[list[int], list[int]]] = [([], list(range(len(rows))))]
    while unseen:
        path, members = unseen.pop()
        candidates = source.candidates(members, len(path))
        assert [(token, cell, list(through)) for token, cell, through in candidates] == expected(rows, path)
        if len(path) + 1 < DEPTH:
            unseen += [([*path, token], list(through)) for token, _, through in candidates]
    assert source.candidates(range(len(rows)), DEPTH) == []


@given(TEXTS, TEXTS)
def test_a_token_of_several_sources_takes_the_most_confident_estimate(
    first: list[tuple[int, list[int]]], second: list[tuple[int, list[int]]]
) -> None:
    sources = [SourceRows(0, rows_of(first)), SourceRows(1, rows_of(second))]
    proposal = propose([(rows, range(len(rows))) for rows in sources], 0, lambda cell: 1 / (2 + cell))
    of_token: dict[int, list[tuple[float, int, tuple[SourceRows, object]]]] = {}
    for rows, candidates in proposal.by_source:
        for token, cell, through in candidates:
            of_token.setdefault(token, []).append((1 / (2 + cell), rows.source, (rows, through)))
    assert proposal.merged.keys() == of_token.keys()
    for token, (probability, source, below) in proposal.merged.items():
        assert (probability, source) == max(of_token[token], key=lambda seen: seen[0])[:2]
        assert below == [members for _, _, members in of_token[token]]


# ---- Where a token is from -----------------------------------------------------------------------------------------


def origins_in(path: Path) -> list[Origin | None]:
    """Return the origins of two tokens that a datastore of TEXT drafts, and of one that it does not."""
    with Datastore.open(path) as store:
        sources = Sources([store], 1000)
        sources.restart(TEXT[:10])
        drafted = grown(sources.rows(), lambda cell: 0.9, lambda probability: True, 2, 1)
        return origins_of(drafted, [*TEXT[10:12], 1], lambda tokens: "line\n" * len(tokens))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "store"
    build(path, [("a.py", np.array(TEXT, np.int32))], vocabulary=VocabularyId("0" * 64, 1000, "test"), recipe={})
    return path


def test_a_drafted_token_has_a_file_and_a_line(path: Path) -> None:
    first, second, last = origins_in(path)
    assert first is not None
    assert second is not None
    assert last is None
    assert [(origin.source, origin.file, origin.match) for origin in (first, second)] == [
        ("datastore", "a.py", 10),
        ("datastore", "a.py", 11),
    ]
    assert (first.line, second.line) == (11, 12)


@pytest.mark.parametrize("fault", [DatastoreCorrupt("store", "names"), IndexError("position"), OSError("gone")])
def test_a_damaged_table_only_hides_the_place(path: Path, fault: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(self: Datastore, position: int) -> tuple[str, int]:
        raise fault

    monkeypatch.setattr(Datastore, "locate", damaged)
    first, second, _ = origins_in(path)
    assert first is not None
    assert second is not None
    assert {(origin.source, origin.file, origin.line) for origin in (first, second)} == {("datastore", None, None)}
