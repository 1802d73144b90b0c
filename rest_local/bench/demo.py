"""The demo's measurement: one prompt, plain and drafted, interleaved, the same engine; returns dataclasses.

The first pair is shown and warms the caches (showing text costs time on the same cores). The pairs after it are timed
and run silently. Speed is the median of the ratios within pairs. Where greedy decoding loops, both sides sample with
the same seed instead, so that they share their draws. Knows nothing about terminals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

from rest_local.bench.prompts import Prompt
from rest_local.bench.repeats import LOOPING, repeated_share

if TYPE_CHECKING:
    from rest_local.decoding.engine import Engine, Piece, Result
    from rest_local.llama.sampling import Sampling

SIDES = ("plain", "drafted")
CONTEXT = 2048
SEED = 1
TEMPERATURE = 0.8


class Audience(Protocol):
    """Shows the first pair of runs."""

    def begin(self, prompt: Prompt, mode: str, sampled: bool) -> None: ...

    def piece(self, side: str, piece: Piece) -> None: ...


@dataclass(frozen=True)
class Side:
    """The timed runs of one side: the last result, and tokens per second of each."""

    result: Result
    speeds: tuple[float, ...]

    @property
    def tokens_per_second(self) -> float:
        return median(self.speeds)

    @property
    def repeated(self) -> float:
        return repeated_share(self.result.tokens)

    def to_json(self) -> dict[str, Any]:
        draft = self.result.draft.to_dict()
        return {
            "tokens_per_second": round(self.tokens_per_second, 2),
            "runs": [round(speed, 2) for speed in self.speeds],  # how noisy the machine was
            **{name: draft[name] for name in ("mat", "accepted", "drafted", "by_source")},
            "n_tokens": len(self.result.tokens),
            "repeated_8grams": round(self.repeated, 4),
        }


@dataclass(frozen=True)
class Comparison:
    """One prompt in one mode ("exact" or "fast"). `identical`: every run of both sides gave the same tokens."""

    prompt: Prompt
    mode: str
    sampled: bool
    plain: Side
    drafted: Side
    identical: bool
    speedup: float

    @property
    def loops(self) -> bool:
        return self.plain.repeated > LOOPING

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt.kind,
            "title": self.prompt.title,
            "mode": self.mode,
            "sampling": f"temperature {TEMPERATURE}, seed {SEED}" if self.sampled else "greedy",
            "identical": self.identical,
            "speedup": round(self.speedup, 3),
            "plain": self.plain.to_json(),
            "drafted": self.drafted.to_json(),
        }


def compare(
    engine: Engine, prompt: Prompt, mode: str, *, max_tokens: int, repeats: int, audience: Audience | None = None
) -> Comparison:
    """Measure one prompt. Costs `2 * repeats + 3` generations of `max_tokens`. Raises what `generate` raises."""
    sampling = choose_sampling(engine, prompt, max_tokens)
    if audience is not None:
        audience.begin(prompt, mode, not sampling.is_greedy)
    shown = {side: run(engine, prompt, side, sampling, max_tokens, audience) for side in SIDES}
    timed = [{side: run(engine, prompt, side, sampling, max_tokens) for side in SIDES} for _ in range(repeats)]
    outputs = {tuple(pair[side].tokens) for pair in [shown, *timed] for side in SIDES}
    sides = {side: Side(timed[-1][side], tuple(speed(pair[side]) for pair in timed)) for side in SIDES}
    return Comparison(
        prompt=prompt,
        mode=mode,
        sampled=not sampling.is_greedy,
        plain=sides["plain"],
        drafted=sides["drafted"],
        identical=len(outputs) == 1,
        speedup=median(speed(pair["drafted"]) / (speed(pair["plain"]) or 1.0) for pair in timed),
    )


def choose_sampling(engine: Engine, prompt: Prompt, max_tokens: int) -> Sampling:
    """Greedy, or seeded sampling where plain greedy decoding repeats more than `LOOPING` of its 8-grams."""
    from rest_local.llama.sampling import Sampling

    greedy = Sampling()
    result = run(engine, prompt, "plain", greedy, max_tokens)
    loops = repeated_share(result.tokens) > LOOPING
    return replace(greedy, temperature=TEMPERATURE, seed=SEED) if loops else greedy


def run(
    engine: Engine, prompt: Prompt, side: str, sampling: Sampling, max_tokens: int, audience: Audience | None = None
) -> Result:
    """Generate once."""
    text = engine.chat_prompt([{"role": "user", "content": prompt.text}]) if prompt.chat else prompt.text
    stream = engine.generate(
        text,
        max_tokens=max_tokens,
        sampling=sampling,
        policy="off" if side == "plain" else None,
        prediction=prompt.prediction,
    )
    for piece in stream:
        if audience is not None:
            audience.piece(side, piece)
    return stream.result


def speed(result: Result) -> float:
    """Return tokens per second of the generation proper, the prompt not counted."""
    return result.timings.predicted_per_second


def to_json(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """What `demo --json` prints: the first comparison's drafted run as `generate --json` prints it, and all of them."""
    first = comparisons[0]
    return {
        **first.drafted.result.to_dict(),
        "identical": first.identical,
        "speedup": round(first.speedup, 3),
        "prompts": [comparison.to_json() for comparison in comparisons],
    }
