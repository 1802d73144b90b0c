"""A build in shards: planned once, built anywhere and in any order, killed anywhere, and the same bytes at the end."""

import contextlib
import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from failpoints import kills, put_tree

from rest_local.errors import DatastoreError, DatastoreUnwritable, OptionError
from rest_local.retrieval import Datastore, build_datastore
from rest_local.retrieval.building import indexing, shards
from rest_local.retrieval.building.shards import FIXED_MEMORY, ShardPlan, build_shard, finished, plan, segment_tokens
from rest_local.retrieval.files import Files, locked
from rest_local.retrieval.format import MAX_SEGMENT, SegmentEntry, VocabularyId
from rest_local.retrieval.sources.walk import Walk

pytestmark = pytest.mark.usefixtures("forked_builds")
MEMORY = 1 << 30


class Bytes:
    """Every byte is a token. It can be opened by another process."""

    name, size, hash = "bytes", 256, "b0" * 32

    def tokenize(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def reopen(self) -> object:
        return opened


@contextlib.contextmanager
def opened() -> Iterator[Bytes]:
    yield Bytes()


class Here(Bytes):
    """Only this process opens it, so that the shards are built here."""

    def reopen(self) -> None:
        return None


class Deadly(Bytes):
    """Its process dies by one text."""

    def tokenize(self, text: str) -> np.ndarray:
        if "die" in text:
            os._exit(7)
        return super().tokenize(text)

    def reopen(self) -> object:
        return deadly


@contextlib.contextmanager
def deadly() -> Iterator[Deadly]:
    yield Deadly()


IDENTITY = VocabularyId(Bytes.hash, Bytes.size, Bytes.name)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write 60 files of 2 to 8 KB, for shards of some 16 KB."""
    monkeypatch.setattr(shards, "LEAST_SHARD", 1 << 14)
    monkeypatch.setattr(indexing, "SMALL_TEXT", 0)
    folder = tmp_path / "source"
    folder.mkdir()
    numbers = random.Random(5)
    for number in range(60):
        lines = [f"value_{numbers.randrange(1000)} = {numbers.random()}\n" for _ in range(numbers.randrange(80, 300))]
        (folder / f"f{number:02}.py").write_text("".join(lines))
        os.utime(folder / f"f{number:02}.py", (1e9, 1e9))  # long ago, so that the time of change is certain
    return folder


def walk(*paths: Path) -> Walk:
    return Walk(tuple(map(str, paths)))


def content(path: Path) -> Counter[str]:
    """Count the files of an index by kind and checksum, since segments have new names in each build."""
    names = [path / name for name in os.listdir(path) if name.endswith(".bin")]
    return Counter(f"{name.name.split('.')[1]} {hashlib.sha256(name.read_bytes()).hexdigest()}" for name in names)


def unnamed(entries: Iterable[SegmentEntry]) -> list[SegmentEntry]:
    return [replace(entry, name="") for entry in entries]


def stagings(path: Path) -> list[str]:
    return [name for name in os.listdir(path) if name.startswith("staging-")]


def test_a_plan_has_every_file_once_and_survives_json(source: Path) -> None:
    made = plan(walk(source), MEMORY, IDENTITY, least=4)
    assert len(made.shards) == 4
    sizes = [made.shard_bytes(number) for number in range(4)]
    assert max(sizes) < 1.5 * min(sizes)
    assert sorted(file.path for shard in made.shards for file in shard) == sorted(map(str, source.iterdir()))
    again = ShardPlan.from_dict(json.loads(json.dumps(made.to_dict())))
    assert again == made
    assert [again.record(number) for number in range(4)] == [made.record(number) for number in range(4)]


def test_shards_in_any_order_and_anywhere_have_the_same_bytes(source: Path, tmp_path: Path) -> None:
    made = plan(walk(source), MEMORY, IDENTITY, least=4)
    found = []
    for name, order in (("one", (0, 1, 2, 3)), ("two", (2, 0, 3, 1))):
        directory = tmp_path / name
        directory.mkdir()
        entries = {number: build_shard(made, number, directory, Bytes()) for number in order}
        found.append(([unnamed(entries[number]) for number in range(4)], content(directory)))
    assert found[0] == found[1]
    assert all(len(entries) == 1 for entries in found[0][0])


def test_a_build_over_processes_is_committed_and_leaves_no_staging(source: Path, tmp_path: Path) -> None:
    built = build_datastore(tmp_path / "store", [source], vocabulary=Bytes(), jobs=2)
    assert len(built.manifest.segments) == 2
    assert stagings(built.path) == []
    with Datastore.open(built.path) as store:
        store.check()
        assert sorted(store.document_names()) == sorted(map(str, source.iterdir()))
        documents = [document for index in range(2) for document in store.documents(index)]
    for document in documents:
        (state,) = document.states
        read = Path(document.name).read_bytes()
        assert (state.name, state.size, state.sha256) == (document.name, len(read), hashlib.sha256(read).digest())
        assert bytes(document.tokens.astype(np.uint8)) == read


def test_files_with_the_same_content_are_one_document_with_all_states(source: Path, tmp_path: Path) -> None:
    text = (source / "f00.py").read_bytes()
    copies = [source / name for name in ("f00.py", "copy.py", "z_copy.py")]
    for path in copies[1:]:
        path.write_bytes(text)
    (source / "other.py").write_bytes((b"y\n" * len(text))[: len(text)])  # the same size
    built = build_datastore(tmp_path / "store", [source], vocabulary=Bytes(), jobs=1)
    assert (built.documents, sum(segment.states for segment in built.manifest.segments)) == (61, 63)
    assert built.tokens == 61 + sum(path.stat().st_size for path in source.iterdir()) - 2 * len(text)


_MEASURED = """
import sys
sys.path[:0] = sys.argv[3:]
from pathlib import Path
import pydivsufsort, numpy
import test_staging
from rest_local.retrieval import build_datastore
from rest_local.retrieval.building import shards

def status(key):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(key))

