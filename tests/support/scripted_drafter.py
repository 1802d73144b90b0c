"""A drafter that answers by a table of paths, without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rest_local.drafting.models.drafter import Drafter, DraftText, Likely, Query

Table = Mapping[tuple[int, ...], Sequence[Likely]]


class ByTable(DraftText, Drafter):
    """A drafter and its one text. `passes_asked`: the paths of each pass. `ready`: whether its text is caught up.

    A pass is said to take `pass_ms`. `error`: what a pass raises.
    """

    name = path = "scripted"

    def __init__(self, table: Table, pass_ms: float = 0.0, ready: bool = True, room: bool = True) -> None:
        self.table, self.pass_ms_each, self.ready, self.room = table, pass_ms, ready, room
        self.passes_asked: list[list[tuple[int, ...]]] = []
        self.step_ms = self.query_ms = 0.0
        self.error: Exception | None = None

    @property
    def drafter(self) -> ByTable:  # type: ignore[override]
        return self

    @property
    def can_ask(self) -> bool:
        return self.room and not self.failed

    def caught_up(self, saves_ms: float) -> bool:
        return self.ready

    def passes(self, path: Sequence[int]) -> int:
        return 1

    def pass_ms(self, n: int) -> float:
        return self.pass_ms_each

    def answer(self, queries: Sequence[Query]) -> list[Sequence[Likely]]:
        assert all(text is self for text, _ in queries)
        if self.error is not None:
            raise self.error
        self.passes_asked.append([path for _, path in queries])
        self.step_ms += self.pass_ms_each
        self.query_ms += self.pass_ms_each
        return [self.table.get(path, ()) for _, path in queries]
