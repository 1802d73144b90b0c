"""What the words of a candidate say beside its evidence: whether this token, and this token behind that one, is right
more often than others of the same evidence.

Contract: the candidates below a node with their estimates by evidence (`rest_local.planning.acceptance`) go in,
corrected probabilities come out; what the model then said comes back, submitted or not. A logistic regression, learned
online: the evidence's log-odds, and three weights for each candidate, each with a step of its own (AdaGrad): of the
token, of the pair of tokens, and of its odds together with the sum of all estimates at the node, which can exceed 1
where sources propose different tokens. Tokens are numbers here; knows nothing of text.

What evidence alone can tell is told by the cells; this is what it cannot. Log loss on recorded answers, cold start, the
later half of each: HumanEval with a datastore 0.210 to 0.171, chat with history 0.175 to 0.164, MT-Bench 0.352 to
0.327.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import exp, log, sqrt

from rest_local.drafting.drafter import Judged, Merged

SLOTS = 1 << 16  # weights of tokens and pairs together; those that collide share one
RATE = 0.5
DAMPING = 1.0  # squared errors that a weight begins with
HALVES = 16  # the odds count by halves of a nat, from -8 to 8,
QUARTERS = 8  # and the sum of all estimates by quarters, up to 2

_MASK = SLOTS - 1
_SPREAD, _BEHIND = 0x9E3779B1, 0x85EBCA6B  # odd numbers of 32 bits: neighbouring ids come to lie far apart
_LINE = QUARTERS + 1


class Wording:
    """Not thread safe. 2 lists of 66 000 floats."""

    def __init__(self) -> None:
        n = SLOTS + (2 * HALVES + 1) * _LINE
        self._weights = [0.0] * n
        self._squares = [DAMPING] * n

    def judge(self, previous: int, candidates: Merged) -> list[Judged]:
        """The corrected probability of each of `candidates` behind the token `previous`. 0.7 us a candidate."""
        weights = self._weights
        behind = previous * _BEHIND
        together = sum([found[0] for found in candidates.values()])
        crowd = SLOTS + HALVES * _LINE + min(int(4.0 * together), QUARTERS)
        judged = []
        for token, (estimate, _, _) in candidates.items():
            odds = log(estimate / (1.0 - estimate))
            own = token * _SPREAD
            alone = own & _MASK
            pair = ((own ^ behind) * _SPREAD >> 16) & _MASK
            among = crowd + max(-HALVES, min(HALVES, round(2.0 * odds))) * _LINE
            odds += weights[alone] + weights[pair] + weights[among]
            judged.append((token, 1.0 / (1.0 + exp(-odds)), alone, pair, among))
        return judged

    def learn(self, judgements: Iterable[tuple[Iterable[Judged], int]]) -> None:
        """What was judged at some nodes, and the token that the model gave there."""
        weights, squares = self._weights, self._squares
        for judged, right in judgements:
            for token, probability, *used in judged:
                error = (token == right) - probability
                for slot in used:
                    squares[slot] += error * error
                    weights[slot] += RATE * error / sqrt(squares[slot])
