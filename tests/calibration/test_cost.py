"""A cost curve is physical, follows real steps in both directions, and knows its uncertainty."""

import json
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.curves import load_curve
from rest_local.calibration.cost import (
    ESTIMATED,
    FEWEST,
    GIVEN,
    LARGEST,
    OUTLIER,
    SIZES,
    STEP_ERROR,
    Corrections,
    CostCurve,
    Deviations,
    from_dict,
    is_certain,
    per_cell,
    per_token,
    to_dict,
)
from rest_local.calibration.measuring import Timing
from rest_local.calibration.tuning import estimated, shipped

CPU = CostCurve.from_points(
    [512], list(SIZES), [[20.0, 37.2, 50.0, 48.2, 79.2, 76.0, 107.2, 98.2, 164.4, 179.0, 278.0, 362.0]]
)
COUNTS = np.arange(1, LARGEST + 1)
times = st.floats(0.01, 1e4)
rows = st.lists(times, min_size=len(SIZES), max_size=len(SIZES))
steps = st.lists(
    st.tuples(st.integers(-1, 70), st.integers(0, 10_000), st.floats(), st.booleans()), min_size=0, max_size=60
)


def curve_of(per_token: float, attention: float = 0.0, plain: float = 10.0) -> CostCurve:
    """Return a curve: n tokens cost `plain` x (1 + per_token (n - 1)) ms, and `attention` ms a token of context."""
    base = [plain * (1 + per_token * (n - 1)) for n in SIZES]
    return CostCurve.from_points([0, 1000], SIZES, [base, [ms + 1000 * attention for ms in base]])


def assert_physical(curve: CostCurve) -> None:
    for n_ctx in (0, 1, 64, 700, 5000, 100_000):
        for line in (curve.at(n_ctx), curve.expected(n_ctx)):
            assert np.isfinite(line).all()
            assert (line > 0).all()
            assert (np.diff(line) >= -1e-9 * line[1:]).all()
            assert (line <= line[0] * COUNTS * (1 + 1e-9)).all()
        assert per_token(curve, n_ctx) > 0
    assert per_cell(curve, 1) >= 0


@given(st.lists(rows, min_size=1, max_size=3), steps)
@settings(deadline=None, max_examples=150)
def test_times_never_fall_with_the_size_nor_exceed_single_steps(
    table: list[list[float]], observed: list[tuple[int, int, float, bool]]
) -> None:
    curve = CostCurve.from_points([64, 512, 2048][: len(table)], SIZES, table)
    assert_physical(curve)
    for n, n_ctx, ms, busy in observed:  # any number that a broken clock can return
        curve.observe(n, n_ctx, ms, busy)
    assert_physical(curve)
    assert_physical(from_dict(json.loads(json.dumps(to_dict(curve)))))


@given(st.floats(0.01, 1.0), st.floats(0.01, 1.0), st.floats(0.2, 5.0), st.floats(0.001, 0.02))
@settings(deadline=None, max_examples=60)
def test_real_steps_correct_every_wrong_table(
    believed: float, per_token: float, speed: float, attention: float
) -> None:
    """The table is too expensive or too cheap, in all sizes or in drafts; every size that is tried becomes right.

    Where a drafted token costs more than 20 times what the table says, some tables in a thousand stay wrong by half
    (0.03125, 1.0, 0.75, 0.0078125): the speed and attention explain such times as well as the sizes do. The first steps
    at load leave no such table.
    """
    assume(per_token <= 20 * believed)
    curve, true = curve_of(believed, 0.004), curve_of(per_token, attention, 10.0 * speed)
    for _ in range(30):
        for n in (1, 2, 1, 4, 1, 8, 1, 16):
            for n_ctx in (100, 3000):
                curve.observe(n, n_ctx, float(true.expected(n_ctx)[n - 1]))
    for n_ctx in (100, 3000):
        wanted = true.expected(n_ctx)
        for n in (1, 2, 4, 8, 16):
            assert curve.expected(n_ctx)[n - 1] == pytest.approx(wanted[n - 1], rel=0.25)


def test_another_speed_of_the_machine_scales_all_sizes() -> None:
    """The table was measured under load. Plain steps alone must not make drafts relatively more expensive."""
    curve = CostCurve.from_points([64], [1, 64], [[2.0, 20.0]])
    before = curve.expected(64)[15] / curve.expected(64)[0]
    for _ in range(300):
        curve.observe(1, 64, 0.5)
    assert curve.expected(64)[0] == pytest.approx(0.5, rel=0.05)
    assert curve.expected(64)[15] / curve.expected(64)[0] == pytest.approx(before, rel=0.02)


