"""The simulated drafting model is as right as it says, and answers the same question alike."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.simulated_drafters import (
    LENGTHS,
    Cell,
    Chains,
    SimulatedDrafter,
    Unmatched,
    candidates_at,
    draws,
    measure,
    summary,
    unseen,
)
from rest_local.bench.replay import replay
from rest_local.bench.workload import Recorded
from rest_local.calibration.cost import CostCurve
from rest_local.drafting.growth import Draft
from rest_local.drafting.models.drafter import CONFIDENT, Query
from rest_local.drafting.sources import Lookup, Sources
from rest_local.drafting.tree import ROOT, DraftTree
from rest_local.planning.policy import Stateless, StepContext

CURVE = CostCurve.from_points([0], [1, 64], [[10.0, 30.0]])
ANSWERS = [Recorded(str(n), [n, n], [(7 * n + 13 * i * i) % 251 for i in range(300)]) for n in range(12)]


class Chain(Stateless):
    """A chain of the first candidates of fixed length at every step."""

    name = "chain"

    def __init__(self, length: int) -> None:
        self._length = length

    def draft(self, sources: Lookup, at: StepContext) -> Draft:
        tree, node = DraftTree(at.leaves), ROOT
        text = sources.draft_text
        for _ in range(self._length):
            assert text is not None
            ((first, *_),) = text.drafter.answer([Query(text, tuple(tree.path(node)))])
            node = tree.add(first[0], node, first[1], 4)
        return Draft(tree)


@pytest.mark.parametrize("acceptance", [0.6, 0.75, 0.9])
@pytest.mark.parametrize("constant", [False, True])
def test_the_mean_acceptance_is_as_given_and_confidences_are_calibrated(acceptance: float, constant: bool) -> None:
    drawn = draws(acceptance, constant)
    confidence = np.array([each.confidence for each in drawn])
    right = np.array([each.right for each in drawn])
    assert np.mean(right == 0) == pytest.approx(acceptance, abs=0.02)
    for low, high in ((0.0, 0.5), (0.5, 0.9), (0.9, 1.0)):
        among = (confidence >= low) & (confidence <= high)
        if among.any():
            assert np.mean(right[among] == 0) == pytest.approx(confidence[among].mean(), abs=0.03)
    assert np.mean(right[right > 0] == 1) == (0.0 if constant else pytest.approx(0.5, abs=0.05))


def test_candidates_are_distinct_and_the_same_every_time() -> None:
    drawn = draws(0.75, False)
    for answer in ANSWERS[:3]:
        for at in range(1, 200):
            for astray in ((), (at, 5)):
                found = candidates_at(drawn, 2, answer.answer, at, astray)
                assert found == candidates_at(drawn, 2, answer.answer, at, astray)
                assert len({token for token, _ in found}) == len(found) == (1 if found[0][1] > CONFIDENT else 3)
                assert sum(probability for _, probability in found) <= 1.0


@pytest.mark.parametrize("length", [0, 1, 3, 16])
def test_chains_are_those_of_a_replay(length: int) -> None:
    drawn = draws(0.75, False)
    drafter = SimulatedDrafter(ANSWERS, drawn, 1.0)

    def sources() -> Sources:
        made = Unmatched([], 1000)
        made.draft_text = drafter.text()
        return made

    tally = replay(ANSWERS, sources, Chain(length), CURVE)
    steps = Chains.of(ANSWERS, drawn).steps[length]
    assert tally.steps == len(steps)
    ms = sum(float(CURVE.at(n_ctx)[length]) + length * 1.0 for n_ctx in steps)
    assert tally.drafted_ms == pytest.approx(ms)
    assert tally.queried_ms == pytest.approx(length * len(steps))


def test_the_best_chain_is_the_least_of_all_lengths() -> None:
    chains = Chains.of(ANSWERS, draws(0.9, False))
    free, length = chains.best(CURVE, 0.0)
    dear, none = chains.best(CURVE, 1000.0)
    assert length > 3
    assert none == LENGTHS[0] == 0
    assert free < dear == pytest.approx(sum(float(CURVE.at(n_ctx)[0]) for n_ctx in chains.steps[0]))


def test_text_without_matches_gains_from_the_model_alone() -> None:
    cells = measure("unseen", unseen(600), "rtx4090-8b-iq3_xxs", False)
    assert len(cells) == 9
    for cell in cells:
        assert cell.retrieval == pytest.approx(1.0, abs=0.01)
        assert cell.all > 1.0
        assert cell.passes > 0.3
    by_cost = {(cell.acceptance, cell.cost): cell.all for cell in cells}
    assert by_cost[0.9, 0.03] > by_cost[0.9, 0.25] > by_cost[0.6, 0.25]


def test_the_summary_has_means_and_the_worst() -> None:
    cells = [Cell("a", "c", 0.6, 0.1, 1.0, 0, 1.0, 1.0, speed, 0.0, 0.0) for speed in (1.2, 1.4)]
    cells.append(Cell("b", "c", 0.6, 0.1, 2.0, 3, 1.0, 1.0, 2.2, 1.0, 1.0))
    found = summary(cells)
    assert list(found) == ["a", "b", "all"]
    assert found["a"] == ((pytest.approx(1.3), 1.2), (pytest.approx(1.3), 1.2))
    assert found["all"][0] == (pytest.approx((1.2 + 1.4 + 1.1) / 3), pytest.approx(1.1))
