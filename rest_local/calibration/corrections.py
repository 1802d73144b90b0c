"""What real steps say about a cost table: a Kalman filter over a few logarithmic corrections.

Contract: times of batches go in, one factor for the machine's speed, one for each batch size and one for the cost of
attention come out, with their uncertainties. The state is (speed, one for each of KNOTS, attention at ATTENTION_KNOTS);
neighbouring sizes share what is learned about one of them. Nothing here knows the table itself: the caller says what it
expects of a batch and how much of that is attention. All values are natural logarithms, so 0.1 means about 10%.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

LARGEST = 64
KNOTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # batch sizes with a correction of their own; t(1) has the speed only
ATTENTION_KNOTS = (1, 8, 64)
N_STATES = 1 + len(KNOTS) + len(ATTENTION_KNOTS)
_SIZES = slice(1, 1 + len(KNOTS))
_ATTENTION = slice(1 + len(KNOTS), N_STATES)

STEP_ERROR = 0.05  # steps of one size differ by so much for other reasons than noise: trees, caches, rebuilt graphs
BUSY_ERROR = 1.0  # of a time that was taken while other processes ran: factors of 2 to 3 were seen with one per core
SPEED_DRIFT = 0.016  # per plain step; with STEP_ERROR a plain step then weighs about 0.2, as 0.15 did before
FORGETTING = 1 / 20_000  # per observation: a size that is never seen is uncertain again after some thousand steps
OUTLIER = 2.0  # standard deviations upwards beyond which a single time counts for little: noise only makes slower
OUTLIER_WEIGHT = 0.3
MOST_DOUBT, MOST = 2.0, 12.0  # of a correction, whatever a clock says: a factor of 7, and of 160 000
OUTLIER_DOUBT = 1.1  # factor of the variances: after some twenty in a row they are believed


@dataclass(frozen=True)
class Doubt:
    """Standard deviations of the corrections before anything was observed."""

    speed: float
    sizes: tuple[float, ...]  # by KNOTS
    attention: tuple[float, ...]  # by ATTENTION_KNOTS

    @classmethod
    def of(cls, speed: float, sizes: float, attention: float) -> Doubt:
        """The same for every size."""
        return cls(speed, (sizes,) * len(KNOTS), (attention,) * len(ATTENTION_KNOTS))

    def __post_init__(self) -> None:
        values = np.array([self.speed, *self.sizes, *self.attention])
        if values.shape != (N_STATES,) or not np.isfinite(values).all() or (values < 0).any() or (values > 10).any():
            raise ValueError("uncertainties are numbers from 0 to 10, one for each size")


GIVEN = Doubt.of(0.1, 0.25, 0.7)  # a table from elsewhere; also what FORGETTING goes back to
ESTIMATED = Doubt.of(0.2, 0.5, 1.0)  # the table of another machine


class Corrections:
    """The filter. `mean` [N_STATES], `noise`: relative spread of plain steps, as seen."""

    def __init__(self, doubt: Doubt) -> None:
        self.mean: Array = np.zeros(N_STATES)
        self._covariance = _covariance(doubt)
        self.noise = STEP_ERROR

    @property
    def doubt(self) -> Doubt:
        """Standard deviations now."""
        sd = [float(value) for value in np.sqrt(np.maximum(np.diag(self._covariance), 0.0))]
        return Doubt(sd[0], tuple(sd[_SIZES]), tuple(sd[_ATTENTION]))

    def factors(self) -> tuple[Array, Array]:
        """By size less one, [64] each: the factor of what a batch costs without attention, and of its attention."""
        return np.exp(_FEATURES @ self.mean), np.exp(self.mean[0] + _ATTENTION_FEATURES @ self.mean)

    def factor(self, n: int) -> tuple[float, float]:
        """Those of n tokens."""
        speed = float(self.mean[0])
        own = float(_FEATURES[n - 1] @ self.mean)
        return math.exp(own), math.exp(speed + float(_ATTENTION_FEATURES[n - 1] @ self.mean))

    @property
    def doubts_sizes(self) -> bool:
        """Whether a size is less certain than those of a table from elsewhere."""
        return bool(self._covariance.diagonal()[_SIZES].max() > GIVEN.sizes[0] ** 2)

    def ratio_sd(self, share: Array) -> Array:
        """Standard deviation of log t(n)/t(1) by size less one, [64]; `share` [64]: of attention in each time."""
        rows = _rows(share)
        rows -= rows[0]
        return np.asarray(np.sqrt(np.maximum(((rows @ self._covariance) * rows).sum(axis=1), 0.0)))

    def learn(self, n: int, share: float, difference: float, count: int, busy: bool) -> None:
        """`difference`: log of a time over what is expected now, the median of `count` steps of n tokens, of which
        attention is expected to take `share`. A time from a busy machine moves the means, with caution, and makes
        nothing more certain.
        """
        row = _FEATURES[n - 1] * (1.0 - share) + (_SPEED + _ATTENTION_FEATURES[n - 1]) * share
        covariance, cautious = self._covariance, busy and n > 1
        covariance += (
            covariance.T.copy()
        )  # observations shrink the symmetric part alone: rounding errors would grow with
        covariance *= 0.5  # every doubt until a variance is negative
        covariance += min(1.0, FORGETTING * count) * (_GIVEN - covariance)
        covariance[0, 0] += SPEED_DRIFT**2 * count
        error = self.noise**2 / count + STEP_ERROR**2 + (BUSY_ERROR**2 if cautious else 0.0)
        along = covariance @ row
        variance = float(row @ along) + error
        surprise = abs(difference) / (OUTLIER * variance**0.5)
        outlier = n > 1 and count < 3 and difference > 0 and surprise > 1
        limit = OUTLIER_WEIGHT * OUTLIER * variance**0.5
        if surprise > 1 and not cautious:
            self._doubt_more(n, share, difference, OUTLIER_DOUBT if outlier else min(surprise, 4.0) ** 2)
            along = covariance @ row
            variance = float(row @ along) + error
        gain = along / variance
        if n > 1:
            gain[0] = 0.0  # plain steps alone tell the speed: a dear draft does not make the machine slow
        if not outlier:
            limit = 4 * OUTLIER * variance**0.5
        self.mean = np.clip(self.mean + gain * min(max(difference, -limit), limit), -MOST, MOST)
        if not outlier and not cautious:  # as for any gain, not the best one only
            mixed = np.outer(gain, along)
            covariance -= mixed + mixed.T - variance * np.outer(gain, gain)

    def _doubt_more(self, n: int, share: float, difference: float, factor: float) -> None:
        """A time that the uncertainty does not explain: the uncertainty was too small, of the speed for plain steps."""
        if n == 1:
            self._covariance[0, 0] += (difference * (1.0 - share)) ** 2
            self._covariance[_ATTENTION, _ATTENTION] *= 1.0 + (factor - 1.0) * share
        else:
            self._covariance[1:, :] *= factor**0.5
            self._covariance[:, 1:] *= factor**0.5
        scale = np.minimum(1.0, MOST_DOUBT / np.sqrt(np.maximum(np.diag(self._covariance), 1e-12)))
        self._covariance *= scale[:, None] * scale[None, :]

    def learn_noise(self, spread: float) -> None:
        """`spread`: relative standard deviation among plain steps that followed one another."""
        self.noise += 0.1 * (min(max(spread, 0.0), 1.0) - self.noise)


def _hats(knots: tuple[int, ...]) -> Array:
    """[64, knots]: by size less one, how far each knot's correction applies; linear in the logarithm of the size."""
    at = np.log2(np.arange(1, LARGEST + 1))
    return np.stack([np.interp(at, np.log2(knots), unit) for unit in np.eye(len(knots))], axis=1)


