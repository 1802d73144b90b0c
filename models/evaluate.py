"""Evaluate a GGUF on the held-out modules through rest_local, without torch.

    python models/evaluate.py [--model models/demo.gguf] [--windows 3] [--lines 200] [--tokens 200] [--output FILE.json]

It measures three things on the standard-library modules of `held_out.txt` in the running interpreter:

- loss: nats per token and bits per byte. Each module is cut into windows of 1 024 tokens, of which `--windows` evenly
  spaced ones count (0: all, a minute or two). A token is predicted from the tokens before it in its window, and the
  first token of a module from the end-of-text token.
- fill-in-the-middle: one whole line with its indentation, from about 30 lines before and 15 after it, greedy. The rate
  is the share of lines that are reproduced exactly, except for trailing blanks.
- loops: the share of repeated 8-grams in greedy completions, one prompt per module.

It prints a table, then one line of JSON. Decoding is greedy and the lines are drawn with a fixed seed, so two runs on
one machine with the same threads agree. It takes about a minute for 10 M parameters on 2 cores.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rest_local.bench.demo import LOOPING, repeated_share
from rest_local.bench.prompts import begin_of, held_out_modules, standard_library
from rest_local.errors import DecodeFailed, ModelError, RestLocalError
from rest_local.llama.context import Context, ContextSettings
from rest_local.llama.model import Model
from rest_local.llama.vocabulary import Vocabulary
from rest_local.paths import demo_model

Logits = NDArray[np.float32]

WINDOW = 1024
PROMPT_CHARACTERS = 1200  # of a completion; about 350 tokens
BEFORE, AFTER = 1000, 500  # characters around a line; together the length of a short piece in training
MOST_BEFORE, MOST_AFTER = 640, 256  # tokens, so that any prompt and its answer fit a window
LONGEST_LINE = 64  # tokens of an infill
SEED = 20240611


@dataclass
class Loss:
    """Sums over a text: `nats` of `tokens` predictions, which make `size` bytes of UTF-8."""

    nats: float = 0.0
    tokens: int = 0
    size: int = 0

    def add(self, other: Loss) -> None:
        self.nats += other.nats
        self.tokens += other.tokens
        self.size += other.size

    def to_dict(self) -> dict[str, float]:
        return {
            "bytes": self.size,
            "tokens": self.tokens,
            "nats_per_token": round(self.nats / max(self.tokens, 1), 4),
            "bits_per_byte": round(self.nats / math.log(2) / max(self.size, 1), 4),
        }


@dataclass(frozen=True)
class Infill:
    """A line of a module with the text on both sides; `line` ends with its line break."""

    before: str
    line: str
    after: str


class Evaluator:
    """Evaluates one sequence in one context without drafts; keeps nothing between calls."""

    def __init__(self, context: Context, vocabulary: Vocabulary) -> None:
        self.context = context
        self.vocabulary = vocabulary
        self.first = vocabulary.eos if vocabulary.bos is None else vocabulary.bos

    def loss(self, text: str, windows: int = 0) -> Loss:
        """The loss over all windows of a text, or over `windows` of them, evenly spaced from the first to the last."""
        tokens = self.vocabulary.tokenize(text)
        if self.first is not None:
            tokens = np.concatenate(([np.int32(self.first)], tokens))
        window = min(WINDOW, self.context.n_ctx)
        begins = list(range(0, len(tokens) - 1, window))
        if 0 < windows < len(begins):
            begins = [begins[i] for i in np.linspace(0, len(begins) - 1, windows).astype(int)]
        total = Loss()
        for begin in begins:
            part = tokens[begin : begin + window + 1]
            size = sum(len(self.vocabulary.piece(int(token))) for token in part[1:])
            total.add(Loss(self._nats(part), len(part) - 1, size))
        return total

    def greedy(self, prompt: Sequence[int]) -> Iterator[int]:
        """The likeliest tokens after `prompt`, without an end token. The caller stops before the context is full."""
        self.context.clear()
        step = self.context.n_batch
        for begin in range(0, len(prompt), step):
            part = prompt[begin : begin + step]
            self._decode(part, begin, np.arange(begin, begin + len(part)) == len(prompt) - 1)
        for at in count(len(prompt)):
            token = int(self.context.logits(1)[0].argmax())
            if self.vocabulary.is_end(token):
                return
            yield token
            self._decode([token], at, 1)

    def _nats(self, tokens: NDArray[np.int32]) -> float:
        """The nats of every token but the first, given the tokens before it."""
        self.context.clear()
        total = 0.0
        step = min(self.context.max_outputs, self.context.n_batch)
        for begin in range(0, len(tokens) - 1, step):
            targets = tokens[begin + 1 : begin + 1 + step]
            self._decode(tokens[begin : begin + len(targets)], begin, 1)
            total += nats_of(self.context.logits(len(targets)), targets)
        return total

    def _decode(self, tokens: Sequence[int] | NDArray[np.int32], begin: int, output: Any) -> None:
        self.context.batch.fill(tokens, np.arange(begin, begin + len(tokens)), 0, 1, output)
        if code := self.context.decode():
            raise DecodeFailed(code, len(tokens))


def nats_of(logits: Logits, targets: NDArray[np.int32]) -> float:
    """The summed negative log probability of one target per row; `logits` float32 [n, n_vocab]."""
    rows = logits - logits.max(axis=1, keepdims=True)
    normalisers = np.log(np.exp(rows).sum(axis=1, dtype=np.float64))
    return float((normalisers - rows[np.arange(len(targets)), targets]).sum())


def held_out_texts() -> dict[str, str]:
    """The held-out modules that this interpreter has. Raises SystemExit if it has none."""
    library = standard_library()
    texts = {name: (library / name).read_text("utf-8") for name in held_out_modules() if (library / name).is_file()}
    if not texts:
        raise SystemExit(f"{library}: has none of the held-out modules")
    return texts


def infills(texts: dict[str, str], wanted: int) -> Iterator[Infill]:
    """Lines of at least 8 characters of code, without comments, drawn with a fixed seed from all modules."""
    places: list[tuple[str, int, int]] = []
    for name, text in texts.items():
        at = 0
        for line in text.splitlines(keepends=True):
            code = line.strip()
            if len(code) >= 8 and not code.startswith("#") and line.endswith("\n"):
                places.append((name, at, at + len(line)))
            at += len(line)
    for name, begin, end in random.Random(SEED).sample(places, min(wanted, len(places))):
        text = texts[name]
        first = 0 if begin <= BEFORE else text.find("\n", begin - BEFORE, begin) + 1 or begin
        last = text.rfind("\n", end, end + AFTER) + 1 or end
        yield Infill(text[first:begin], text[begin:end], text[end:last])


def infill_prompt(vocabulary: Vocabulary, infill: Infill) -> list[int]:
    """Prefix, suffix and middle in the model's tokens. Raises ModelError if it lacks tokens for the three roles."""
    roles = (vocabulary.fim_prefix, vocabulary.fim_suffix, vocabulary.fim_middle)
    if None in roles:
        raise ModelError(f"vocabulary {vocabulary.name}: has no fill-in-the-middle tokens; give another model")
    before = vocabulary.tokenize(infill.before).tolist()[-MOST_BEFORE:]
    after = vocabulary.tokenize(infill.after).tolist()[:MOST_AFTER]
    return [int(t) for t in (roles[0], *before, roles[1], *after, roles[2]) if t is not None]


