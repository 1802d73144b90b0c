"""Measure a cost curve through a probe: a few steps before the first token, or all sizes at several lengths.

Contract: a probe that times one batch goes in, times with how far they can be trusted come out. Other processes make
single times too long by any factor, a suspended machine too, and a clock that is set back makes them short or negative:
everything here is a low quartile of interleaved rounds. Bounded by counts, not by a clock. Knows nothing about
llama.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rest_local.calibration.corrections import ATTENTION_KNOTS, KNOTS, LARGEST, Doubt
from rest_local.calibration.cost import SIZES, CostCurve, isotonic

ROUNDS = 5
MOST_ROUNDS = 15  # where they disagree
QUIET = 0.1  # spread of the rounds up to which a measurement is final
QUARTILE = 0.25
STEP_DOUBT = 0.08  # what a loop of batches cannot tell of a step: what ran before it, and how cold caches are


class Timing(NamedTuple):
    """One batch: milliseconds, and whether other processes took part of the machine."""

    ms: float
    busy: bool = False

    @property
    def valid(self) -> bool:
        """Whether a clock can have measured it."""
        return math.isfinite(self.ms) and self.ms > 0


Probe = Callable[[int, int], Timing]  # (tokens in the batch, tokens in the context)
Progress = Callable[[int, int], None]  # batches done, and of how many; the second can grow


@dataclass
class Measured:
    """`complete`: every size at every length was timed, in rounds that agree, on a machine that did nothing else.
    `noise`: relative spread of the rounds, of a typical size. `busy`: share of the batches that other processes
    disturbed.
    """

    curve: CostCurve
    complete: bool
    noise: float
    busy: float

    def teach(self, curve: CostCurve) -> None:
        """Let another curve learn these times, with caution where others disturbed them."""
        for row in self.curve.table():
            curve.observe(int(row["n"]), int(row["n_ctx"]), row["ms"], busy=self.busy > QUIET or self.noise > QUIET)


def quick(probe: Probe, n_ctx: int, largest: int = LARGEST) -> list[tuple[int, Timing]]:
    """The first steps on a machine, of 1, 4 and 8 tokens: at most 15 plain steps altogether, the first of which, which
    also builds graphs and reads weights from the disk, is not counted in. What no clock can have measured is left out.
    On a busy machine, where all threads together were seen to take 30 times as long, it ends with the first plain step.
    """
    probe(1, n_ctx)
    timed = [(1, probe(1, n_ctx))]
    if not timed[0][1].busy:
        timed += [(n, probe(n, n_ctx)) for n in (1, 4, 8) if n <= largest]
    return [(n, timing) for n, timing in timed if timing.valid]


def measure(
    probe: Probe,
    contexts: Sequence[int],
    *,
    largest: int = LARGEST,
    rounds: int = ROUNDS,
    most_rounds: int = MOST_ROUNDS,
    progress: Progress | None = None,
) -> Measured:
    """Time all of SIZES up to `largest` at each length, in interleaved rounds; again where the rounds disagree.

    At most `most_rounds` x sizes x lengths batches. Raises ValueError where a size was never timed in earnest.
    """
    sizes = [n for n in SIZES if n <= largest]
    done, disturbed, rows, spreads = 0, 0, list[NDArray[np.float64]](), list[float]()
    total = rounds * len(sizes) * len(contexts)
    for n_ctx in contexts:
        probe(1, n_ctx)  # fills the cells
        samples: list[list[float]] = [[] for _ in sizes]
        for number in range(most_rounds):
            wanted = [i for i, times in enumerate(samples) if number < rounds or _spread(times) > QUIET]
            total += len(wanted) if number >= rounds else 0
            for i in wanted if number % 2 == 0 else reversed(wanted):
                timing = probe(sizes[i], n_ctx)
                disturbed += timing.busy
                if timing.valid:
                    samples[i].append(timing.ms)
                done += 1
                if progress:
                    progress(done, total)
        if not all(samples):
            raise ValueError("a batch could not be timed; does the clock of this machine stand still?")
        rows.append(np.array([float(np.quantile(times, QUARTILE)) for times in samples]))
        spreads += [_spread(times) for times in samples]
    noise, busy = float(np.median(spreads)), disturbed / max(done, 1)
    curve = fitted(contexts, sizes, rows, max(noise, busy))
    return Measured(curve, max(spreads) <= QUIET and busy <= QUIET and largest == LARGEST, noise, busy)


def fitted(
    contexts: Sequence[int], sizes: Sequence[int], rows: Sequence[NDArray[np.float64]], noise: float
) -> CostCurve:
    """The curve of these times, `rows[c][i]` of `sizes[i]` tokens at `contexts[c]`: a table over the sizes at the first
    length, and attention that grows in proportion to the context, by size, fitted to all lengths.
    """
    times = np.stack([isotonic(row) for row in rows])
    doubt = max(STEP_DOUBT, noise)
    if len(contexts) == 1:
        certain = Doubt(doubt, (doubt,) * len(KNOTS), (0.7,) * len(ATTENTION_KNOTS))
        return _of(contexts, sizes, times, certain, noise)
    further = np.array(contexts, np.float64)[1:] - contexts[0]
    weight = further / times[1:].T  # errors are relative, so each length counts by the inverse of its time
    slope = isotonic(np.maximum(((times[1:] - times[0]).T / times[1:].T * weight).sum(1) / (weight**2).sum(1), 0.0))
    table = np.stack([times[0], times[0] + further[-1] * slope])
    certain = Doubt(doubt, (doubt,) * len(KNOTS), (2 * doubt,) * len(ATTENTION_KNOTS))
    return _of([contexts[0], contexts[-1]], sizes, table, certain, noise)


def _of(
    contexts: Sequence[int], sizes: Sequence[int], ms: NDArray[np.float64], doubt: Doubt, noise: float
) -> CostCurve:
    curve = CostCurve.from_points(contexts, sizes, ms.tolist(), doubt)
    curve.noise = min(noise, 1.0)
    return curve


def _spread(times: Sequence[float]) -> float:
    """How far rounds are apart below their middle. Above it is what disturbs a batch, and does no harm there."""
    if not times:
        return 1.0
    low, middle = np.quantile(times, [QUARTILE / 2, 0.5])
    return float(middle / low - 1.0)
