"""Runs a batch: takes answers from a worker or a cluster, writes them, and counts.

Contract: an answer is written before the next one is taken. An interrupt leaves an output with every answer so far.
Knows no terminal: `report` shows the progress.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from rest_local.batch.output import Output
from rest_local.batch.worker import JobAnswer
from rest_local.decoding.results import Timings


@dataclass
class Summary:
    """What a batch came to. `total`: jobs of the input; `kept`: those that an earlier run had answered; `answered`: in
    this run. Errors are answers: `failed` of this run, `failed_before` of earlier ones.
    """

    total: int
    kept: int = 0
    answered: int = 0
    failed: int = 0
    failed_before: int = 0
    timings: Timings = field(default_factory=Timings)
    seconds: float = 0.0

    @property
    def left(self) -> int:
        """Jobs without an answer."""
        return self.total - self.kept - self.answered

    @property
    def all_failed(self) -> int:
        """Errors in the output."""
        return self.failed + self.failed_before

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the answers of this run for each second of it."""
        return self.timings.predicted_tokens / self.seconds if self.seconds else 0.0

    @property
    def drafted_share(self) -> float:
        """The share of these tokens that were drafted and accepted."""
        return self.timings.accepted_tokens / max(self.timings.predicted_tokens, 1)

    @property
    def seconds_left(self) -> float | None:
        """An estimate; None before the first answer."""
        return self.seconds / self.answered * self.left if self.answered else None

    def to_dict(self) -> dict[str, Any]:
        """The object of `--json`."""
        return {
            "requests": self.total,
            "kept": self.kept,
            "answered": self.answered,
            "failed": self.all_failed,
            "left": self.left,
            "prompt_tokens": self.timings.cached_tokens + self.timings.prompt_tokens,
            "cached_tokens": self.timings.cached_tokens,
            "completion_tokens": self.timings.predicted_tokens,
            "drafted": self.timings.drafted_tokens,
            "accepted": self.timings.accepted_tokens,
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(self.tokens_per_second, 2),
        }


def run(
    answers: Iterable[JobAnswer], output: Output, summary: Summary, report: Callable[[Summary], None] = lambda _: None
) -> Summary:
    """Write all answers; `report` after each. `summary` counts on, also where this raises."""
    begun = time.perf_counter()
    output.start()
    for answer in answers:
        output.write(answer.record)
        summary.answered += 1
        summary.failed += not answer.ok
        summary.timings = Timings.total((summary.timings, answer.timings))
        summary.seconds = time.perf_counter() - begun
        report(summary)
    output.flush()
    summary.seconds = time.perf_counter() - begun
    return summary
