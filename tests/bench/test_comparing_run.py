"""The interleaved run of a comparison, with scripted sides: order, interruption, failing sides, identity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rest_local.bench.comparing.run import WARM_TOKENS, Stage, Unit, failures, run, single
from rest_local.bench.comparing.sides import Run, SideFailed, Task, TaskLeftOut
from rest_local.bench.results import Journal
from rest_local.errors import RestLocalError

ANSWER = tuple(range(100, 140))
TASKS = [Task(f"t{n}", "chat", (1, 2, n), 40) for n in range(4)]


class Scripted:
    """Answers ANSWER at `speed` tokens per second, and writes every call into `log`. `at`: what a task does first."""

    def __init__(
        self, name: str, log: list[str], speed: float = 10.0, at: Callable[[Task], object] = lambda task: None
    ) -> None:
        self.name, self.log, self.speed, self.at = name, log, speed, at
        self.options: dict[str, Any] = {}
        self.answer = ANSWER

    def open(self) -> None:
        self.log.append(f"{self.name} opens")

    def run(self, task: Task) -> Run:
        self.at(task)
        tokens = self.answer[: task.max_tokens]
        if task.max_tokens > WARM_TOKENS:
            self.log.append(f"{self.name} {task.name}")
        return Run(tokens, 1e3 * (len(tokens) - 1) / self.speed, steps=len(tokens) - 1 - 3, drafted=6, accepted=3)

    def close(self) -> None:
        self.log.append(f"{self.name} closes")


class ManySlots(Scripted):
    def run_together(self, tasks: Sequence[Task]) -> list[Run]:
        return [replace(self.run(task), ms=1e3) for task in tasks]


def stage(*sides: Scripted, tasks: Sequence[Task] = TASKS) -> Stage:
    return Stage("fast", "real", "fast", sides, single(tasks))


def measured(log: Sequence[str]) -> list[str]:
    return [line for line in log if not line.endswith(("opens", "closes"))]


def test_plain_runs_first_and_last_and_the_order_of_the_others_rotates(tmp_path: Path) -> None:
    log: list[str] = []
    sides = [Scripted("plain", log), *(Scripted(name, log, 20.0) for name in "abc")]
    records = run([stage(*sides)], Journal(tmp_path / "j", {}))
    order = [line.split()[0] for line in measured(log)]
    assert ["".join(order[n : n + 5]) for n in range(0, 20, 5)] == [
        "plainabcplain", "plainbcaplain", "plaincabplain", "plainabcplain",
    ]  # fmt: skip
    assert log[-4:] == ["c closes", "b closes", "a closes", "plain closes"]
    assert [record["task"] for record in records] == ["t0", "t1", "t2", "t3"]
    row = records[0]["sides"]["a"]
    assert (row["speedup"], row["steps"], row["accepted"], row["differs_at"]) == (2.0, 36, 3, [None])
    assert records[0]["plain"] == {
        "tokens": 40, "tokens_per_second": [10.0, 10.0], "repeated_8grams": 0.0, "same": True, "joules_per_token": None,
    }  # fmt: skip


def test_a_speedup_is_relative_to_the_mean_of_both_plain_runs(tmp_path: Path) -> None:
    plain = Scripted("plain", [])

    def slows_down(task: Task) -> None:
        if task.max_tokens > WARM_TOKENS:
            plain.speed = 30.0 - plain.speed

    plain.speed, plain.at = 20.0, slows_down
    records = run([stage(plain, Scripted("a", [], 30.0), tasks=TASKS[:1])], Journal(tmp_path / "j", {}))
    assert records[0]["plain"]["tokens_per_second"] == [10.0, 20.0]
    assert records[0]["sides"]["a"]["speedup"] == 2.0


def test_an_interrupted_run_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    whole = run([stage(Scripted("plain", []), Scripted("a", []), Scripted("b", []))], Journal(tmp_path / "whole", {}))

    def interrupt(task: Task) -> None:
        if task.name == "t2" and task.max_tokens > WARM_TOKENS:
            raise KeyboardInterrupt

    log: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run(
            [stage(Scripted("plain", log), Scripted("a", log), Scripted("b", log, at=interrupt))],
            Journal(tmp_path / "j", {}),
        )
    assert log[-3:] == ["b closes", "a closes", "plain closes"]
    assert measured(log)[-2:] == ["plain t2", "a t2"]
    finished = {line for line in measured(log) if not line.endswith("t2")}
    assert len(finished) == 6
    again: list[str] = []
    sides = [Scripted(name, again) for name in ("plain", "a", "b")]
    assert run([stage(*sides)], Journal(tmp_path / "j", {})) == whole
    assert finished.isdisjoint(measured(again))
    assert measured(again)[0] == "plain t2"
    third: list[str] = []
    assert run([stage(*(Scripted(name, third) for name in ("plain", "a", "b")))], Journal(tmp_path / "j", {})) == whole
    assert third == []  # nothing is missing, so nothing is opened


@pytest.mark.parametrize("when", ["open", "warm-up", "t1"])
def test_a_side_that_fails_is_left_out_from_then_on_with_its_reason(tmp_path: Path, when: str) -> None:
    def fail(task: Task) -> None:
        if when == "warm-up" or (task.name == when and task.max_tokens > WARM_TOKENS):
            raise SideFailed("b", "it crashed")

    class Broken(Scripted):
        def open(self) -> None:
            if when == "open":
                raise SideFailed("b", "it crashed")
            super().open()

    log: list[str] = []
    said: list[str] = []
    stages = [stage(Scripted("plain", log), Scripted("a", log), Broken("b", log, at=fail))]
    records = run(stages, Journal(tmp_path / "j", {}), said.append)
    assert failures(stages, Journal(tmp_path / "j", {})) == [{"stage": "fast", "side": "b", "reason": "it crashed"}]
    assert any("b: left out from now on (it crashed)" in line for line in said)
    assert "b closes" in log
    assert [record["sides"]["a"]["speedup"] for record in records] == [1.0] * 4
    done = [line for line in measured(log) if line.startswith("b")]
    assert done == (["b t0"] if when == "t1" else [])
    if when == "t1":
        assert records[1]["sides"]["b"] == {"left_out": "it crashed"}
        assert "b" not in records[2]["sides"]


def test_a_side_that_failed_stays_out_when_the_run_goes_on(tmp_path: Path) -> None:
    def fail(task: Task) -> None:
        raise SideFailed("b", "it crashed")

    def interrupt(task: Task) -> None:
        if task.name == "t1":
            raise KeyboardInterrupt

    log: list[str] = []
    sides = [Scripted("plain", log), Scripted("a", log, at=interrupt), Scripted("b", log, at=fail)]
    with pytest.raises(KeyboardInterrupt):
        run([stage(*sides)], Journal(tmp_path / "j", {}))
    again: list[str] = []
    run([stage(*(Scripted(name, again) for name in ("plain", "a", "b")))], Journal(tmp_path / "j", {}))
    assert not [line for line in again if line.startswith("b ")]


def test_nothing_can_be_compared_without_plain_decoding(tmp_path: Path) -> None:
    log: list[str] = []

    def fail(task: Task) -> None:
        raise SideFailed("plain", "no memory")

    with pytest.raises(RestLocalError, match="plain decoding failed: no memory"):
        run([stage(Scripted("plain", log, at=fail), Scripted("a", log))], Journal(tmp_path / "j", {}))
    assert "a closes" in log


def test_no_exact_settings_leave_out_the_exact_stage_alone(tmp_path: Path) -> None:
    class Inexact(Scripted):
        def open(self) -> None:
            raise SideFailed("plain", "this backend has none")

    exact = Stage("exact", "real", "exact", [Inexact("plain", []), Scripted("a", [])], single(TASKS))
    stages = [exact, stage(Scripted("plain", []), Scripted("a", []))]
    records = run(stages, Journal(tmp_path / "j", {}))
    assert {record["settings"] for record in records} == {"fast"}
    expected = [{"stage": "exact", "side": "all", "reason": "this backend has none"}]
    assert failures(stages, Journal(tmp_path / "j", {})) == expected


def test_a_task_that_a_side_cannot_do_costs_that_task_alone(tmp_path: Path) -> None:
    def leave_out(task: Task) -> None:
        if task.name == "t1":
            raise TaskLeftOut("a", "no schemas")

    records = run([stage(Scripted("plain", []), Scripted("a", [], at=leave_out))], Journal(tmp_path / "j", {}))
    assert [record["sides"]["a"].get("left_out") for record in records] == [None, "no schemas", None, None]


@pytest.mark.parametrize(
    ("answer", "place"),
    [((*ANSWER[:7], 5, *ANSWER[8:]), 7), (ANSWER[:20], 20), ((*ANSWER, 9), None), (ANSWER, None)],
)
def test_a_token_that_plain_decoding_does_not_have_is_found(
    tmp_path: Path, answer: tuple[int, ...], place: int | None
) -> None:
    side = Scripted("a", [])
    side.answer = answer
    records = run([stage(Scripted("plain", []), side, tasks=TASKS[:1])], Journal(tmp_path / "j", {}))
    assert records[0]["sides"]["a"]["differs_at"] == [place]


def test_plain_runs_that_differ_from_each_other_are_noted(tmp_path: Path) -> None:
    plain = Scripted("plain", [])

    def change(task: Task) -> None:
        plain.answer = tuple(token + 1 for token in plain.answer)

    plain.at = change
    records = run([stage(plain, Scripted("a", []), tasks=TASKS[:1])], Journal(tmp_path / "j", {}))
    assert not records[0]["plain"]["same"]


def test_requests_at_once_run_only_where_a_side_decodes_together(tmp_path: Path) -> None:
    tasks = tuple(replace(task, workload="batch") for task in TASKS)
    sides = [ManySlots("plain", []), ManySlots("a", []), Scripted("b", [])]
    stages = [Stage("batch", "real", "fast", sides, [Unit("4 at once", "batch", tasks)])]
    [record] = run(stages, Journal(tmp_path / "j", {}))
    assert record["sides"]["a"]["tokens_per_second"] == 4 * len(ANSWER)
    assert record["sides"]["a"]["differs_at"] == [None] * 4
    assert record["sides"]["b"] == {"left_out": "decodes one request at a time"}
    assert failures(stages, Journal(tmp_path / "j", {})) == []


def test_the_key_of_a_stage_changes_with_its_tasks_and_the_options_of_its_sides() -> None:
    first = stage(Scripted("plain", []), Scripted("a", []))
    other = stage(Scripted("plain", []), Scripted("a", []), tasks=[replace(TASKS[0], seed=2), *TASKS[1:]])
    tuned = stage(Scripted("plain", []), Scripted("a", []))
    tuned.sides[1].options["slots"] = 2
    assert first.key() == stage(Scripted("plain", []), Scripted("a", [])).key()
    assert first.key() != other.key()
    assert first.key() != tuned.key()
