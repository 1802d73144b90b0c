"""Replay that pays its forward passes: recorded tokens through a real context of a real or synthetic model.

Contract: every step decodes root and tree in llama.cpp with the slot bookkeeping, the sources and the policy of a real
generation; only what the model would have said is taken from the recording, so weights may be random and figures are
those of a model that would give these answers. Plain and drafted runs of an answer alternate, who begins changes from
answer to answer, and the evaluation of the prompt is not timed. Beside the wall clock stands what the same replay
implies by the cost curve that was measured on this model at load, so that the two can be compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rest_local.bench.recorded import Recorded
from rest_local.bench.replay import counted
from rest_local.bench.replay import replay as replay_by_curve
from rest_local.decoding.generation import Generation, Statistics
from rest_local.decoding.slot import Slot
from rest_local.decoding.tuning import capability_of, tune
from rest_local.drafting.sources import Lookup
from rest_local.errors import OptionError
from rest_local.llama.context import Context, ContextSettings
from rest_local.llama.model import Model
from rest_local.planning.cost import CostCurve
from rest_local.planning.off import Off
from rest_local.planning.policy import Policy

TOKENS = 160  # of an answer
ROUNDS = 3
MAX_CONTEXT = 16384  # longer prompts are left out: their evaluation alone takes minutes on a CPU

MakePolicy = Callable[[CostCurve], Policy]


class _Recording:
    """In the sampler's place: reads the row as greedy sampling does, then says what was recorded."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self._next = 0

    def sample(self, logits: NDArray[np.float32]) -> int:
        logits.argmax()
        self._next += 1
        return self._tokens[self._next - 1]

    def accept(self, token: int) -> None:
        """Nothing is kept."""


@dataclass
class _Bench:
    """A context with its sources; runs one answer at a time."""

    model: Model
    context: Context
    slot: Slot

    def run(self, answer: Recorded, sources: Lookup, policy: Policy) -> tuple[float, Statistics]:
        """Milliseconds from the first token of the answer to its last, and what the steps did."""
        rest = answer.answer[1:]
        generation = Generation(
            self.context, self.slot, policy, sources, _Recording(rest),
            capability_of(self.model, self.context, exact=False), lambda token: False,
        )  # fmt: skip
        generation.start([*answer.prompt, answer.answer[0]])
        given: list[int] = []
        begun = time.perf_counter()
        while len(given) < len(rest):
            given.extend(token for token, _ in generation.step(len(rest) - len(given)))
        ms = 1e3 * (time.perf_counter() - begun)
        if given != rest:
            raise AssertionError(f"answer {answer.name}: the step loop changed a recorded token")
        return ms, generation.statistics


@dataclass
class WallClock:
    """`curve`: as measured at load. `report`: the object of `--json`."""

    curve: CostCurve
    report: dict[str, Any]


def wall_clock(
    path: str,
    recorded: Sequence[Recorded],
    make_sources: Callable[[], Lookup],
    make_policy: MakePolicy,
    *,
    tokens: int = TOKENS,
    rounds: int = ROUNDS,
) -> WallClock:
    """The first `tokens` tokens of every answer, `rounds` times. Raises ModelError, OptionError, DecodeFailed."""
    cut = [replace(answer, answer=answer.answer[:tokens]) for answer in counted(recorded)]
    with Model.open(path) as model:
        most = min(model.n_ctx_train or MAX_CONTEXT, MAX_CONTEXT)
        fitting = [answer for answer in cut if len(answer.prompt) + len(answer.answer) <= most]
        _check(fitting, model, most)
        longest = max(len(answer.prompt) + len(answer.answer) for answer in fitting)
        n_ctx = min(most, max(1024, (longest + 64 + 255) // 256 * 256))  # few sizes: each is tuned once and cached
        context, tuning = tune(model, ContextSettings(n_ctx=n_ctx), exact=False)
        with context:
            curve = tuning.curve
            bench = _Bench(model, context, Slot(context))
            measured = [
                _round(bench, fitting, make_sources, make_policy, _copy(curve), number) for number in range(rounds)
            ]
        implied = replay_by_curve(fitting, make_sources, make_policy(_copy(curve)), _copy(curve)).to_dict()
        report = _report(model.name, context.settings, measured, implied)
    report |= {"answers": len(fitting), "left_out": len(cut) - len(fitting)}
    return WallClock(curve, report)


def _check(answers: Sequence[Recorded], model: Model, most: int) -> None:
    if not answers:
        raise OptionError(f"no recorded answer fits the {most} tokens of context of model {model.path}")
    if max(max([*answer.prompt, *answer.answer]) for answer in answers) >= model.n_vocab:
        raise OptionError(
            f"model {model.path} has {model.n_vocab} tokens, --vocab gives ids beyond; use the model's own"
        )


def _copy(curve: CostCurve) -> CostCurve:
    """Policies refine the curve that they are given."""
    return CostCurve(list(curve.contexts), curve.ms.copy())


def _round(
    bench: _Bench,
    answers: Sequence[Recorded],
    make_sources: Callable[[], Lookup],
    make_policy: MakePolicy,
    curve: CostCurve,
    number: int,
) -> dict[str, Any]:
    """One pass over all answers with a fresh policy, as `replay` makes it; plain and drafted in turns."""
    sides = {"plain": (make_sources(), Off()), "drafted": (make_sources(), make_policy(curve))}
    ms = dict.fromkeys(sides, 0.0)
    steps = generated = drafted = 0
    for index, answer in enumerate(answers):
        order = list(sides) if (index + number) % 2 else list(sides)[::-1]
        for side in order:
            took, statistics = bench.run(answer, *sides[side])
            ms[side] += took
            if side == "drafted":
                steps += statistics.steps
                generated += statistics.generated
                drafted += statistics.drafted
    return {**ms, "steps": steps, "generated": generated, "drafted": drafted}


def _report(
    name: str, settings: ContextSettings, rounds: Sequence[dict[str, Any]], implied: dict[str, Any]
) -> dict[str, Any]:
    speedups = [row["plain"] / row["drafted"] for row in rounds]
    wall = median(speedups)
    first = rounds[0]
    return {
        "model": name,
        "settings": settings.to_dict(),
        "tokens": first["generated"],
        "plain_ms_per_token": round(median(row["plain"] / row["generated"] for row in rounds), 3),
        "drafted_ms_per_token": round(median(row["drafted"] / row["generated"] for row in rounds), 3),
        "mat": round(first["generated"] / first["steps"], 4),
        "nodes_per_step": round(first["drafted"] / first["steps"], 3),
        "speedup": round(wall, 4),
        "rounds": [round(value, 4) for value in speedups],
        "implied": {key: implied[key] for key in ("speedup", "mat", "nodes_per_step")},
        "implied_over_wall": round(implied["speedup"] / wall, 4),
    }
