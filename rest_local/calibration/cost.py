"""Keep the cost curve: the time of one `llama_decode` of n tokens at a context length, in milliseconds.

- It is a table of context lengths x batch sizes. Every real step corrects it: `Corrections`, a Kalman filter, gives
  factors for the machine's speed, for each batch size and for the cost of attention, with standard deviations.
- It is stored as JSON with the covariance of its corrections.
- It differs by machine, model and settings, so it is measured.
- It is always physical: more tokens never cost less, n tokens never cost more than n single steps, and attention grows
  linearly with the context beyond the last length of the table.

The module knows nothing about llama.cpp.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rest_local.retrieval.rows import MAX_DEPTH

Array = NDArray[np.float64]

LARGEST = MAX_DEPTH
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # the measured batch sizes; kernels change between them
KNOTS = SIZES[1:]  # each has its own correction; t(1) has only the speed
ATTENTION_KNOTS = (1, 8, 64)
N_STATES = len(SIZES) + len(ATTENTION_KNOTS)
COUNTS = np.arange(1, LARGEST + 1)
_SIZES = slice(1, len(SIZES))
_ATTENTION = slice(len(SIZES), N_STATES)

STEP_ERROR = 0.05  # difference between steps of one size for other reasons than noise: trees, caches, rebuilt graphs
BUSY_ERROR = 1.0  # error of a time taken while other processes ran: factors of 2 to 3 were seen with one per core
SPEED_DRIFT = 0.016  # per plain step; with STEP_ERROR a plain step then has a weight of about 0.2
FORGETTING = 1 / 20_000  # per observation: a size that never occurs is uncertain again after some thousand steps
OUTLIER = 2.0  # noise does not explain a time beyond so many standard deviations; four times as many count at most
LIMIT = 10.0  # largest correction and deviation, for any clock


@dataclass(frozen=True)
class Deviations:
    """The standard deviations of corrections, natural logarithms from 0 to LIMIT. Raises ValueError for others."""

    speed: float
    sizes: tuple[float, ...]  # one for each of KNOTS
    attention: tuple[float, ...]  # one for each of ATTENTION_KNOTS

    @classmethod
    def of(cls, speed: float, sizes: float, attention: float) -> Deviations:
        """Make the same deviation for every size."""
        return cls(speed, (sizes,) * len(KNOTS), (attention,) * len(ATTENTION_KNOTS))

    def __post_init__(self) -> None:
        values = np.array([self.speed, *self.sizes, *self.attention])
        if values.shape != (N_STATES,) or not np.isfinite(values).all() or (values < 0).any() or (values > LIMIT).any():
            raise ValueError(f"standard deviations are numbers from 0 to {LIMIT:g}, one for each size")


GIVEN = Deviations.of(0.1, 0.25, 0.7)  # a table from a file has these, and FORGETTING returns to them
ESTIMATED = Deviations.of(0.2, 0.5, 1.0)  # another machine's table has these


class Corrections:
    """The corrections of a cost table, learned from real steps by a Kalman filter.

    The state is (speed, one value for each of KNOTS, one for each of ATTENTION_KNOTS), in natural logarithms, so 0.1 is
    about 10%: `mean`, float64 [N_STATES], with `covariance`, float64 [N_STATES, N_STATES], which begins with `known`.
    Neighbouring sizes share what is learned about one of them. The caller states the expected time of a batch and the
    share of attention in it. `noise` is the measured relative spread of plain steps.
    """

    def __init__(self, known: Deviations | Array) -> None:
        self.mean: Array = np.zeros(N_STATES)
        self.covariance = _covariance(known) if isinstance(known, Deviations) else known.copy()
        self.noise = STEP_ERROR

    def factors(self) -> tuple[Array, Array]:
        """Return the factors of the cost without attention and of attention, [64] each, by the size less one."""
        return np.exp(_FEATURES @ self.mean), np.exp(_ATTENTION_FEATURES @ self.mean)

    def factor(self, n: int) -> tuple[float, float]:
        """Return the two factors of a batch of n tokens."""
        own, attention = float(_FEATURES[n - 1] @ self.mean), float(_ATTENTION_FEATURES[n - 1] @ self.mean)
        return math.exp(own), math.exp(attention)

    def ratio_sd(self, share: Array) -> Array:
        """Return the standard deviation of log t(n)/t(1), [64], for a `share` [64] of attention in t(n)."""
        rows = _rows(share)
        rows -= rows[0]
        return np.asarray(np.sqrt(np.maximum(((rows @ self.covariance) * rows).sum(axis=1), 0.0)))

    def plain_sd(self, share: float) -> float:
        """Return the standard deviation of log t(1) for a `share` of attention in it."""
        row = _FEATURES[0] * (1.0 - share) + _ATTENTION_FEATURES[0] * share
        return math.sqrt(max(float(row @ self.covariance @ row), 0.0))

    def learn(self, n: int, share: float, difference: float, count: int, busy: bool) -> None:
        """Update the state with the median time of `count` steps of n tokens. `difference` is the log of that time over
        the expected time, `share` the expected share of attention. A time from a busy machine moves the means with a
        small weight and reduces no deviation.
        """
        row = _FEATURES[n - 1] * (1.0 - share) + _ATTENTION_FEATURES[n - 1] * share
        covariance, cautious = self.covariance, busy and n > 1
        # Keep it symmetric: observations shrink only the symmetric part, so rounding errors would grow with every
        # widening until a variance is negative.
        covariance += covariance.T.copy()
        covariance *= 0.5
        covariance += min(1.0, FORGETTING * count) * (_GIVEN - covariance)
        covariance[0, 0] += SPEED_DRIFT**2 * count
        error = self.noise**2 / count + STEP_ERROR**2 + (BUSY_ERROR**2 if cautious else 0.0)
        along = covariance @ row
        variance = float(row @ along) + error
        if n == 1 and (surprise := abs(difference) / (OUTLIER * variance**0.5)) > 1:
            self._widen(share, difference, min(surprise, 4.0) ** 2)
            along = covariance @ row
            variance = float(row @ along) + error
        gain = along / variance
        if n > 1:
            gain[0] = 0.0  # Only plain steps change the speed: an expensive draft does not mean a slow machine.
        limit = 4 * OUTLIER * variance**0.5
        mean = self.mean + gain * min(max(difference, -limit), limit)
        self.mean = np.minimum(np.maximum(mean, -LIMIT), LIMIT)
        if not cautious:  # This form is right for any gain, not only for the optimal one.
            column = gain[:, None]
            mixed = column * along
            covariance -= mixed + mixed.T - variance * (column * gain)

    def _widen(self, share: float, difference: float, factor: float) -> None:
        """Widen the deviations of the speed and of attention after a plain step whose time they do not explain. Those
        of the sizes stay: on a machine whose speed comes and goes, every draft after a change would widen them, until a
        size that was measured often is tried as if nothing were known of it.
        """
        self.covariance[0, 0] += (difference * (1.0 - share)) ** 2
        self.covariance[_ATTENTION, _ATTENTION] *= 1.0 + (factor - 1.0) * share
        scale = np.minimum(1.0, LIMIT / np.sqrt(np.maximum(np.diag(self.covariance), 1e-12)))
        self.covariance *= scale[:, None] * scale[None, :]

    def learn_noise(self, spread: float) -> None:
        """Smooth `noise` towards `spread`, the relative standard deviation among consecutive plain steps."""
        self.noise += 0.1 * (min(max(spread, 0.0), 1.0) - self.noise)


def _hats(knots: tuple[int, ...]) -> Array:
    """Return each knot's weight by size less one, [64, knots]; linear in the logarithm of the size."""
    at = np.log2(COUNTS)
    return np.stack([np.interp(at, np.log2(knots), unit) for unit in np.eye(len(knots))], axis=1)