def evaluate_loss(evaluator: Evaluator, texts: dict[str, str], windows: int) -> dict[str, Any]:
    """The loss by module and over all modules."""
    overall, modules = Loss(), {}
    for name, text in texts.items():
        loss = evaluator.loss(text, windows)
        overall.add(loss)
        modules[name] = loss.to_dict()
    return {**overall.to_dict(), "windows": windows, "modules": modules}


def evaluate_infills(evaluator: Evaluator, texts: dict[str, str], wanted: int) -> dict[str, Any]:
    """The rate of lines that are reproduced exactly."""
    chosen = list(infills(texts, wanted))
    exact = sum(fill(evaluator, infill) == infill.line.rstrip() for infill in chosen)
    return {"lines": len(chosen), "exact": exact, "rate": round(exact / max(len(chosen), 1), 4), "seed": SEED}


def fill(evaluator: Evaluator, infill: Infill) -> str:
    """The model's first line for the gap, without trailing blanks."""
    answer = b""
    for token in islice(evaluator.greedy(infill_prompt(evaluator.vocabulary, infill)), LONGEST_LINE):
        answer += evaluator.vocabulary.piece(token)
        if b"\n" in answer:
            break
    return answer.decode("utf-8", "replace").partition("\n")[0].rstrip()


def evaluate_loops(evaluator: Evaluator, texts: dict[str, str], limit: int) -> dict[str, Any]:
    """The share of repeated 8-grams of the greedy completions: mean, median, and the number that loop."""
    vocabulary = evaluator.vocabulary
    shares = []
    for text in texts.values():
        prompt = vocabulary.tokenize(begin_of(text, PROMPT_CHARACTERS)).tolist()[-MOST_BEFORE:]
        shares.append(repeated_share(list(islice(evaluator.greedy(prompt), limit))))
    return {
        "prompts": len(shares),
        "tokens": limit,
        "mean": round(statistics.fmean(shares), 4),
        "median": round(statistics.median(shares), 4),
        "looping": sum(share > LOOPING for share in shares),
    }


