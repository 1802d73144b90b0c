"""Compare drafted with plain output: 100 prompts of 200 tokens, greedy, in exact and fast settings, on a real model.

    python -m benchmarks exact [--model GGUF] [--prompts N] [--tokens N] [--json]

Prompts are windows of the held-out standard-library modules. Every second one is followed by a repeat of its own
beginning, so that long drafts are accepted. The result has the prompts whose tokens differ, the tokens before the first
difference, and the numbers of drafted and accepted tokens: equality without accepted drafts would prove nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from benchmarks.library import held_out_modules, standard_library
from rest_local.decoding.engine import Engine
from rest_local.decoding.stream import Result

WINDOW_CHARACTERS = 900


def prompts(count: int) -> Iterator[str]:
    """Yield windows at fixed places of the held-out modules. Every second one repeats its beginning."""
    library = standard_library()
    texts = [path.read_text("utf-8") for name in held_out_modules() if (path := library / name).is_file()]
    for number in range(count):
        text = texts[number % len(texts)]
        begin = (number * 7919) % max(1, len(text) - WINDOW_CHARACTERS)
        window = text[begin : begin + WINDOW_CHARACTERS]
        yield window if number % 2 else f"{window}\n\n# once more:\n\n{window[: WINDOW_CHARACTERS // 4]}"


def run(model: str | None = None, count: int = 100, tokens: int = 200) -> dict[str, Any]:
    """Run both modes. Raises the errors of `Engine.load` and `Engine.generate`."""
    return {mode: _run_mode(model, mode == "exact", count, tokens) for mode in ("exact", "fast")}


def _run_mode(model: str | None, exact: bool, count: int, tokens: int) -> dict[str, Any]:
    differing, drafted, accepted, steps, compared = [], 0, 0, 0, 0
    with Engine.load(model, exact=exact, n_ctx=2048) as engine:
        for number, prompt in enumerate(prompts(count)):
            plain = _generate(engine, prompt, tokens, "off")
            other = _generate(engine, prompt, tokens, "auto")
            compared += len(plain.tokens)
            drafted += other.draft.drafted
            accepted += other.draft.accepted
            steps += other.draft.steps
            if plain.tokens != other.tokens:
                pairs = zip(plain.tokens, other.tokens, strict=False)
                same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(plain.tokens), len(other.tokens)))
                differing.append({"prompt": number, "same_tokens": same})
        settings, self_test = engine.settings, engine.decoder.context.tuning.self_test
    return {
        "prompts": count, "tokens": compared, "differing": differing, "steps": steps, "drafted": drafted,
        "accepted": accepted, "settings": settings, "self_test": self_test,
    }  # fmt: skip


def _generate(engine: Engine, prompt: str, tokens: int, policy: Any) -> Result:
    stream = engine.generate(prompt, max_tokens=tokens, policy=policy)
    for _ in stream:
        pass
    return stream.result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the demo model")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--json", action="store_true", help="only the line of JSON")
    args = parser.parse_args()
    result = run(args.model, args.prompts, args.tokens)
    if not args.json:
        for mode, row in result.items():
            done = f"{row['tokens']} tokens, {row['accepted']} of {row['drafted']} drafted accepted"
            print(f"{mode:6} {row['prompts']} prompts, {done}: {len(row['differing'])} prompts differ")
    print(json.dumps(result))
