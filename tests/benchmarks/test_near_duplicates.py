"""Near-duplicates: what the search finds, against a comparison of all pairs."""

from __future__ import annotations

import numpy as np

from benchmarks.near_duplicates import jaccard, near_duplicates, shingles, study


def documents() -> list[np.ndarray]:
    random = np.random.default_rng(3)
    found = []
    for _ in range(12):
        base = random.integers(0, 500, 1500, np.int32)
        found.append(base)
        for changes in (1, 4, 12, 40):
            other = base.copy()
            other[random.integers(0, len(other), changes)] = 501
            found.append(other)
    return found


def by_all_pairs(found: list[np.ndarray], threshold: float) -> list[int]:
    kept: list[int] = []
    dropped = []
    for number, one in enumerate(found):
        if any(jaccard(one, found[other]) >= threshold for other in kept):
            dropped.append(number)
        else:
            kept.append(number)
    return dropped


def test_the_search_finds_what_all_pairs_have() -> None:
    found = [shingles(tokens) for tokens in documents()]
    dropped = near_duplicates(found, (1.0, 0.9, 0.8))
    assert dropped[1.0] == []
    for threshold in (0.9, 0.8):
        assert dropped[threshold] == by_all_pairs(found, threshold)
    assert len(dropped[0.9]) < len(dropped[0.8])


def test_identical_documents_have_similarity_one() -> None:
    one = shingles(np.arange(100, dtype=np.int32))
    assert jaccard(one, one) == 1.0
    assert jaccard(one, shingles(np.arange(200, 300, dtype=np.int32))) == 0.0
    assert near_duplicates([one, one], (1.0,)) == {1.0: [1]}
    assert len(shingles(np.arange(3, dtype=np.int32))) == 1


def test_the_report_counts_the_tokens_that_go() -> None:
    text = np.arange(400, dtype=np.int32)
    report = study([text, text, np.arange(400, 500, dtype=np.int32)], 1000, [])
    assert report["tokens"] == 401 + 401 + 101
    row = report["thresholds"]["0.95"]
    assert row == {"documents": 1, "share": round(401 / 903, 4), "saved_bytes": 401 * 6, "pruned": {}}