def _correlation(knots: tuple[int, ...], common: float, reach: float) -> Array:
    distance = np.abs(np.subtract.outer(np.log2(knots), np.log2(knots)))
    return np.asarray(common + (1.0 - common) * np.exp(-distance / reach))


def _covariance(deviations: Deviations) -> Array:
    sd = np.array([deviations.speed, *deviations.sizes, *deviations.attention])
    return np.asarray(sd[:, None] * _CORRELATION * sd[None, :])


def _rows(share: Array) -> Array:
    """Return the derivative of log t by the states, [64, N_STATES], for a `share` [64] of attention."""
    rows = _FEATURES * (1.0 - share)[:, None] + _ATTENTION_FEATURES * share[:, None]
    return np.asarray(rows)


# The weight of each state in the logarithm of the cost without attention, and of attention; the speed counts in both.
_FEATURES, _ATTENTION_FEATURES = np.zeros((LARGEST, N_STATES)), np.zeros((LARGEST, N_STATES))
_FEATURES[:, 0] = _ATTENTION_FEATURES[:, 0] = 1.0
_FEATURES[1:, _SIZES] = _hats(KNOTS)[1:]
_ATTENTION_FEATURES[:, _ATTENTION] = _hats(ATTENTION_KNOTS)
_CORRELATION = np.eye(N_STATES)
# Among common shares of 0.4 to 0.7 and reaches of 1 and 2 doublings, these correct a wrong table best in 300 tokens.
_CORRELATION[_SIZES, _SIZES] = _correlation(KNOTS, 0.6, 2.0)
_CORRELATION[_ATTENTION, _ATTENTION] = _correlation(ATTENTION_KNOTS, 0.5, 3.0)
_GIVEN = _covariance(GIVEN)

