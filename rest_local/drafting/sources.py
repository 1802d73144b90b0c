"""Ask the sources: stored text, earlier answers, the prediction, the request's own text, and what it edits.

`Sources` searches all of them for the end of one sequence. It returns `SourceRows`: continuations with the length of
their context match, longest first. `SourceRows.candidates` then gives the distinct next tokens at a node of the draft,
each with its evidence: the longest match that predicts it, the number of rows that match at least that long, and the
share of those rows that agree. So shorter matches count too, not only the longest (DESIGN.md section 5). Evidence is
the number of a cell, and `rest_local.planning.acceptance` says how likely it is.

A store that fails while it is read is excluded with one warning. That costs speed only and never changes a token.
"""

from __future__ import annotations

import logging
from array import array
from bisect import bisect_left
from collections.abc import Container, Sequence
from functools import cached_property
from math import inf, sqrt
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from rest_local.drafting.edit_source import EditSource, Spelling
from rest_local.drafting.prediction import Prediction
from rest_local.errors import DatastoreError
from rest_local.llama.placeholders import common_prefix
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.growing import GrowingText
from rest_local.retrieval.rows import MAX_DEPTH, MAX_MATCH, Int32Array, Int64Array, Rows

if TYPE_CHECKING:
    from rest_local.drafting.models.drafter import DraftText

log = logging.getLogger("rest_local.drafting")

ROWS = 32  # Rows of each source. 64 gain nothing in speed and take longer.
DEPTH = 16  # Tokens of a branch, until as many were accepted without a rejected one.

SOURCES = ("datastore", "context", "history", "prediction", "model", "grammar", "edit")
SOURCE_NUMBER = {name: number for number, name in enumerate(SOURCES)}
MODEL = SOURCE_NUMBER["model"]
GRAMMAR = SOURCE_NUMBER["grammar"]

# Evidence cells: the upper ends of the buckets of match lengths, of numbers of rows and of shares that agree.
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, inf)
ROW_COUNTS = (1, 2, 4, 8, 16, inf)
SHARES = (0.1, 0.25, 0.5, 0.75, 0.9999, inf)
N_LENGTHS, N_ROWS, N_SHARES = len(LENGTHS), len(ROW_COUNTS), len(SHARES)
CELLS_PER_SOURCE = N_LENGTHS * N_ROWS * N_SHARES
N_CELLS = len(SOURCES) * CELLS_PER_SOURCE
N_CONFIDENCES = N_ROWS * N_SHARES  # Buckets of a draft model's own probability.

# A possible next token, its evidence cell, and the rows of its source that continue with it. It is a tuple because an
# object costs 0.25 us, thirty times a step.
Candidate = tuple[int, int, Sequence[int]]
Members = list[tuple["SourceRows", Sequence[int]]]  # The rows that agree with a path, by source.
Merged = dict[int, tuple[float, int, Members]]  # Probability, source, and rows that continue with a token, by token.

PrecedingBigram = tuple[int, int]  # The two tokens before a candidate, the newest last.
NO_BIGRAM: PrecedingBigram = (-1, -1)


def model_cell(depth: int, probability: float) -> int:
    """Return the cell of a draft model's candidate by depth below the root and its own probability, finer towards 1."""
    bucket = min(int(N_CONFIDENCES * (1.0 - sqrt(max(0.0, 1.0 - probability)))), N_CONFIDENCES - 1)
    share, row = divmod(bucket, N_ROWS)
    return MODEL * CELLS_PER_SOURCE + (min(depth, N_LENGTHS - 1) * N_ROWS + row) * N_SHARES + share


def grammar_cell(kind: int, apart: bool, depth: int) -> int:
    """Return the cell of forced text by kind of token (`rest_local.grammar.constraint`), whether the text before it
    was split otherwise than the vocabulary does, and tokens below the root.
    """
    return GRAMMAR * CELLS_PER_SOURCE + (apart * N_ROWS + min(depth, N_ROWS - 1)) * N_SHARES + kind


_FIRST_CELLS = [  # By source and match length.
    [(source * N_LENGTHS + bisect_left(LENGTHS, n)) * N_ROWS * N_SHARES for n in range(MAX_MATCH + MAX_DEPTH + 1)]
    for source in range(len(SOURCES))
]