def evaluate(model: Path, *, windows: int = 3, lines: int = 200, tokens: int = 200, threads: int = 0) -> dict[str, Any]:
    """The complete evaluation, as the object that is printed. Raises ModelError, DecodeFailed."""
    begun = time.perf_counter()
    texts = held_out_texts()
    settings = ContextSettings(n_ctx=WINDOW, n_branches=1, threads=threads)
    with Model.open(model) as opened, Context(opened, settings) as context:
        evaluator = Evaluator(context, opened.vocabulary)
        result: dict[str, Any] = {
            "model": model.name,
            "model_bytes": model.stat().st_size,
            "parameters": opened.n_params,
            "python": sys.version.split()[0],
            "threads": context.threads,
            "held_out": evaluate_loss(evaluator, texts, windows),
            "fill_in_the_middle": evaluate_infills(evaluator, texts, lines),
            "repeated_8_grams": evaluate_loops(evaluator, texts, tokens),
        }
    result["seconds"] = round(time.perf_counter() - begun, 1)
    return result


def report(result: dict[str, Any]) -> Iterator[str]:
    """The lines of the table."""
    yield f"{'module':32} {'bytes':>8} {'tokens':>8} {'nats/token':>10} {'bits/byte':>9}"
    rows = {**result["held_out"]["modules"], "all": result["held_out"]}
    for name, row in rows.items():
        figures = f"{row['tokens']:>8} {row['nats_per_token']:>10.3f} {row['bits_per_byte']:>9.3f}"
        yield f"{name:32} {row['bytes']:>8} {figures}"
    fim, loops = result["fill_in_the_middle"], result["repeated_8_grams"]
    yield f"fill-in-the-middle: {fim['exact']} of {fim['lines']} lines exact ({fim['rate']:.1%})"
    yield (
        f"greedy completions: {loops['mean']:.1%} of their 8-grams repeated (median {loops['median']:.1%}), "
        f"{loops['looping']} of {loops['prompts']} loop"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="default: the demo model")
    parser.add_argument(
        "--windows", type=int, default=3, help="windows of 1 024 tokens per module for the loss; 0: all"
    )
    parser.add_argument("--lines", type=int, default=200, help="lines to fill in")
    parser.add_argument("--tokens", type=int, default=200, help="length of a greedy completion, at most 320")
    parser.add_argument("--threads", type=int, default=0, help="default: all cores")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    args = parser.parse_args()
    if not 0 < args.tokens <= WINDOW - MOST_BEFORE or args.lines < 1 or args.windows < 0:
        parser.error(f"--tokens is 1 to {WINDOW - MOST_BEFORE}, --lines at least 1, --windows at least 0")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["REST_LOCAL_CACHE"] = folder  # only --output is kept
        try:
            model = args.model or demo_model()
            result = evaluate(model, windows=args.windows, lines=args.lines, tokens=args.tokens, threads=args.threads)
        except RestLocalError as error:
            raise SystemExit(str(error)) from error
    for line in report(result):
        print(line)
    print(json.dumps(result))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
