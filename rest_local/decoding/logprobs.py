"""Log-probabilities of the target, for a request that asks for them.

Contract: a row of logits in, as `llama_decode` gave it, before any sampler; natural logarithms out. With drafting, the
row of a verified node is the row of plain decoding (in exact settings to the bit), and so the results are the same.
"""

from __future__ import annotations

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
    """`row`: float32 [n_vocab], only read; `top` likeliest, at most n_vocab of them.

    Exponentials in float32 of differences to the greatest logit, summed in float64: within 1e-6 of exact ones.
    -inf for a token the model rules out. At 152 k tokens 0.15 ms, 0.35 ms with `top`."""
    greatest = row.max()
    mass = np.log(np.exp(row - greatest).sum(dtype=np.float64)) + np.float64(greatest)
    likeliest = tuple((int(other), float(row[other] - mass)) for other in _likeliest(row, min(top, len(row))))
    return TokenLogprobs(token, float(row[token] - mass), likeliest)


def _likeliest(row: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Ids by falling logit, of equal ones the lowest first.

    The count-th greatest of the blocks' own greatest is exceeded or reached by `count` logits at least: what is below
    it needs no sorting. (At 152 k tokens 0.2 ms; one `np.partition` of the row takes 1 ms.)"""
    if not count:
        return np.zeros(0, np.int64)
    blocks = row[: len(row) // BLOCK * BLOCK].reshape(-1, BLOCK).max(axis=1)
    least = np.sort(blocks)[-count] if len(blocks) >= count else -np.inf
    among = np.flatnonzero(row >= least)
    return among[np.lexsort((among, -row[among]))][:count]
