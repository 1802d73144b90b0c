"""Count what requests take and give: in one step, in one request, in an engine since it was opened, as users read it.

- `Timings` and `DraftStatistics` are what a result tells: frozen, in milliseconds and microseconds, not rounded;
  `to_dict` rounds and has the names of the JSON that `generate --json` and the server give.
- `PassClock` has the times of a forward pass, `StepClock` those of the step that one request makes in it. Whatever a
  policy is told of time is made here (`StepClock.cost`), from what was measured where it happened.
- `Statistics` sums up the steps of one request, `Totals` the requests of one engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rest_local.calibration.cost import CostCurve
from rest_local.decoding.verify import Verdict
from rest_local.drafting.sources import SOURCES
from rest_local.drafting.tree import Draft, DraftTree
from rest_local.planning.policy import StepCost

ENOUGH_STEPS = 30  # The time of a plain pass is known from so many.
LARGEST_ERROR = 0.1  # The standard deviation of the logarithm of that time by the cost curve.


@dataclass(frozen=True)
class Timings:
    """Tokens and times of one request, or of several together (`total`).

    Attributes:
        cached_tokens: tokens of the prompt that the KV cache held already
        prompt_tokens: tokens of the prompt that were evaluated, in `prompt_ms`
        predicted_tokens: tokens of the answer
        predicted_ms: the time that passed while they came, not the share of a request
        drafted_tokens: draft tokens that were verified; `accepted_tokens` of them were right
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
        each = list(each)
        return cls(**{f.name: sum(getattr(timings, f.name) for timings in each) for f in fields(cls)})

    @property
    def prompt_per_second(self) -> float:
        """Return the evaluated tokens of the prompt per second, 0 where there was none."""
        return 1e3 * self.prompt_tokens / self.prompt_ms if self.prompt_ms else 0.0

    @property
    def predicted_per_second(self) -> float:
        """Return the tokens of the answer per second, 0 where there was none."""
        return 1e3 * self.predicted_tokens / self.predicted_ms if self.predicted_ms else 0.0

    def to_dict(self) -> dict[str, float]:
        """Return them with the names and in the order of llama-server's `timings`."""
        return {
            "cache_n": self.cached_tokens,
            **llama_timings("prompt", self.prompt_tokens, self.prompt_ms),
            **llama_timings("predicted", self.predicted_tokens, self.predicted_ms),
            "draft_n": self.drafted_tokens,
            "draft_n_accepted": self.accepted_tokens,
        }


