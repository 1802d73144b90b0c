"""Pruning: what is kept, that the result is a regular index, and that a failed one changes nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from stores import VOCABULARY, content_of, make
from support.examples import few

from rest_local.errors import DatastoreNotFound, OptionError
from rest_local.retrieval.building.build import build
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.documents import Document, FileState, bitmap_of
from rest_local.retrieval.home import read_manifest
from rest_local.retrieval.update.pruning import CONTEXT, LEAST_SLOTS, Target, choose, contexts_of, prune, size_of

COMMON = [1, 2, 3, 4, 5, 6, 7, 8]
CONTENT = {
    "copy.py": COMMON,
    "more.py": [*COMMON, 9, 10, 11, 12, 13],
    "last.py": [*COMMON, 9, 10, 11, 12, 13, 40],
    "alone.py": list(range(500, 560)),
}


def contexts(tokens: list[int]) -> list[tuple[int, ...]]:
    return [tuple(tokens[i : i + CONTEXT + 1]) for i in range(len(tokens) - CONTEXT)]


def bytes_on_disk(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.bin"))


def test_what_is_seen_twice_stays_and_the_rest_goes(tmp_path: Path) -> None:
    path = make(tmp_path / "store", CONTENT)
    pruned = prune(path, Target(seen=2))
    assert content_of(path) == {"more.py": CONTENT["more.py"]}  # it has every context that is seen twice
    assert pruned.documents == (4, 1)
    assert pruned.tokens[1] == len(CONTENT["more.py"]) + 1
    assert pruned.bytes[1] == bytes_on_disk(path) < pruned.bytes[0]
    with Datastore.open(path) as store:
        assert store.manifest.recipe == {"paths": ["src"], "pruned": "seen:2"}
        match, _, positions = store.find(np.array(COMMON))
        assert match == len(COMMON)
        assert store.locate(int(positions[0])) == ("more.py", len(COMMON))


@few(30)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=8),
    st.integers(2, 4),
)
def test_every_context_seen_often_enough_is_kept(documents: list[list[int]], seen: int) -> None:
    arrays = [np.array(tokens, np.int32) for tokens in documents]
    counts = Counter(context for tokens in documents for context in contexts(tokens))
    wanted = {context for context, count in counts.items() if count >= seen}
    total = sum(map(len, arrays))
    shift = np.uint64(64 - LEAST_SLOTS.bit_length() + 1)
    slots = {
        (slot, context)
        for tokens, array in zip(documents, arrays, strict=True)
        for slot, context in zip(contexts_of(array, shift).tolist(), contexts(tokens), strict=True)
    }
    assume(len({slot for slot, _ in slots}) == len(slots))  # contexts with one hash count as one
    kept = choose([len(a) + 1 for a in arrays], arrays.__getitem__, Target(seen=seen), total).tolist()
    assert kept == sorted(set(kept))
    held = [set(contexts(documents[number])) & wanted for number in kept]
    assert set().union(*held) == wanted
    for tokens in held:
        assert tokens  # no document without such a context is kept


@few(30)
@given(
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=40), min_size=1, max_size=8),
    st.integers(1, 3000),
)
def test_a_size_is_never_exceeded(documents: list[list[int]], size: int) -> None:
    arrays = [np.array(tokens, np.int32) for tokens in documents]
    sizes = [size_of(Document(str(n), a), 2) for n, a in enumerate(arrays)]
    kept = choose(sizes, arrays.__getitem__, Target(size=size), sum(map(len, arrays))).tolist()
    assert sum(sizes[number] for number in kept) <= size
    if sum(sizes) <= size:
        assert kept == list(range(len(sizes)))


def test_the_files_keep_the_size(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    states = [(FileState(f"document {n}", 5, 7, n.to_bytes(32, "big")),) * (n % 3) for n in range(60)]
    documents = [Document(f"document {n}", random.integers(0, 1000, 200, np.int32), states[n]) for n in range(60)]
    path = tmp_path / "store"
    for segment_tokens in (1 << 20, 1000):
        build(path, documents, vocabulary=VOCABULARY, segment_tokens=segment_tokens)
        before = bytes_on_disk(path)
        pruned = prune(path, Target(size=before // 3))
        assert bytes_on_disk(path) == pruned.bytes[1]
        assert before // 3 - 3 * (1500 + 200) < pruned.bytes[1] <= before // 3
        with Datastore.open(path) as store:
            kept = [document for index in range(len(store.segments)) for document in store.documents(index)]
        assert [document.states for document in kept] == [
            documents[int(document.name.split()[1])].states for document in kept
        ]


def test_segments_that_lose_nothing_stay(tmp_path: Path) -> None:
    content = {"a": [1, 2, 3, 4, 5, 6], "b": [1, 2, 3, 4, 5, 6, 7, 8], "c": [1, 2, 3, 4, 5, 6], "d": [6, 7, 8, 9]}
    path = make(tmp_path / "store", content, segment_tokens=9)
    names = {file.name for file in path.glob("*.tokens.bin")}
    assert len(names) == 3 + 1
    with Datastore.open(path) as store:
        stays = store.manifest.segments[0].name
    prune(path, Target(seen=2))
    assert content_of(path) == {"a": content["a"]}
    assert {file.name for file in path.glob("*.tokens.bin")} == {f"{stays}.tokens.bin"}


def test_nothing_left_is_refused(tmp_path: Path) -> None:
    path = make(tmp_path / "store", {"a": [1, 2, 3], "b": list(range(50))})
    before = (path / "manifest.json").read_bytes()
    for target in (Target(seen=2), Target(size=100)):
        with pytest.raises(OptionError, match="no document would be left"):
            prune(path, target)
    assert (path / "manifest.json").read_bytes() == before
    with pytest.raises(DatastoreNotFound):
        prune(tmp_path / "none", Target(seen=2))


def test_deleted_documents_do_not_count(tmp_path: Path) -> None:
    path = make(tmp_path / "store", {"a": COMMON, "dead": COMMON, "c": list(range(100, 120))})
    assert prune(path, Target(seen=2), dry=True).documents == (3, 1)
    manifest = read_manifest(path)
    entry = replace(manifest.segments[0], dead=bitmap_of([1], 3))
    (path / "manifest.json").write_bytes(replace(manifest, segments=(entry,)).to_bytes())
    with pytest.raises(OptionError, match="no document"):
        prune(path, Target(seen=2))
    pruned = prune(path, Target(size=bytes_on_disk(path) - 1))
    assert pruned.documents == (2, 2)
    assert sorted(content_of(path)) == ["a", "c"]
