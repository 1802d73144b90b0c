"""After any fault on disk a history has the old or the new commit, gives one warning, and keeps the next answer."""

import errno
import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from changes import left_over
from failpoints import Named, fail_at, kills, put_tree
from stores import VOCABULARY, Durable
from support.files import files_up_to
from test_datastore import rewrite
from test_history import answers_in

from rest_local.retrieval import History, Segment, history
from rest_local.retrieval.files import locked
from rest_local.retrieval.format import MANIFEST, file_name
from rest_local.retrieval.home import read_manifest

BEFORE, SAID = [[1, 2, 3, 4], [9, 9, 2, 5]], [1, 2, 3, 7]
BOTH = [*BEFORE, SAID]
CONTEXT = np.array([1, 2, 3])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Make a history with the answers BEFORE."""
    return written(tmp_path / "toy")


def written(path: Path) -> Path:
    kept = History.open(path, VOCABULARY)
    for answer in BEFORE:
        kept.add(answer)
    kept.close()
    return path


def say(path: Path, answer: list[int] = SAID, **options: object) -> None:
    """Make one run: open, search, add, close."""
    kept = History.open(path, VOCABULARY, **options)  # type: ignore[arg-type]
    rows = kept.rows(CONTEXT, 8, 4)
    assert rows.continuations.max(initial=-1) < VOCABULARY.size
    kept.add(answer)
    kept.close()


def set_aside(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.parent.iterdir() if ".damaged-" in entry.name)


def test_killed_before_any_step_of_a_commit(path: Path) -> None:
    seen = []
    for state in kills(path, lambda files: say(path, files=files)):
        put_tree(path, state.tree)
        seen.append(answers_in(path))
        assert seen[-1] in (BEFORE, BOTH)
        say(path, [5, 5])
        assert answers_in(path) == [*seen[-1], [5, 5]]
        assert left_over(path) == set()
    assert seen[0] == BEFORE
    assert seen[-1] == BOTH


def test_a_disk_that_fails_at_every_step(path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    counting = Named()
    say(written(tmp_path / "counted"), files=counting)
    for failing in range(1, counting.steps + 1):
        caplog.clear()
        say(path, files=(files := Named(fail_at(failing, errno.EIO))))
        if files.trace[failing - 1].startswith("delete"):  # the commit is done, so there is no warning
            assert caplog.records == []
            assert answers_in(path) == BOTH
            shutil.rmtree(path)
            written(path)
        else:
            (record,) = caplog.records
            assert os.strerror(errno.EIO) in record.message
            assert answers_in(path) == BEFORE
    assert set_aside(path) == []


def test_a_full_disk_gives_one_warning_and_answers_are_committed_later(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = History.open(path, VOCABULARY)
    kept.add(SAID)
    with files_up_to(100):
        for _ in range(3):
            kept.commit()
    (record,) = caplog.records
    assert "EFBIG" in record.message
    assert answers_in(path) == BEFORE
    assert kept.rows(CONTEXT, 8, 1).continuations.tolist() == [[4], [7]]
    kept.close()
    assert answers_in(path) == BOTH
    assert left_over(path) == set()


def test_answers_that_cannot_be_written_do_not_fill_the_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "UNWRITTEN", 100)
    (tmp_path / "file").write_text("")
    kept = History.open(tmp_path / "file" / "toy", VOCABULARY, wait_s=0)
    for number in range(100):
        kept.add([number] * 20)
        kept.commit()
        assert kept.tokens <= 120
    assert len(caplog.records) == 1


def test_after_a_timeout_of_the_lock_the_answer_is_kept(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = History.open(path, VOCABULARY, wait_s=0.02)
    with locked(path):
        for answer in (SAID, [5, 5]):
            kept.add(answer)
            kept.commit()
        assert answers_in(path) == BEFORE  # readers need no lock
        assert kept.rows(CONTEXT, 8, 1).continuations.tolist() == [[4], [7]]
    (record,) = caplog.records
    assert f"locked by process {os.getpid()} on" in record.message
    kept.close()
    assert answers_in(path) == [*BOTH, [5, 5]]


def test_no_answer_waits_for_a_commit_that_add_begins(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another process has the lock: the next answers are kept and searched meanwhile, and no token is lost."""
    threads = set[int]()
    files = Named(lambda step, name: threads.add(threading.get_ident()))
    kept = History.open(path, VOCABULARY, wait_s=60, files=files)
    long = [*SAID, *[5] * history.COMMIT_TOKENS]
    with locked(path):
        kept.add(long)
        kept.add([6, 6])
        assert kept.rows(CONTEXT, 8, 1).continuations.tolist() == [[4], [7]]
        assert answers_in(path) == BEFORE
    kept.commit()
    assert answers_in(path) == [*BEFORE, long, [6, 6]]
    assert len(threads) == 2, "the commit of `long`, and that of the test"
    assert kept.rows(CONTEXT, 8, 1).continuations.tolist() == [[4], [7]]
    assert kept.tokens == sum(len(answer) + 1 for answer in answers_in(path))
    assert caplog.records == []