vocabulary = test_staging.Bytes()
warm = Path(sys.argv[2]) / "warm.py"
build_datastore(sys.argv[1] + "-warm", [warm], vocabulary=vocabulary, jobs=1)
before = status("VmRSS")
memory = shards.FIXED_MEMORY + shards.SORTED_MEMORY[2] * (3 << 20)
built = build_datastore(sys.argv[1], [sys.argv[2]], vocabulary=vocabulary, jobs=1, memory=memory)
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
    assert peak < shards.SORTED_MEMORY[2] * (3 << 20) + (72 << 20)  # and batches of text, and what the heap keeps


def test_memory_decides_the_size_of_a_segment() -> None:
    assert segment_tokens(FIXED_MEMORY + (170 << 20), 1000) == 10 << 20
    assert segment_tokens(FIXED_MEMORY + (230 << 20), 100_000) == 10 << 20
    assert segment_tokens(1 << 40, 1000) * 2 < MAX_SEGMENT
    with pytest.raises(OptionError, match="at least 4"):
        segment_tokens(100 << 20, 1000)


def test_a_shard_is_built_again_only_if_a_file_changed(source: Path, tmp_path: Path) -> None:
    class Noting(Here):
        texts = 0

        def tokenize(self, text: str) -> np.ndarray:
            self.texts += 1
            return super().tokenize(text)

    noting = Noting()
    with killed_before_the_commit(tmp_path):
        build_datastore(tmp_path / "store", [source], vocabulary=noting, jobs=4, files=Refusing())
    assert noting.texts == 60
    (source / "f59.py").write_text("changed = 1\n")
    built = build_datastore(tmp_path / "store", [source], vocabulary=noting, jobs=4)
    largest = max(map(len, plan(walk(source), MEMORY, IDENTITY, least=4).shards))
    assert 60 < noting.texts <= 60 + largest + 1
    assert len(built.manifest.segments) == 4
    with Datastore.open(built.path) as store:
        store.check()
        assert built.documents == 60
    assert built.tokens == 60 + sum(path.stat().st_size for path in source.iterdir())


class Killed(BaseException):
    """Ends a build as a kill does: what is staged stays."""


class Refusing(Files):
    """Kills the build when it moves the first file into the index. full: the disk has no room for the manifest."""

    full = False

    def rename(self, old: Path, new: Path) -> None:
        if self.full and new.name == "manifest.json":
            raise OSError(28, "No space left on device", str(new))
        if not self.full and not new.parent.name.startswith("staging-"):
            raise Killed
        super().rename(old, new)


@contextlib.contextmanager
def killed_before_the_commit(tmp_path: Path) -> Iterator[None]:
    """Kill a build when every shard is done in the staging directory, and the index has nothing."""
    with pytest.raises(Killed):
        yield
    assert content(tmp_path / "store") == {}
    (name,) = stagings(tmp_path / "store")
    assert len([f for f in os.listdir(tmp_path / "store" / name) if f.endswith(".tokens.bin")]) == 4


