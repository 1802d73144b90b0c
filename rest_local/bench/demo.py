"""The demo's measurement: one prompt, plain and drafted, interleaved, the same engine; returns dataclasses.

The first pair is for the eye and for warming up (showing text costs time on the same cores); the pairs after it are
timed and run silently. Speed is the median of the ratios within pairs. Where greedy decoding loops, both sides sample
with the same seed instead, so that they share their draws. Knows nothing about terminals.

    python -m rest_local.bench.demo [--model GGUF] [--tokens N] [--repeats N]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

from rest_local.bench.prompts import Prompt
from rest_local.bench.repeats import LOOPING, repeated_share

if TYPE_CHECKING:
    from rest_local.decoding.engine import Engine, Piece, Result
    from rest_local.llama.sampling import Sampling

SIDES = ("plain", "drafted")
MODES = ("exact", "fast")
CONTEXT = 1024
SEED = 1
TEMPERATURE = 0.8


class Audience(Protocol):
    """Who watches the first pair of runs."""

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
        return {
            "tokens_per_second": round(self.tokens_per_second, 2),
            "runs": [round(speed, 2) for speed in self.speeds],  # how noisy the machine was
            "mat": self.result.draft["mat"],
            "accepted": self.result.draft["accepted"],
            "drafted": self.result.draft["drafted"],
            "by_source": self.result.draft["by_source"],
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
    stream = engine.generate(
        prompt.text, max_tokens=max_tokens, sampling=sampling, policy="off" if side == "plain" else None
    )
    for piece in stream:
        if audience is not None:
            audience.piece(side, piece)
    return stream.result


def speed(result: Result) -> float:
    """Return tokens per second of the generation proper, the prompt not counted."""
    return float(result.timings["predicted_per_second"])


def headline(comparisons: Sequence[Comparison]) -> Comparison:
    """Return the comparison that stands for the demo: exact mode, the stored prompt, degenerate outputs last."""
    kinds = ("stored", "copy", "unseen")
    return min(comparisons, key=lambda c: (c.loops, c.mode != "exact", kinds.index(c.prompt.kind)))


def to_json(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Return the demo's final line: the headline's drafted run as `generate --json` prints it, and all comparisons."""
    best = headline(comparisons)
    rows = [comparison.to_json() for comparison in comparisons]
    return {
        **best.drafted.result.to_dict(),
        "identical": best.identical,
        "speedup": round(best.speedup, 3),
        "plain": best.plain.to_json(),
        "drafted": best.drafted.to_json(),
        "headline": {"prompt": best.prompt.kind, "mode": best.mode},
        "prompts": rows,
    }


def measure(model: Path, *, max_tokens: int, repeats: int) -> list[Comparison]:
    """Every prompt in both modes, drafted from the standard library. Raises ModelError, DatastoreError."""
    from rest_local.bench.prompts import demo_prompts
    from rest_local.bench.stdlib import ensure
    from rest_local.decoding.engine import Engine

    store, comparisons = ensure(model), []
    for mode in MODES:
        with Engine.load(model, datastores=[store], n_ctx=CONTEXT, exact=mode == "exact") as engine:
            comparisons += [
                compare(engine, prompt, mode, max_tokens=max_tokens, repeats=repeats) for prompt in demo_prompts()
            ]
    return comparisons


def main() -> None:
    """The command line of this module: a line for each prompt, then one line of JSON."""
    from rest_local.paths import demo_model

    parser = argparse.ArgumentParser(prog="python -m rest_local.bench.demo")
    parser.add_argument("--model", type=Path, help="GGUF file; default: the demo model")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    comparisons = measure(options.model or demo_model(), max_tokens=options.tokens, repeats=options.repeats)
    for c in comparisons:
        print(f"{c.mode:<6}{c.prompt.kind:<8}{c.speedup:6.2f} times, identical: {c.identical}")
    print(json.dumps(to_json(comparisons)))


if __name__ == "__main__":
    main()
