"""Shannon entropy of the distribution that a row of logits stands for.

Contract: float32 logits in, nats out, 0..log(n): -inf is a token that cannot come, and a row without a finite greatest
logit says nothing, so it counts as uniform. Works in two buffers a thread, kept for the next row: fresh ones would take
longer to map than to fill.
"""

from __future__ import annotations

import math
import threading

import numpy as np
from numpy.typing import NDArray

LEAST = -80.0  # below the greatest logit; further down float32 has no fast numbers, and 1e6 such tokens weigh nothing


class _Buffers(threading.local):
    def __init__(self) -> None:
        self.both: NDArray[np.float32] = np.empty((2, 0), np.float32)


_buffers = _Buffers()


def entropy_of(logits: NDArray[np.float32]) -> float:
    """With d = logit - greatest and z = sum e^d: log z - sum(d e^d) / z. `logits` is only read."""
    greatest = float(logits.max())
    if not math.isfinite(greatest):
        return math.log(len(logits))
    if _buffers.both.shape[1] != len(logits):
        _buffers.both = np.empty((2, len(logits)), np.float32)
    below, weight = _buffers.both
    with np.errstate(over="ignore"):  # -inf is what it should be
        np.subtract(logits, np.float32(greatest), out=below)
    np.maximum(below, np.float32(LEAST), out=below)
    np.exp(below, out=weight)
    total = float(weight.sum())
    return max(0.0, math.log(total) - float(np.dot(below, weight)) / total)
