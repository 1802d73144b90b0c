"""Merges keep the content, bound the number of segments and what is written, and block no reader or writer."""

import random
from pathlib import Path

import numpy as np
import pytest
from edited import IDENTITY, Bytes, Folder, live_tokens, merge_all, store_documents, text_on_disk, texts_in
from hypothesis import given
from hypothesis import strategies as st

from rest_local.errors import DatastoreCorrupt
from rest_local.retrieval.building.build import build, commit
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.files import Files, locked
from rest_local.retrieval.history import SMALL_SEGMENT
from rest_local.retrieval.home import read_manifest
from rest_local.retrieval.staging import MERGE
from rest_local.retrieval.update import merging, updating
from rest_local.retrieval.update.forgetting import forget
from rest_local.retrieval.update.merging import DEAD, FANOUT, Size, chosen_of, merge, segments_without, tier_of

CAP = SMALL_SEGMENT * FANOUT**4


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """Make five files in five segments, one of them deleted, and one with the content of another one."""
    monkeypatch.setattr(updating, "SMALL_SEGMENT", 1)
    monkeypatch.setattr(merging, "SMALL_SEGMENT", 1000)
    folder = Folder(tmp_path)
    folder.write("a.py", "alpha")
    folder.build()
    for name, text in (("b.py", "beta"), ("c.py", "gamma"), ("copy.py", "alpha"), ("gone.py", "deleted")):
        folder.write(name, text)
        folder.update()
    folder.delete("gone.py")
    folder.write("c.py", "changed")
    folder.update()
    return folder


def test_all_segments_become_one_without_deleted_text(folder: Folder) -> None:
    assert len(live_tokens(folder.path)) == 4
    merged = merge_all(folder.path)
    assert merged == read_manifest(folder.path)
    assert [(entry.documents, entry.states, entry.dead, entry.gone) for entry in merged.segments] == [(3, 4, b"", b"")]
    assert texts_in(folder.path) == folder.texts()
    assert merge_all(folder.path) is None
    assert list(folder.path.glob("staging-*")) == []


def test_what_is_due_is_merged_by_itself(folder: Folder) -> None:
    assert merge(folder.path) is not None
    assert len(live_tokens(folder.path)) < FANOUT
    assert texts_in(folder.path) == folder.texts()
    assert merge(folder.path) is None


def test_a_segment_of_mostly_deleted_text_is_written_again_alone(folder: Folder) -> None:
    merge_all(folder.path)
    for name in ("a.py", "b.py", "copy.py"):
        folder.delete(name)
    folder.update()
    assert any("beta" in text for text in text_on_disk(folder.path))
    assert merge(folder.path) is not None
    assert texts_in(folder.path) == folder.texts()
    assert not any("beta" in text for text in text_on_disk(folder.path))


class During(Files):
    """Calls `what` once, while a merge writes."""

    def __init__(self, what: object) -> None:
        self.what = what

    def create(self, path: Path) -> int:
        if self.what and path.parent.name == MERGE:
            what, self.what = self.what, None
            what()  # type: ignore[operator]
        return super().create(path)


def test_what_is_deleted_during_a_merge_stays_deleted(folder: Folder) -> None:
    def other() -> None:
        with locked(folder.path):
            pass  # no lock is held
        folder.delete("a.py")
        folder.delete("b.py")
        folder.write("new.py", "new")
        folder.update()

    merge_all(folder.path, files=During(other))
    assert texts_in(folder.path) == folder.texts()