class SourceRows:
    """The rows of one source, longest match first. `match` has the match length of each row, `begin` the number of
    drafted tokens before all of them.

    Tokens are decoded depth by depth, when the tree reaches that depth. All data is in plain lists, because Python
    iterates a few dozen rows faster than numpy.
    """

    def __init__(self, source: int, rows: Rows, store: object = None, begin: int = 0) -> None:
        """Take the `rows` of a source. `store` is their origin, for display."""
        self.source, self.store, self.begin = source, store, begin
        self.match = rows.matches()
        self.depth = rows.depth
        self._rising = self.match[::-1]
        self._rows = rows
        self._columns: list[list[int]] = []
        self._texts: dict[int, list[int]] = {}
        self._cells = _FIRST_CELLS[source]

    def __len__(self) -> int:
        return len(self.match)

    @property
    def positions(self) -> Int64Array:
        """Return the position in the source's text at which each row begins."""
        return self._rows.positions

    @cached_property
    def continuations(self) -> list[list[int]]:
        """Return all tokens by row and depth; -1 after the end of the document."""
        rows: list[list[int]] = self._rows.continuations.tolist()
        return rows

    def column(self, depth: int) -> list[int]:
        """Return the token of every row at `depth` (0 is directly below the root); -1 if its document ends there."""
        columns = self._columns
        while len(columns) <= depth:
            columns.append(self._rows.column(len(columns)))
        return columns[depth]

    def candidates(self, members: Sequence[int], depth: int) -> list[Candidate]:
        """Return the distinct tokens at `depth` of the rows `members` (ascending), longest match first.

        O(len(members)); 10 us for 64 rows, 1 us for one. Most nodes below the first have one row.
        """
        depth -= self.begin
        if depth >= self.depth:
            return []
        match, cells = self.match, self._cells
        if len(members) == 1:
            row = members[0]
            text = self._texts.get(row)
            if text is None:
                text = self._texts[row] = self._rows.row(row)
            token = text[depth]
            return [(token, cells[match[row] + depth] + N_SHARES - 1, members)] if token >= 0 else []
        column = self.column(depth)
        groups: dict[int, list[int]] = {}
        for row in members:
            token = column[row]
            if token in groups:
                groups[token].append(row)
            else:
                groups[token] = [row]
        ended = groups.pop(-1, ())
        found: list[Candidate] = []
        length = shorter = -1
        for token, rows in groups.items():
            if match[rows[0]] != length:
                length = match[rows[0]]
                shorter = len(match) - bisect_left(self._rising, length)  # The first row with a shorter match.
                reaching = bisect_left(members, shorter) - bisect_left(ended, shorter)
                cell = cells[length + depth] + bisect_left(ROW_COUNTS, reaching) * N_SHARES
            agreeing = bisect_left(rows, shorter) if len(rows) > 1 else 1
            found.append((token, cell + bisect_left(SHARES, agreeing / reaching), rows))
        return found


class EditRows(SourceRows):
    """Rows of files that the answer edits.

    Their evidence is the level, how the file was found and is written (`way`), what the request's own text proposes
    (nothing, the same, another token), and whether a line ends at a token, because blocks end there.
    """

    def __init__(self, rows: Rows, breaks: Sequence[bytes], way: int, context: Rows | None, begin: int = 0) -> None:
        """Take `rows`, with 1 in `breaks` where a line ends, else 0. `way` is below N_SHARES. `context` has the rows
        of the source `context`.
        """
        super().__init__(SOURCE_NUMBER["edit"], rows, begin=begin)
        likely = context.column(0) if context is not None and len(context) else []
        self._kinds = [
            (0 if not likely else 1 if token in likely else 2) * 2 * N_SHARES + way for token in self.column(0)
        ]
        self._breaks = breaks

    def candidates(self, members: Sequence[int], depth: int) -> list[Candidate]:
        """Return the distinct tokens at `depth`, the likeliest first. It takes 1 us for each row."""
        depth -= self.begin
        if depth >= self.depth:
            return []
        groups: dict[int, list[int]] = {}
        for row in members:
            text = self._texts.get(row)
            if text is None:
                text = self._texts[row] = self._rows.row(row)
            token = text[depth]
            if token in groups:
                groups[token].append(row)
            elif token >= 0:
                groups[token] = [row]
        found: list[Candidate] = []
        for token, through in groups.items():
            row = through[0]
            breaks = self._breaks[row]
            ends = depth < len(breaks) and breaks[depth]
            cell = self._cells[self.match[row] + depth] + self._kinds[row] + (N_SHARES if ends else 0)
            found.append((token, cell, through))
        return found


