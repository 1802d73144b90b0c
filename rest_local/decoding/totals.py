"""What an engine did since it was opened, summed over its requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rest_local.decoding.generation import Statistics
from rest_local.decoding.stream import Result


@dataclass
class Totals:
    """Counted when a request ends, however it ends; tokens evaluated of prompts leave out cached ones.

    Seconds are those of forward passes and what goes with them, shared out by the tokens that each request had in the
    pass: those of prompts and of answers together are the time that passed, however many were served at once. (What
    one request waited for is in its own `timings`.)
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_seconds: float = 0.0
    predicted_tokens: int = 0
    predicted_seconds: float = 0.0
    steps: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    relaxed: int = 0
    lookups: int = 0
    lookups_skipped: int = 0
    by_source: dict[str, dict[str, int]] = field(default_factory=dict)

    def add(self, statistics: Statistics, result: Result) -> None:
        """Count a request in."""
        self.requests += 1
        self.prompt_tokens += statistics.prompt_tokens - statistics.cached_tokens
        self.cached_tokens += statistics.cached_tokens
        self.prompt_seconds += 1e-3 * statistics.prompt_share_ms
        self.predicted_tokens += len(result.tokens)
        self.predicted_seconds += 1e-3 * statistics.answer_share_ms
        self.steps += statistics.steps
        self.drafts += statistics.drafts
        self.drafted += statistics.drafted
        self.accepted += statistics.accepted
        self.relaxed += statistics.relaxed
        self.lookups += len(statistics.lookup_us)
        self.lookups_skipped += statistics.lookups_skipped
        for source, counts in statistics.by_source.items():
            mine = self.by_source.setdefault(source, {"drafted": 0, "accepted": 0})
            for key, count in counts.items():
                mine[key] += count

    def to_dict(self) -> dict[str, Any]:
        """A copy, from any thread: a source may be counted for the first time meanwhile."""
        by_source = {source: dict(counts) for source, counts in list(self.by_source.items())}
        return {**vars(self), "by_source": by_source}