def llama_timings(what: str, n: int, milliseconds: float) -> dict[str, float]:
    """Return the fields that llama-server has for n tokens of `what` (`prompt`, `predicted`). Rates are 0 for none."""
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
    """The effect of drafting in one request.

    Attributes:
        steps: forward passes after the prompt
        generated: tokens that the steps gave, including those after the end of the answer
        drafted: draft tokens that were verified; `accepted` of them were right
        relaxed: of the accepted ones, those that pass only because verification is relaxed
        by_source: the same counts by source: datastore, history, context, prediction, model, grammar, edit
        plain_step_ms: what a step of plain decoding takes here, 0 if that is not known (`Statistics.plain_step_ms`)
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
        """Return the tokens for each pass: 1 without drafting. The JSON calls it `mat` (mean accepted tokens)."""
        return self.generated / max(self.steps, 1)

    def of_source(self, name: str) -> SourceCounts:
        """Return the counts of one source, zeros where it drafted nothing."""
        return self.by_source.get(name, SourceCounts())

    def to_dict(self) -> dict[str, Any]:
        """Return the object `draft` of the JSON."""
        counts = {name: {"drafted": each.drafted, "accepted": each.accepted} for name, each in self.by_source.items()}
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


@dataclass(slots=True)
class PassClock:
    """The contents of a pass, and when it was begun, submitted (the decode that succeeded) and computed: seconds of
    `time.perf_counter`.

    n_ctx      tokens in the cells before it
    n_running  requests that generate
    prompted   it holds a part of a prompt
    n_nodes    drafted tokens of all requests
    again      how many tokens each request evaluates again
    """

    n_ctx: int
    n_running: int
    prompted: bool
    n_nodes: int = 0
    again: list[int] = field(default_factory=list)
    begun: float = 0.0
    submitting: float = 0.0
    submitted: float = 0.0
    ready: float = 0.0

    @property
    def decode_ms(self) -> float:
        return 1e3 * (self.ready - self.submitting)

    @property
    def batch_ms(self) -> float:
        """Return the share of one sequence in building the batch and in submissions that failed."""
        return 1e3 * (self.submitting - self.begun) / self.n_running


@dataclass(slots=True)
class StepClock:
    """Milliseconds of the stages of one sequence's step, in the order in which they come.

    draft       lookup, growth and pruning, without the draft model
    lookup      the lookup alone; None where nothing was looked up
    model       the draft model: catching up with the text, and queries
    queries     the queries alone
    verify      verification, the cells, the sources
    late        learning, and what came after the pass: charged to the next step
    checkpoint  saving recurrent state for a draft, and going back to it; a part of the stages above
    again       tokens that were evaluated again because a draft was rejected
    """

    draft: float = 0.0
    lookup: float | None = None
    model: float = 0.0
    queries: float = 0.0
    verify: float = 0.0
    late: float = 0.0
    checkpoint: float = 0.0
    again: int = 0

    def begin(self) -> None:
        """Begin a step. What the last one left to be charged stays."""
        self.draft = self.model = self.queries = self.verify = 0.0
        self.lookup = None

    @property
    def sequence_ms(self) -> float:
        """Return the milliseconds that this sequence took in the step, without its part of the pass."""
        return self.draft + self.verify + self.late

    def cost(self, done: PassClock, n_nodes: int, n_accepted: int, first: bool) -> StepCost:
        """Return the costs that a policy learns from. `first`: the cost curve learns from this sequence of the pass.

        A lookup that led to no draft is charged with all of drafting; otherwise growth is a part of the draft's costs.
        A part of a prompt says nothing about steps without one.
        """
        lookup = self.lookup
        if lookup is not None:
            lookup = min(lookup, self.draft) if n_nodes else self.draft
        return StepCost(
            n_ctx=done.n_ctx,
            n_nodes=n_nodes,
            n_accepted=n_accepted,
            decode_ms=done.decode_ms,
            driver_ms=max(0.0, done.batch_ms + self.sequence_ms - (lookup or 0.0) - self.checkpoint),
            lookup_ms=lookup,
            n_other=done.n_running - 1,
            n_other_nodes=done.n_nodes - n_nodes + sum(done.again) - self.again,
            updates_curve=first and not done.prompted,
            query_ms=self.queries,
            prompted=done.prompted,
            n_again=self.again,
            checkpoint_ms=self.checkpoint,
        )


class StepResult(NamedTuple):
    """A verified step of one request, whose tokens are committed. `Speculation.finish` does the rest.

    `rows`: the rows of logits that the rest reads. `overlaps`: a device computes the next pass before the rest is done.
    """

    verdict: Verdict
    tree: DraftTree
    drafted: Draft
    rows: Sequence[NDArray[np.float32]]
    overlaps: bool


@dataclass(slots=True)
class PlainSteps:
    """The passes of one request that cost what they would in plain decoding: `n` of them took `ms`.

    A pass after one of another size takes longer than in plain decoding (cold caches; on a GPU a new graph, 2 times),
    so one without a draft counts after another such one. `alone`: no other request was in any pass of the answer.
    """

    n: int = 0
    ms: float = 0.0
    alone: bool = True
    _follows: bool = False

    def count(self, done: PassClock, plain: bool) -> None:
        """Count a pass. `plain`: this request had no draft in it."""
        if plain and self._follows:
            self.n += 1
            self.ms += done.decode_ms
        self._follows = plain
        self.alone &= done.n_running == 1 and not done.prompted


@dataclass
class Statistics:
    """The counts of one sequence; times in milliseconds."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_ms: float = 0.0
    again_ms: float = 0.0  # Evaluating text of the answer anew, after a pause or a context shift.
    # Its shares of passes, by tokens: summed over requests, the time that passed.
    prompt_share_ms: float = 0.0
    answer_share_ms: float = 0.0
    steps: int = 0
    drafts: int = 0  # Steps that submitted something.
    generated: int = 0
    drafted: int = 0
    accepted: int = 0
    relaxed: int = 0  # Accepted tokens that plain decoding would not have given there.
    by_source: dict[str, dict[str, int]] = field(default_factory=dict)
    lookup_us: list[float] = field(default_factory=list)
    lookups_skipped: int = 0  # Steps in which the policy chose not to look anything up.
    plain: PlainSteps = field(default_factory=PlainSteps)
    decode_ms: float = 0.0
    step_ms: float = 0.0  # With the driver's own time.
    model_ms: float = 0.0  # The time of a draft model.

    def count_prompt(self, ms: float) -> None:
        """Count a pass with a part of the prompt. After the first step that is text of the answer, evaluated anew."""
        if self.steps:
            self.again_ms += ms
        else:
            self.prompt_ms += ms

    def count_share(self, ms: float, is_prompt: bool) -> None:
        """Count the share of a pass, in the same two ways."""
        if is_prompt and not self.steps:
            self.prompt_share_ms += ms
        else:
            self.answer_share_ms += ms

    def count_step(self, tree: DraftTree, verdict: Verdict) -> None:
        path = verdict.path
        self.steps += 1
        self.generated += len(verdict.tokens)
        self.relaxed += len(verdict.relaxed)
        self.drafts += len(tree) > 0
        self.drafted += len(tree)
        self.accepted += len(path)
        for number in set(tree.source):
            source = self.by_source.setdefault(SOURCES[number], {"drafted": 0, "accepted": 0})
            source["drafted"] += tree.source.count(number)
        for node in path:
            self.by_source[SOURCES[tree.source[node]]]["accepted"] += 1

    def count_free(self, steps: Sequence[StepCost], skipped: bool) -> None:
        """Count steps of one token after a plain one that drafted nothing. `skipped`: by choice of the policy."""
        ms = sum(step.decode_ms for step in steps)
        self.steps += len(steps)
        self.lookups_skipped += skipped * len(steps)
        self.plain.n += len(steps)
        self.plain.ms += ms
        self.decode_ms += ms
        self.step_ms += ms + sum(step.driver_ms for step in steps)

    def plain_step_ms(self, curve: CostCurve, measured: bool) -> float:
        """Return the milliseconds of a plain forward pass in the middle of this answer, 0 if that is not known.

        It is the mean of the answer's own plain passes (`PlainSteps`) if there are ENOUGH_STEPS. Otherwise it is the
        time by the cost curve, but no more than the mean pass of the answer, if the curve is certain of this length and
        was `measured` as a whole or has learned from ENOUGH_STEPS plain passes. An answer whose passes were shared with
        other requests is compared with nothing.
        """
        if not self.plain.alone or not self.steps:
            return 0.0
        if self.plain.n >= ENOUGH_STEPS:
            return self.plain.ms / self.plain.n
        middle = self.prompt_tokens + self.generated // 2
        if not (measured or curve.plain_steps >= ENOUGH_STEPS) or curve.plain_sd(middle) > LARGEST_ERROR:
            return 0.0
        return min(float(curve.expected(middle)[0]), self.decode_ms / self.steps)

    def summary(self) -> DraftStatistics:
        """Return the statistics of drafting for the result of the request."""
        steps = max(self.steps, 1)
        times = np.array(self.lookup_us or [0.0])
        median, p99 = float(np.median(times)), float(np.percentile(times, 99))
        return DraftStatistics(
            steps=self.steps,
            generated=self.generated,
            drafted=self.drafted,
            accepted=self.accepted,
            relaxed=self.relaxed,
            by_source={name: SourceCounts(**counts) for name, counts in self.by_source.items()},
            lookups=Lookups(len(self.lookup_us), self.lookups_skipped, median, p99),
            driver_ms_per_step=(self.step_ms - self.decode_ms) / steps,
            decode_ms_per_step=self.decode_ms / steps,
            draft_model_ms_per_step=self.model_ms / steps,
        )


