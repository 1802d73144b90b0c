"""Sides of this project: policies that share one loaded engine, and drafters, each with an engine of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rest_local.bench.comparing.energy import Energy
from rest_local.bench.comparing.sides import Run, SideFailed, Task
from rest_local.decoding.config import EngineConfig
from rest_local.errors import RestLocalError

if TYPE_CHECKING:
    from rest_local.decoding.engine import Engine
    from rest_local.decoding.request import Request
    from rest_local.decoding.stream import Result

R = TypeVar("R")
PLAIN = "plain"
POLICIES = {PLAIN: "off", "rest": "rest", "sam": "sam", "respec": "respec", "auto": "auto"}
"""Sides that every comparison has, and the policy of each."""


@dataclass
class SharedEngine:
    """An engine that the first of its sides opens and the last one closes. `exact`: confirm exact settings first."""

    config: EngineConfig
    _engine: Engine | None = None
    _users: set[str] = field(default_factory=set)

    def take(self, user: str) -> Engine:
        """Raises what opening an engine raises, and ModelError where exact settings are wanted and there are none."""
        from rest_local.decoding.engine import Engine
        from rest_local.errors import ModelError

        if self._engine is None:
            engine = Engine(self.config)
            try:
                if self.config.exact:
                    engine.compare()
                    if engine.capability.kind == "none":
                        raise ModelError(f"no exact settings on this backend ({engine.capability.reason})")
            except BaseException:
                engine.close()
                raise
            self._engine = engine
        self._users.add(user)
        return self._engine

    def give_back(self, user: str) -> None:
        """Never fails, also without `take`."""
        self._users.discard(user)
        if not self._users and self._engine is not None:
            engine, self._engine = self._engine, None
            with suppress(RestLocalError, OSError):
                engine.close()


class EngineSide:
    """One policy of an engine. Also decodes together, on an engine of several slots."""

    def __init__(self, name: str, policy: str, shared: SharedEngine) -> None:
        self.name = name
        config = shared.config
        self.options: dict[str, Any] = {
            "policy": policy,
            "exact": config.exact,
            "slots": config.slots,
            "drafter": None if config.draft_model is None else Path(config.draft_model).name,
        }
        self._policy, self._shared = policy, shared
        self._energy = Energy()
        self._engine: Engine | None = None

    def open(self) -> None:
        self._engine = self._guard(lambda: self._shared.take(self.name))

    def close(self) -> None:
        self._engine = None
        self._shared.give_back(self.name)

    def run(self, task: Task) -> Run:
        engine = self._opened()

        def generate() -> tuple[Result, float | None]:
            stream = engine.generate(task.prompt, **self._request_options(task))
            self._energy.begin()  # the prompt is evaluated
            for _ in stream:
                pass
            return stream.result, self._energy.joules()

        return _run_of(*self._guard(generate))

    def run_together(self, tasks: Sequence[Task]) -> list[Run]:
        """See `Together`."""
        import time

        engine = self._opened()

        def answer() -> list[Run]:
            requests: list[Request] = [
                engine.request(task.prompt, keep_prefix=False, **self._request_options(task)) for task in tasks
            ]
            results: dict[int, Result] = {}
            self._energy.begin()
            begun = time.perf_counter()
            for done in engine.batch(requests):
                if done.error is not None:
                    raise done.error
                results[done.number] = done.result
            ms, joules = 1e3 * (time.perf_counter() - begun), self._energy.joules()
            return [_of_many(results[number], ms, joules if number == 0 else None) for number in range(len(tasks))]

        return self._guard(answer)

    def _request_options(self, task: Task) -> Any:
        from rest_local.grammar import json_schema
        from rest_local.llama.sampling import Sampling

        grammar = None if task.schema is None else json_schema(task.schema)
        sampling = Sampling(temperature=task.temperature, seed=task.seed, grammar=grammar)
        options = {"max_tokens": task.max_tokens, "sampling": sampling, "policy": self._policy}
        return {**options, **({"prediction": task.prediction} if task.prediction else {})}

    def _opened(self) -> Engine:
        if self._engine is None:
            raise SideFailed(self.name, "it is not open")
        return self._engine

    def _guard(self, call: Callable[[], R]) -> R:
        """Errors of this project end the side, not the comparison."""
        try:
            return call()
        except (RestLocalError, OSError, MemoryError) as error:
            self.close()
            raise SideFailed(self.name, str(error) or type(error).__name__) from error


def _run_of(result: Result, joules: float | None) -> Run:
    """The engine's time is that of all tokens: the step of the first one is taken off, as large as the mean token."""
    n, timings = len(result.tokens), result.timings
    ms = timings.predicted_ms * (n - 1) / n if n else 0.0
    draft = result.draft
    return Run(tuple(result.tokens), ms, draft.steps, draft.drafted, draft.accepted, joules)


def _of_many(result: Result, ms: float, joules: float | None) -> Run:
    draft = result.draft
    return Run(tuple(result.tokens), ms, draft.steps, draft.drafted, draft.accepted, joules)


def policy_sides(config: EngineConfig, names: Sequence[str] = tuple(POLICIES)) -> list[EngineSide]:
    """A side for each of POLICIES in `names`, all on one engine."""
    shared = SharedEngine(config)
    return [EngineSide(name, POLICIES[name], shared) for name in names]