def test_steps_on_a_busy_machine_have_little_weight_and_add_no_certainty() -> None:
    quiet = CostCurve.from_points([0], [1, 64], [[10.0, 100.0]], ESTIMATED)
    busy = quiet.copy()
    before = busy.uncertainty(0)[7]
    for _ in range(500):
        for curve, disturbed in ((quiet, False), (busy, True)):
            curve.observe(8, 10, 60.0, disturbed)
            curve.observe(1, 10, 10.0, disturbed)
    assert is_certain(quiet, 0, [8])
    assert not is_certain(busy, 0, [8])
    assert busy.uncertainty(0)[7] == pytest.approx(before, rel=0.5)
    assert quiet.expected(0)[7] == pytest.approx(60.0, rel=0.05)


def test_steps_that_are_told_together_are_judged_together() -> None:
    seen: list[tuple[float, int]] = []

    def busy_now(ms: float, steps: int) -> bool:
        seen.append((ms, steps))
        return False

    curve = curve_of(0.3)
    curve.busy_now = busy_now
    curve.observe(1, 10, 10.0)
    curve.observe(8, 10, 31.0)
    curve.observe_all([(1, 10, 2.0), (1, 10, -1.0), (1, 11, 3.0)])
    assert seen == [(10.0, 1), (31.0, 1), (5.0, 2)]


@pytest.mark.parametrize("busy", [False, True])
def test_steps_teach_what_they_teach_when_their_load_is_told(busy: bool) -> None:
    told, asked = curve_of(0.3), curve_of(0.3)
    asked.busy_now = lambda ms, steps: busy
    for n, ms in ((1, 10.0), (8, 60.0), (1, 11.0), (8, 55.0)):
        told.observe(n, 10, ms, busy)
        asked.observe(n, 10, ms)
    assert (told.ms == asked.ms).all()
    assert (told.covariance == asked.covariance).all()


def test_a_size_with_few_observations_is_planned_optimistically() -> None:
    """Otherwise a wrong high price would keep the size from ever being tried."""
    curve = CostCurve.from_points([0], SIZES, [[10.0 * n**0.8 for n in SIZES]], ESTIMATED)
    optimism = curve.at(0) / curve.expected(0)
    assert optimism[0] == 1.0
    assert 0.6 < optimism[7] < 0.9
    for _ in range(10):
        curve.observe(1, 0, 10.0)
        curve.observe(8, 0, float(curve.expected(0)[7]))
    optimism = curve.at(0) / curve.expected(0)
    assert optimism[7] == pytest.approx(1.0)
    assert optimism[63] < 0.95  # too far from 8 to learn from it
    given_table = CostCurve.from_points([0], SIZES, [[10.0 * n**0.8 for n in SIZES]])
    assert (given_table.at(0) == given_table.expected(0)).all()


def test_certainty_fades_after_thousands_of_other_steps() -> None:
    curve = curve_of(0.3)
    for _ in range(40):
        curve.observe(1, 10, 10.0)
        curve.observe(16, 10, 55.0)
    assert is_certain(curve, 10, [16])
    for _ in range(40_000):
        curve.observe(1, 10, 10.0)
    assert not is_certain(curve, 10, [16])


def test_a_curve_survives_json_with_its_covariance() -> None:
    curve = curve_of(0.3, 0.01)
    for _ in range(20):
        curve.observe(4, 2000, 50.0)
        curve.observe(1, 2000, 25.0)
    again = from_dict(json.loads(json.dumps(to_dict(curve))))
    assert np.allclose(again.ms, curve.ms)
    assert (again.covariance == curve.covariance).all()
    assert again.corrections.noise == curve.corrections.noise


def test_restarts_teach_nothing_of_sizes_that_were_never_measured() -> None:
    """Large batches are not tried in short runs, and each run begins with what the one before has stored."""
    rng = np.random.default_rng(1)
    truth = CPU.expected(512)
    kept = restarted = CostCurve([0, 4096], np.stack([truth, truth]), ESTIMATED)
    for _ in range(40):
        restarted = from_dict(json.loads(json.dumps(to_dict(restarted))))
        for n in (1, 1, 1, 4, 1, 8, 1, 16):
            ms = float(truth[n - 1] * np.exp(rng.normal(0.0, 0.05)))
            for curve in (kept, restarted):
                curve.observe(n, 300, ms)
    assert np.allclose(restarted.expected(300), kept.expected(300), rtol=0.05)
    assert np.allclose(restarted.uncertainty(300), kept.uncertainty(300), atol=0.02)
    assert not is_certain(restarted, 300, [64])
    assert is_certain(restarted, 300, [4, 8, 16])


