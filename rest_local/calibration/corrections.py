"""Corrections of a cost table, learned from real steps by a Kalman filter.

- Times of batches go in. Factors for the machine's speed, for each batch size and for the cost of attention come out,
  with their standard deviations.
- The state is (speed, one value for each of KNOTS, one for each of ATTENTION_KNOTS). Neighbouring sizes share what is
  learned about one of them.
- All values are natural logarithms, so 0.1 means about 10%.
- The module does not know the table: the caller states the expected time of a batch and the share of attention in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

LARGEST = 64
KNOTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # batch sizes with their own correction; t(1) has only the speed
ATTENTION_KNOTS = (1, 8, 64)
N_STATES = 1 + len(KNOTS) + len(ATTENTION_KNOTS)
_SIZES = slice(1, 1 + len(KNOTS))
_ATTENTION = slice(1 + len(KNOTS), N_STATES)

STEP_ERROR = 0.05  # difference between steps of one size for other reasons than noise: trees, caches, rebuilt graphs
BUSY_ERROR = 1.0  # error of a time taken while other processes ran: factors of 2 to 3 were seen with one per core
SPEED_DRIFT = 0.016  # per plain step; with STEP_ERROR a plain step then has a weight of about 0.2
FORGETTING = 1 / 20_000  # per observation: a size that never occurs is uncertain again after some thousand steps
OUTLIER = 2.0  # standard deviations above which a single time has little weight: noise only makes steps slower
OUTLIER_WEIGHT = 0.3
MAX_DEVIATION, MAX_CORRECTION = 2.0, 12.0  # limits for any clock: factors of 7 and of 160 000
OUTLIER_GROWTH = 1.1  # factor of the variances per outlier: about twenty outliers in a row are accepted


@dataclass(frozen=True)
class Deviations:
    """Standard deviations of the corrections, natural logarithms from 0 to 10. Raises ValueError for other values."""

    speed: float
    sizes: tuple[float, ...]  # by KNOTS
    attention: tuple[float, ...]  # by ATTENTION_KNOTS

    @classmethod
    def of(cls, speed: float, sizes: float, attention: float) -> Deviations:
        """The same deviation for every size."""
        return cls(speed, (sizes,) * len(KNOTS), (attention,) * len(ATTENTION_KNOTS))

    def __post_init__(self) -> None:
        values = np.array([self.speed, *self.sizes, *self.attention])
        if values.shape != (N_STATES,) or not np.isfinite(values).all() or (values < 0).any() or (values > 10).any():
            raise ValueError("standard deviations are numbers from 0 to 10, one for each size")


GIVEN = Deviations.of(0.1, 0.25, 0.7)  # of a table from a file; FORGETTING returns to these
ESTIMATED = Deviations.of(0.2, 0.5, 1.0)  # of the table of another machine


class Corrections:
    """The filter. `mean`: float64 [N_STATES]. `noise`: measured relative spread of plain steps."""

    def __init__(self, deviations: Deviations) -> None:
        self.mean: Array = np.zeros(N_STATES)
        self._covariance = _covariance(deviations)
        self.noise = STEP_ERROR

    @property
    def deviations(self) -> Deviations:
        """The present standard deviations."""
        sd = [float(value) for value in np.sqrt(np.maximum(np.diag(self._covariance), 0.0))]
        return Deviations(sd[0], tuple(sd[_SIZES]), tuple(sd[_ATTENTION]))

    def factors(self) -> tuple[Array, Array]:
        """The factors of the cost without attention and of attention, [64] each, indexed by the size less one."""
        return np.exp(_FEATURES @ self.mean), np.exp(self.mean[0] + _ATTENTION_FEATURES @ self.mean)

    def factor(self, n: int) -> tuple[float, float]:
        """The two factors of a batch of n tokens."""
        speed = float(self.mean[0])
        own = float(_FEATURES[n - 1] @ self.mean)
        return math.exp(own), math.exp(speed + float(_ATTENTION_FEATURES[n - 1] @ self.mean))

    @property
    def has_uncertain_sizes(self) -> bool:
        """Whether a size is less certain than in a table from a file (GIVEN)."""
        return bool(self._covariance.diagonal()[_SIZES].max() > GIVEN.sizes[0] ** 2)

    def ratio_sd(self, share: Array) -> Array:
        """Standard deviation of log t(n)/t(1), [64], by the size less one. `share` [64]: share of attention in t(n)."""
        rows = _rows(share)
        rows -= rows[0]
        return np.asarray(np.sqrt(np.maximum(((rows @ self._covariance) * rows).sum(axis=1), 0.0)))

    def plain_sd(self, share: float) -> float:
        """Standard deviation of log t(1), where attention takes `share` of it."""
        row = _FEATURES[0] * (1.0 - share) + (_SPEED + _ATTENTION_FEATURES[0]) * share
        return math.sqrt(max(float(row @ self._covariance @ row), 0.0))

    def learn(self, n: int, share: float, difference: float, count: int, busy: bool) -> None:
        """Update the state with the median time of `count` steps of n tokens. `difference`: log of that time over the
        expected time. `share`: expected share of attention. A time from a busy machine moves the means with a small
        weight and reduces no deviation.
        """
        row = _FEATURES[n - 1] * (1.0 - share) + (_SPEED + _ATTENTION_FEATURES[n - 1]) * share
        covariance, cautious = self._covariance, busy and n > 1
        # Keep it symmetric: observations shrink only the symmetric part, so rounding errors would grow with every
        # widening until a variance is negative.
        covariance += covariance.T.copy()
        covariance *= 0.5
        covariance += min(1.0, FORGETTING * count) * (_GIVEN - covariance)
        covariance[0, 0] += SPEED_DRIFT**2 * count
        error = self.noise**2 / count + STEP_ERROR**2 + (BUSY_ERROR**2 if cautious else 0.0)
        along = covariance @ row
        variance = float(row @ along) + error
        surprise = abs(difference) / (OUTLIER * variance**0.5)
        outlier = n > 1 and count < 3 and difference > 0 and surprise > 1
        limit = OUTLIER_WEIGHT * OUTLIER * variance**0.5
        if surprise > 1 and not cautious:
            self._widen(n, share, difference, OUTLIER_GROWTH if outlier else min(surprise, 4.0) ** 2)
            along = covariance @ row
            variance = float(row @ along) + error
        gain = along / variance
        if n > 1:
            gain[0] = 0.0  # only plain steps change the speed: an expensive draft does not mean a slow machine
        if not outlier:
            limit = 4 * OUTLIER * variance**0.5
        mean = self.mean + gain * min(max(difference, -limit), limit)
        self.mean = np.minimum(np.maximum(mean, -MAX_CORRECTION), MAX_CORRECTION)
        if not outlier and not cautious:  # the form that is right for any gain, not only for the optimal one
            column = gain[:, None]
            mixed = column * along
            covariance -= mixed + mixed.T - variance * (column * gain)

    def _widen(self, n: int, share: float, difference: float, factor: float) -> None:
        """Widen the deviations after a time that they do not explain: of the speed after a plain step, else of the
        sizes and attention.
        """
        if n == 1:
            self._covariance[0, 0] += (difference * (1.0 - share)) ** 2
            self._covariance[_ATTENTION, _ATTENTION] *= 1.0 + (factor - 1.0) * share
        else:
            self._covariance[1:, :] *= factor**0.5
            self._covariance[:, 1:] *= factor**0.5
        scale = np.minimum(1.0, MAX_DEVIATION / np.sqrt(np.maximum(np.diag(self._covariance), 1e-12)))
        self._covariance *= scale[:, None] * scale[None, :]

    def learn_noise(self, spread: float) -> None:
        """Smooth `noise` towards `spread`, the relative standard deviation among consecutive plain steps."""
        self.noise += 0.1 * (min(max(spread, 0.0), 1.0) - self.noise)


def _hats(knots: tuple[int, ...]) -> Array:
    """The weight of each knot's correction by size less one, [64, knots]; linear in the logarithm of the size."""
    at = np.log2(np.arange(1, LARGEST + 1))
    return np.stack([np.interp(at, np.log2(knots), unit) for unit in np.eye(len(knots))], axis=1)