def test_what_a_failed_build_has_staged_is_deleted(source: Path, tmp_path: Path) -> None:
    """A full disk gets its room back, also where other processes have written."""
    files = Refusing()
    files.full = True
    with pytest.raises(DatastoreUnwritable, match=r"ENOSPC.*index remove NAME"):
        build_datastore(tmp_path / "store", [source], vocabulary=Bytes(), jobs=2, files=files)
    assert (stagings(tmp_path / "store"), content(tmp_path / "store")) == ([], {})


def test_a_damaged_shard_is_built_again(source: Path, tmp_path: Path) -> None:
    with killed_before_the_commit(tmp_path):
        build_datastore(tmp_path / "store", [source], vocabulary=Here(), jobs=4, files=Refusing())
    (name,) = stagings(tmp_path / "store")
    damaged = next((tmp_path / "store" / name).glob("*.order.bin"))
    data = bytearray(damaged.read_bytes())
    data[100] ^= 1
    damaged.write_bytes(data)
    next((tmp_path / "store" / name).glob("shard-*.json")).write_text("{}")
    built = build_datastore(tmp_path / "store", [source], vocabulary=Here(), jobs=4)
    with Datastore.open(built.path) as store:
        store.check()
    assert built.documents == 60


def test_a_staging_directory_in_use_is_left_alone(source: Path, tmp_path: Path) -> None:
    other = tmp_path / "store" / "staging-0123456789abcdef"
    other.mkdir(parents=True)
    (other / "plan.json.new-0123456789abcdef").write_text("x")
    with locked(other):
        built = build_datastore(tmp_path / "store", [source], vocabulary=Bytes(), jobs=1)
        assert stagings(built.path) == [other.name]
    build_datastore(tmp_path / "store", [source], vocabulary=Bytes(), jobs=1)
    assert stagings(built.path) == []


def test_a_process_that_dies_is_reported_and_no_other_is_left(source: Path, tmp_path: Path) -> None:
    (source / "f30.py").write_text("die\n" * 100)
    with pytest.raises(DatastoreError, match=r"ended with code 7; less `memory`"):
        build_datastore(tmp_path / "store", [source], vocabulary=Deadly(), jobs=2)
    (source / "f30.py").write_text("live\n" * 100)
    assert build_datastore(tmp_path / "store", [source], vocabulary=Deadly(), jobs=2).documents == 60


_BUILD = """
import os, sys
sys.path[:0] = sys.argv[4:]
from pathlib import Path
import test_staging
from failpoints import Named
from rest_local.retrieval import build_datastore
from rest_local.retrieval.building import indexing, shards
shards.LEAST_SHARD, indexing.SMALL_TEXT = 1 << 14, 0

def die(step, name):
    if step == int(sys.argv[3]):
        os.kill(os.getpid(), 9)

if __name__ == "__main__":
    files = Named(die)
    build_datastore(sys.argv[1], [sys.argv[2]], vocabulary=test_staging.Bytes(), jobs={jobs}, files=files)
"""


def run(store: Path, source: Path, step: int, jobs: int = 1) -> subprocess.Popen[bytes]:
    here = Path(__file__).parent
    code = _BUILD.replace("{jobs}", str(jobs))
    arguments = [str(store), str(source), str(step), str(here), str(here.parents[1])]
    return subprocess.Popen([sys.executable, "-c", code, *arguments], env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_killed_before_any_step_and_built_again_is_as_never_killed(source: Path, tmp_path: Path) -> None:
    for path in sorted(source.iterdir())[12:]:
        path.unlink()
    store, right = tmp_path / "killed", tmp_path / "right"
    build_datastore(right, [source], vocabulary=Here(), jobs=1)
    build_datastore(store, [source], vocabulary=Here(), include=["f00.py"])  # an older commit
    for state in kills(store, lambda files: build_datastore(store, [source], vocabulary=Here(), files=files)):
        put_tree(store, state.tree)
        with Datastore.open(store) as opened_store:
            opened_store.check()
        build_datastore(store, [source], vocabulary=Here(), jobs=1)
        assert content(store) == content(right), state.before
        assert stagings(store) == []


def test_processes_of_a_killed_build_end_too(source: Path, tmp_path: Path) -> None:
    process = run(tmp_path / "store", source, 6, jobs=2)
    assert process.wait(120) == -9
    deadline = time.monotonic() + 60
    while True:  # the lock of the staging directory is free at once; the workers notice the closed pipe
        left = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False).stdout
        if not left.strip() or time.monotonic() > deadline:
            break
    assert not left.strip()
    assert build_datastore(tmp_path / "store", [source], vocabulary=Bytes(), jobs=2).documents == 60
    made = plan(walk(source), MEMORY, IDENTITY, least=2)
    assert finished(made, 0, tmp_path / "store") is None