def damaged() -> list[str]:
    whole = to_dict(CPU)
    falling = [*whole["ms"][0][:31], *(ms * 0.3 for ms in whole["ms"][0][31:])]
    lopsided, unknown, negative = (np.array(whole["covariance"]) for _ in range(3))
    lopsided[0, 1], unknown[0, 0], negative[0, 0] = 1.0, math.nan, -1.0
    changes = [
        {"ms": [[math.nan] * LARGEST]}, {"ms": [[-1.0] * LARGEST]}, {"ms": [[0.0] * LARGEST]}, {"ms": [[1.0, 2.0]]},
        {"ms": []}, {"ms": [falling]}, {"ms": [[1.0] + [90.0] * (LARGEST - 1)]}, {"contexts": []}, {"contexts": [-5]},
        {"contexts": [1, 1], "ms": whole["ms"] * 2}, {"contexts": ["x"]}, {"covariance": {}}, {"covariance": None},
        {"noise": None}, {"noise": -1}, {"noise": math.nan}, {"ms": "fast"}, {"covariance": [[0.1]]},
        *({"covariance": each.tolist()} for each in (lopsided, unknown, negative, 1e5 * unknown)),
    ]  # fmt: skip
    return ["", "[]", "{}", "null", "7", *(json.dumps(whole | change) for change in changes)]


@pytest.mark.parametrize("text", damaged())
def test_text_that_is_not_a_curve_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        from_dict(json.loads(text))


def test_a_machine_whose_speed_comes_and_goes_makes_no_large_batch_look_cheap() -> None:
    """Other guests of a host slow a dozen steps at a time. Large batches, which then fail, cost several plain steps."""
    truth, least = CPU.expected(512), 1.0
    for seed in range(2):
        rng, curve, slowed = np.random.default_rng(seed), CPU.copy(), 0
        for step in range(1000):
            slowed = slowed - 1 if slowed else int(rng.exponential(15)) * (rng.random() < 0.02)
            factor = math.exp(abs(rng.normal(0.5, 0.5) if slowed else rng.normal(0, 0.08)))
            n = int(rng.choice([1, 1, 1, 1, 2, 4, 4, 8, 16, 24]))
            curve.observe(n, 512, float(truth[n - 1]) * factor, False)
            if step % 10 == 9:
                planned = curve.at(512)
                least = min(least, planned[23] / planned[0] / (truth[23] / truth[0]))
    assert least > 0.5


def test_many_outliers_keep_the_variances_positive() -> None:
    """An hour on a busy machine: times differ by a factor of three."""
    rng = np.random.default_rng(5)
    corrections = Corrections(GIVEN)
    corrections.covariance[0, 1] += 1e-6  # like rounding errors after an hour
    for _ in range(5_000):
        n = int(rng.choice([1, 1, 1, 2, 3, 4, 8, 13, 64]))
        corrections.learn(n, float(rng.uniform(0, 0.9)), float(rng.normal(0, 0.6)), int(rng.integers(1, 9)), False)
    assert np.isfinite(corrections.mean).all()
    covariance = corrections.covariance
    assert np.abs(covariance - covariance.T).max() < 1e-9
    assert np.linalg.eigvalsh(covariance).min() > 0


# ---- Curves that are shipped ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_curve_is_physical(name: str) -> None:
    assert_physical(load_curve(name))


@pytest.mark.parametrize("busy", [False, True])
def test_a_new_machine_gets_the_nearest_shape_of_its_backend(busy: bool) -> None:
    for name, backend in (("xeon-amx-0.5b-q8_0", "CPU"), ("cpu-2-cores-0.5b-q4_0", "CPU"), ("m1pro-13b-q4_0", "Metal")):
        row = load_curve(name).ms[0]
        timed = [(n, Timing(3.0 * row[n - 1], busy)) for n in (1, 1, 4, 8)]
        curve, chosen = estimated(timed, backend, 1e-4)
        assert chosen == name
        for n in SIZES:
            assert curve.expected(0)[n - 1] == pytest.approx(3.0 * row[n - 1], rel=0.15)
        assert not is_certain(curve, 0)
        assert curve.expected(4000)[0] > curve.expected(0)[0]