@dataclass
class Totals:
    """The counts of an engine, summed over its requests when each ends. Prompt tokens are those that were evaluated.

    Seconds are those of forward passes and what belongs to them, shared out by the tokens that each request had in the
    pass: prompts and answers together add up to the time that passed, however many requests were served at once. (What
    one request waited for is in its own `timings`.)
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_seconds: float = 0.0
    predicted_tokens: int = 0
    predicted_seconds: float = 0.0
    longest: int = 0  # Prompt and answer of one request.
    steps: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    relaxed: int = 0
    lookups: int = 0
    lookups_skipped: int = 0
    by_source: dict[str, dict[str, int]] = field(default_factory=dict)

    def add(self, statistics: Statistics, n_answer: int) -> None:
        """Count a request whose answer has so many tokens."""
        self.requests += 1
        self.prompt_tokens += statistics.prompt_tokens - statistics.cached_tokens
        self.cached_tokens += statistics.cached_tokens
        self.prompt_seconds += 1e-3 * statistics.prompt_share_ms
        self.predicted_tokens += n_answer
        self.longest = max(self.longest, statistics.prompt_tokens + n_answer)
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
        """Return a copy, in any thread: a source may be counted for the first time meanwhile."""
        by_source = {source: dict(counts) for source, counts in list(self.by_source.items())}
        return {**vars(self), "by_source": by_source}
