"""No way through a recorded answer is faster than the oracle's, and no policy."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import few

from benchmarks.bounds import OracleMatch, fair, oracle, reaches
from benchmarks.priors import Threshold
from benchmarks.recorded import Recorded
from benchmarks.replay import replay
from rest_local.calibration.cost import LARGEST, CostCurve
from rest_local.drafting.sources import Sources
from rest_local.planning.auto import Auto
from rest_local.retrieval.growing import GrowingText


def curve_of(ms: list[float]) -> CostCurve:
    return CostCurve([0], np.array([ms + [ms[-1]] * (LARGEST - len(ms))]))


def least(longest: list[int], ms: list[float]) -> float:
    """Return the least time over all sequences of right chains. A chain may be padded to a size that costs less."""

    @cache
    def from_(at: int) -> float:
        if at == len(longest):
            return 0.0
        return min(min(ms[n:]) + from_(at + 1 + n) for n in range(longest[at] + 1))

    return from_(1)


@given(st.data())
@few(25)
def test_no_way_through_an_answer_is_faster(data: st.DataObject) -> None:
    length = data.draw(st.integers(2, 9))
    longest = [0, *(data.draw(st.integers(0, length - 1 - at)) for at in range(1, length))]
    ms = data.draw(st.lists(st.floats(1, 50), min_size=length, max_size=length))
    plain = curve_of(ms)
    result = oracle([OracleMatch(0, longest, [0] * length)], plain)
    best = least(longest, [float(cost) for cost in plain.ms[0]])
    assert result["speedup"] == pytest.approx(ms[0] * (length - 1) / best, abs=1e-4)


@given(st.data())
@few(25)
def test_the_fair_bound_is_the_oracle_if_every_place_looks_different(data: st.DataObject) -> None:
    length = data.draw(st.integers(2, 9))
    longest = [0, *(data.draw(st.integers(0, length - 1 - at)) for at in range(1, length))]
    curve = curve_of(data.draw(st.lists(st.floats(1, 50), min_size=length, max_size=length)))
    ceiling = oracle([OracleMatch(0, longest, [0] * length)], curve)["speedup"]
    assert fair([OracleMatch(0, longest, list(range(length)))], curve)["speedup"] == pytest.approx(ceiling, abs=1e-3)
    assert fair([OracleMatch(0, longest, [0] * length)], curve)["speedup"] <= ceiling + 1e-3


def test_the_oracle_drafts_only_what_the_sources_hold() -> None:
    history = GrowingText()
    history.extend([1, 2, 3, 4, 5, 9, -1])
    (reach,) = reaches([Recorded("a", [7], [1, 2, 3, 4, 5, 6])], lambda: Sources([], 100, history))
    assert reach.n_prompt == 1
    assert reach.longest == [0, 4, 3, 2, 1, 0]  # never the last token, which comes from the model


@pytest.mark.parametrize("slope", [0.0, 0.05, 0.3, 1.0])
def test_no_policy_is_faster_than_the_oracle(slope: float) -> None:
    random = np.random.default_rng(3)
    phrases = [random.integers(0, 300, 12).tolist() for _ in range(6)]
    recorded = [
        Recorded(str(n), [t for i in random.integers(0, 6, 8) for t in phrases[i]],
                 [t for i in random.integers(0, 6, 12) for t in phrases[i][: random.integers(3, 12)]])
        for n in range(6)
    ]  # fmt: skip
    curve = curve_of([1.0 + slope * n for n in range(LARGEST)])
    found = reaches(recorded, lambda: Sources([], 300))
    best = oracle(found, curve)["speedup"]
    for policy in (Auto(curve_of([1.0 + slope * n for n in range(LARGEST)])), Threshold(0.3), Threshold(0.0, 8)):
        assert replay(recorded, lambda: Sources([], 300), policy, curve).speedup <= best + 1e-4
    assert best >= 1.0
    if slope == 0.0:
        assert best > 2


def test_the_first_tokens_of_the_fair_bound_end_with_a_whole_step() -> None:
    longest = [0] * 101 + [min(299 - at, LARGEST - 1) for at in range(101, 300)]
    found = fair([OracleMatch(0, longest, [int(at > 100) for at in range(300)])], curve_of([1.0]))
    assert found["first_tokens_speedup"] == pytest.approx(164 / 101, abs=1e-4)  # 100 plain steps, and one of 64 tokens
    assert found["speedup"] == pytest.approx(299 / 104, abs=1e-4)
