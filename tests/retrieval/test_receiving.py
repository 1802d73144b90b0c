"""Segments that arrive from another machine: whole, or not at all. The messages are those of a task, without Ray."""

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from failpoints import Named
from test_staging import IDENTITY, MEMORY, Bytes, content, opened, source, unnamed, walk

from rest_local.cluster import Lost
from rest_local.errors import DatastoreError
from rest_local.retrieval.building import cluster
from rest_local.retrieval.building.cluster import SAMPLE, Receiving, _shard
from rest_local.retrieval.building.shards import ShardPlan, build_shard, finished, plan
from rest_local.retrieval.files import Files

__all__ = ["source"]

Message = tuple[Any, ...]


@pytest.fixture
def made(source: Path, monkeypatch: pytest.MonkeyPatch) -> ShardPlan:
    """Make a plan of one shard with several segments, whose files arrive in several parts."""
    monkeypatch.setattr(cluster, "PART", 60_000)
    return replace(plan(walk(source), MEMORY, IDENTITY), tokens=150_000)


def messages(made: ShardPlan) -> Iterator[Message]:
    return _shard(made, (opened, Bytes().tokenize(SAMPLE)), False, "")  # type: ignore[arg-type]


def received(made: ShardPlan, directory: Path, files: Files | None = None) -> Receiving:
    directory.mkdir(exist_ok=True)
    return Receiving(made, 0, directory, files or Files(), lambda what, amount: None)


def take(receiving: Receiving, given: Iterable[Message]) -> None:
    messages = iter(given)
    while not receiving.take(messages):
        pass


def left(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if ".new-" in path.name]


def test_what_arrives_is_what_a_local_build_writes(made: ShardPlan, tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    entries = build_shard(made, 0, tmp_path / "local", Bytes())
    assert len(entries) > 1
    seen = Counter[str]()
    receiving = received(made, tmp_path / "ray")
    receiving.report = lambda what, amount: seen.update({what: amount})
    take(receiving, messages(made))
    assert content(tmp_path / "ray") == content(tmp_path / "local")
    both = [finished(made, 0, tmp_path / name, check=True) for name in ("ray", "local")]
    assert both[0]
    assert both[1]
    assert unnamed(both[0].segments) == unnamed(both[1].segments)
    assert both[0].skipped == both[1].skipped
    assert seen["read"] == made.bytes
    assert left(tmp_path / "ray") == []


def test_a_task_that_ends_early_leaves_nothing_that_counts(made: ShardPlan, tmp_path: Path) -> None:
    """It may end after any message, and leaves no record and no file."""
    expected = tmp_path / "local"
    expected.mkdir()
    build_shard(made, 0, expected, Bytes())
    whole = content(expected)
    given = list(messages(made))
    for count in range(1, len(given), 3):
        directory = tmp_path / str(count)
        seen = Counter[str]()
        receiving = received(made, directory)
        receiving.report = lambda what, amount, seen=seen: seen.update({what: amount})  # type: ignore[misc]
        with pytest.raises(Lost):
            take(receiving, given[:count])
        receiving.drop()
        assert finished(made, 0, directory) is None
        assert left(directory) == []
        assert not content(directory)
        assert set(seen.values()) <= {0}  # what was reported is taken back
        take(receiving, given)  # the shard is built again, with the same object
        assert content(directory) == whole
        assert set(seen.values()) != {0}


@pytest.mark.parametrize("number", [0, 3, -1])
def test_data_that_was_damaged_on_its_way_is_refused(made: ShardPlan, tmp_path: Path, number: int) -> None:
    given = list(messages(made))
    parts = [message for message in given if message[0] == "data"]
    damaged = parts[number][1].copy()
    damaged[len(damaged) // 2] ^= 1
    receiving = received(made, tmp_path / "ray")
    with pytest.raises(DatastoreError, match="damaged on its way from the node that built it"):
        take(receiving, (("data", damaged) if message is parts[number] else message for message in given))
    receiving.drop()
    assert finished(made, 0, tmp_path / "ray") is None
    assert left(tmp_path / "ray") == []


def test_a_disk_that_fails_at_every_operation(made: ShardPlan, tmp_path: Path) -> None:
    given = list(messages(made))
    counting = Named()
    receiving = received(made, tmp_path / "counted", counting)
    take(receiving, given)
    for wrong in range(1, counting.steps + 1):
        directory = tmp_path / str(wrong)

        def fail(step: int, name: str, wrong: int = wrong) -> None:
            if step == wrong:
                raise OSError(28, "No space left on device")

        receiving = received(made, directory, Named(fail))
        with pytest.raises(OSError, match="No space left"):
            take(receiving, given)
        receiving.drop()
        done = finished(made, 0, directory, check=True)
        assert done is None or content(directory) == content(tmp_path / "counted")
        assert [name for name in left(directory) if not name.startswith("shard-")] == []


def test_a_vocabulary_that_does_not_open_is_an_error_of_its_node(made: ShardPlan) -> None:
    @contextlib.contextmanager
    def missing() -> Iterator[Bytes]:
        raise DatastoreError("no such file")
        yield

    other = replace(made, vocabulary=replace(made.vocabulary, hash="fe" * 32))
    (*_, last) = _shard(other, (missing, Bytes().tokenize(SAMPLE)), False, "")  # type: ignore[arg-type]
    assert last == ("failed", "no such file")


def test_a_node_that_tokenizes_in_another_way_is_refused(made: ShardPlan) -> None:
    other = replace(made, vocabulary=replace(made.vocabulary, hash="fd" * 32))
    (*_, last) = _shard(other, (opened, Bytes().tokenize(SAMPLE)[1:]), False, "")  # type: ignore[arg-type]
    assert last == ("failed", "tokenizes in another way than the driver; install the same llama-cpp-python")