CERTAIN = 0.15  # nothing is measured further up to this standard deviation of log t(n)/t(1), or spread of rounds
MAX_QUEUED = 32  # observations between updates; the filter is linear, so a large error takes several updates
FEWEST = 3  # Fewer slow batches may be spikes; these show another speed of the machine.

# (milliseconds of the steps since the last call, their number) -> True if other processes took CPU time
BusyNow = Callable[[float, int], bool]


class Lines(NamedTuple):
    """Times of n = 1..64 tokens at some context lengths, and what each further token of context adds to them, [64]."""

    contexts: list[int]
    ms: Array
    slope: Array

    @classmethod
    def of(cls, contexts: list[int], ms: Array) -> Lines:
        """Make lines that go on beyond the last length as they came there."""
        if len(contexts) < 2:
            return cls(contexts, ms, np.zeros(LARGEST))
        return cls(contexts, ms, physical(np.maximum(ms[-1] - ms[-2], 0.0) / (contexts[-1] - contexts[-2])))

    def at(self, n_ctx: int) -> Array:
        """Return the times at a context length, interpolated or extrapolated. Sums of physical rows are physical."""
        contexts, ms = self.contexts, self.ms
        if n_ctx <= contexts[0]:
            return np.array(ms[0])
        if n_ctx >= contexts[-1]:
            return np.asarray(ms[-1] + (n_ctx - contexts[-1]) * self.slope)
        high = bisect_left(contexts, n_ctx)
        weight = (n_ctx - contexts[high - 1]) / (contexts[high] - contexts[high - 1])
        return np.asarray(ms[high - 1] + weight * (ms[high] - ms[high - 1]))


