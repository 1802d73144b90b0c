"""Fixed prices: no test's outcome depends on how fast or how busy the machine is.

`fix` is in force for all tests (`tests/conftest.py`). In an engine of this process a step costs what `engine_curve`
says, lookups and the rest of the driver what `StepOverhead` starts with, and what a model drafts costs nothing;
bounds on the time of a lookup or of a grammar are never reached. Tests of the measurements take `measured_prices`.

Planners that a test makes itself take a `FixedCurve`, and `FixedAuto` where they would measure their own time.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from rest_local.calibration.cost import LARGEST, CostCurve, Deviations
from rest_local.calibration.tuning import Tuning
from rest_local.decoding import decode_context
from rest_local.drafting.models.draft_model import DraftModel
from rest_local.drafting.models.drafter import Drafter, PassTimes
from rest_local.drafting.models.heads import Head
from rest_local.drafting.tree import Draft
from rest_local.grammar import constraint as forced
from rest_local.llama.context import Context
from rest_local.planning.auto import Auto
from rest_local.planning.policy import StepCost
from rest_local.retrieval import segment

QUERY_MS = 1e-3


class FixedCurve(CostCurve):
    """Learns from no measured time."""

    def observe(self, n: int, n_ctx: int, ms: float, busy: bool | None = None) -> None:
        return

    def observe_all(self, steps: Iterable[tuple[int, int, float]], busy: bool | None = None) -> None:
        return


FLAT = FixedCurve.from_points([0], [1, 64], [[1.0, 1.2]])


def engine_curve() -> FixedCurve:
    """Return the curve of an engine. Every price is certain, so nothing is timed between steps or in idle time."""
    return FixedCurve.from_points([0], [1, 64], [[10.0, 12.0]], Deviations.of(0.0, 0.0, 0.0))


class FixedAuto(Auto):
    """Is told that steps take what its curve says, and the driver what it took before."""

    def learn(self, drafted: Draft, tokens: Sequence[int], done: StepCost) -> None:
        driver, nodes = self.shared.driver, done.n_nodes + done.n_other + done.n_other_nodes
        own = driver.tree + driver.NODE * done.n_nodes if done.n_nodes else 0.0
        told = done._replace(
            decode_ms=float(self.shared.curve.expected(done.n_ctx)[min(nodes, LARGEST - 1)]),
            driver_ms=driver.step + own,
            lookup_ms=None if done.lookup_ms is None else driver.lookup,
            query_ms=QUERY_MS if done.query_ms else 0.0,
        )
        super().learn(drafted, tokens, told)


class Free(PassTimes):
    """Passes of what drafts take no time."""

    def __init__(self) -> None:
        super().__init__(0.0, 0.0)

    def learn(self, n: int, ms: float) -> None:
        return


def free(drafter: Drafter) -> None:
    """Tell the planner that passes of what drafts take no time."""
    assert isinstance(drafter, Head | DraftModel)
    drafter.times = Free()
    if isinstance(drafter, DraftModel):
        drafter.token_ms = 0.0


def _fixed_tune(tune: Callable[..., tuple[Context, Tuning]]) -> Callable[..., tuple[Context, Tuning]]:
    def tuned(*arguments: Any) -> tuple[Context, Tuning]:
        context, tuning = tune(*arguments)
        tuning.curve = engine_curve()
        return context, tuning

    return tuned


def _free_drafter(opened: Callable[..., tuple[Drafter | None, str]]) -> Callable[..., tuple[Drafter | None, str]]:
    def open_it(*arguments: Any) -> tuple[Drafter | None, str]:
        drafter, refusal = opened(*arguments)
        if drafter is not None:
            free(drafter)
        return drafter, refusal

    return open_it


_FIXED: list[tuple[Any, str, Any, Any]] = [  # Where it is, its name, its value, and its value in tests.
    (decode_context, "tune", decode_context.tune, _fixed_tune(decode_context.tune)),
    (decode_context, "_opened", decode_context._opened, _free_drafter(decode_context._opened)),
    (decode_context, "Auto", decode_context.Auto, FixedAuto),
    (decode_context, "FRAME_MS", decode_context.FRAME_MS, 0.0),  # each step by itself
    (forced, "_clock", forced._clock, lambda: 0.0),
    (segment, "perf_counter_ns", segment.perf_counter_ns, lambda: 0),
]


def fix(patch: pytest.MonkeyPatch) -> None:
    """Put fixed prices in force."""
    for place, name, _, fixed in _FIXED:
        patch.setattr(place, name, fixed)


def measure(patch: pytest.MonkeyPatch) -> None:
    """Put measured prices in force again."""
    for place, name, measured, _ in _FIXED:
        patch.setattr(place, name, measured)
