"""Sides of a replay: recorded answers, with the forward passes of a real or synthetic model paid (`bench.wall`).

All sides take turns on one context. Each has its own sources, its own policy and its own copy of the measured cost
curve, and all have the same earlier answers. The tokens are the recorded ones, so a replay says nothing about identity.

The logits are those of the paying model, which knows nothing of the answer: the entropies that trigger `respec` and the
recycled logits of `auto` are not those of the model that gave the answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rest_local.bench.comparing.engine_sides import PLAIN, POLICIES
from rest_local.bench.comparing.sides import Run, SideFailed, Task, TaskLeftOut
from rest_local.bench.peers import ARCTIC_VARIANTS, PEERS, Arctic, Peer, why_no_arctic
from rest_local.bench.recorded import Recorded
from rest_local.bench.replay import Predictable, counted
from rest_local.bench.wall import Paying, opened, settled
from rest_local.bench.workload import Workload
from rest_local.calibration.cost import CostCurve
from rest_local.errors import RestLocalError
from rest_local.planning.policies import make_policy
from rest_local.planning.policy import Policy

Make = Callable[[Workload, CostCurve], tuple[Predictable, Policy]]


def tasks_of(workloads: Mapping[str, Workload], tokens: int) -> tuple[list[Task], dict[str, Recorded]]:
    """A task for each answer under test, by workload, and the answers by `workload/name`, cut to `tokens`."""
    tasks, answers = [], {}
    for name, workload in workloads.items():
        for answer in counted(workload.tested):
            cut = replace(answer, answer=answer.answer[:tokens])
            task = Task(answer.name, f"replay/{name}", answer.prompt, len(cut.answer))
            if f"{task.workload}/{task.name}" not in answers:
                tasks.append(task)
                answers[f"{task.workload}/{task.name}"] = cut
    return tasks, answers


class PayingModel:
    """The model that the sides of a replay share: the first one opens it, the last one closes it."""

    def __init__(self, path: Path, answers: Mapping[str, Recorded], threads: int) -> None:
        self.path, self.answers, self._threads = path, answers, threads
        self._stack = ExitStack()
        self._paying: Paying | None = None
        self._users: set[str] = set()

    def take(self, user: str) -> Paying:
        """Raises what `opened` raises."""
        if self._paying is None:
            answers = list(self.answers.values())
            self._paying = self._stack.enter_context(opened(str(self.path), answers, self._threads))
        self._users.add(user)
        return self._paying

    def give_back(self, user: str) -> None:
        """Never fails, also without `take`."""
        self._users.discard(user)
        if not self._users and self._paying is not None:
            self._paying = None
            try:
                self._stack.close()
            except (RestLocalError, OSError):  # what the curve learned is not kept
                return


class ReplaySide:
    """`make` gives sources and policy for a workload; those of other workloads are kept apart."""

    def __init__(self, name: str, make: Make, shared: PayingModel, workloads: Mapping[str, Workload]) -> None:
        self.name = name
        self.options: dict[str, Any] = {"replay": name}
        self._make, self._shared, self._workloads = make, shared, workloads
        self._state: dict[str, tuple[Predictable, Policy]] = {}
        self._paying: Paying | None = None

    def open(self) -> None:
        try:
            self._paying = self._shared.take(self.name)
        except (RestLocalError, OSError, MemoryError) as error:
            raise SideFailed(self.name, str(error) or type(error).__name__) from error

    def close(self) -> None:
        self._paying, self._state = None, {}
        self._shared.give_back(self.name)

    def run(self, task: Task) -> Run:
        if self._paying is None:
            raise SideFailed(self.name, "it is not open")
        paying, answer = self._paying, self._shared.answers[f"{task.workload}/{task.name}"]
        answer = replace(answer, answer=answer.answer[: task.max_tokens])
        if len(answer.answer) < 2:
            raise TaskLeftOut(self.name, "the answer has fewer than two tokens")
        try:
            ms, done = paying.runner.run(answer, *self._of(task.workload, paying.curve))
        except Exception as error:  # a peer's own code may raise anything
            self.close()
            raise SideFailed(self.name, str(error) or type(error).__name__) from error
        return Run(tuple(answer.answer), ms, done.steps, done.drafted, done.accepted)

    def _of(self, workload: str, curve: CostCurve) -> tuple[Predictable, Policy]:
        if workload not in self._state:
            own = settled(curve)
            own.busy_now = curve.busy_now
            self._state[workload] = self._make(self._workloads[workload.partition("/")[2]], own)
        return self._state[workload]


def replay_sides(shared: PayingModel, workloads: Mapping[str, Workload]) -> tuple[list[ReplaySide], dict[str, str]]:
    """Plain decoding, the policies, and the rules of other runtimes; and the reason for each that is left out."""
    makers: dict[str, Make] = {name: partial(_ours, POLICIES[name]) for name in POLICIES}
    makers |= {kind.name: partial(_peer, kind) for kind in PEERS}
    left_out = {}
    if reason := why_no_arctic():
        left_out["arctic"] = reason
    else:
        for options in ARCTIC_VARIANTS[:2]:  # its default, and its tree
            name = "arctic tree" if options.get("tree") else "arctic"
            makers[name] = partial(_peer, partial(Arctic, **options))
    return [ReplaySide(name, make, shared, workloads) for name, make in makers.items()], left_out


def _ours(policy: str, workload: Workload, curve: CostCurve) -> tuple[Predictable, Policy]:
    return workload.sources(), make_policy(policy, curve)


def _peer(kind: Callable[[Sequence[Sequence[int]]], Peer], workload: Workload, _: CostCurve) -> tuple[Peer, Peer]:
    peer = kind(workload.earlier or [])
    return peer, peer


__all__ = ["PLAIN", "PayingModel", "ReplaySide", "replay_sides", "tasks_of"]
