"""A history gives the rows of all answers of all processes, up to its cap."""

import contextlib
import logging
import multiprocessing
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import every_row
from stores import VOCABULARY
from support.examples import few

from rest_local.errors import HistoryNotFound
from rest_local.retrieval import Datastore, History, forget_history, history, history_home, list_histories

TOKENS = st.sampled_from([0, 1, 2, 700])


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REST_LOCAL_DATA", str(tmp_path))
    return history_home()


def opened(name: str = "toy", **options: Any) -> History:
    return History.open(history_home() / name, VOCABULARY, {"model": "Toy 1M"}, **options)


def random_answers(n: int, length: int = 50, seed: int = 0) -> list[list[int]]:
    return np.random.default_rng(seed).integers(0, VOCABULARY.size, (n, length)).tolist()


def answers_in(path: Path) -> list[list[int]]:
    """Return all committed answers, oldest first, after a comparison of every checksum."""
    with Datastore.open(path) as store:
        store.check()
        return [tokens.tolist() for i in range(len(store.segments)) for _, tokens, _ in store.documents(i)]


def plain(rows: Any) -> list[tuple[int, list[int]]]:
    return list(zip(rows.match.tolist(), rows.continuations.tolist(), strict=True))


@few(30)
@given(
    st.lists(st.one_of(st.lists(TOKENS, max_size=12), st.sampled_from(["commit", "reopen"])), max_size=12),
    st.lists(TOKENS, max_size=36),
    st.integers(1, 9),
    st.integers(1, 6),
)
def test_rows_are_those_of_all_answers_stored_and_new(
    tmp_path_factory: pytest.TempPathFactory,
    steps: Sequence[list[int] | str],
    context: list[int],
    limit: int,
    depth: int,
) -> None:
    path = tmp_path_factory.mktemp("histories") / "toy"
    kept, added = History.open(path, VOCABULARY), []
    for step in steps:
        if step == "commit":
            kept.commit()
        elif step == "reopen":
            kept.close()
            kept = History.open(path, VOCABULARY)
        elif step not in added and step:  # the same answer is stored once, which is tested below
            added.append(step)
            kept.add(step)
    assert kept.tokens == sum(len(answer) + 1 for answer in added)
    expected = every_row(added, context, depth).values()
    found = plain(kept.rows(np.array(context, np.int32), limit, depth))
    assert all(row in expected for row in found)
    assert [match for match, _ in found] == sorted((match for match, _ in expected), reverse=True)[:limit]


def test_the_same_answer_is_stored_once() -> None:
    kept = opened()
    for _ in range(2):
        kept.add([1, 2, 3])
    kept.commit()
    kept.add([1, 2, 3])
    kept.add([1, 2, 4])
    kept.close()
    assert answers_in(kept.path) == [[1, 2, 3], [1, 2, 4]]
    used, manifest = opened(), kept.path / "manifest.json"
    before = manifest.read_bytes()
    os.utime(manifest, (0, 0))
    used.add([1, 2, 3])
    used.close()
    assert manifest.read_bytes() == before
    assert not list_histories()[0].last_use.startswith("1970"), "it was used"


