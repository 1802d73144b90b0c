"""The simulated drafting model is as right as it says, and answers the same question alike."""

import numpy as np
import pytest

from benchmarks.recorded import Recorded
from benchmarks.replay import replay
from benchmarks.simulated_drafters import Chains, SimulatedDrafter, Together, Unmatched, draws
from rest_local.calibration.cost import CostCurve
from rest_local.drafting.models.drafter import Query
from rest_local.drafting.sources import Lookup, Sources
from rest_local.drafting.tree import ROOT, Draft, DraftTree
from rest_local.planning.policy import Policy, StepContext

CURVE = CostCurve.from_points([0], [1, 64], [[10.0, 30.0]])
ANSWERS = [Recorded(str(n), [n, n], [(7 * n + 13 * i * i) % 251 for i in range(300)]) for n in range(12)]


class Chain(Policy):
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


def test_a_block_answers_the_paths_of_its_own_candidates() -> None:
    text = SimulatedDrafter(ANSWERS, draws(0.75, False), 1.0, depths=3).text()
    text.restart(list(ANSWERS[2].prompt), 0)
    assert text.following is not None
    path: tuple[int, ...] = ()
    for _ in range(3):
        likely = text.following(path)
        assert likely == text.likely(path)
        assert not text.following((*path, -5))
        path = (*path, likely[-1][0])
    assert not text.following(path)


def test_of_two_types_the_first_one_with_a_draft_gives_it() -> None:
    drawn = draws(0.75, False)
    answers = [Recorded(each.name, each.prompt, each.answer[:200]) for each in ANSWERS]  # They repeat nothing.
    alone, known = (Together(SimulatedDrafter(answers, drawn, 1.0, 2), 3, texts) for texts in ((), [answers[0].answer]))
    tally = replay(answers, lambda: alone, alone, CURVE)
    assert tally.steps == len(Chains.of(answers, drawn).steps[3])
    assert tally.queried_ms == pytest.approx(2.0 * tally.steps)  # Two passes of two depths for three tokens.
    found = replay(answers[:1], lambda: known, known, CURVE)
    asked = int(found.queried_ms / 2.0)
    assert 0 < asked < found.steps
    assert found.drafted >= 3 * asked + 48 * (found.steps - asked)
