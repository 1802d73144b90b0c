"""How much of a text repeats itself: a small model that loops flatters every drafter, so each output says so.

Knows nothing about tokenization; it is purely token ids.
"""

from __future__ import annotations

from collections.abc import Sequence

N = 8
LOOPING = 0.3  # above this share greedy decoding counts as looping, and the demo samples instead


def repeated_share(tokens: Sequence[int], n: int = N) -> float:
    """Return the share, 0 to 1, of the n-grams of `tokens` that occurred earlier in `tokens`; 0 below n + 1 tokens.

    O(len(tokens) * n) time.
    """
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
