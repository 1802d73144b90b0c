"""What the result of a request tells about time and drafting, as typed values and as the documented JSON.

Contract: frozen, times in milliseconds and microseconds, not rounded; `to_dict` rounds and has the names of the JSON
that `generate --json` and the server give.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Timings:
    """Tokens and times of one request, or of several together (`total`).

    cached_tokens      tokens of the prompt that the KV cache held already
    prompt_tokens      tokens of the prompt that were evaluated, in `prompt_ms`
    predicted_tokens   tokens of the answer, in `predicted_ms`; this is the time that passed, not the share of a request
    drafted_tokens     draft tokens that were verified; `accepted_tokens` of them were right
    """

    cached_tokens: int = 0
    prompt_tokens: int = 0
    prompt_ms: float = 0.0
    predicted_tokens: int = 0
    predicted_ms: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @classmethod
    def total(cls, each: Iterable[Timings]) -> Timings:
        """The sums of all fields."""
        each = list(each)
        return cls(**{f.name: sum(getattr(timings, f.name) for timings in each) for f in fields(cls)})

    @property
    def prompt_per_second(self) -> float:
        """Evaluated tokens of the prompt per second, 0 where there was none."""
        return 1e3 * self.prompt_tokens / self.prompt_ms if self.prompt_ms else 0.0

    @property
    def predicted_per_second(self) -> float:
        """Tokens of the answer per second, 0 where there was none."""
        return 1e3 * self.predicted_tokens / self.predicted_ms if self.predicted_ms else 0.0

    def to_dict(self) -> dict[str, float]:
        """The names and the order of llama-server's `timings`."""
        return {
            "cache_n": self.cached_tokens,
            **llama_timings("prompt", self.prompt_tokens, self.prompt_ms),
            **llama_timings("predicted", self.predicted_tokens, self.predicted_ms),
            "draft_n": self.drafted_tokens,
            "draft_n_accepted": self.accepted_tokens,
        }


def llama_timings(what: str, n: int, milliseconds: float) -> dict[str, float]:
    """What llama-server tells about `what` (`prompt`, `predicted`) of n tokens; rates are 0 where there was none."""
    return {
        f"{what}_n": n,
        f"{what}_ms": round(milliseconds, 3),
        f"{what}_per_token_ms": round(milliseconds / n, 3) if n else 0.0,
        f"{what}_per_second": round(1e3 * n / milliseconds, 2) if milliseconds else 0.0,
    }


@dataclass(frozen=True)
class SourceCounts:
    """Draft tokens of one source, and how many of them were accepted."""

    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class Lookups:
    """Lookups in the sources: how many were made, how many the policy skipped, and how long one took (microseconds)."""

    made: int = 0
    skipped: int = 0
    median_us: float = 0.0
    p99_us: float = 0.0


@dataclass(frozen=True)
class DraftStatistics:
    """What drafting did in one request.

    steps         forward passes after the prompt
    generated     tokens that the steps gave, including those after the end of the answer
    drafted       draft tokens that were verified; `accepted` of them were right
    relaxed       of the accepted ones, those that pass only because verification is relaxed
    by_source     the same counts by source: datastore, history, context, prediction, model, grammar, logits
    plain_step_ms what a step of plain decoding takes here, 0 where that is not known (`Statistics.plain_step_ms`)
    """

    steps: int = 0
    generated: int = 0
    drafted: int = 0
    accepted: int = 0
    relaxed: int = 0
    by_source: Mapping[str, SourceCounts] = field(default_factory=dict)
    lookups: Lookups = field(default_factory=Lookups)
    plain_step_ms: float = 0.0
    driver_ms_per_step: float = 0.0
    decode_ms_per_step: float = 0.0
    draft_model_ms_per_step: float = 0.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens for each forward pass: 1 without drafting. The JSON calls it `mat` (mean accepted tokens)."""
        return self.generated / max(self.steps, 1)

    def of_source(self, name: str) -> SourceCounts:
        """The counts of one source, zeros where it drafted nothing."""
        return self.by_source.get(name, SourceCounts())

    def to_dict(self) -> dict[str, Any]:
        """The object `draft` of the JSON."""
        counts = {
            name: {"drafted": count.drafted, "accepted": count.accepted} for name, count in self.by_source.items()
        }
        of_model = self.draft_model_ms_per_step
        return {
            "steps": self.steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "relaxed": self.relaxed,
            "mat": round(self.tokens_per_step, 4),
            "by_source": counts,
            "lookups": {"made": self.lookups.made, "skipped": self.lookups.skipped},
            "lookup_us": {"p50": round(self.lookups.median_us, 1), "p99": round(self.lookups.p99_us, 1)},
            "driver_ms_per_step": round(self.driver_ms_per_step, 4),
            "decode_ms_per_step": round(self.decode_ms_per_step, 4),
            "plain_step_ms": round(self.plain_step_ms, 4) or None,
            **({"draft_model_ms_per_step": round(of_model, 4)} if of_model else {}),
        }
