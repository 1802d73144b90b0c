"""Functions on texts of token ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Tokens = Sequence[int] | NDArray[np.int32]


def common_prefix(one: Tokens, other: Tokens) -> int:
    """The length of the common prefix of two texts. Takes about 1 us for 100 tokens."""
    limit = min(len(one), len(other))
    differ = np.flatnonzero(np.asarray(one[:limit], np.int64) != np.asarray(other[:limit], np.int64))
    return int(differ[0]) if len(differ) else limit
