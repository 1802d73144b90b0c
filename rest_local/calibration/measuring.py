"""Time batches on a backend, measure a cost curve from them, and explain it.

- `DecodeProbe` times batches on a backend without requests.
- `LoadMeter` detects other processes that use the machine: it compares the process's CPU time with the clock.
- `first_steps` times a few batches before the first token and compares their bits with plain steps; `measure` times
  all sizes at several context lengths.
- Other processes or a suspended machine make single times too long by any factor, and a clock that is set back makes
  them short or negative. So every time is a low quartile of interleaved rounds.
- Measurements are bounded by counts, not by a clock.

The module knows nothing about llama.cpp.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rest_local.calibration.cost import (
    ATTENTION_KNOTS,
    CERTAIN,
    KNOTS,
    LARGEST,
    SIZES,
    STEP_ERROR,
    CostCurve,
    Deviations,
    isotonic,
    measured_rows,
)
from rest_local.errors import DecodeFailed
from rest_local.kv_cache.backend import Backend, remove_tail

ROUNDS = 5  # There are three times as many if the first ones disagree.

# A machine is busy when threads wait this share of their time for a processor. With one other program each, it is half.
BUSY_DELAY = 0.25
PREEMPTIONS_PER_SECOND = 20.0  # The threads of a busy machine were preempted 110 to 250 times.


class Timing(NamedTuple):
    """The time of one batch in milliseconds, and whether other processes used the machine."""

    ms: float
    busy: bool = False

    @property
    def valid(self) -> bool:
        """Return True if a clock can measure such a time: finite and positive."""
        return math.isfinite(self.ms) and self.ms > 0


Probe = Callable[[int, int], Timing]  # (tokens in the batch, tokens in the context)
Progress = Callable[[int, int], None]  # (batches done, batches in all); the second number can grow


class LoadMeter:
    """A meter of other processes that use the machine. `threads` gives the number of threads that compute; 0 on a GPU,
    whose work takes no CPU time, so that no load can be detected. `known_busy` is another way to know that the machine
    is busy.
    """

    def __init__(self, threads: Callable[[], int], known_busy: Callable[[], bool] | None = None) -> None:
        self._threads, self._known_busy = threads, known_busy
        self._last = _usage()

    def start(self) -> None:
        self._last = _usage()

    def busy(self, ms: float, steps: int = 1) -> bool:
        """Return True if others used the machine since the last call. `steps` steps of the interval took `ms`."""
        last, self._last = self._last, _usage()
        wall, cpu, preempted = self._last[0] - last[0], self._last[1] - last[1], self._last[2] - last[2]
        if self._known_busy is not None and self._known_busy():
            return True
        threads = self._threads()
        if not threads or not 0 < wall < 1e-3 * (1.5 * ms + steps):  # The interval includes a pause.
            return False
        return cpu < (1 - BUSY_DELAY) * threads * wall and preempted > PREEMPTIONS_PER_SECOND * wall


def _usage() -> tuple[float, float, float]:
    """Return the clock and the process's CPU time in seconds, and the number of preemptions. Takes 1.5 us."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return time.perf_counter(), usage.ru_utime + usage.ru_stime, float(usage.ru_nivcsw)


class DecodeProbe:
    """A probe that times one decode of n tokens after `n_ctx` others. It fills the KV cache once per context length.

    A plain step precedes each decode, as in generation: llama.cpp keeps the graph of the last decode and builds a new
    one for another size (0.2 ms for the toy model). The cache is cleared at another length; the next user of the
    backend has to clear it too.
    """

    def __init__(self, backend: Backend, text: Sequence[int], meter: LoadMeter | None = None) -> None:
        self.backend = backend
        self._meter = meter
        self._text = np.resize(np.asarray(text, np.int32), max(backend.n_ctx, LARGEST))
        self._n_past = -1

    def __call__(self, n: int, n_ctx: int) -> Timing:
        """Time a decode after a plain step. Raises DecodeFailed."""
        if n > 1:
            self.alone(1, n_ctx)
        return self.alone(n, n_ctx)

    def alone(self, n: int, n_ctx: int) -> Timing:
        """Time a decode without a plain step before it. Raises DecodeFailed."""
        if self._n_past != n_ctx:
            self._fill(n_ctx)
        if self._meter:
            self._meter.start()
        begun = time.perf_counter()
        self._decode(n, n_ctx, 1)
        self.backend.logits(n)
        ms = 1e3 * (time.perf_counter() - begun)
        busy = self._meter is not None and self._meter.busy(ms)
        if not remove_tail(self.backend, n_ctx):
            self._n_past = -1
        return Timing(ms, busy)

    def _fill(self, n_ctx: int) -> None:
        self.backend.clear()
        for begin in range(0, n_ctx, self.backend.n_batch):
            self._decode(min(self.backend.n_batch, n_ctx - begin), begin, 0)
        self._n_past = n_ctx

    def _decode(self, n: int, begin: int, output: int) -> None:
        backend = self.backend
        backend.batch.fill(self._text[:n], np.arange(begin, begin + n), 0, backend.n_branches, output)
        if code := backend.decode():
            raise DecodeFailed(code, n)


