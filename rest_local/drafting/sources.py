"""Where drafts come from: the datastores, earlier answers, the prediction, and the text of the request so far.

Contract: token ids in, rows by source out. A store that fails while it is read is set aside with one warning and
costs speed only: it can never change a token (RELIABILITY: every handled fault degrades to plain decoding).
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Container, Sequence
from typing import Protocol

import numpy as np

from rest_local.drafting.candidates import NOTHING, SOURCE_NUMBER, SOURCES, SourceRows
from rest_local.drafting.draft_model import Follower
from rest_local.drafting.prediction import Prediction
from rest_local.drafting.text import common_prefix
from rest_local.errors import DatastoreError
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.growing import GrowingText
from rest_local.retrieval.rows import Int32Array, Rows

log = logging.getLogger("rest_local.drafting")

CONTEXT_TOKENS = 32  # how much of the newest text a lookup compares
DEPTH = 16  # tokens of continuation a row brings
DATASTORE_ROWS = 64
HISTORY_ROWS = 48
CONTEXT_ROWS = 24
MISALIGNED = 8  # finds between two tokens that a search for a repeat goes on from
LONG_REPEAT = 8  # tokens; 73% of the drafts behind such a match were accepted, 95% behind 25 (planning.acceptance)


class Lookup(Protocol):
    """What drafts are made from: `Sources`, or a fake. `follower`: a draft model that knows the sequence."""

    @property
    def follower(self) -> Follower | None: ...
    def restart(self, tokens: Sequence[int]) -> None: ...
    def predict(self, tokens: Sequence[int] | Int32Array) -> None: ...
    def extend(self, tokens: Sequence[int]) -> None: ...
    def rows(
        self, limit: int | None = None, depth: int = DEPTH, only: Container[str] = SOURCES
    ) -> list[SourceRows]: ...
    def repeats(self, n: int = LONG_REPEAT) -> bool: ...


class Searchable(Protocol):
    """Text of others: a `Datastore`, a `History`, or a `GrowingText` of recorded answers."""

    def rows(self, context: Sequence[int], limit: int, depth: int) -> Rows: ...


class Sources:
    """The stores to ask for one sequence. `extend` follows the sequence; `rows` asks every source about its end."""

    def __init__(
        self,
        datastores: Sequence[Datastore],
        n_vocab: int,
        history: Searchable | None = None,
        aside: list[Searchable] | None = None,
        follower: Follower | None = None,
    ) -> None:
        """`history`: earlier answers. `aside`: stores that failed, to be shared by all who ask the same ones.
        `follower`: of a draft model, for this sequence alone.
        """
        self._n_vocab = n_vocab
        self.follower = follower
        self._aside: list[Searchable] = [] if aside is None else aside
        self.ask(datastores, history)
        self._bytes = bytearray()  # the sequence, 4 bytes each token: what `repeats` searches
        self._prediction: Prediction | None = None
        self._growing = GrowingText()
        self._indexed = 0  # tokens of the sequence that `_growing` has
        self._whole = True  # False while an update is under way: an interrupt there means starting anew

    def ask(self, datastores: Sequence[Datastore], history: Searchable | None = None) -> None:
        """From now on ask these, but for those that were set aside."""
        self._datastores = [store for store in datastores if store not in self._aside]
        self._history = None if history in self._aside else history

    def restart(self, tokens: Sequence[int]) -> None:
        """The sequence is now exactly `tokens`; what it shares with the last one is kept, and what is expected next.

        A follower keeps `tokens` itself: with one, the owner appends to it before it calls `extend`.
        """
        if not self._whole:
            self._bytes, self._growing, self._indexed = bytearray(), GrowingText(), 0
            self._whole = True
        same = common_prefix(np.frombuffer(self._bytes, np.int32), tokens) if self._bytes else 0
        if 4 * same < len(self._bytes):
            self._whole = False
            self._indexed = min(self._indexed, same)
            self._growing.truncate(self._indexed)
            del self._bytes[4 * same :]
            self._whole = True
        self._append(tokens[same:])
        if self.follower:
            self.follower.restart(tokens, same)

    def predict(self, tokens: Sequence[int] | Int32Array) -> None:
        """What is expected to follow the sequence as it is now, in place of what was expected before."""
        self._prediction = Prediction(tokens) if len(tokens) else None

    def extend(self, tokens: Sequence[int]) -> None:
        """Tokens that were confirmed."""
        self._append(tokens)
        if self._prediction:
            self._prediction.extend(tokens)

    def _append(self, tokens: Sequence[int]) -> None:
        if len(tokens):
            self._bytes += array("i", tokens)

    def _from(self, begin: int) -> list[int]:
        """The tokens of the sequence from a place on."""
        return array("i", self._bytes[4 * begin :]).tolist()

    def repeats(self, n: int = LONG_REPEAT) -> bool:
        """Whether the newest `n` tokens stand in the sequence before, or the answer follows the prediction: a search of
        its bytes, about 5 us. Also True where only bytes between two tokens were found so far, which is rare.
        """
        if self._prediction and self._prediction.follows:
            return True
        end = len(self._bytes)
        if end < 8 * n:
            return False
        newest, found = self._bytes[-4 * n :], end - 4 * n
        for _ in range(MISALIGNED):
            found = self._bytes.rfind(newest, 0, found + 4 * n - 1)
            if found < 0 or found % 4 == 0:
                return found >= 0
        return True

    def rows(self, limit: int | None = None, depth: int = DEPTH, only: Container[str] = SOURCES) -> list[SourceRows]:
        """Rows that continue the end of the sequence, by source; sources without a match are left out.

        `limit`: most rows of a store, None for what suits its source; `depth`: tokens of a row, at most 64; `only`: the
        sources to ask.
        """
        context = self._from(max(0, len(self._bytes) // 4 - CONTEXT_TOKENS))
        found: list[tuple[str, Rows, object]] = []
        if "datastore" in only:
            for store in list(self._datastores):
                found.append(("datastore", self._ask(store, context, limit or DATASTORE_ROWS, depth), store))
        if "history" in only and self._history is not None:
            found.append(("history", self._ask(self._history, context, limit or HISTORY_ROWS, depth), None))
        if "prediction" in only and self._prediction:
            found.append(("prediction", self._prediction.rows(context, depth), None))
        if "context" in only:
            self._index()
            found.append(("context", self._growing.rows(context, limit or CONTEXT_ROWS, depth), None))
        before, last = [*NOTHING, *context[-2:]][-2:]
        return [
            SourceRows(SOURCE_NUMBER[source], rows, store, (before, last)) for source, rows, store in found if len(rows)
        ]

    def _index(self) -> None:
        """Bring the searchable text up to date."""
        length = len(self._bytes) // 4
        if self._indexed < length:  # only now: most steps of a fast model look nothing up
            self._whole = False
            self._growing.extend(self._from(self._indexed))
            self._indexed = length
            self._whole = True

    def _ask(self, store: Searchable, context: Sequence[int], limit: int, depth: int) -> Rows:
        try:
            rows = store.rows(context, limit, depth)
        except (DatastoreError, OSError, ValueError) as error:
            self._set_aside(store, f"cannot be read ({error})")
            return Rows.empty(depth)
        if rows.limit > self._n_vocab and len(rows) and int(rows.continuations.max()) >= self._n_vocab:
            self._set_aside(store, "holds token ids the model does not have")
            return Rows.empty(depth)
        return rows

    def _set_aside(self, store: Searchable, why: str) -> None:
        self._aside.append(store)
        if store is self._history:
            self._history = None
        else:
            self._datastores = [other for other in self._datastores if other is not store]
        name = f"datastore {store.path}" if isinstance(store, Datastore) else "history"
        log.warning("%s %s; going on without it", name, why)