def _correlation(knots: tuple[int, ...], common: float, reach: float) -> Array:
    distance = np.abs(np.subtract.outer(np.log2(knots), np.log2(knots)))
    return np.asarray(common + (1.0 - common) * np.exp(-distance / reach))


def _covariance(deviations: Deviations) -> Array:
    sd = np.array([deviations.speed, *deviations.sizes, *deviations.attention])
    return np.asarray(sd[:, None] * _CORRELATION * sd[None, :])


def _rows(share: Array) -> Array:
    """The derivative of log t by the states, [64, N_STATES], where attention takes `share` [64]."""
    rows = _FEATURES * (1.0 - share)[:, None] + (_SPEED + _ATTENTION_FEATURES) * share[:, None]
    return np.asarray(rows)


_SPEED = np.eye(N_STATES)[0]
_FEATURES = np.zeros((LARGEST, N_STATES))  # of the cost without attention
_FEATURES[:, 0] = 1.0
_FEATURES[1:, _SIZES] = _hats(KNOTS)[1:]
_ATTENTION_FEATURES = np.zeros((LARGEST, N_STATES))
_ATTENTION_FEATURES[:, _ATTENTION] = _hats(ATTENTION_KNOTS)
_CORRELATION = np.eye(N_STATES)
# Among common shares of 0.4 to 0.7 and reaches of 1 and 2 doublings, these correct a wrong table best in 300 tokens.
_CORRELATION[_SIZES, _SIZES] = _correlation(KNOTS, 0.6, 2.0)
_CORRELATION[_ATTENTION, _ATTENTION] = _correlation(ATTENTION_KNOTS, 0.5, 3.0)
_GIVEN = _covariance(GIVEN)
