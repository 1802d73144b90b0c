"""The prediction of a request as tokens: as many as are useful, in bounded time and memory.

Contract: text or ids in, int32 ids of the model out. An answer cannot be longer than the context, so a longer
prediction cannot be followed to its end. More tokens than the context holds are kept, because the answer may begin
further on. Without a limit 10 MB of text took 13 to 18 s and up to 800 MB before the first token; 65 536 tokens of code
take 0.1 to 0.3 s (4k and 152k vocabulary) and some 10 MB. Knows nothing about drafting.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rest_local.llama.vocabulary import Vocabulary

log = logging.getLogger("rest_local.decoding")

LEAST_LIMIT = 1 << 16  # tokens: 16 contexts of the usual 4 096


class Predictions:
    """One for each engine, for any thread. `most`: tokens that are kept of one prediction."""

    def __init__(self, vocabulary: Vocabulary, n_ctx: int) -> None:
        self.most = max(n_ctx, LEAST_LIMIT)
        self._vocabulary = vocabulary
        self._warned = False

    def tokenize(self, text: str) -> NDArray[np.int32]:
        """The tokens of a text. Where there are more than `most`, the rest of the text is not read."""
        tokens = self._vocabulary.tokenize(text, most=self.most)
        if len(tokens) > self.most:
            self._warn()
        return tokens[: self.most]

    def take(self, tokens: Sequence[int] | NDArray[np.int32]) -> NDArray[np.int32]:
        """Given ids, up to the first that the model does not have."""
        if len(tokens) > self.most:
            self._warn()
        ids = np.asarray(tokens[: self.most])
        unknown = np.flatnonzero((ids < 0) | (ids >= self._vocabulary.size))
        return ids[: unknown[0] if len(unknown) else None].astype(np.int32)

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            log.warning("a prediction is longer than %d tokens; only its beginning is drafted from", self.most)
