"""Acceptance counts survive a restart, and any fault of their file costs one warning."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rest_local.drafting.candidates import CELLS_PER_SOURCE, LENGTHS, N_CELLS, ROWS, SHARES, SOURCES, cell_of
from rest_local.planning import acceptance as memory
from rest_local.planning.acceptance import HALVE_AT, LAYOUT, Acceptance, recall, remember
from rest_local.retrieval.files import locked
from rest_local.retrieval.format import sealed

CELL = cell_of(0, 8, 1, 1)


def learned(outcomes: list[tuple[int, bool]]) -> Acceptance:
    acceptance = Acceptance()
    acceptance.learn(outcomes)
    return acceptance


def recalled(path: Path) -> Acceptance:
    acceptance = Acceptance()
    recall(path, acceptance)
    return acceptance


def kept(path: Path, cell: int) -> float:
    """The number of observations of a cell in the file."""
    return memory._read(path)[cell][1]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "acceptance" / "toy.json"


def test_a_new_run_starts_where_the_last_one_ended(path: Path) -> None:
    before = learned([(CELL, False)] * 150)
    remember(path, before)
    assert kept(path, CELL) == 150
    after = recalled(path)
    assert after.seen(CELL) == memory.RECALLED
    sibling = cell_of(0, 8, 3, 3)  # without counts: backs off to its marginal
    for cell, share in ((CELL, 2), (sibling, 1.5)):
        assert before.estimate(cell) < after.estimate(cell) < Acceptance().estimate(cell) / share


def test_only_what_this_run_learned_is_added(path: Path) -> None:
    first = learned([(CELL, True)] * 10)
    remember(path, first)
    remember(path, first)  # nothing new
    second = recalled(path)
    remember(path, second)
    assert kept(path, CELL) == 10
    second.learn([(CELL, False)] * 5)
    remember(path, second)
    assert kept(path, CELL) == 15


@settings(max_examples=30)
@given(st.lists(st.lists(st.tuples(st.integers(0, N_CELLS - 1), st.booleans()), max_size=20), max_size=8))
def test_concurrent_runs_add_up(tmp_path_factory: pytest.TempPathFactory, runs: list[list[tuple[int, bool]]]) -> None:
    path = tmp_path_factory.mktemp("memory") / "toy.json"
    for run in [(recalled(path), outcomes) for outcomes in runs]:
        run[0].learn(run[1])
        remember(path, run[0])
    total = recalled(path)
    all_outcomes = [outcome for run in runs for outcome in run]
    for cell in {cell for cell, _ in all_outcomes}:
        assert total.seen(cell) == sum(other == cell for other, _ in all_outcomes)
        assert total.estimate(cell) == pytest.approx(learned(all_outcomes).estimate(cell), abs=1e-3)


def test_stored_counts_are_bounded_and_follow_newer_runs(path: Path) -> None:
    for _ in range(20):
        acceptance = recalled(path)
        acceptance.learn([(CELL, True)] * 350)
        remember(path, acceptance)
        assert kept(path, CELL) <= HALVE_AT / 2
    assert recalled(path).estimate(CELL) > 0.85
    for _ in range(5):
        acceptance = recalled(path)
        acceptance.learn([(CELL, False)] * 200)
        remember(path, acceptance)
    assert recalled(path).estimate(CELL) < 0.2


def _run(path: Path, cell: int, barrier: Any) -> None:
    barrier.wait(120)
    for _ in range(25):
        acceptance = Acceptance()
        recall(path, acceptance)
        acceptance.learn([(cell, True), (CELL, False)])
        remember(path, acceptance)


def test_concurrent_writers_lose_no_counts(path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    barrier = context.Barrier(3)
    cells = [CELL + 1, CELL + 2, CELL + 3]
    runs = [context.Process(target=_run, args=(path, cell, barrier), daemon=True) for cell in cells]
    for run in runs:
        run.start()
    for run in runs:
        run.join(120)
        assert run.exitcode == 0
    assert [kept(path, cell) for cell in [CELL, *cells]] == [75, 25, 25, 25]
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["lock", "toy.json"]


def test_files_are_private(path: Path) -> None:
    remember(path, learned([(CELL, True)]))
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def reseal(**change: object) -> Callable[[bytes], bytes]:
    def rewrite(content: bytes) -> bytes:
        fields = json.loads(content)
        del fields["sha256"]
        return sealed({**fields, **change})

    return rewrite


@pytest.mark.parametrize("n", range(1, len(SOURCES)))
def test_counts_of_versions_with_fewer_sources_stay_readable(path: Path, n: int) -> None:
    """Sources are added at the end, so the cells of the others keep their numbers."""
    cell = cell_of(0, 4, 3, 2)
    remember(path, learned([(cell, True)] * 10))
    layout = f"{n * CELLS_PER_SOURCE} {SOURCES[:n]} {LENGTHS} {ROWS} {SHARES}"
    path.write_bytes(reseal(layout=layout)(path.read_bytes()))
    second = recalled(path)
    assert second.seen(cell) == 10
    second.learn([(N_CELLS - 1, True)])
    remember(path, second)
    assert json.loads(path.read_bytes())["layout"] == LAYOUT
    assert recalled(path).seen(N_CELLS - 1) == 1
    assert not [*path.parent.glob("*damaged*")]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut": lambda content: content[:-30],
    "a bit flipped": lambda content: content.replace(b"1.0", b"3.0", 1),
    "not an object": lambda content: b"[1]",
    "not JSON": lambda content: b"GGUF" + bytes(100),
    "deep": lambda content: b"[" * 100_000,
    "large": lambda content: b" " * (5 << 20),
    "NaN": lambda content: b'{"sha256": "0", "cells": NaN}',
    "newer format": reseal(format=2),
    "something else": reseal(magic="rest-local datastore"),
    "other cells": reseal(layout="9 cells"),
    "no cells": reseal(cells=[1]),
    "a cell too many": reseal(cells={str(N_CELLS): [1, 1]}),
    "a cell of a word": reseal(cells={"x": [1, 1]}),
    "more hits than proposals": reseal(cells={"0": [2, 1]}),
    "negative": reseal(cells={"0": [-1, 1]}),
    "beyond the memory": reseal(cells={"0": [1, 1e9]}),
    "beyond a float": reseal(cells={"0": [1, 10**400]}),
    "no pair": reseal(cells={"0": [1]}),
    "nothing seen": reseal(cells={"0": [0, 0]}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_or_foreign_file_is_set_aside_with_one_warning(
    path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    remember(path, learned([(CELL, True)]))
    good = path.read_bytes()
    for number, use in enumerate((recalled, lambda path: remember(path, learned([(CELL, False)]))), 1):
        caplog.clear()
        path.write_bytes(DAMAGES[damage](good))
        use(path)
        (record,) = caplog.records
        assert str(path) in record.message
        assert f"set aside as toy.json.damaged-{number}" in record.message
        assert path.with_name(f"toy.json.damaged-{number}").read_bytes() == DAMAGES[damage](good)
    caplog.clear()
    assert recalled(path).seen(CELL) == 1
    assert caplog.records == []


def test_a_held_lock_costs_the_counts_of_the_run(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "WAIT_S", 0.02)
    remember(path, learned([(CELL, True)]))
    with locked(path.parent):
        remember(path, learned([(CELL, True)]))
        assert recalled(path).seen(CELL) == 1  # reading takes no lock
    (record,) = caplog.records
    assert f"locked by process {os.getpid()}" in record.message


def test_unreadable_and_unwritable_paths_cost_one_warning(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember(path.parent / "x.json" / "below.json", learned([(CELL, True)]))
    assert caplog.records == []
    (path.parent / "file").write_text("")
    remember(path.parent / "file" / "toy.json", learned([(CELL, True)]))
    (record,) = caplog.records
    assert "cannot be written" in record.message
    caplog.clear()
    path.mkdir()
    assert recalled(path).seen(CELL) == 0
    (record,) = caplog.records
    assert "cannot be read" in record.message
    path.rmdir()
    caplog.clear()
    remember(path, learned([(CELL, True)]))

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    remember(path, learned([(CELL, True)]))
    (record,) = caplog.records
    assert "No space left" in record.message
    assert recalled(path).seen(CELL) == 1
    assert sorted(entry.name for entry in path.parent.iterdir() if entry.is_file()) == ["file", "lock", "toy.json"]