@dataclass
class Measured:
    """A measured curve."""

    curve: CostCurve
    complete: bool  # every size was timed at every length, in rounds that agree, on a machine without other work
    noise: float  # relative spread of the rounds of a typical size
    busy: float  # share of the batches that other processes disturbed

    def teach(self, curve: CostCurve) -> None:
        """Let another curve learn these times, with a small weight if other processes disturbed them."""
        for row in measured_rows(self.curve):
            curve.observe(int(row["n"]), int(row["n_ctx"]), row["ms"], busy=self.busy > CERTAIN or self.noise > CERTAIN)


@dataclass(frozen=True)
class FirstSteps:
    """The times of the first batches on a machine, and the longest draft with the bits of plain steps."""

    # (tokens in a batch, time). The first plain step is left out, as it also builds graphs and reads weights from disk.
    timed: list[tuple[int, Timing]]
    longest: int  # the most drafted tokens of a batch in which every row had the bits of a plain step; 0 if none did


CHECKED = (2, 4, 8, 3, 16, 31)  # batch sizes in order: kernels change at powers of two, and some take odd rows apart
ALWAYS_CHECKED = 16  # A larger batch is checked only if FIRST_MS leaves time for it.
FIRST_MS = 1000.0


def first_steps(
    backend: Backend, text: Sequence[int], meter: LoadMeter | None = None, *, compare: bool = True
) -> FirstSteps:
    """Evaluate the beginning of `text` in plain steps and in batches, and time both. With `compare`, also compare the
    logits bit by bit, and end with the first batch if that differs already.

    Takes about 35 plain steps, or 80 if these take less than FIRST_MS together. Clears the KV cache before and after.
    Raises DecodeFailed.
    """
    most = min(backend.max_outputs, backend.n_batch, backend.n_ctx // 2, len(text))
    plain: list[NDArray[np.float32]] = []
    plain_times: list[Timing] = []
    timed: list[tuple[int, Timing]] = []
    same: dict[int, bool] = {}
    spent = 0.0

    def evaluate(begin: int, n: int) -> tuple[NDArray[np.float32], Timing]:
        nonlocal spent
        if meter:
            meter.start()
        begun = time.perf_counter()
        backend.batch.fill(text[begin : begin + n], np.arange(begin, begin + n), 0, backend.n_branches, 1)
        if code := backend.decode():
            raise DecodeFailed(code, n)
        rows = backend.logits(n)
        ms = 1e3 * (time.perf_counter() - begun)
        spent += ms
        return rows, Timing(ms, meter is not None and meter.busy(ms))

    def alone(n: int) -> None:
        backend.clear()
        plain.clear()
        for begin in range(n):
            row, timing = evaluate(begin, 1)
            plain.append(row[0].copy())
            if begin and timing.valid:
                plain_times.append(timing)

    def has_plain_bits(n: int) -> bool:
        if compare and len(plain) < n:
            alone(n)
        backend.clear()
        rows, timing = evaluate(0, n)
        if timing.valid:
            timed.append((n, timing))
        return all(np.array_equal(a.view(np.uint32), b.view(np.uint32)) for a, b in zip(plain, rows, strict=False))

    try:
        alone(min(most, 8))
        for n in (each for each in CHECKED if each <= most):
            if n <= ALWAYS_CHECKED or 4 * spent < FIRST_MS:
                same[n] = has_plain_bits(n)
                if compare and not same[n] and n == CHECKED[0]:
                    break
    finally:
        backend.clear()
    longest = 0
    for n in sorted(same):
        if not same[n]:
            break
        longest = n - 1
    if plain_times:
        plain_times.sort(key=lambda timing: timing.ms)
        timed.insert(0, (1, plain_times[len(plain_times) // 2]))
    return FirstSteps(timed, longest)


def measure(
    probe: Probe,
    contexts: Sequence[int],
    *,
    largest: int = LARGEST,
    rounds: int = ROUNDS,
    progress: Progress | None = None,
) -> Measured:
    """Time all of SIZES up to `largest` at each length in interleaved rounds, and again while the rounds disagree.

    Takes at most 3 x `rounds` x sizes x lengths batches. Raises ValueError if a size has no valid time.
    """
    sizes = [n for n in SIZES if n <= largest]
    done, disturbed, rows, spreads = 0, 0, list[NDArray[np.float64]](), list[float]()
    total = rounds * len(sizes) * len(contexts)
    for n_ctx in contexts:
        probe(1, n_ctx)  # It fills the KV cache.
        samples: list[list[float]] = [[] for _ in sizes]
        for number in range(3 * rounds):
            wanted = [i for i, times in enumerate(samples) if number < rounds or _spread(times) > CERTAIN]
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
        rows.append(np.array([float(np.quantile(times, 0.25)) for times in samples]))
        spreads += [_spread(times) for times in samples]
    noise, busy = float(np.median(spreads)), disturbed / max(done, 1)
    curve = fitted(contexts, sizes, rows, max(noise, busy))
    return Measured(curve, max(spreads) <= CERTAIN and busy <= CERTAIN and largest == LARGEST, noise, busy)


def fitted(
    contexts: Sequence[int], sizes: Sequence[int], rows: Sequence[NDArray[np.float64]], noise: float
) -> CostCurve:
    """Fit a curve to these times; `rows[c][i]` is the time of `sizes[i]` tokens at `contexts[c]`. It has a table over
    the sizes at the first length, and for each size an attention cost proportional to the context, fitted to all
    lengths.
    """
    times = np.stack([isotonic(row) for row in rows])
    error = max(STEP_ERROR, noise)
    if len(contexts) == 1:
        deviations = Deviations(error, (error,) * len(KNOTS), (0.7,) * len(ATTENTION_KNOTS))
        return _curve(contexts, sizes, times, deviations, noise)
    further = np.array(contexts, np.float64)[1:] - contexts[0]
    weight = further / times[1:].T  # Errors are relative, so each length counts by the inverse of its time.
    slope = isotonic(np.maximum(((times[1:] - times[0]).T / times[1:].T * weight).sum(1) / (weight**2).sum(1), 0.0))
    table = np.stack([times[0], times[0] + further[-1] * slope])
    deviations = Deviations(error, (error,) * len(KNOTS), (2 * error,) * len(ATTENTION_KNOTS))
    return _curve([contexts[0], contexts[-1]], sizes, table, deviations, noise)


def _curve(
    contexts: Sequence[int], sizes: Sequence[int], ms: NDArray[np.float64], deviations: Deviations, noise: float
) -> CostCurve:
    curve = CostCurve.from_points(contexts, sizes, ms.tolist(), deviations)
    curve.corrections.noise = min(noise, 1.0)
    return curve


def _spread(times: Sequence[float]) -> float:
    """Return the relative spread of the rounds below their median. Disturbed batches lie above it, and do no harm."""
    if not times:
        return 1.0
    low, middle = np.quantile(times, [0.125, 0.5])
    return float(middle / low - 1.0)


def advantages(curve: CostCurve, n_ctx: int) -> list[dict[str, Any]]:
    """Return, for drafts of 1 to 63 tokens, {"draft", "steps": its cost in plain steps, "least_accepted": the accepted
    tokens from which on it pays, or None if it never pays}.
    """
    line = curve.expected(n_ctx)
    rows = []
    for draft in (1, 3, 7, 15, 31, 63):  # the batch has one token more
        steps = float(line[draft] / line[0])
        least = math.floor(steps - 1.0) + 1  # `accepted` + 1 tokens must exceed the cost in plain steps
        rows.append({
            "draft": draft, "steps": round(steps, 2), "least_accepted": least if least <= draft else None,
        })  # fmt: skip
    return rows


def explain(curve: CostCurve, n_ctx: int) -> Iterator[str]:
    """Yield one sentence for a plain step at this context length, and one for each draft."""
    line = curve.expected(n_ctx)
    yield f"At {n_ctx} tokens of context one token takes {line[0]:.3g} ms, {1e3 / line[0]:.3g} tokens a second."
    for row in advantages(curve, n_ctx):
        draft, least = row["draft"], row["least_accepted"]
        tokens = "1 token" if draft == 1 else f"{draft} tokens"
        if least is None:
            pays = "it never pays"
        elif draft == 1:
            pays = f"it pays when over {math.ceil(100 * (row['steps'] - 1))}% are accepted"
        else:
            pays = f"it pays when at least {least} in {draft} are accepted"
        yield f"A draft of {tokens} costs {row['steps']:.1f} plain steps; {pays}."
