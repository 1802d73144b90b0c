"""Shannon entropy of the distribution that a row of logits describes.

Contract: float32 logits in, nats out, 0..log(n). -inf is a token that cannot come; a row without a finite greatest
logit counts as uniform. The buffers of a thread are kept for its next row: fresh ones take longer to map than to fill.
One exponential and two dot products: 0.1 ms for 152 000 logits, twice that where the logits have to be shifted first.
"""

from __future__ import annotations

import math
import threading

import numpy as np
from numpy.typing import NDArray

LEAST = -80.0  # below the greatest logit; float32 is slow further down, and 1e6 such tokens have no weight
LEAST_SUM, MOST_SUM = 1e-25, 1e30  # of the weights: within these, float32 holds the sums and the products in full


class _Buffers(threading.local):
    def __init__(self) -> None:
        self.weight: NDArray[np.float32] = np.empty(0, np.float32)
        self.ones: NDArray[np.float32] = np.empty(0, np.float32)


_buffers = _Buffers()


def entropy_of(logits: NDArray[np.float32]) -> float:
    """With z = sum e^logit: log z - sum(logit e^logit) / z. `logits` is only read. Errors stay below 1e-4 nats."""
    if len(_buffers.weight) != len(logits):
        _buffers.weight, _buffers.ones = np.empty(len(logits), np.float32), np.ones(len(logits), np.float32)
    weight = _buffers.weight
    with np.errstate(all="ignore"):  # overflow shows in the sums
        np.exp(logits, out=weight)
        total, moment = float(np.dot(weight, _buffers.ones)), float(np.dot(weight, logits))
    if not (LEAST_SUM < total < MOST_SUM and math.isfinite(moment)):
        return _shifted(logits, weight)
    return max(0.0, math.log(total) - moment / total)


def _shifted(logits: NDArray[np.float32], weight: NDArray[np.float32]) -> float:
    """The same with d = logit - greatest: for logits of any size, and tokens that cannot come."""
    greatest = float(logits.max())
    if not math.isfinite(greatest):
        return math.log(len(logits))
    with np.errstate(over="ignore"):  # -inf is what it should be
        below = np.maximum(logits - np.float32(greatest), np.float32(LEAST))
    np.exp(below, out=weight)
    total = float(np.dot(weight, _buffers.ones))
    return max(0.0, math.log(total) - float(np.dot(below, weight)) / total)
