"""A policy that always drafts, and sources that draft what may come, in five shapes."""

from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from support.fake_backend import END, N_VOCAB, logits_of

from rest_local.drafting.sources import (
    LENGTHS,
    N_LENGTHS,
    N_ROWS,
    N_SHARES,
    ROW_COUNTS,
    SHARES,
    SOURCE_NUMBER,
    SourceRows,
)
from rest_local.drafting.tree import Calibrate, Draft, Estimate, Force, Growth
from rest_local.planning.auto import Auto
from rest_local.planning.plan import Plan, Worth, grow
from rest_local.planning.policy import StepContext, StepCost
from rest_local.retrieval.rows import Rows


class Keen(Auto):
    """Always looks up and always drafts: the planner that makes most mistakes."""

    def looks_up(self, at: StepContext, repeats: Callable[[int], bool]) -> bool:
        return True

    def account(self, drafted: Draft, done: StepCost) -> None:
        return


def always_draft(monkeypatch: pytest.MonkeyPatch, most: int = 16) -> None:
    """Make `auto` draft at every step whatever there is, at most `most` nodes, so that no measured time decides."""

    def plan(self: Auto, n_ctx: int, limit: int, n_other: int) -> Plan:
        plan = Plan([1.0] * (min(limit, most) + 1), [0.0] * 64, 1.0)
        plan.best_rate = 0.0
        return plan

    monkeypatch.setattr(Auto, "looks_up", lambda self, at, repeats: True)
    monkeypatch.setattr(Auto, "plan", plan)
    monkeypatch.setattr(Auto, "account", lambda self, drafted, done: None)


def cell_of(source: int, length: int, rows: int, agreeing: int) -> int:
    """Return the evidence cell of a source by match length, number of rows, and how many of the rows agree."""
    row = (source * N_LENGTHS + bisect_left(LENGTHS, length)) * N_ROWS + bisect_left(ROW_COUNTS, rows)
    return row * N_SHARES + bisect_left(SHARES, agreeing / rows)


def grown(
    rows: Sequence[SourceRows],
    estimate: Estimate,
    worth: Worth,
    limit: int,
    leaves: int,
    calibrate: Calibrate | None = None,
    force: Force | None = None,
) -> Draft:
    """Grow a tree of at most `limit` nodes and `leaves` leaves by `worth` alone."""
    growth = Growth(rows, estimate, limit, leaves, calibrate, force)
    grow([growth], worth, limit)
    return growth.draft


class Fortune:
    """Drafts what may come: `truth` of the rows follow the model, the rest are random; `width` of them."""

    draft_text = None

    def __init__(self, seed: int, width: int, depth: int, truth: float) -> None:
        self._rng = np.random.default_rng(seed)
        self._width, self._depth, self._truth = width, depth, truth
        self._tokens: list[int] = []

    def restart(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)

    def predict(self, tokens: Sequence[int]) -> None: ...

    def extend(self, tokens: Sequence[int]) -> None:
        self._tokens.extend(tokens)

    def repeats(self, n: int = 8) -> bool:
        return False

    def rows_after(self, tokens: Sequence[int], *_: object) -> list[SourceRows]:
        self._tokens += tokens
        found = self.rows()
        del self._tokens[-len(tokens) :]
        return found

    def rows(self, *_: object, **__: object) -> list[SourceRows]:
        rows = self._rng.integers(0, N_VOCAB, (self._width, self._depth))
        for row in rows:
            if self._rng.random() < self._truth:
                history = list(self._tokens)
                for k in range(int(self._rng.integers(1, self._depth + 1))):
                    row[k] = int(logits_of(history).argmax())
                    history.append(int(row[k]))
        if not self._truth:  # never right
            right = int(logits_of(self._tokens).argmax())
            rows[:, 0][rows[:, 0] == right] = (right + 1) % END
        match = np.sort(self._rng.integers(1, 20, self._width))[::-1]
        found = Rows(rows.astype(np.int32), match.astype(np.int32), np.arange(self._width, dtype=np.int64))
        return [SourceRows(SOURCE_NUMBER["context"], found)]


SHAPES = {
    "chain": (1, 1, 12, 0.9),
    "bush": (2, 16, 1, 0.5),
    "tree": (3, 8, 5, 0.6),
    "deep": (4, 3, 16, 0.8),
    "wrong": (5, 8, 6, 0.0),
}


def fortune(shape: str) -> Fortune:
    """Return a `Fortune` of a named shape. It follows one text, so each request needs its own."""
    return Fortune(*SHAPES[shape])
