"""What the words of a candidate say beside its evidence: whether this token, behind these, is right more often than
other tokens of the same evidence.

Contract: the candidates below a node with their estimates by evidence (`rest_local.planning.acceptance`) go in,
corrected probabilities come out; what the model then said comes back, submitted or not. A logistic regression, learned
online: to the log-odds of the evidence come five weights, each with a step of its own (AdaGrad): of the token, of it
behind the last token, of it behind the last but one, of the last token whatever follows, and of the odds themselves
together with the sum of all estimates at the node, which exceeds 1 where sources propose different tokens. Tokens are
numbers here; knows nothing of text.

The cells tell what evidence can tell; this is what it cannot. Log loss on recorded answers, cold start, by
halves of the answers: HumanEval with a datastore 0.221 and 0.210 to 0.183 and 0.168, chat with history 0.175 and 0.178
to 0.161 and 0.157, MT-Bench 0.336 and 0.346 to 0.310 and 0.311.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import exp, log, sqrt

from rest_local.drafting.candidates import PrecedingBigram
from rest_local.drafting.drafter import Calibrated, Merged

SLOTS = 1 << 18  # of all weights that tokens have; those that collide share one. Chat with 1 << 16: 0.3% fewer tokens
RATE = 0.5  # 0.3 to 0.7 are within half a percent of log loss
LEAST = 1e-5  # squared errors below are not learned from
DAMPING = 1.0  # squared errors that a weight begins with
HALVES = 16  # the odds count by halves of a nat, from -8 to 8,
QUARTERS = 8  # and the sum of all estimates by quarters, up to 2
MOST_SOURCES = 4  # and how many sources propose the token, 3 or more as one

_MASK = SLOTS - 1
_SPREAD, _LAST, _BEFORE = 0x237B1, 0x2CA6B, 0x1AE35  # odd and below SLOTS: neighbouring ids come to lie far apart
_LINE = QUARTERS + 1
_ODDS = 2 * HALVES + 1
_LARGEST = HALVES / 2
_MIDDLE = HALVES + 0.5


class TokenCalibrator:
    """Not thread safe. 2 lists of 262 000 floats: 4 MB, and 48 bytes for each weight that was learned."""

    def __init__(self) -> None:
        n = SLOTS + MOST_SOURCES * _ODDS * _LINE
        self._weights = [0.0] * n
        self._squares = [DAMPING] * n

    def calibrate(self, preceding: PrecedingBigram, candidates: Merged) -> list[Calibrated]:
        """The corrected probability of each of `candidates`. 1 us a node and 0.6 us a
        candidate; those of little evidence, too, or HumanEval loses 2% of its tokens a step."""
        weights = self._weights
        before, last = preceding[0] * _BEFORE + 1, preceding[1] * _LAST + 2
        after = last & _MASK
        common = weights[after]
        together = 0.0  # a loop: most nodes have one candidate, for which `sum` and `min` take longer than the rest
        for found in candidates.values():
            together += found[0]
        crowd = SLOTS + (int(4.0 * together) if together < QUARTERS / 4 else QUARTERS)
        calibrated: list[Calibrated] = []
        for token, (estimate, _, members) in candidates.items():
            odds = log(estimate / (1.0 - estimate))
            own = token * _SPREAD
            alone, pair, apart = own & _MASK, own + last & _MASK, own + before & _MASK
            half = int(2.0 * odds + _MIDDLE) if -_LARGEST < odds < _LARGEST else 2 * HALVES if odds > 0.0 else 0
            among = crowd + (half + _ODDS * min(len(members), MOST_SOURCES - 1)) * _LINE
            odds += common + weights[alone] + weights[pair] + weights[apart] + weights[among]
            calibrated.append((token, 1.0 / (1.0 + exp(-odds)), (alone, pair, apart, after, among)))
        return calibrated

    def learn(self, calibrations: Iterable[tuple[Iterable[Calibrated], int]]) -> None:
        """What was judged at some nodes, and the token that the model gave there."""
        weights, squares = self._weights, self._squares
        for calibrated, right in calibrations:
            for token, probability, used in calibrated:
                error = (token == right) - probability
                square, step = error * error, RATE * error
                if square < LEAST:
                    continue
                for slot in used:
                    squares[slot] = sum_ = squares[slot] + square
                    weights[slot] += step / sqrt(sum_)
