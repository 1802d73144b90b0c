"""What is left of a text that the context cannot hold: a beginning that is kept, and the newer of what follows.

Contract: token ids in, fewer out. What is dropped depends on positions alone, in blocks of one size: a conversation
that was shifted while it was answered, and is sent again longer, is cut at the same place, so that the cells of before
hold the beginning of what is left.
"""

from __future__ import annotations

from collections.abc import Sequence

SHIFT_KEEPS = 0.5  # of the text behind the kept tokens


def shifted(text: Sequence[int], keep: int, n_ctx: int) -> list[int]:
    """The text as it goes on, with fewer than `n_ctx` tokens; as it is where it has fewer. Of `keep` tokens at its
    beginning at most half a context is kept.
    """
    keep = min(keep, n_ctx // 2)
    block = n_ctx + 1 - keep - max(1, int(SHIFT_KEEPS * (n_ctx - keep)))
    blocks = max(0, -(-(len(text) - n_ctx + 1) // block))
    return [*text[:keep], *text[keep + blocks * block :]]