class CostCurve:
    """A cost curve: `ms[c, n - 1]` is the cost of n = 1..64 tokens at the length `contexts[c]`, float64 [contexts, 64].

    If times fall with n or with the context, the lower of the two is taken, and t(n) is at most n t(1). `deviations`
    tell how certain the table is, or are the covariance of what is still unknown of it. `busy_now` judges the steps
    that are observed.
    """

    def __init__(
        self,
        contexts: Sequence[int],
        ms: NDArray[np.float64],
        deviations: Deviations | Array = GIVEN,
        busy_now: BusyNow | None = None,
    ) -> None:
        self.contexts = list(contexts)
        self.busy_now = busy_now
        self._table = np.maximum.accumulate(physical(np.asarray(ms, np.float64)), axis=0)
        self.corrections = Corrections(deviations)
        self._queue: list[tuple[int, int, float, bool]] = []
        self.plain_steps = 0  # counts those that it has learned from
        self._expected: Lines | None = None  # None means that the corrections have changed.
        self._refreshed()

    @classmethod
    def from_points(
        cls,
        contexts: Sequence[int],
        sizes: Sequence[int],
        ms: Sequence[Sequence[float]],
        deviations: Deviations = GIVEN,
    ) -> CostCurve:
        """Make a curve that is linear between the measured sizes and proportional to n beyond the largest."""
        return cls(contexts, table_of(sizes, ms), deviations)

    def copy(self) -> CostCurve:
        """Return an independent curve with the present times and covariance."""
        return CostCurve(self.contexts, self.ms.copy(), self.covariance, self.busy_now)

    @property
    def ms(self) -> NDArray[np.float64]:
        """Return the most likely times with corrections, float64 [contexts, 64]. Callers must not write to it."""
        return self._current().ms

    @property
    def covariance(self) -> Array:
        """Return that of the corrections, float64 [N_STATES, N_STATES]. Callers must not write to it."""
        self._update()
        return self.corrections.covariance

    def at(self, n_ctx: int) -> NDArray[np.float64]:
        """Return optimistic milliseconds of n = 1..64 tokens for planning, float64 [64]. A size with few observations
        on this machine counts a standard deviation less, so that it is tried.
        """
        self._current()
        return self._optimistic.at(n_ctx)

    def expected(self, n_ctx: int) -> NDArray[np.float64]:
        """Return the most likely milliseconds of n = 1..64 tokens, float64 [64]."""
        return self._current().at(n_ctx)

    def uncertainty(self, n_ctx: int) -> NDArray[np.float64]:
        """Return the standard deviation of log t(n)/t(1) for n = 1..64, float64 [64]: 0.1 is about 10%."""
        return self.corrections.ratio_sd(self._attention_share(self._current(), n_ctx))

    def plain_sd(self, n_ctx: int) -> float:
        """Return the standard deviation of log t(1), from the machine's speed and attention at this length."""
        return self.corrections.plain_sd(float(self._attention_share(self._current(), n_ctx)[0]))

    def observe(self, n: int, n_ctx: int, ms: float, busy: bool | None = None) -> None:
        """Learn from a real step of n tokens that took `ms`. Takes 1 us, and 4 us if `busy_now` is asked; the update
        happens when the curve is next read.

        `busy` tells whether other processes used the machine; None asks `busy_now`. A time that is not finite or not
        positive is dropped.
        """
        self.observe_all([(n, n_ctx, ms)], busy)

    def observe_all(self, steps: Iterable[tuple[int, int, float]], busy: bool | None = None) -> None:
        """Learn from steps (n, n_ctx, ms) that ended just now, as `observe` does. `busy_now` judges them together."""
        known = [step for step in steps if 1 <= step[0] <= LARGEST and 0 < step[2] < math.inf]
        if busy is None:
            busy = self.busy_now is not None and self.busy_now(sum(ms for _, _, ms in known), len(known))
        for step in known:
            self._queue.append((*step, busy))
            if len(self._queue) >= MAX_QUEUED:
                self._update()

    # Learning

    def _current(self) -> Lines:
        """Learn what is queued, and return the most likely times."""
        self._update()
        return self._refreshed()

    def _update(self) -> None:
        """Learn from the queued observations: steps of one size, length and load together, by their median. The lines
        are computed when they are next read.
        """
        if not self._queue or not self._learn_speed():
            return
        queue, self._queue = self._queue, []
        groups: dict[tuple[int, int, bool], list[tuple[int, float]]] = {}  # (size, context / 256, busy) -> steps
        for n, n_ctx, ms, busy in queue:
            groups.setdefault((n, n_ctx >> 8, busy), []).append((n_ctx, math.log(ms)))
        for (n, _, busy), seen in sorted(groups.items()):  # plain steps first: they set the speed
            n_ctx = seen[len(seen) // 2][0]
            self.plain_steps += len(seen) if n == 1 else 0
            logs = sorted(value for _, value in seen)
            middle = logs[len(logs) // 2]
            base, attention = self._parts(n, n_ctx)
            expected = base + attention
            self.corrections.learn(n, attention / expected, middle - math.log(expected), len(seen), busy)
            if n == 1 and len(seen) > 3:
                self.corrections.learn_noise(1.48 * sorted(abs(value - middle) for value in logs)[len(logs) // 2])
        self._expected = None

    def _learn_speed(self) -> bool:
        """Correct the speed by the queued batches if none is a plain step and most take a time that no correction of
        their size explains. Return False if they are too few to tell that from a spike, and have to wait for the next.
        """
        if any(n == 1 for n, *_ in self._queue):
            return True
        lines = self._refreshed()
        noise = OUTLIER * math.hypot(self.corrections.noise, STEP_ERROR)
        lengths = {n_ctx >> 8: n_ctx for _, n_ctx, *_ in self._queue}
        logs = {at: np.log(lines.at(n_ctx)).tolist() for at, n_ctx in lengths.items()}
        off = [math.log(ms) - logs[n_ctx >> 8][n - 1] for n, n_ctx, ms, _ in self._queue]
        if abs(sorted(off)[len(off) // 2]) <= noise:  # the usual case
            return True
        # A correction of the size explains a time down to `least`. A time up to n t(1) is always explained: then drafts
        # cease, and a plain step tells the speed.
        least: dict[int, list[float]] = {}
        for at, n_ctx in lengths.items():
            sd = self.corrections.ratio_sd(self._attention_share(lines, n_ctx)).tolist()
            least[at] = [max(middle - OUTLIER * each, logs[at][0]) for middle, each in zip(logs[at], sd, strict=True)]
        found: list[tuple[float, float, int]] = []  # (difference that no size explains, whole difference, length)
        for difference, (n, n_ctx, ms, _) in zip(off, self._queue, strict=True):
            seen, at = math.log(ms), n_ctx >> 8
            explained = min(max(seen, least[at][n - 1]), logs[at][0] + math.log(n))
            found.append((seen - explained, difference, n_ctx))
        excess, difference, n_ctx = sorted(found)[len(found) // 2]
        if abs(excess) <= noise:
            return True
        if len(found) < FEWEST:
            return False
        base, attention = self._parts(1, n_ctx)
        self.corrections.learn(1, attention / (base + attention), difference, len(found), False)
        return True

    def _parts(self, n: int, n_ctx: int) -> tuple[float, float]:
        """Return the expected time of n tokens in two parts: up to the first length, and attention beyond it."""
        own, attention = self.corrections.factor(n)
        first, contexts = float(self._table[0, n - 1]), self.contexts
        if n_ctx <= contexts[0] or len(contexts) == 1:
            return first * own, 0.0
        high = min(bisect_left(contexts, n_ctx), len(contexts) - 1)
        begin, end = float(self._table[high - 1, n - 1]), float(self._table[high, n - 1])
        further = begin + (end - begin) * (n_ctx - contexts[high - 1]) / (contexts[high] - contexts[high - 1])
        return first * own, (further - first) * attention

    def _refreshed(self) -> Lines:
        """Return the most likely times, computed from the table and the corrections if these have changed. That takes
        about 0.1 ms.
        """
        if self._expected is not None:
            return self._expected
        base, attention = self.corrections.factors()
        rows = self._table[0] * base + (self._table - self._table[0]) * attention
        falls = (rows[:, 1:] < rows[:, :-1]).any(axis=1).tolist()
        uncertain = bool(self.corrections.covariance.diagonal()[_SIZES].max() > GIVEN.sizes[0] ** 2)
        sd = self.corrections.ratio_sd(_NO_ATTENTION) if uncertain or any(falls) else _NO_ATTENTION
        if any(falls):  # isotonic regression weighted by certainty
            weights = 1.0 / np.maximum(sd, 0.01) ** 2  # t(1) has a deviation of 0, and must not outweigh all others
            pooled = [isotonic(row, weights) if fall else row for row, fall in zip(rows, falls, strict=True)]
            rows = np.maximum.accumulate(pooled, axis=0)
        lines = self._expected = self._optimistic = Lines.of(self.contexts, physical(rows))
        if uncertain:
            excess = np.maximum(sd - GIVEN.sizes[0], 0.0)
            optimistic = np.maximum.accumulate(physical(lines.ms * np.exp(-excess)), axis=0)
            self._optimistic = Lines.of(self.contexts, optimistic)
        return lines

    def _attention_share(self, lines: Lines, n_ctx: int) -> NDArray[np.float64]:
        """Return the share [64] of each time that attention beyond the first length of the table takes."""
        base = self._table[0] * self.corrections.factors()[0]
        return np.asarray(np.clip(1.0 - base / lines.at(n_ctx), 0.0, 1.0))


def per_cell(curve: CostCurve, n: int) -> float:
    """Return the milliseconds that one more token in the KV cache adds to n tokens; 0 with one measured length."""
    contexts, ms = curve.contexts, curve.ms
    return float(ms[-1, n - 1] - ms[0, n - 1]) / (contexts[-1] - contexts[0]) if len(contexts) > 1 else 0.0


def per_token(curve: CostCurve, n_ctx: int) -> float:
    """Return the milliseconds that one more token adds to a large batch."""
    cost = curve.expected(n_ctx)
    return max(float(cost[-1] - cost[LARGEST // 2 - 1]) / (LARGEST - LARGEST // 2), 1e-6)


def is_certain(curve: CostCurve, n_ctx: int, sizes: Sequence[int] = SIZES) -> bool:
    """Return True if the times of these sizes at this length need no further measurement."""
    sd = curve.uncertainty(n_ctx)
    return bool(max(sd[n - 1] for n in sizes) <= CERTAIN)


def measured_rows(curve: CostCurve) -> list[dict[str, float]]:
    """Return rows {n_ctx, n, ms, ratio} at the measured sizes, for tables and JSON."""
    return [
        {"n_ctx": c, "n": n, "ms": round(float(row[n - 1]), 4), "ratio": round(float(row[n - 1] / row[0]), 3)}
        for c, row in zip(curve.contexts, curve.ms, strict=True)
        for n in SIZES
    ]


def to_dict(curve: CostCurve) -> dict[str, Any]:
    """Return the table and its covariance, for JSON.

    The covariance is kept whole: sizes that are correlated in a new table are not in a known one, and with the
    deviations alone each start would let a size that is measured often move, and make certain, one that was never
    measured.
    """
    ms, covariance = curve.ms.tolist(), curve.covariance.tolist()
    return {"contexts": curve.contexts, "ms": ms, "covariance": covariance, "noise": curve.corrections.noise}


def from_dict(data: Any) -> CostCurve:
    """Read what `to_dict` returned. Raises ValueError if it is not a curve or not physical."""
    try:
        ms, covariance = np.array(data["ms"], np.float64), np.array(data["covariance"], np.float64)
        contexts, noise = [int(c) for c in data["contexts"]], float(data["noise"])
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"not a cost curve: {error!r}") from error
    check_table(contexts, ms)
    _check_covariance(covariance)
    if not 0 <= noise <= 1:
        raise ValueError("not a cost curve: noise is a share of 1")
    curve = CostCurve(contexts, ms, covariance)
    if not np.allclose(curve.ms, ms, rtol=1e-3):
        raise ValueError("not a cost curve: times fall, or n tokens cost more than n single ones")
    curve.corrections.noise = noise
    return curve


def table_of(sizes: Sequence[int], ms: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    """Return the rows of `CostCurve.from_points` before they are made physical, float64 [contexts, 64]."""
    table = []
    for row in ms:
        line = np.interp(COUNTS, sizes, row)
        if sizes[-1] < LARGEST and len(sizes) > 1:
            line = np.where(sizes[-1] < COUNTS, row[-1] * COUNTS / sizes[-1], line)
        table.append(line)
    return np.array(table, np.float64)


def physical(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Make times of n = 1, 2, ... tokens along the last axis physical: no time is below that of one token, a size that
    costs more than a larger one costs as much as that (its batch is padded), and n tokens cost at most n single steps.
    """
    first = rows[..., :1]
    rows = np.minimum.accumulate(np.maximum(rows, first)[..., ::-1], axis=-1)[..., ::-1]
    return np.asarray(np.minimum(rows, first * COUNTS[: rows.shape[-1]]))


def isotonic(values: NDArray[np.float64], weights: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
    """Return the nearest sequence that never falls, by pooling adjacent violators to their weighted mean."""
    means: list[float] = []  # block means
    totals: list[float] = []  # their weights
    counts: list[int] = []
    for value, weight in zip(
        values.tolist(), (np.ones(len(values)) if weights is None else weights).tolist(), strict=True
    ):
        count = 1
        while means and means[-1] > value:
            before, total = means.pop(), totals.pop()
            value = (before * total + value * weight) / (total + weight)
            weight += total
            count += counts.pop()
        means.append(value)
        totals.append(weight)
        counts.append(count)
    return np.repeat(means, counts)


def check_table(contexts: Sequence[int], ms: NDArray[np.float64]) -> None:
    """Raise ValueError if this cannot be a table of times."""
    if ms.ndim != 2 or not contexts or ms.shape != (len(contexts), LARGEST):
        raise ValueError(f"not a cost curve: {len(contexts)} lengths and a table of shape {ms.shape}")
    if not np.isfinite(ms).all() or (ms <= 0).any():
        raise ValueError("not a cost curve: times are positive numbers")
    if contexts[0] < 0 or any(high <= low for low, high in itertools.pairwise(contexts)):
        raise ValueError("not a cost curve: lengths must rise")


def _check_covariance(matrix: Array) -> None:
    """Raise ValueError if this cannot be the covariance of corrections."""
    if matrix.shape != (N_STATES, N_STATES) or not np.isfinite(matrix).all():
        raise ValueError(f"not a cost curve: covariances are {N_STATES} x {N_STATES} numbers, not {matrix.shape}")
    if np.abs(matrix).max() > LIMIT**2 or not np.allclose(matrix, matrix.T) or np.linalg.eigvalsh(matrix)[0] < -1e-6:
        raise ValueError(f"not a cost curve: no covariances, or deviations above {LIMIT:g}")


_NO_ATTENTION = np.zeros(LARGEST)