def test_an_unknown_gpu_without_valid_times_gets_a_curve() -> None:
    curve, name = estimated([], "SYCL", 1e-4)
    assert name in shipped()
    assert (curve.at(100) > 0).all()
    assert not is_certain(curve, 0)
    for _ in range(20):
        curve.observe(1, 0, 150.0)  # the first real steps
    assert curve.expected(0)[0] == pytest.approx(150.0, rel=0.05)


# ---- Speeds that were wrong ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("deviations", [GIVEN, ESTIMATED])
@given(
    st.sampled_from(shipped()),
    st.one_of(st.floats(1.001, 300.0), st.floats(1e-3, 1 / 70)),
    st.lists(st.sampled_from([2, 3, 4, 5, 8, 13, 20, 33, 64]), min_size=1, max_size=4),
    st.booleans(),
    st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_ten_batches_correct_a_wrong_speed(
    deviations: Deviations, name: str, beyond: float, sizes: list[int], often: bool, busy: bool
) -> None:
    """The batches are read each or all together.

    If a step of 64 tokens is up to 64 times too fast, its size may be the reason. So may it be if it is too slow by no
    more than the size is uncertain: 1.9 times (GIVEN), 3.13 times (ESTIMATED).
    """
    curve = load_curve(name)
    true = curve.expected(600)
    explained = math.exp(OUTLIER * (max(deviations.sizes) + math.hypot(STEP_ERROR, STEP_ERROR)))
    factor = explained * beyond if beyond > 1 else beyond
    wrong = CostCurve(curve.contexts, curve.ms * factor, deviations)
    for number in range(10):
        n = sizes[number % len(sizes)]
        wrong.observe(n, 600, float(true[n - 1]), busy)
        if often:
            wrong.expected(600)
    found = wrong.expected(600)
    for n in (1, *sizes):
        assert 0.5 < found[n - 1] / true[n - 1] < 2
    assert per_token(wrong, 600) < 2 * per_token(curve, 600) + 1e-3 * true[0]


def three_sizes(ratio: float) -> CostCurve:
    """Return the costs: 10 ms for one token, `ratio` times as much for 8, and 64 tokens in proportion."""
    return CostCurve.from_points([0], [1, 8, 64], [[10.0, 10.0 * ratio, 10.0 * (1 + 9 * (ratio - 1))]])


@pytest.mark.parametrize("spike", [0.001, 2000.0])
def test_fewer_than_three_spikes_change_no_speed(spike: float) -> None:
    curve = three_sizes(1.5)
    for number in range(40):
        curve.observe(8, 10, spike if number % 4 == 0 else 15.0)
        assert curve.expected(10)[0] == pytest.approx(10.0)
    for _ in range(FEWEST - 1):
        curve.observe(8, 10, spike)
        assert curve.expected(10)[0] == pytest.approx(10.0)


def test_where_plain_steps_are_told_they_alone_change_the_speed() -> None:
    """Batches of eight take more than eight single steps, on a machine that cannot be."""
    curve = three_sizes(1.5)
    for _ in range(20):
        for _ in range(FEWEST):
            curve.observe(8, 10, 200.0)
        curve.observe(1, 10, 10.0)
        assert curve.expected(10)[0] == pytest.approx(10.0)
    assert curve.expected(10)[7] == pytest.approx(80.0, rel=0.01)


def test_a_time_that_the_size_explains_is_learned_for_the_size() -> None:
    """Twice the expected time, and a little less than the expected time."""
    for ms in (30.0, 12.0):
        curve = three_sizes(1.5)
        for _ in range(20):
            curve.observe(8, 10, ms)
            assert curve.expected(10)[0] == pytest.approx(10.0, rel=0.01)
        assert curve.expected(10)[7] == pytest.approx(ms, rel=0.05)


def test_a_batch_as_quick_as_one_token_is_no_proof_within_the_noise() -> None:
    """On a flat curve half of the drafts are quicker than t(1) by accident."""
    curve = CostCurve.from_points([0], SIZES, [[10.0] * len(SIZES)])
    rng = np.random.default_rng(7)
    for _ in range(300):
        curve.observe(4, 10, 10.0 * math.exp(rng.normal(0, 0.04)))
        curve.expected(10)
    assert curve.expected(10)[0] == pytest.approx(10.0, rel=0.1)
