"""Numbers that are computed from a row of logits: log-probabilities and the entropy.

`logprobs_of` gives the log-probabilities that a request asks for: a row of logits in, as `llama_decode` gave it, before
any sampler; natural logarithms out. With drafting, the row of a verified node is the row of plain decoding (in exact
settings to the bit), and so the results are the same.

`entropy_of` gives the Shannon entropy of the distribution that the row describes: float32 logits in, nats out,
0..log(n). -inf is a token that cannot come; a row without a finite greatest logit counts as uniform. The buffers of a
thread are kept for its next row: fresh ones take longer to map than to fill. One exponential and two dot products: 0.1
ms for 152 000 logits, twice that where the logits have to be shifted first.

"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK = 64


@dataclass(frozen=True)
class TokenLogprobs:
    """`logprob` of `token`, and the likeliest tokens with theirs, likeliest first; of equal ones the lowest id."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def logprobs_of(row: NDArray[np.float32], token: int, top: int) -> TokenLogprobs:
    """Return the log-probability of `token` and of the `top` likeliest, at most n_vocab of them. `row`: float32
    [n_vocab], only read.

    Exponentials in float32 of differences to the greatest logit, summed in float64: within 1e-6 of exact ones.
    -inf for a token the model rules out. At 152 k tokens 0.15 ms, 0.35 ms with `top`."""
    greatest = row.max()
    mass = np.log(np.exp(row - greatest).sum(dtype=np.float64)) + np.float64(greatest)
    likeliest = tuple((int(other), float(row[other] - mass)) for other in _likeliest(row, min(top, len(row))))
    return TokenLogprobs(token, float(row[token] - mass), likeliest)


def among(left: list[tuple[int, float]], token: int, top: int) -> TokenLogprobs:
    """Return the log-probability of a token among those that the samplers left, -inf if it is none of them, and those
    of the `top` likeliest.
    """
    probabilities = dict(left)
    likeliest = tuple((other, math.log(each)) for other, each in left[:top] if each > 0)
    return TokenLogprobs(token, math.log(found) if (found := probabilities.get(token, 0.0)) else -math.inf, likeliest)


def _likeliest(row: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Return ids by falling logit, of equal ones the lowest first.

    The count-th greatest of the blocks' own greatest is exceeded or reached by `count` logits at least: what is below
    it needs no sorting. (At 152 k tokens 0.2 ms; one `np.partition` of the row takes 1 ms.)"""
    if not count:
        return np.zeros(0, np.int64)
    blocks = row[: len(row) // BLOCK * BLOCK].reshape(-1, BLOCK).max(axis=1)
    least = np.sort(blocks)[-count] if len(blocks) >= count else -np.inf
    among = np.flatnonzero(row >= least)
    return among[np.lexsort((among, -row[among]))][:count]


# Lower logits, next to the greatest, are raised: float32 is slow further down, and 1e6 such tokens have no weight.
LEAST = -80.0
# Within these sums of weights, float32 holds the sums and the products in full.
LEAST_SUM, MOST_SUM = 1e-25, 1e30


class _Buffers(threading.local):
    def __init__(self) -> None:
        self.weight: NDArray[np.float32] = np.empty(0, np.float32)
        self.ones: NDArray[np.float32] = np.empty(0, np.float32)


_buffers = _Buffers()


def entropy_of(logits: NDArray[np.float32]) -> float:
    """Return log z - sum(logit e^logit) / z, z = sum e^logit, within 1e-4 nats. `logits` is only read."""
    if len(_buffers.weight) != len(logits):
        _buffers.weight, _buffers.ones = np.empty(len(logits), np.float32), np.ones(len(logits), np.float32)
    weight = _buffers.weight
    with np.errstate(all="ignore"):  # Overflow shows in the sums.
        np.exp(logits, out=weight)
        total, moment = float(np.dot(weight, _buffers.ones)), float(np.dot(weight, logits))
    if not (LEAST_SUM < total < MOST_SUM and math.isfinite(moment)):
        return _shifted(logits, weight)
    return max(0.0, math.log(total) - moment / total)


def _shifted(logits: NDArray[np.float32], weight: NDArray[np.float32]) -> float:
    """Return the same with d = logit - greatest: for logits of any size, and tokens that cannot come."""
    greatest = float(logits.max())
    if not math.isfinite(greatest):
        return math.log(len(logits))
    with np.errstate(over="ignore"):  # -inf is what it should be
        below = np.maximum(logits - np.float32(greatest), np.float32(LEAST))
    np.exp(below, out=weight)
    total = float(np.dot(weight, _buffers.ones))
    return max(0.0, math.log(total) - float(np.dot(below, weight)) / total)
