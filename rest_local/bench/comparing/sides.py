"""What `bench compare` runs: tasks on sides. A side is a way to decode: a policy of this project or another runtime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from rest_local.errors import RestLocalError


@dataclass(frozen=True)
class Task:
    """One generation that all sides make.

    name         unique in its workload
    workload     "completion", "edit", "chat", "batch", "json", "spec-bench/qa", "humaneval" and so on
    prompt       token ids, with the beginning token where the model wants one
    max_tokens   a side may end earlier, at an end token
    prediction   text that the client expects, for sides that take one
    temperature  0: greedy
    seed         of the sampling, for sides that sample in the same way
    schema       JSON schema of the answer, for sides that constrain it; others leave such tasks out
    """

    name: str
    workload: str
    prompt: Sequence[int]
    max_tokens: int
    prediction: str = ""
    temperature: float = 0.0
    seed: int = 1
    schema: dict[str, Any] | None = None


@dataclass(frozen=True)
class Run:
    """One task on one side.

    tokens    ids of the answer
    ms        from the first token of the answer to the last, without the prefill
    steps     forward passes in that time; 0 if the side does not tell
    drafted   tokens
    accepted  of these
    joules    of the whole machine in that time, where the platform tells it
    """

    tokens: Sequence[int]
    ms: float
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    joules: float | None = None

    @property
    def tokens_per_second(self) -> float:
        """The first token comes from the prefill and does not count; 0 for fewer than two tokens."""
        return 1e3 * (len(self.tokens) - 1) / self.ms if len(self.tokens) > 1 and self.ms > 0 else 0.0


class SideFailed(RestLocalError):
    """A side cannot run, or crashed, or did not answer in time. The comparison goes on without it and says why."""

    def __init__(self, side: str, cause: str) -> None:
        super().__init__(f"{side}: {cause}")
        self.side, self.cause = side, cause


class TaskLeftOut(RestLocalError):
    """A side cannot do this task, such as one with a schema. It stays open, and does the other tasks."""

    def __init__(self, side: str, cause: str) -> None:
        super().__init__(f"{side}: {cause}")
        self.side, self.cause = side, cause


class Side(Protocol):
    """Opened once, closed once; runs of different sides alternate."""

    name: str
    options: dict[str, Any]
    """What the figures of this side depend on, JSON-ready: part of the key of the journal."""

    def open(self) -> None:
        """Load the model, or start the program. Raises SideFailed."""

    def run(self, task: Task) -> Run:
        """Raises SideFailed; afterwards the side is closed. Raises TaskLeftOut; the side goes on."""

    def close(self) -> None:
        """End it. Never fails, also if it was not opened or has crashed."""


@runtime_checkable
class Together(Protocol):
    """A side that decodes several requests in the same forward passes, for the workload "batch"."""

    def run_together(self, tasks: Sequence[Task]) -> list[Run]:
        """All tasks at the same time, in their order. `ms` of each run is the time from the start of the whole to its
        end, with the prefills, and so the same in all of them; `joules`, if any, is in the first run. Raises
        SideFailed.
        """
