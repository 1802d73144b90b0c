"""The sources of drafts: datastores, earlier answers, the prediction, and the text of the request itself.

Contract: token ids go in, rows by source come out. A store that fails while it is read is excluded with one warning.
That costs speed only and never changes a token: after every handled fault decoding continues without that source.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Container, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from rest_local.drafting.candidates import (
    NO_BIGRAM,
    SOURCE_NUMBER,
    SOURCES,
    EditRows,
    PrecedingBigram,
    SourceRows,
)
from rest_local.drafting.edit_source import EditSource
from rest_local.drafting.line_cursor import Spelling
from rest_local.drafting.models.drafter import DraftText
from rest_local.drafting.prediction import Prediction
from rest_local.drafting.tree import DEPTH
from rest_local.errors import DatastoreError
from rest_local.llama.placeholders import common_prefix
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.growing import GrowingText
from rest_local.retrieval.rows import MAX_MATCH, Int32Array, Rows

log = logging.getLogger("rest_local.drafting")

ROWS = 32  # of each source: 64 gain nothing in speed, and take longer


class Lookup(Protocol):
    """What a policy drafts from: `Sources`, or a fake in tests. `draft_text`: in the drafting model, if any."""

    draft_text: DraftText | None

    def restart(self, tokens: Sequence[int]) -> None: ...
    def predict(self, tokens: Sequence[int] | Int32Array) -> None: ...
    def extend(self, tokens: Sequence[int]) -> None: ...
    def rows(
        self, limit: int | None = None, depth: int = DEPTH, only: Container[str] = SOURCES
    ) -> list[SourceRows]: ...
    def rows_after(self, tokens: Sequence[int], depth: int = DEPTH) -> list[SourceRows]: ...
    def repeats(self, n: int) -> bool: ...


class Searchable(Protocol):
    """Stored text: a `Datastore`, a `History`, or a `GrowingText` of recorded answers."""

    def rows(self, context: Sequence[int], limit: int, depth: int) -> Rows: ...


class _Assumed(NamedTuple):
    """What a sequence becomes if these tokens are added next."""

    tokens: list[int]
    prediction: Prediction | None
    edits: EditSource | None


class Sources:
    """The sources of one sequence. `extend` adds tokens to the sequence; `rows` searches every source for its end.

    `rows_after` searches for the end that the sequence is likely to have next. If `extend` then adds those tokens, they
    need not be read again; otherwise nothing of them is left.
    """

    def __init__(
        self,
        datastores: Sequence[Datastore],
        n_vocab: int,
        history: Searchable | None = None,
        failed_stores: list[Searchable] | None = None,
        spelling: Spelling | None = None,
    ) -> None:
        """`history`: earlier answers. `failed_stores`: a list that all sequences with the same stores share.
        `spelling`: the model's vocabulary, to recognise what an answer edits; None leaves that out.
        """
        self._n_vocab = n_vocab
        self._edits = None if spelling is None else EditSource(spelling)
        self.draft_text: DraftText | None = None  # the text of this sequence in a drafting model
        self._failed_stores: list[Searchable] = [] if failed_stores is None else failed_stores
        self.use(datastores, history)
        self._bytes = bytearray()  # the sequence, 4 bytes for each token; `repeats` searches it
        self._prediction: Prediction | None = None
        self._growing = GrowingText()
        self._indexed = 0  # number of tokens of the sequence in `_growing`
        self._assumed: _Assumed | None = None  # `_growing` has these tokens as well
        self._whole = True  # False during an update: after an interrupt there, `restart` rebuilds everything

    def use(self, datastores: Sequence[Datastore], history: Searchable | None = None) -> None:
        """Search these stores from now on, except those that failed before."""
        self._datastores = [store for store in datastores if store not in self._failed_stores]
        self._history = None if history in self._failed_stores else history

    def restart(self, tokens: Sequence[int]) -> None:
        """Set the sequence to `tokens`. Keeps the index of the prefix that it shares with the last one, and the
        prediction.
        """
        if not self._whole:
            self._bytes, self._growing, self._indexed, self._assumed = bytearray(), GrowingText(), 0, None
            self._whole = True
        self._drop_assumed()
        same = common_prefix(np.frombuffer(self._bytes, np.int32), tokens) if self._bytes else 0
        if 4 * same < len(self._bytes):
            self._whole = False
            self._indexed = min(self._indexed, same)
            self._growing.truncate(self._indexed)
            del self._bytes[4 * same :]
            self._whole = True
        self._append(tokens[same:])
        if self._edits:
            self._edits.restart(tokens, same)

    def predict(self, tokens: Sequence[int] | Int32Array) -> None:
        """Set the text that is expected to follow the sequence. It replaces an earlier prediction."""
        self._prediction = Prediction(tokens) if len(tokens) else None

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens that were accepted."""
        self._append(tokens)
        if self._assumed is not None:
            if self._assumed.tokens == tokens:
                self._indexed += len(tokens)
                self._prediction, self._edits = self._assumed.prediction, self._edits and self._assumed.edits
                self._assumed = None
                return
            self._drop_assumed()
        if self._prediction:
            self._prediction.extend(tokens)
        if self._edits:
            self._edits.extend(tokens)

    def _append(self, tokens: Sequence[int]) -> None:
        if len(tokens):
            self._bytes += array("i", tokens)

    def _from(self, begin: int) -> list[int]:
        """The tokens of the sequence from index `begin` on."""
        return array("i", self._bytes[4 * begin :]).tolist()

    def repeats(self, n: int) -> bool:
        """Whether the newest `n` tokens occur earlier in the sequence, or the answer follows the prediction.

        Searches bytes, in about 5 us. In rare cases it is True although only matches were found that do not begin at a
        token.
        """
        if (self._prediction and self._prediction.follows) or (self._edits and self._edits.follows):
            return True
        end = len(self._bytes)
        if end < 8 * n:
            return False
        newest, found = self._bytes[-4 * n :], end - 4 * n
        for _ in range(8):  # matches that do not begin at a token
            found = self._bytes.rfind(newest, 0, found + 4 * n - 1)
            if found < 0 or found % 4 == 0:
                return found >= 0
        return True

    def rows(self, limit: int | None = None, depth: int = DEPTH, only: Container[str] = SOURCES) -> list[SourceRows]:
        """Rows that continue the end of the sequence, by source. Sources without a match are left out.

        `limit`: the maximum of rows from a store; None takes ROWS. `depth`: tokens in a row, at
        most 64. `only`: the sources to search.
        """
        self._drop_assumed()
        if "context" in only:
            self._index()
        context = self._from(max(0, len(self._bytes) // 4 - MAX_MATCH))
        return self._search_all(context, limit, depth, only, self._prediction, self._edits)

    def rows_after(self, tokens: Sequence[int], depth: int = DEPTH) -> list[SourceRows]:
        """The rows that `rows` will return after these tokens, if `extend` adds them next. They hold until it adds
        others. Without a row where that cannot be told cheaply.
        """
        self._drop_assumed()
        self._index()
        prediction, edits = self._prediction and self._prediction.fork(), self._edits and self._edits.fork()
        if (self._edits and not edits) or self._growing.room < len(tokens):
            return []
        tokens = list(tokens)
        for source in (prediction, edits):
            if source:
                source.extend(tokens)
        self._whole = False
        self._growing.extend(tokens)
        self._assumed = _Assumed(tokens, prediction, edits)
        self._whole = True
        context = [*self._from(max(0, len(self._bytes) // 4 - MAX_MATCH)), *tokens][-MAX_MATCH:]
        return self._search_all(context, None, depth, SOURCES, prediction, edits)

    def _drop_assumed(self) -> None:
        if self._assumed is not None:
            self._whole = False
            self._growing.truncate(self._indexed)
            self._assumed = None
            self._whole = True

    def _search_all(
        self,
        context: list[int],
        limit: int | None,
        depth: int,
        only: Container[str],
        prediction: Prediction | None,
        edits: EditSource | None,
    ) -> list[SourceRows]:
        """The rows of every source, whose texts end with `context`."""
        found: list[tuple[str, Rows, object]] = []
        if "datastore" in only:
            for store in list(self._datastores):
                found.append(("datastore", self._search(store, context, limit or ROWS, depth), store))
        if "history" in only and self._history is not None:
            found.append(("history", self._search(self._history, context, limit or ROWS, depth), None))
        if "prediction" in only and prediction:
            found.append(("prediction", prediction.rows(context, depth), None))
        own = None
        if "context" in only:
            own = self._growing.rows(context, limit or ROWS, depth)
            found.append(("context", own, None))
        before, last = [*NO_BIGRAM, *context[-2:]][-2:]
        sources = [
            SourceRows(SOURCE_NUMBER[source], rows, store, (before, last)) for source, rows, store in found if len(rows)
        ]
        if "edit" in only and edits and (edited := self._edited(edits, context, depth, own, (before, last))):
            sources.append(edited)
        return sources

    def _edited(
        self, edits: EditSource, context: Sequence[int], depth: int, own: Rows | None, newest: PrecedingBigram
    ) -> EditRows | None:
        """Rows of what the answer edits; None without any. `own`: the rows of the request's own text."""
        try:
            rows, breaks = edits.rows(context, depth)
        except Exception:  # costs drafts, never an answer
            log.warning("what an answer edits cannot be recognised; going on without", exc_info=True)
            self._edits = None
            return None
        if not len(rows):
            return None
        return EditRows(rows, breaks, edits.evidence_kind, own, newest)

    def _index(self) -> None:
        """Add the newest tokens to the searchable text."""
        length = len(self._bytes) // 4
        if self._indexed < length:  # not earlier, because most steps of a fast model make no lookup
            self._whole = False
            self._growing.extend(self._from(self._indexed))
            self._indexed = length
            self._whole = True

    def _search(self, store: Searchable, context: Sequence[int], limit: int, depth: int) -> Rows:
        try:
            rows = store.rows(context, limit, depth)
        except (DatastoreError, OSError, ValueError) as error:
            self._exclude(store, f"cannot be read ({error})")
            return Rows.empty(depth)
        if rows.limit > self._n_vocab and len(rows) and int(rows.continuations.max()) >= self._n_vocab:
            self._exclude(store, "holds token ids the model does not have")
            return Rows.empty(depth)
        return rows

    def _exclude(self, store: Searchable, why: str) -> None:
        self._failed_stores.append(store)
        if store is self._history:
            self._history = None
        else:
            self._datastores = [other for other in self._datastores if other is not store]
        name = f"datastore {store.path}" if isinstance(store, Datastore) else "history"
        log.warning("%s %s; going on without it", name, why)
