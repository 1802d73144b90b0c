"""A build is atomic, also the first one and with concurrent readers. `test_failpoints` has the other kills."""

import errno
import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from edited import Bytes
from failpoints import Disk, kills, put_tree
from stores import NEW, OLD, VOCABULARY, Durable, content_of, make

from rest_local.errors import (
    CorpusEmpty,
    CorpusTooLarge,
    DatastoreLocked,
    DatastoreNotFound,
    DatastoreUnwritable,
    InputInvalid,
    OptionError,
)
from rest_local.retrieval import (
    Datastore,
    build,
    build_datastore,
    datastore_path,
    datastores_home,
    list_datastores,
    remove,
)
from rest_local.retrieval import files as files_module
from rest_local.retrieval.building.build import FIXED_MEMORY, SORTED_MEMORY, segment_tokens_in
from rest_local.retrieval.format import MANIFEST, MAX_SEGMENT, owns


def names(path: Path) -> set[str]:
    return {file.name for file in path.iterdir()}


def orphans(path: Path) -> set[str]:
    """Return the files of builds that no manifest names."""
    manifest = (path / MANIFEST).read_text() if (path / MANIFEST).exists() else ""
    return {name for name in names(path) if (owns(name) and name.split(".")[0] not in manifest) or ".new-" in name}


def test_a_first_build_killed_before_any_step(tmp_path):
    path, seen = tmp_path / "home" / "store", []
    for state in kills(path.parent, lambda files: make(path, NEW, segment_tokens=12, files=files)):
        put_tree(path.parent, state.tree)
        seen.append(content_of(path) if (path / MANIFEST).exists() else None)
        assert seen[-1] in (None, NEW)
        make(path, NEW)
        assert content_of(path) == NEW
        assert orphans(path) == set()
    assert seen[0] is None
    assert seen[-1] == NEW


def test_a_power_cut_after_the_last_fsync_failed_leaves_either_commit(tmp_path):
    """The kernel writes the names at last, with or without fsync, so the restored copy has to be complete."""
    path, synced = make(tmp_path / "store", OLD), []

    class Failing(Disk):
        def sync_directory(self, directory: Path) -> None:
            synced.append(directory)
            if len(synced) == 2:  # the names of the segments, then the rename
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            super().sync_directory(directory)

    disk = Failing(path)
    with pytest.raises(DatastoreUnwritable, match="EIO"):
        make(path, NEW, segment_tokens=12, files=disk)
    assert len(synced) == 2
    disk.look()
    disk.close()
    seen = []
    for tree in disk.trees:
        put_tree(tmp_path / "after", tree)
        seen.append(content_of(tmp_path / "after"))
        assert seen[-1] in (OLD, NEW)
    assert NEW in seen
    assert content_of(path) == OLD
    make(path, NEW)
    assert orphans(path) == set()


def test_a_file_system_without_hard_links(tmp_path, no_hard_links):
    for content in (OLD, NEW, OLD):
        assert content_of(make(tmp_path / "store", content)) == content
    assert orphans(tmp_path / "store") == set()


def test_an_interrupt_leaves_what_was_there(tmp_path):
    path = make(tmp_path / "store", OLD)

    def interrupted():
        yield "a", np.array([1] * 20)
        yield "b", np.array([1])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(path, interrupted(), vocabulary=VOCABULARY, segment_tokens=10)
    assert content_of(path) == OLD
    assert orphans(path) == set()


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_lock_that_was_removed_meanwhile_guards_nothing(tmp_path, monkeypatch, how):
    """Between our open and our flock. Another builder may hold the one that is there now."""
    path = make(tmp_path / "store", OLD)

    def lost(*arguments: object, **options: object) -> bool:
        (path / "lock").unlink()
        if how == "replaced":
            (path / "lock").write_text("process 1 on another\n")
        return True

    monkeypatch.setattr(files_module, "lock_descriptor", lost)
    with pytest.raises(DatastoreLocked, match=how[:6]):
        make(path, NEW)
    assert content_of(path) == OLD