def test_what_is_deleted_of_an_input_that_stays_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file, a copy of another one's content and a document of no file are deleted while a merge writes. Each lies in
    a segment of which something is left, so the merge is published, and must not bring them back.
    """
    folder, known = Folder(tmp_path), Bytes()
    for name, text in (("a.py", "alpha"), ("b.py", "beta"), ("c.py", "alpha")):
        folder.write(name, text)
    folder.build()
    documents = [(name, known.tokenize(name)) for name in ("stored:x", "stored:y")]
    monkeypatch.setattr(updating, "SMALL_SEGMENT", 1)
    store_documents(folder.path, documents)
    inputs = {entry.name for entry in read_manifest(folder.path).segments}

    def other() -> None:
        folder.delete("a.py")
        folder.delete("b.py")
        folder.write("new.py", "new")
        folder.update()
        forget_by_mask(folder.path, "stored:x")
        assert inputs <= {entry.name for entry in read_manifest(folder.path).segments}, "no input is gone"

    merge_all(folder.path, files=During(other))
    assert texts_in(folder.path) == {**folder.texts(), "stored:y": "stored:y"}
    assert inputs.isdisjoint(entry.name for entry in read_manifest(folder.path).segments), "the merge was published"


def forget_by_mask(path: Path, name: str) -> None:
    """Delete a document of no file as an update does: by a bit in the manifest."""
    with locked(path), Datastore.open(path) as store:
        kept = tuple(entry for entry in segments_without(store, {name}) if entry)
        manifest = store.manifest
        commit(path, vocabulary=manifest.vocabulary, recipe=manifest.recipe, keep=kept, files=Files())


def test_everything_deleted_during_a_merge(folder: Folder) -> None:
    def other() -> None:
        for name in ("a.py", "b.py", "c.py", "copy.py"):
            folder.delete(name)
        folder.write("new.py", "new")
        folder.update()

    merge_all(folder.path, files=During(other))
    assert texts_in(folder.path) == folder.texts() == {str(folder.source / "new.py"): "new"}


def test_a_merge_whose_input_is_gone_is_dropped_and_done_again(folder: Folder) -> None:
    removed = str(folder.source / "b.py")
    merge_all(folder.path, files=During(lambda: forget(folder.path, {removed})))
    assert texts_in(folder.path) == {name: text for name, text in folder.texts().items() if name != removed}
    assert not any("beta" in text for text in text_on_disk(folder.path))
    assert len(live_tokens(folder.path)) == 1


def test_damage_is_not_written_again_under_a_new_checksum(folder: Folder) -> None:
    file = sorted(folder.path.glob("*.tokens.bin"))[0]
    data = bytearray(file.read_bytes())
    data[131] ^= 1  # another token of the vocabulary, so that only the checksum tells
    file.write_bytes(data)
    before = read_manifest(folder.path)
    with pytest.raises(DatastoreCorrupt):
        merge_all(folder.path)
    assert read_manifest(folder.path) == before


def test_no_segment_beyond_the_cap(tmp_path: Path) -> None:
    documents = [(f"stored:{n}", np.full(9, n, np.int32)) for n in range(20)]
    build(tmp_path / "store", documents, vocabulary=IDENTITY, segment_tokens=10)
    merge_all(tmp_path / "store", most=45)
    assert sorted(live_tokens(tmp_path / "store")) == [40] * 5
    assert len(texts_in(tmp_path / "store")) == 20


@given(st.lists(st.integers(1, 40), min_size=1, max_size=300), st.integers(0, 1 << 30))
def test_segments_stay_few_and_a_token_is_written_a_few_times(sizes: list[int], seed: int) -> None:
    """Segments are numbers here: each commit adds one, and merges replace what is due. Later ones may be deleted."""
    draw = random.Random(seed)
    segments: list[Size] = []
    written = added = deleted = 0
    for size in sizes:
        tokens = size * SMALL_SEGMENT // 2
        segments.append(Size(tokens, 0))
        added += tokens
        number = draw.randrange(len(segments))
        live, dead = segments[number]
        lost = int(live * draw.random() * 0.3)
        segments[number] = Size(live - lost, dead + lost)
        deleted += lost
        while chosen := chosen_of(segments, CAP):
            merged = sum(segments[index].live for index in chosen)
            assert merged <= CAP
            written += merged
            segments = [one for index, one in enumerate(segments) if index not in chosen] + [Size(merged, 0)]
    tiers = tier_of(CAP)
    large = sum(one.live for one in segments) / (CAP / FANOUT)
    assert len(segments) <= (FANOUT - 1) * tiers + large + 1
    assert written <= added * tiers + deleted * (1 / DEAD - 1)
    assert all(one.dead <= DEAD * (one.live + one.dead) for one in segments)
