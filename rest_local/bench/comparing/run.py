"""One interleaved run: every task on every side of its stage, in turns, with a journal.

- A stage is a set of sides that are open at the same time, plain decoding first, and the units that they run.
- A unit is a task on all sides (in the workload "batch" a group of tasks). Plain decoding runs first and last, the
  others between in an order that rotates from unit to unit. A side's speed-up is its speed over the mean of the two
  plain speeds, so that a machine that slows down meanwhile favours no side; how far the two plain runs differ says
  how noisy the machine was.
- When a stage is opened, also in the middle of an interrupted run, its first unit runs once without being counted.
- The journal gets a line after each unit. A side that fails is left out from then on, also when the run goes on later.
- What is kept of the tokens is how many there are, how many of them repeat, and where they first differ from plain
  decoding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from rest_local.bench.comparing.sides import Run, Side, SideFailed, Task, TaskLeftOut, Together
from rest_local.bench.demo import repeated_share
from rest_local.bench.results import Journal
from rest_local.errors import RestLocalError

WARM_TOKENS = 32
Say = Callable[[str], None]


@dataclass(frozen=True)
class Unit:
    """Tasks that run together; one, except in the workload "batch"."""

    name: str
    workload: str
    tasks: tuple[Task, ...]


@dataclass(frozen=True)
class Stage:
    """`mode`: "real" or "replay". `settings`: "fast" or "exact". `sides`: plain decoding first."""

    name: str
    mode: str
    settings: str
    sides: Sequence[Side]
    units: Sequence[Unit]

    def key(self) -> dict[str, Any]:
        """What the figures depend on."""
        digest = hashlib.sha256()
        for unit in self.units:
            digest.update(repr((unit.name, unit.workload, unit.tasks)).encode())
        return {"sides": {side.name: side.options for side in self.sides}, "tasks": digest.hexdigest()[:16]}


def single(tasks: Sequence[Task]) -> list[Unit]:
    """A unit for each task."""
    return [Unit(task.name, task.workload, (task,)) for task in tasks]


def run(stages: Sequence[Stage], journal: Journal, say: Say = lambda line: None) -> list[dict[str, Any]]:
    """Measure what the journal lacks; the records of all units, in order. Raises RestLocalError where plain decoding
    itself fails; OSError.
    """
    total = sum(len(stage.units) for stage in stages)
    done = 0
    for stage in stages:
        missing = [unit for unit in stage.units if _name(stage, unit) not in journal]
        done += len(stage.units) - len(missing)
        if not missing or f"closed/{stage.name}" in journal:
            done += len(missing)
            continue
        with _Opened(stage, journal, say) as opened:
            if not opened.open(missing[0]):
                done += len(missing)
                continue
            for number, unit in enumerate(stage.units):
                if _name(stage, unit) in journal:
                    continue
                record = opened.measure(unit, number)
                journal.put(_name(stage, unit), record)
                done += 1
                say(f"{done} of {total}: {unit.workload} {unit.name}: {best_line(record)}")
    return [
        {"mode": stage.mode, "settings": stage.settings, **journal[_name(stage, unit)]}
        for stage in stages
        for unit in stage.units
        if _name(stage, unit) in journal
    ]


def failures(stages: Sequence[Stage], journal: Journal) -> list[dict[str, str]]:
    """The sides that failed, and why: {"stage", "side", "reason"}."""
    found = []
    for stage in stages:
        if f"closed/{stage.name}" in journal:
            found.append({"stage": stage.name, "side": "all", "reason": journal[f"closed/{stage.name}"]})
        for side in stage.sides:
            if _failed(stage, side) in journal:
                found.append({"stage": stage.name, "side": side.name, "reason": journal[_failed(stage, side)]})
    return found


def best_line(record: Mapping[str, Any]) -> str:
    """The fastest side of a unit, for people who watch."""
    speedups = {name: row["speedup"] for name, row in record["sides"].items() if row.get("speedup")}
    if not speedups:
        return "no answer of two tokens"
    name = max(speedups, key=lambda name: speedups[name])
    return f"{name} {speedups[name]:.2f} x plain"


def _name(stage: Stage, unit: Unit) -> str:
    return f"{stage.name}/{unit.workload}/{unit.name}"


def _failed(stage: Stage, side: Side) -> str:
    return f"failed/{stage.name}/{side.name}"


@dataclass
class _Opened:
    """A stage whose sides are open."""

    stage: Stage
    journal: Journal
    say: Say
    sides: list[Side] = field(default_factory=list)
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> _Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def open(self, first: Unit) -> bool:
        """Open the sides and warm them up; False where an exact stage has no exact settings. Raises RestLocalError
        where plain decoding fails.
        """
        plain = self.stage.sides[0]
        for side in self.stage.sides:
            if _failed(self.stage, side) in self.journal:
                continue
            self._stack.callback(side.close)
            try:
                side.open()
                self.sides.append(side)
            except SideFailed as error:
                if side is plain and self.stage.settings == "exact":
                    self.journal.put(f"closed/{self.stage.name}", error.cause)
                    self.say(f"exact settings: left out ({error.cause})")
                    return False
                self._fail(side, error)
        short = tuple(replace(task, max_tokens=min(task.max_tokens, WARM_TOKENS)) for task in first.tasks)
        for side in list(self.sides):
            self._run(side, replace(first, tasks=short))
        return True

    def measure(self, unit: Unit, number: int) -> dict[str, Any]:
        """Run a unit on all sides and compare."""
        plain, *others = self.sides
        turn = number % len(others) if others else 0
        found: dict[str, list[Run] | str] = {}
        first = self._plain(plain, unit)
        for side in others[turn:] + others[:turn]:
            found[side.name] = self._run(side, unit)
        last = self._plain(plain, unit)
        sides = {side.name: compare_runs(found[side.name], first, last) for side in others}  # in the order of the stage
        return {"workload": unit.workload, "task": unit.name, "plain": plain_record(first, last), "sides": sides}

    def _plain(self, side: Side, unit: Unit) -> list[Run]:
        runs = self._run(side, unit)
        if isinstance(runs, str):  # `_fail` has raised for a failure
            raise RestLocalError(f"plain decoding leaves out {unit.workload} {unit.name}: {runs}")
        return runs

    def _run(self, side: Side, unit: Unit) -> list[Run] | str:
        """The runs of a unit, or the reason why there are none."""
        try:
            if unit.workload == "batch":
                if not isinstance(side, Together):
                    return "decodes one request at a time"
                return side.run_together(unit.tasks)
            return [side.run(task) for task in unit.tasks]
        except TaskLeftOut as error:
            return error.cause
        except SideFailed as error:
            self._fail(side, error)
            return error.cause

    def _fail(self, side: Side, error: SideFailed) -> None:
        """Leave the side out from now on. Raises RestLocalError for plain decoding: nothing can be compared then."""
        side.close()
        if side is self.stage.sides[0]:
            raise RestLocalError(f"plain decoding failed: {error.cause}") from error
        self.sides = [other for other in self.sides if other is not side]
        self.journal.put(_failed(self.stage, side), error.cause)
        self.say(f"{side.name}: left out from now on ({error.cause})")


def plain_record(first: Sequence[Run], last: Sequence[Run]) -> dict[str, Any]:
    """The two plain runs of a unit. `same`: they gave the same tokens. `joules_per_token`: None if unknown."""
    return {
        "tokens": sum(len(run.tokens) for run in first),
        "tokens_per_second": [round(speed(runs), 3) for runs in (first, last)],
        "repeated_8grams": round(max(repeated_share(run.tokens) for run in first), 4),
        "same": all(a.tokens == b.tokens for a, b in zip(first, last, strict=True)),
        "joules_per_token": _joules(first),
    }


def compare_runs(runs: Sequence[Run] | str, first: Sequence[Run], last: Sequence[Run]) -> dict[str, Any]:
    """One side of a unit. `differs_at`: by answer, the first token that plain decoding does not have there, or None.
    A reason in place of runs: {"left_out": reason}.
    """
    if isinstance(runs, str):
        return {"left_out": runs}
    plain = (speed(first) + speed(last)) / 2
    mine = speed(runs)
    tokens = sum(len(run.tokens) for run in runs)
    accepted = sum(run.accepted for run in runs)
    return {
        "tokens": tokens,
        "tokens_per_second": round(mine, 3),
        "speedup": round(mine / plain, 4) if plain and mine else None,
        "steps": sum(run.steps or max(len(run.tokens) - 1 - run.accepted, 0) for run in runs),
        "drafted": sum(run.drafted for run in runs),
        "accepted": accepted,
        "differs_at": [_first_difference(run.tokens, other.tokens) for run, other in zip(runs, first, strict=True)],
        "repeated_8grams": round(max(repeated_share(run.tokens) for run in runs), 4),
        "joules_per_token": _joules(runs),
    }


def speed(runs: Sequence[Run]) -> float:
    """Tokens per second of a unit; of several requests at once, of all together."""
    if len(runs) == 1:
        return runs[0].tokens_per_second
    ms = max((run.ms for run in runs), default=0.0)
    return 1e3 * sum(len(run.tokens) for run in runs) / ms if ms else 0.0


def _joules(runs: Sequence[Run]) -> float | None:
    known = [run.joules for run in runs if run.joules is not None]
    tokens = sum(len(run.tokens) for run in runs)
    return round(sum(known) / tokens, 4) if known and tokens else None


def _first_difference(mine: Sequence[int], plain: Sequence[int]) -> int | None:
    pairs = enumerate(zip_longest(mine, plain))
    return next((at for at, (one, other) in pairs if one != other), None)
