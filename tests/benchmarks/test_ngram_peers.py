"""llama.cpp's other rules match hand-computed cases, and all of its rules match what the program itself counted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.ngram_peers import NgramCache, NgramMapK, NgramMapK4v
from benchmarks.peer_counts import RULES, compare, counts_of
from benchmarks.peers import Peer

RECORDED = Path(__file__).parents[1] / "data" / "peer-counts.json"
KEY = list(range(1, 13))
FILLER = list(range(500, 600))


def proposed(peer: Peer, tokens: Sequence[int], limit: int = 63) -> list[int]:
    peer.restart(tokens)
    return peer.propose(limit).token


def test_ngram_map_k_drafts_what_followed_twelve_tokens() -> None:
    text = [0, *KEY, *FILLER, *KEY]
    assert proposed(NgramMapK(), text) == FILLER[:48]
    assert proposed(NgramMapK(), text, limit=5) == FILLER[:5]
    assert proposed(NgramMapK(), text[1:]) == []  # position 0 means no match
    assert proposed(NgramMapK(), [0, *KEY, *FILLER[:40], *KEY]) == []  # too near
    assert proposed(NgramMapK(), [0, *KEY, *FILLER, *KEY[1:]]) == []  # only eleven


def test_ngram_map_k_drafts_as_much_as_was_accepted_of_the_last_draft() -> None:
    other = list(range(700, 800))
    answer = [KEY[11], *FILLER[:3], *other[:60], *KEY, *FILLER[:3], *other[60:]]
    found = counts_of(NgramMapK(), [0, *KEY, *FILLER, *KEY[:11]], answer, len(answer) + 60)
    assert (found.drafted, found.accepted) == (48 + 3, 3 + 3)


def test_ngram_map_k4v_drafts_only_what_is_twice_as_frequent_as_the_rest() -> None:
    one, other = [*FILLER], [*range(700, 800)]
    assert proposed(NgramMapK4v(), [0, *KEY, *one, *KEY, *other, *KEY]) == []
    assert proposed(NgramMapK4v(), [0, *KEY, *one, *KEY, *other, *KEY, *other, *KEY]) == other[:48]
    assert proposed(NgramMapK(), [0, *KEY, *one, *KEY, *other, *KEY]) == other[:48]


def test_ngram_cache_drafts_the_most_frequent_token() -> None:
    assert proposed(NgramCache(), [1, 2, 3, 4, 9, 1, 2, 3, 4]) == [9, 1, 2, 3, 4, 9, 1, 2]
    assert proposed(NgramCache(), [1, 2, 3, 4, 9, 1, 2, 3, 4], limit=2) == [9, 1]
    assert proposed(NgramCache(), [1, 2, 3]) == []
    assert proposed(NgramCache(), [7, 1, 8, 1]) == []  # one token, seen once
    assert proposed(NgramCache(), [7, 8, 6, 7, 8, 5, 7, 8, 4, 7]) == [8]  # then one of three tokens
    assert proposed(NgramCache(), [7, 8, 6, 7, 8, 5, 7], limit=2) == [8, 5]  # of two as frequent the later one
    assert proposed(NgramCache(), []) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_counts_what_the_program_counted(rule: type[Peer]) -> None:
    rows = compare(json.loads(RECORDED.read_text("ascii")))[rule.name]
    assert [name for name, theirs, ours in rows if theirs != ours] == []
    assert sum(theirs.accepted for _, theirs, _ in rows) > 0