def test_new_directories_survive_a_power_cut(tmp_path):
    files, path = Durable(), tmp_path / "a" / "b" / "store"
    make(path, OLD, files=files)
    while path != tmp_path:
        assert path.name in files.names[path.parent]
        path = path.parent


def test_an_empty_corpus_is_refused_and_the_old_one_stays(tmp_path):
    path = make(tmp_path / "store", OLD)
    for content in ({}, {"empty": []}):
        with pytest.raises(CorpusEmpty, match="no tokens"):
            make(path, content)
    assert content_of(path) == OLD
    with pytest.raises(DatastoreNotFound):
        remove(tmp_path / "nothing")


@pytest.mark.parametrize("content", [{"one": [5]}, {"equal": [7] * 3000}, {"a": [1], "b": [1], "c": [1]}])
def test_the_smallest_and_dullest_corpora(tmp_path, content):
    assert content_of(make(tmp_path / "store", content, segment_tokens=4)) == content


def test_a_document_that_no_segment_can_hold_is_refused_before_the_work(tmp_path):
    giant = np.broadcast_to(np.int32(1), (2**31 - 1,))
    with pytest.raises(CorpusTooLarge, match="2147483647"):
        build(tmp_path / "store", [("giant", giant)], vocabulary=VOCABULARY)


def test_ids_and_caps_out_of_range_are_refused(tmp_path):
    for token in (-1, VOCABULARY.size):
        with pytest.raises(ValueError, match="token ids"):
            make(tmp_path / "store", {"a": [token]})
    for cap in (0, 2**31):
        with pytest.raises(ValueError, match="segment_tokens"):
            make(tmp_path / "store", NEW, segment_tokens=cap)


def test_names_and_paths(tmp_path, monkeypatch):
    monkeypatch.setenv("REST_LOCAL_DATASTORES", str(tmp_path))
    assert datastores_home() == tmp_path
    assert list_datastores() == []
    make(datastore_path("mine"), OLD)
    (tmp_path / "no datastore").mkdir()
    assert list_datastores() == ["mine"]
    assert datastore_path("mine") == tmp_path / "mine"
    assert datastore_path("./mine") == Path("./mine")
    for name in ("", ".", "..", ".hidden", "nul\0"):
        with pytest.raises(OptionError):
            datastore_path(name)
    monkeypatch.setenv("REST_LOCAL_DATASTORES", str(tmp_path / "missing"))
    assert list_datastores() == []


def test_remove_deletes_the_datastore_and_nothing_else(tmp_path):
    path = make(tmp_path / "store", OLD)
    (path / "notes.txt").write_text("mine")
    with pytest.raises(DatastoreUnwritable, match=r"notes\.txt"):
        remove(path)
    assert content_of(path) == OLD
    (path / "notes.txt").unlink()
    leftover = tmp_path / f".removed-{'0' * 16}"  # left by a killed remove
    shutil.copytree(path, leftover)
    remove(path)
    assert names(tmp_path) == set()


# ---- From files ----------------------------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REST_LOCAL_DATASTORES", str(tmp_path / "home"))
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "a.py").write_text("alpha")
    (folder / "b.py").write_text("be")
    (folder / "c.txt").write_text("c")
    (folder / "d.py").write_bytes(b"\0")
    return folder


def test_files_become_a_named_datastore_with_its_recipe(source: Path, tmp_path: Path) -> None:
    reported: Counter[str] = Counter()

    def progress(what: str, tokens: int) -> None:
        reported[what] += tokens

    built = build_datastore(
        "mine", [source], vocabulary=Bytes(), include=["*.py"], recipe={"why": "a test"}, progress=progress
    )
    assert built.path == tmp_path / "home" / "mine"
    assert (built.documents, built.tokens) == (2, 5 + 2 + 2)  # a separator after each document
    assert dict(built.skipped.counts) == {"not a wanted kind of file": 1, "binary": 1}
    assert reported == {"read": 8, "tokenized": 7, "sorted": 9, "written": 9}
    with Datastore.open(built.path, vocabulary_hash=Bytes.hash) as store:
        assert [Path(name).name for name in store.document_names()] == ["a.py", "b.py"]
        info = store.info()
        assert (info["tokens"], info["bytes"]) == (built.tokens, built.bytes)
        assert info["vocabulary"] == {"hash": Bytes.hash, "size": 256, "name": "bytes"}
        assert info["recipe"] == {
            "sources": [
                {
                    "kind": "walk", "paths": [str(source)], "include": ["*.py"], "exclude": [], "allow_secrets": False,
                    "max_file_size": 1 << 20,
                }
            ],
            "why": "a test",
        }  # fmt: skip
    assert json.loads(json.dumps(built.to_dict()))["skipped"] == dict(built.skipped.counts)