def test_automatic_commits_show_the_answers_of_other_processes() -> None:
    one, other = opened(), opened()
    mine, theirs = random_answers(2, history.COMMIT_TOKENS // 2)
    one.add(mine)
    assert not one.path.exists()
    other.add(theirs)
    other.close()
    one.add([5] * (history.COMMIT_TOKENS // 2))
    one.commit()
    assert len(answers_in(one.path)) == 3
    assert one.rows(np.array(theirs[:20]), 1, 4).continuations.tolist() == [theirs[20:24]]
    assert one.tokens == sum(map(len, answers_in(one.path))) + 3


def test_segments_stay_few_and_no_answer_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "SMALL_SEGMENT", 100)
    answers = random_answers(100, 30)
    kept = opened()
    most = 0
    for answer in answers:
        kept.add(answer)
        kept.commit()
        with Datastore.open(kept.path) as store:
            most = max(most, len(store.segments))
    assert 1 < most <= 5
    assert answers_in(kept.path) == answers


def test_the_oldest_answers_are_deleted_at_the_cap() -> None:
    answers = random_answers(60, 50)
    kept = opened(cap=1000)
    for answer in answers:
        kept.add(answer)
        kept.commit()
        found = answers_in(kept.path)
        assert kept.tokens <= 1000
        assert answer in found
        assert found == [answer for answer in answers if answer in found]
    assert answers_in(kept.path) == answers[-len(found) :]
    assert len(found) >= 14  # three quarters are left, and the answers since
    kept.add(list(range(1000)))
    kept.close()
    assert answers_in(kept.path) == [list(range(1000))[-749:]]


def test_ids_outside_the_vocabulary_are_refused_and_no_context_fails() -> None:
    kept = opened()
    kept.add([1, 2, 3])
    kept.commit()
    for answer in ([1, VOCABULARY.size], [-1]):
        with pytest.raises(ValueError, match="0 to 999"):
            kept.add(answer)
    assert len(kept.rows(np.array([2, 10**6, -5]), 4, 2)) == 0
    with pytest.raises(ValueError, match="cap 2"):
        opened(cap=2)


def test_histories_are_listed_and_forgotten(home: Path) -> None:
    assert list_histories() == []
    for name in ("a-1", "b-2"):
        kept = opened(name)
        kept.add([1, 2, 3])
        kept.add([4, 5])
        kept.close()
    opened("never-written").close()
    (home / "b-2.damaged-1").mkdir()
    (home / "b-2.damaged-1" / "manifest.json").write_text("{}")
    (home / "c-3").mkdir()
    (home / "c-3" / "lock").write_text("")
    (home / "d-4").mkdir()  # left by a killed first commit
    (home / "d-4" / f"{'0' * 16}.tokens.bin").write_bytes(b"text")
    first, second, damaged, orphan = list_histories()
    assert (first.name, first.model, first.answers, first.tokens) == ("a-1", "Toy 1M", 2, 5)
    assert first.bytes == sum(file.stat().st_size for file in (home / "a-1").glob("*.bin"))
    assert first.last_use.endswith("+00:00")
    assert not first.error
    assert second.name == "b-2"
    assert damaged.error.startswith("set aside: damaged: ")
    assert damaged.error.endswith("`rest-local history forget b-2.damaged-1` deletes it")
    assert "index build" not in damaged.error
    assert orphan.name == "d-4"
    for name in ("a-1", "b-2.damaged-1", "d-4"):
        forget_history(name)
        assert not (home / name).exists()
    assert [listed.name for listed in list_histories()] == ["b-2"]
    for name in ("a-1", "", "..", "../history/b-2", str(home / "b-2"), "c-3"):
        with pytest.raises(HistoryNotFound, match="rest-local history list"):
            forget_history(name)


def _write(path: Path, answers: list[list[int]], barrier: Any, forgotten: Any = None) -> None:
    """Write the answers, each in a run of its own, and wait for the event `forgotten` after the first."""
    warnings: list[str] = []
    logging.getLogger("rest_local.history").addFilter(lambda record: warnings.append(record.getMessage()) or True)
    barrier.wait(120)
    for answer in answers:
        kept = History.open(path, VOCABULARY, wait_s=60)
        kept.add(answer)
        kept.close()
        assert forgotten is None or forgotten.wait(120)
    assert warnings == []


def test_concurrent_writers_lose_nothing(home: Path) -> None:
    answers = random_answers(45, 40)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["numpy", "rest_local.retrieval"])
    barrier = context.Barrier(3)
    writers = [
        context.Process(target=_write, args=(home / "toy", answers[n::3], barrier), daemon=True) for n in range(3)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(120)
        assert writer.exitcode == 0
    found = answers_in(home / "toy")
    assert sorted(found) == sorted(answers)
    for n in range(3):
        assert [answer for answer in found if answer in answers[n::3]] == answers[n::3]


def test_concurrent_writing_and_forgetting_never_fail(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both run at full speed once the first answer is forgotten. The content at the end is intact."""
    monkeypatch.setattr("rest_local.retrieval.history.WAIT_S", 120.0)  # a busy machine finds no gap within 2 s
    context = multiprocessing.get_context("forkserver")
    barrier, forgotten = context.Barrier(2), context.Event()
    answers = random_answers(30, 20)
    writer = context.Process(target=_write, args=(home / "toy", answers, barrier, forgotten), daemon=True)
    writer.start()
    barrier.wait(120)
    while writer.is_alive():
        for listed in list_histories():
            with contextlib.suppress(HistoryNotFound):  # the history may not exist at the moment
                forget_history(listed.name)
                forgotten.set()
    writer.join(120)
    assert writer.exitcode == 0
    assert forgotten.is_set()
    assert [listed for listed in list_histories() if listed.error] == []
    if (home / "toy" / "manifest.json").exists():
        found = answers_in(home / "toy")
        assert found == answers[len(answers) - len(found) :]
