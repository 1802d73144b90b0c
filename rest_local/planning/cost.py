"""The cost curve: what one `llama_decode` of n tokens costs at a context length, in milliseconds.

Contract: measured through a probe that the caller supplies, bounded in time, kept as a table of context lengths x batch
sizes, refined by every real step, stored as JSON. It is uneven (8 to 16 costs little, 16 to 24 nearly doubles,
DESIGN.md
section 4) and differs by machine, model and settings, which is why it is measured. Knows nothing about llama.cpp.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
LARGEST = SIZES[-1]
BLEND = 0.05  # weight of one real step against what is known
BLEND_PLAIN = 0.15  # of one of a single token: everything is paid for in such steps, and few of them may be looked at
OUTLIER = 3.0  # a step this many times dearer than known is clipped: the machine hiccupped

Probe = Callable[[int, int], float]  # (tokens in the batch, tokens in the context) -> milliseconds


class CostCurve:
    """`ms[c, n - 1]`: cost of n = 1..64 tokens at `contexts[c]` tokens of context. float64 [contexts, 64]."""

    def __init__(self, contexts: list[int], ms: NDArray[np.float64]) -> None:
        self.contexts = contexts
        self._seen: dict[tuple[int, bool], int] = {}
        self._take(ms)

    def _take(self, ms: NDArray[np.float64]) -> None:
        self._ms = ms
        self._rows: list[list[float]] = ms.tolist()
        # What `observe` learned since, as factors: of all sizes, of all but n = 1, and of single ones. Behind a forward
        # pass with its cold caches, changing numpy rows cost 48 us a step, noting a factor a few.
        self._all = [1.0] * len(ms)
        self._drafted = [1.0] * len(ms)
        self._single: list[dict[int, float]] = [{} for _ in range(len(ms))]

    @property
    def ms(self) -> NDArray[np.float64]:
        """The table as it is now; not to be written to."""
        if self._seen and any(f != 1.0 for f in (*self._all, *self._drafted)):
            ms = self._ms * np.array(self._all)[:, None]
            ms[:, 1:] *= np.array(self._drafted)[:, None]
            for row, single in zip(ms, self._single, strict=True):
                for n, factor in single.items():
                    row[n - 1] *= factor
            self._take(ms)
        return self._ms

    def _known(self, c: int, n: int) -> float:
        """`ms[c, n - 1]` without bringing the table up to date."""
        drafted = self._drafted[c] * self._single[c].get(n, 1.0) if n > 1 else 1.0
        return self._rows[c][n - 1] * self._all[c] * drafted

    @classmethod
    def from_points(cls, contexts: Sequence[int], sizes: Sequence[int], ms: Sequence[Sequence[float]]) -> CostCurve:
        """Linear between the measured sizes; beyond the largest, along the last slope."""
        n = np.arange(1, LARGEST + 1)
        table = []
        for row in ms:
            line = np.interp(n, sizes, row)
            if sizes[-1] < LARGEST and len(sizes) > 1:
                slope = row[-1] / sizes[-1]
                line = np.where(n > sizes[-1], row[-1] + slope * (n - sizes[-1]), line)
            table.append(line)
        return cls(list(contexts), np.array(table, np.float64))

    def _between(self, n_ctx: int) -> tuple[int, int, float]:
        """The measured lengths around `n_ctx`, and how far it is from the first to the second; beyond the last at most
        three times that distance, so that a curve falling with length by noise stays positive."""
        high = min(bisect_left(self.contexts, n_ctx), len(self.contexts) - 1)
        low = max(high - 1, 0)
        if low == high or n_ctx <= self.contexts[0]:
            return low, low, 0.0
        weight = (n_ctx - self.contexts[low]) / (self.contexts[high] - self.contexts[low])
        rising = self._known(high, 1) >= self._known(low, 1)
        return low, high, min(weight, 4.0 if rising else 1.0)

    def at(self, n_ctx: int) -> NDArray[np.float64]:
        """Milliseconds of n = 1..64 tokens, float64 [64], interpolated between the measured context lengths."""
        low, high, weight = self._between(n_ctx)
        ms = self.ms
        line = ms[low] + weight * (ms[high] - ms[low])
        return np.asarray(np.maximum(line, 0.5 * np.minimum(ms[low], ms[high])))

    def per_cell(self, n: int) -> float:
        """Milliseconds that one more token in the cells costs a decode of n tokens; 0 where one length was measured."""
        if len(self.contexts) < 2:
            return 0.0
        length = self.contexts[-1] - self.contexts[0]
        return max(0.0, (self._known(len(self.contexts) - 1, n) - self._known(0, n)) / length)

    def per_token(self, n_ctx: int) -> float:
        """Milliseconds that one more token costs a large batch."""
        cost = self.at(n_ctx)
        return max(float(cost[-1] - cost[LARGEST // 2 - 1]) / (LARGEST - LARGEST // 2), 1e-6)

    def observe(self, n: int, n_ctx: int, ms: float) -> None:
        """Refine from a real step of n tokens that took `ms`: the first few of a session count most.

        A plain step speaks for the speed of the machine, so all sizes follow it, or plain steps alone would make drafts
        look ever dearer. A drafted one speaks for all drafted ones, which find caches and threads as it did, and a
        little more for its own size.
        """
        if not 1 <= n <= LARGEST:
            return
        low, high, weight = self._between(n_ctx)
        now = self._known(low, n)
        if low != high:
            now += weight * (self._known(high, n) - now)
        change = min(ms, OUTLIER * now) / now - 1.0
        share = min(max(weight, 0.0), 1.0)
        self._follow(low, n, change, 1.0 - share if low != high else 1.0)
        if low != high:  # both, or the other one would keep its part of an error for good
            self._follow(high, n, change, share)

    def _follow(self, c: int, n: int, change: float, share: float) -> None:
        """Move the row of one context length by `change`, as far as that length has a `share` in the step's."""
        seen = self._seen.get((c, n > 1), 0)
        if share >= 0.5:
            self._seen[c, n > 1] = seen + 1
        change *= share
        if n == 1:
            self._all[c] *= 1.0 + change * max(BLEND_PLAIN, 1.0 / (seen + 2))
            return
        self._drafted[c] *= 1.0 + change * max(BLEND / 2, 1.0 / (seen + 2))
        single = self._single[c]
        for size in (n - 1, n, n + 1):  # neighbours share part of the news
            if 1 < size <= LARGEST:
                factor = 1.0 + change * (BLEND if size == n else BLEND / 2)
                single[size] = single.get(size, 1.0) * factor

    def table(self) -> list[dict[str, float]]:
        """Rows {n_ctx, n, ms, ratio} at the measured sizes, for people and for JSON."""
        return [
            {"n_ctx": c, "n": n, "ms": round(float(row[n - 1]), 4), "ratio": round(float(row[n - 1] / row[0]), 3)}
            for c, row in zip(self.contexts, self.ms, strict=True)
            for n in SIZES
        ]

    def to_json(self) -> str:
        return json.dumps({"contexts": self.contexts, "ms": self.ms.tolist()})

    @classmethod
    def from_json(cls, text: str) -> CostCurve:
        """Raises ValueError where the text is not a curve."""
        data: Any = json.loads(text)
        try:
            ms = np.array(data["ms"], np.float64)
            contexts = [int(c) for c in data["contexts"]]
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a cost curve: {error}") from error
        if ms.shape != (len(contexts), LARGEST) or not np.isfinite(ms).all() or (ms <= 0).any():
            raise ValueError(f"not a cost curve: table of shape {ms.shape}")
        return cls(contexts, ms)


def measure(probe: Probe, contexts: Iterable[int], budget_s: float, repeats: int = 3) -> CostCurve:
    """Time `probe` at SIZES for each context length, the least of `repeats` interleaved rounds, within `budget_s`.

    The least, because whatever else the machine does can only make a decode slower.

    `contexts` is read lazily, so that its owner can stop where a longer one is not affordable. When the time runs out,
    larger sizes are extrapolated from the last slope and further contexts left out; n = 1..8 at the first context are
    always measured once.
    """
    end = time.perf_counter() + budget_s
    rows: list[list[float]] = []
    done: list[int] = []
    shared = len(SIZES)
    for context in contexts:
        samples: list[list[float]] = [[] for _ in SIZES]
        for _ in range(repeats):
            for i, size in enumerate(SIZES[:shared]):
                late = time.perf_counter() > end
                if late and (samples[i] or (i >= 6 and not done) or done):
                    break
                samples[i].append(probe(size, context))
        complete = next((i for i, s in enumerate(samples) if not s), len(SIZES))
        if complete == 0 or (done and complete < shared):
            break
        shared = complete
        rows.append([min(s) for s in samples[:complete]])
        done.append(context)
    return CostCurve.from_points(done, SIZES[:shared], [row[:shared] for row in rows])