def test_an_empty_corpus_names_the_skipped_files_and_keeps_the_old_datastore(source: Path) -> None:
    before = build_datastore("mine", [source], vocabulary=Bytes())
    with pytest.raises(CorpusEmpty, match=r"d\.py: no text to index \(1 binary\)"):
        build_datastore("mine", [source / "d.py"], vocabulary=Bytes())
    with pytest.raises(InputInvalid, match="no such file"):
        build_datastore("mine", [source / "gone"], vocabulary=Bytes())
    with Datastore.open(before.path) as store:
        assert store.manifest == before.manifest


def test_files_with_the_same_content_are_one_document_with_all_states(source: Path) -> None:
    (source / "z_copy.py").write_text("alpha")
    (source / "other.py").write_text("omega")  # the same size
    built = build_datastore("mine", [source], vocabulary=Bytes())
    assert (built.documents, sum(segment.states for segment in built.manifest.segments)) == (4, 5)


_MEASURED = """
import sys
sys.path[:0] = sys.argv[3:]
from pathlib import Path
import pydivsufsort, numpy
from edited import Bytes
from rest_local.retrieval import build_datastore
from rest_local.retrieval.building.build import FIXED_MEMORY, SORTED_MEMORY

def status(key):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(key))

vocabulary = Bytes()
build_datastore(sys.argv[1] + "-warm", [Path(sys.argv[2]) / "warm.py"], vocabulary=vocabulary)
before = status("VmRSS")
vocabulary.tokenized = type("Nothing", (), {"append": lambda self, text: None})()
memory = FIXED_MEMORY + SORTED_MEMORY[2] * (3 << 20)
built = build_datastore(sys.argv[1], [sys.argv[2]], vocabulary=vocabulary, memory=memory)
print(len(built.manifest.segments), max(segment.tokens for segment in built.manifest.segments))
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_build_needs_no_more_memory_than_a_segment_takes(tmp_path: Path) -> None:
    """9 M tokens in segments of 3 M: sorting all at once would take three times as much."""
    source = tmp_path / "source"
    source.mkdir()
    numbers = random.Random(1)
    words = ["".join(numbers.choices("abcdefgh", k=7)) for _ in range(5000)]
    for number in range(18):
        (source / f"{number}.py").write_text("\n".join(" ".join(numbers.choices(words, k=8)) for _ in range(8192)))
    (source / "warm.py").write_text("warm\n")
    here = Path(__file__).parent
    arguments = [str(tmp_path / "store"), str(source), str(here), str(here.parents[1])]
    done = subprocess.run([sys.executable, "-c", _MEASURED, *arguments], capture_output=True, text=True, check=True)
    segments, largest, peak = map(int, done.stdout.split())
    assert segments >= 3
    assert largest <= 3 << 20
    assert peak < SORTED_MEMORY[2] * (3 << 20) + (72 << 20)  # and batches of text, and what the heap keeps


def test_memory_decides_the_size_of_a_segment() -> None:
    assert segment_tokens_in(FIXED_MEMORY + (170 << 20), 1000) == 10 << 20
    assert segment_tokens_in(FIXED_MEMORY + (230 << 20), 100_000) == 10 << 20
    assert segment_tokens_in(1 << 40, 1000) * 2 < MAX_SEGMENT
    with pytest.raises(OptionError, match="at least 4"):
        segment_tokens_in(100 << 20, 1000)