class ForcedText(Protocol):
    """Lets drafts read the text that a grammar forces, without importing a grammar (`grammar.constraint.ForcedText`).

    `at` gives tokens, each with its kind, whether the text before it is split otherwise than the vocabulary does, and
    the place after it.
    """

    def __len__(self) -> int: ...
    def at(self, place: int) -> Sequence[tuple[int, int, bool, int]]: ...


class ForcedRows(SourceRows):
    """The text that a grammar allows only one way. The number of a row is a place in the text."""

    def __init__(self, text: ForcedText) -> None:
        self.source, self.store = GRAMMAR, None
        self._text = text

    def __len__(self) -> int:
        return 1

    def candidates(self, members: Sequence[int], depth: int) -> list[Candidate]:
        """Return the tokens at the place `members[0]`, two at most.

        It takes 2 us, and 12 us for text that was split in a new way.
        """
        return [
            (token, grammar_cell(kind, apart, depth), (end,)) for token, kind, apart, end in self._text.at(members[0])
        ]


class ModelRows(SourceRows):
    """The answers of a drafting model in one step, by path. The number of a row is that of its path, 0 the root."""

    def __init__(self) -> None:
        self.source, self.store = MODEL, None
        self.answers: dict[int, Sequence[tuple[int, float]]] = {}
        self._numbers: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return 1

    def below(self, path: int, token: int) -> int:
        """Return the number of the path that continues path number `path` with a token."""
        return self._numbers.setdefault((path, token), len(self._numbers) + 1)

    def candidates(self, members: Sequence[int], depth: int) -> list[Candidate]:
        """Return the tokens after path number `members[0]`; none where the model was not asked."""
        path = members[0]
        return [
            (token, model_cell(depth, probability), (self.below(path, token),))
            for token, probability in self.answers.get(path, ())
        ]


class Lookup(Protocol):
    """The sources of a policy: `Sources`, or a fake in tests. `draft_text` is the text in the drafting model."""

    draft_text: DraftText | None

    def restart(self, tokens: Sequence[int]) -> None: ...
    def predict(self, tokens: Sequence[int] | Int32Array) -> None: ...
    def extend(self, tokens: Sequence[int]) -> None: ...
    def rows(self, limit: int = ROWS, depth: int = DEPTH, only: Container[str] = SOURCES) -> list[SourceRows]: ...
    def rows_after(self, tokens: Sequence[int], depth: int = DEPTH, begin: int = 0) -> list[SourceRows]: ...
    def repeats(self, n: int) -> bool: ...


class Searchable(Protocol):
    """Stored text: a `Datastore`, a `History`, or a `GrowingText` of recorded answers."""

    def rows(self, context: Sequence[int], limit: int, depth: int) -> Rows: ...


