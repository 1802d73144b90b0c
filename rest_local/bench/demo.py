"""The demo's measurement: plain and drafted runs of one prompt alternate on one engine.

- The first pair is shown and warms the caches; showing text takes time on the same cores. The later pairs are timed and
  run silently. Where the first pair took longer than all may take, it is the one that counts.
- The speed-up is the median of the ratios within pairs.
- If greedy decoding loops, both sides sample with the same seed, so that they make the same draws. A small model that
  loops flatters every drafter, so each output states how much of it repeats.

The module knows nothing about terminals.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

from rest_local.bench.prompts import Prompt

if TYPE_CHECKING:
    from rest_local.decoding.engine import Engine, Piece, Result
    from rest_local.llama.sampling import Sampling

SIDES = ("plain", "drafted")
CONTEXT = 2048
SEED = 1
TEMPERATURE = 0.8
LOOPING = 0.3  # share of repeated n-grams from which on greedy decoding loops, and the demo samples instead
NGRAM = 8
DISTURBED = 1.3  # times the slowest of the plain runs; on a quiet machine they differ by 1 to 5%


class Display(Protocol):
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
    """One prompt in one mode ("exact" or "fast"). `identical`: all runs of both sides give the same tokens."""

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

    @property
    def disturbed(self) -> bool:
        """Whether plain runs of the same tokens differ so much that other programs must have run."""
        return max(self.plain.speeds) > DISTURBED * min(self.plain.speeds)

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
    engine: Engine,
    prompt: Prompt,
    mode: str,
    *,
    max_tokens: int,
    repeats: int,
    display: Display | None = None,
    seconds: float = math.inf,
) -> Comparison:
    """Measure one prompt with up to `2 * repeats + 3` generations of `max_tokens`; after `seconds` no pair begins.
    Raises the errors of `Engine.generate`.
    """
    over = time.perf_counter() + seconds
    sampling = choose_sampling(engine, prompt, max_tokens)
    if display is not None:
        display.begin(prompt, mode, not sampling.is_greedy)
    shown = {side: run(engine, prompt, side, sampling, max_tokens, display) for side in SIDES}
    timed: list[dict[str, Result]] = []
    while len(timed) < repeats and time.perf_counter() < over:
        timed.append({side: run(engine, prompt, side, sampling, max_tokens) for side in SIDES})
    outputs = {tuple(pair[side].tokens) for pair in [shown, *timed] for side in SIDES}
    timed = timed or [shown]
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
    """Greedy sampling, or seeded sampling if plain greedy decoding repeats more than LOOPING of its n-grams."""
    from rest_local.llama.sampling import Sampling

    greedy = Sampling()
    result = run(engine, prompt, "plain", greedy, max_tokens)
    loops = repeated_share(result.tokens) > LOOPING
    return replace(greedy, temperature=TEMPERATURE, seed=SEED) if loops else greedy


def run(
    engine: Engine, prompt: Prompt, side: str, sampling: Sampling, max_tokens: int, display: Display | None = None
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
        if display is not None:
            display.piece(side, piece)
    return stream.result


def speed(result: Result) -> float:
    """Tokens per second of the generation, without the prefill."""
    return result.timings.predicted_per_second


def to_json(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """The output of `demo --json`: the first drafted run in the form of `generate --json`, and all comparisons."""
    first = comparisons[0]
    return {
        **first.drafted.result.to_dict(),
        "identical": first.identical,
        "speedup": round(first.speedup, 3),
        "prompts": [comparison.to_json() for comparison in comparisons],
    }


def repeated_share(tokens: Sequence[int], n: int = NGRAM) -> float:
    """The share, 0 to 1, of the n-grams of `tokens` that occur earlier in `tokens`; 0 for fewer than n + 1 tokens.

    Takes O(len(tokens) * n) time.
    """
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