def _correlation(knots: tuple[int, ...], common: float, reach: float) -> Array:
    distance = np.abs(np.subtract.outer(np.log2(knots), np.log2(knots)))
    return np.asarray(common + (1.0 - common) * np.exp(-distance / reach))


def _covariance(doubt: Doubt) -> Array:
    sd = np.array([doubt.speed, *doubt.sizes, *doubt.attention])
    return np.asarray(sd[:, None] * _CORRELATION * sd[None, :])


def _rows(share: Array) -> Array:
    """The derivative of log t by the states, [64, N_STATES], where attention takes `share` [64]."""
    rows = _FEATURES * (1.0 - share)[:, None] + (_SPEED + _ATTENTION_FEATURES) * share[:, None]
    return np.asarray(rows)


_SPEED = np.eye(N_STATES)[0]
_FEATURES = np.zeros((LARGEST, N_STATES))  # of what a batch costs without attention
_FEATURES[:, 0] = 1.0
_FEATURES[1:, _SIZES] = _hats(KNOTS)[1:]
_ATTENTION_FEATURES = np.zeros((LARGEST, N_STATES))
_ATTENTION_FEATURES[:, _ATTENTION] = _hats(ATTENTION_KNOTS)
_CORRELATION = np.eye(N_STATES)
# Of 0.4 to 0.7 in common and a reach of 1 and 2 doublings, 300 tokens heal a wrong table best with these.
_CORRELATION[_SIZES, _SIZES] = _correlation(KNOTS, 0.6, 2.0)
_CORRELATION[_ATTENTION, _ATTENTION] = _correlation(ATTENTION_KNOTS, 0.5, 3.0)
_GIVEN = _covariance(GIVEN)