class _Assumed(NamedTuple):
    """The state of a sequence if these tokens are added next."""

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
        """Search `datastores` and `history`, the earlier answers.

        All sequences with the same stores share the list `failed_stores`. `spelling` is the model's vocabulary, to
        recognise what an answer edits; None leaves that out.
        """
        self._n_vocab = n_vocab
        self._edits = None if spelling is None else EditSource(spelling)
        self.draft_text: DraftText | None = None
        self._failed_stores: list[Searchable] = [] if failed_stores is None else failed_stores
        self.use(datastores, history)
        self._bytes = bytearray()  # The sequence, 4 bytes for each token; `repeats` searches it.
        self._prediction: Prediction | None = None
        self._growing = GrowingText()
        self._indexed = 0  # Number of tokens of the sequence in `_growing`, without assumed ones.
        self._assumed: _Assumed | None = None
        self._whole = True  # False during an update: after an interrupt there, `restart` rebuilds everything.

    def use(self, datastores: Sequence[Datastore], history: Searchable | None = None) -> None:
        """Search these stores from now on, except those that failed before."""
        self._datastores = [store for store in datastores if store not in self._failed_stores]
        self._history = None if history in self._failed_stores else history

    def restart(self, tokens: Sequence[int]) -> None:
        """Set the sequence to `tokens`.

        The index of the prefix that it shares with the last one is kept, and so is the prediction.
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
        self._bytes += array("i", tokens[same:])
        if self._edits:
            self._edits.restart(tokens, same)

    def predict(self, tokens: Sequence[int] | Int32Array) -> None:
        """Set the text that is expected to follow the sequence. It replaces an earlier prediction."""
        self._prediction = Prediction(tokens) if len(tokens) else None

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens that were accepted."""
        self._bytes += array("i", tokens)
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

    def repeats(self, n: int) -> bool:
        """Return True if the newest `n` tokens occur earlier in the sequence, or the answer follows the prediction.

        It searches bytes, in about 5 us. In rare cases it is True although only matches were found that do not begin at
        a token.
        """
        if (self._prediction and self._prediction.follows) or (self._edits and self._edits.follows):
            return True
        end = len(self._bytes)
        if end < 8 * n:
            return False
        newest, found = self._bytes[-4 * n :], end - 4 * n
        for _ in range(8):  # Some matches do not begin at a token.
            found = self._bytes.rfind(newest, 0, found + 4 * n - 1)
            if found < 0 or found % 4 == 0:
                return found >= 0
        return True

    def rows(self, limit: int = ROWS, depth: int = DEPTH, only: Container[str] = SOURCES) -> list[SourceRows]:
        """Return rows that continue the end of the sequence, by source, without the sources that have no match.

        `limit` is the maximum of rows from a store, `depth` the number of tokens in a row, at most 64. Only the
        sources in `only` are searched.
        """
        self._drop_assumed()
        if "context" in only:
            self._index()
        context = self._from(max(0, len(self._bytes) // 4 - MAX_MATCH))
        return self._search_all(context, limit, depth, only, self._prediction, self._edits)

    def rows_after(self, tokens: Sequence[int], depth: int = DEPTH, begin: int = 0) -> list[SourceRows]:
        """Return the rows that `rows` will return if `extend` adds these tokens next.

        They hold until it adds others. There are none where that cannot be told cheaply. `begin` is for `SourceRows`.
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
        return self._search_all(context, ROWS, depth, SOURCES, prediction, edits, begin)

    def _from(self, begin: int) -> list[int]:
        """Return the tokens of the sequence from index `begin` on."""
        return array("i", self._bytes[4 * begin :]).tolist()

    def _index(self) -> None:
        """Add the newest tokens to the searchable text, which is not done earlier because most steps of a fast model
        make no lookup.
        """
        length = len(self._bytes) // 4
        if self._indexed < length:
            self._whole = False
            self._growing.extend(self._from(self._indexed))
            self._indexed = length
            self._whole = True

    def _drop_assumed(self) -> None:
        """Take the assumed tokens out of the searchable text."""
        if self._assumed is not None:
            self._whole = False
            self._growing.truncate(self._indexed)
            self._assumed = None
            self._whole = True

    def _search_all(
        self,
        context: list[int],
        limit: int,
        depth: int,
        only: Container[str],
        prediction: Prediction | None,
        edits: EditSource | None,
        begin: int = 0,
    ) -> list[SourceRows]:
        """Search every source for `context`, the end of its text."""
        found: list[SourceRows] = []

        def add(source: str, rows: Rows, store: object = None) -> None:
            if len(rows):
                found.append(SourceRows(SOURCE_NUMBER[source], rows, store, begin))

        if "datastore" in only:
            for store in list(self._datastores):
                add("datastore", self._search(store, context, limit, depth), store)
        if "history" in only and self._history is not None:
            add("history", self._search(self._history, context, limit, depth))
        if "prediction" in only and prediction:
            add("prediction", prediction.rows(context, depth))
        own = None
        if "context" in only:
            own = self._growing.rows(context, limit, depth)
            add("context", own)
        if "edit" in only and edits:
            try:
                rows, breaks = edits.rows(context, depth)
                if len(rows):
                    found.append(EditRows(rows, breaks, edits.evidence_kind, own, begin))
            except Exception:  # It costs drafts, never an answer.
                log.warning("what an answer edits cannot be recognised; going on without", exc_info=True)
                self._edits = None
        return found

    def _search(self, store: Searchable, context: Sequence[int], limit: int, depth: int) -> Rows:
        """Search stored text, or exclude it if it cannot be used."""
        try:
            rows = store.rows(context, limit, depth)
            if rows.limit <= self._n_vocab or not len(rows) or int(rows.continuations.max()) < self._n_vocab:
                return rows
            why = "holds token ids the model does not have"
        except (DatastoreError, OSError, ValueError) as error:
            why = f"cannot be read ({error})"
        self._failed_stores.append(store)
        if store is self._history:
            self._history = None
        else:
            self._datastores = [other for other in self._datastores if other is not store]
        name = f"datastore {store.path}" if isinstance(store, Datastore) else "history"
        log.warning("%s %s; going on without it", name, why)
        return Rows.empty(depth)