def test_an_interrupt_loses_nothing(path: Path) -> None:
    def interrupt(step: int, name: str) -> None:
        if name == "rename manifest":
            raise KeyboardInterrupt

    kept = History.open(path, VOCABULARY, files=Named(interrupt))
    kept.add(SAID)
    with pytest.raises(KeyboardInterrupt):
        kept.commit()
    assert answers_in(path) == BEFORE
    assert kept.rows(CONTEXT, 8, 1).continuations.tolist() == [[4], [7]]


def first_segment(path: Path, kind: str) -> Path:
    return path / file_name(read_manifest(path).segments[0].name, kind)


def reseal(change: Callable[[dict], None]) -> Callable[[Path], None]:
    return lambda path: rewrite(path, change)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "manifest cut": lambda path: os.truncate(path / MANIFEST, 100),
    "manifest empty": lambda path: (path / MANIFEST).write_bytes(b""),
    "manifest foreign": lambda path: (path / MANIFEST).write_bytes(b"GGUF" * 100),
    "newer format": reseal(lambda fields: fields.update(format=3)),
    "another vocabulary": reseal(lambda fields: fields["vocabulary"].update(hash="cd" * 32)),
    "another size": reseal(lambda fields: fields["vocabulary"].update(size=5000)),
    "not a history": reseal(lambda fields: fields.update(recipe={})),
    "tokens missing": lambda path: first_segment(path, "tokens").unlink(),
    "tokens cut": lambda path: os.truncate(first_segment(path, "tokens"), 50),
    "tokens changed": lambda path: first_segment(path, "tokens").write_bytes(
        bytes(len(first_segment(path, "tokens").read_bytes()))
    ),
    "order out of range": lambda path: first_segment(path, "order").write_bytes(
        b"\x7f" * len(first_segment(path, "order").read_bytes())
    ),
    "documents changed": lambda path: first_segment(path, "documents").write_bytes(
        first_segment(path, "documents").read_bytes()[:-1] + b"?"
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_or_foreign_directory_is_set_aside_with_one_warning(
    path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (1, 2):
        caplog.clear()
        DAMAGES[damage](path)
        with caplog.at_level(logging.WARNING):
            say(path, [*SAID, number])
        (record,) = caplog.records
        assert f"set aside as toy.damaged-{number}, starting anew" in record.message
        assert str(path) in record.message
        assert len(set_aside(path)) == number
        assert answers_in(path) == [[*SAID, number]]
    caplog.clear()
    say(path, [5, 5])
    assert caplog.records == []
    assert answers_in(path) == [[*SAID, 2], [5, 5]]


def test_a_directory_that_was_set_aside_stays_so_after_a_power_cut(path: Path) -> None:
    (path / MANIFEST).write_bytes(b"")
    files = Durable()
    History.open(path, VOCABULARY, files=files)
    assert files.names[path.parent] == {"toy.damaged-1"}


def broken(self: Segment, *arguments: object, **named: object) -> None:
    """Fail in the segment that was read from the disk, which is known by its size."""
    if len(self) > len(SAID) + 1:
        raise IndexError("index 2139062143 is out of bounds")
    return read(self, *arguments, **named)  # type: ignore[arg-type]


read = Segment.read


def test_damage_that_a_lookup_finds_is_set_aside(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = History.open(path, VOCABULARY)
    kept.add(SAID)
    with monkeypatch.context() as patch:
        patch.setattr(Segment, "read", broken)
        for _ in range(2):
            assert kept.rows(CONTEXT, 8, 1).continuations.tolist() == [[7]]
    (record,) = caplog.records
    assert "points outside its text; set aside as toy.damaged-1" in record.message
    kept.close()
    assert answers_in(path) == [SAID]


def test_damage_that_another_process_repaired_is_ignored(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = History.open(path, VOCABULARY)
    say(path)  # a newer commit
    monkeypatch.setattr(Segment, "read", broken)
    assert len(kept.rows(CONTEXT, 8, 1)) == 0
    assert caplog.records == []
    assert set_aside(path) == []
    assert answers_in(path) == BOTH


def test_a_directory_of_something_else_is_never_touched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stranger = tmp_path / "toy"
    stranger.mkdir()
    (stranger / "thesis.txt").write_text("x")
    say(stranger)
    assert [entry.name for entry in stranger.iterdir()] == ["thesis.txt"]
    (record,) = caplog.records
    assert "not a datastore" in record.message


@pytest.mark.usefixtures("unprivileged")
def test_a_read_only_directory_is_still_searched(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.chmod(0o500)
    try:
        kept = History.open(path, VOCABULARY)
        assert kept.rows(CONTEXT, 8, 1).continuations.tolist() == [[4]]
        kept.add(SAID)
        kept.close()
    finally:
        path.chmod(0o700)
    (record,) = caplog.records
    assert "Permission denied" in record.message
    assert answers_in(path) == BEFORE
