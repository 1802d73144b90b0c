"""The effect of skipping lookups, on tokens and entropies of a model that are recorded once and then replayed.

    python -m benchmarks.lookups [--model models/demo.gguf] [--tokens N] [--curve NAME]... [--save FILE]

The model continues the beginnings of held-out modules, sampled at temperature 0.8. The tokens and the entropies of
their distributions are recorded. They are replayed on each curve with a lookup at every step, with the trigger without
entropies, and with the entropy of the newest token or of the one before (as on a GPU, where entropies are computed
after the next submission). Drafts come from the request's own text. The result has the lookups per step, the accepted
tokens, and the speed-ups with and without the time of the lookups.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rest_local import Engine, Sampling
from rest_local.bench.prompts import held_out_modules, standard_library
from rest_local.bench.recorded import Recorded
from rest_local.bench.replay import replay
from rest_local.calibration.cost import CostCurve
from rest_local.calibration.curves import load_curve
from rest_local.decoding.logprobs import entropy_of
from rest_local.drafting.growth import Draft
from rest_local.drafting.sources import Lookup, Sources
from rest_local.llama.context import Context, ContextSettings
from rest_local.llama.model import Model
from rest_local.planning.auto import Auto
from rest_local.planning.policy import StepContext

PROMPT_TOKENS = 256
CURVES = ("rtx4090-8b-iq3_xxs", "rtx3090-8b-q4_0")


class RecordedEntropies(Auto):
    """`auto` with recorded entropies. `lag`: age in tokens of the newest known entropy (1 on a GPU)."""

    def __init__(
        self, curve: CostCurve, entropies: Sequence[Sequence[float]], prompts: Sequence[int], lag: int
    ) -> None:
        super().__init__(curve)
        self._entropies, self._prompts, self._lag = entropies, prompts, lag
        self._answer = -1

    def begin(self, n_ctx: int) -> None:
        super().begin(n_ctx)
        self._answer += 1

    def draft(self, sources: Lookup, at: StepContext) -> Draft:
        known = at.n_ctx - self._prompts[self._answer] - self._lag
        newest = self._entropies[self._answer][max(0, known - 3) : max(0, known)]
        return super().draft(sources, at._replace(entropies=newest))


class AlwaysLooksUp(Auto):
    """`auto` with a lookup at every step."""

    def looks_up(self, at: StepContext, repeats: Callable[[int], bool]) -> bool:
        super().looks_up(at, repeats)
        return True


def record(model: str, n_tokens: int, n_prompts: int) -> tuple[list[Recorded], list[list[float]], int]:
    """Answers of a model, the entropies of their tokens, and the size of its vocabulary."""
    answers: list[Recorded] = []
    entropies: list[list[float]] = []
    with Engine.load(model, n_ctx=2048, policy="off") as engine:
        vocabulary = engine.model.vocabulary
        for name in held_out_modules()[:n_prompts]:
            text = (standard_library() / name).read_text("utf-8", "replace")
            prompt = vocabulary.tokenize(text[:8000], special=False)[:PROMPT_TOKENS].tolist()
            sampling = Sampling(temperature=0.8, seed=len(answers))
            stream = engine.generate(prompt, max_tokens=n_tokens, sampling=sampling)
            for _ in stream:
                pass
            answers.append(Recorded(name, prompt, list(stream.result.tokens)))
    with Model.open(model) as opened, Context(opened, ContextSettings(n_ctx=2048)) as context:
        for answer in answers:
            entropies.append(_entropies(context, [*answer.prompt, *answer.answer], len(answer.prompt)))
        return answers, entropies, opened.n_vocab


def _entropies(context: Context, text: Sequence[int], first: int) -> list[float]:
    """The entropies of the distributions of the tokens from `first` on; one forward pass evaluates 32 tokens."""
    context.clear()
    found = []
    for at in range(0, len(text), 32):
        part = [int(token) for token in text[at : at + 32]]
        context.batch.load(part, [*range(at, at + len(part))], [0] * len(part), [1] * len(part), [1] * len(part))
        if code := context.decode():
            raise RuntimeError(f"llama_decode: {code}")
        found += [entropy_of(row) for row in context.logits(len(part))]
    return found[first - 1 : len(text) - 1]


def measure(
    answers: list[Recorded], entropies: list[list[float]], n_vocab: int, curve: str, lookup_ms: float
) -> dict[str, Any]:
    """By side: lookups per step, accepted tokens, and the speed-up with and without the time of the lookups."""
    prompts = [len(answer.prompt) for answer in answers]
    unknown: list[list[float]] = [[] for _ in answers]
    sides: dict[str, Auto] = {
        "always": AlwaysLooksUp(load_curve(curve)),
        "outcomes": RecordedEntropies(load_curve(curve), unknown, prompts, 0),
    }
    for lag in (0, 1):
        sides[f"entropies, lag {lag}"] = RecordedEntropies(load_curve(curve), entropies, prompts, lag)
    report = {}
    for name, policy in sides.items():
        policy.driver.lookup = lookup_ms
        tally = replay(answers, lambda: Sources([], n_vocab), policy, load_curve(curve))
        row = tally.to_dict()
        report[name] = {
            "lookups": round(row["lookups"] / row["steps"], 3),
            "accepted": tally.accepted,
            "speedup": row["speedup"],
            "speedup_with_lookups": row["speedup_with_lookups"],
        }
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/demo.gguf")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--curve", action="append")
    parser.add_argument("--save", type=Path, help="write the recording to this file, or read it if the file exists")
    args = parser.parse_args()
    if args.save and args.save.exists():
        data = json.loads(args.save.read_text())
        answers, entropies, n_vocab = [Recorded(*each) for each in data[0]], data[1], data[2]
    else:
        answers, entropies, n_vocab = record(args.model, args.tokens, args.prompts)
        if args.save:
            rows = [(each.name, each.prompt, each.answer) for each in answers]
            args.save.write_text(json.dumps([rows, entropies, n_vocab]))
    result = {curve: measure(answers, entropies, n_vocab, curve, 0.15) for curve in args.curve or CURVES}
    for curve, sides in result.items():
        for name, row in sides.items():
            print(f"{curve}  {name:16} {row}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
