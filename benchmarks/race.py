"""Whole programs, one after the other, that write the same recorded answers: a race by the clock.

    python -m benchmarks race --llama-server PATH --vocab GGUF --git REPOSITORY [--rounds 5] [--json]

- The model is a player (`benchmarks.player`), so every runtime writes the recorded text at the price of a real model.
- Answers are whole-file edits from the history of a repository: the message of a commit and the old file are the
  prompt, the new file from the first changed token on is the answer.
- Sides: llama-server without drafts and with each of its n-gram types (`+`: with --draft-min 48 --draft-max 64), and
  `rest-local serve` with drafting off, with the request's text alone, and with the old file as prediction.
- Each run starts a server, evaluates the prompt, then times the answer from the request to its last byte by this
  program's clock. Sides take turns within a round, in another order in each round.
- The result of a side is its time over that of llama-server without drafts, answer by answer: the geometric mean and
  its 95% interval over answers and rounds. Plain decoding of both programs shows whether the comparison is fair.
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
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import player
from benchmarks.program import Binary, Server, ServerFailed
from rest_local.bench.workload import Recorded, load_edits
from rest_local.llama.model import Model

START_SECONDS, ANSWER_SECONDS = 300.0, 600.0
PLAIN = "llama-server"
N_GRAMS = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
LONG = {"--spec-draft-n-min": "48", "--spec-draft-n-max": "64", "--draft-min": "48", "--draft-max": "64"}


@dataclass(frozen=True)
class Side:
    """A program: the command that starts it, and whether its requests carry the prediction."""

    name: str
    command: Sequence[str]
    predicts: bool = False

    def fields(self, answer: Recorded) -> dict[str, Any]:
        """What it adds to a request."""
        return {"prediction": {"type": "content", "content": answer.category}} if self.predicts else {}


def sides(binary: Binary | None, model: Path, context: int, arguments: Sequence[str]) -> Iterator[Side]:
    """Every side. `arguments`: of both programs."""
    if binary is not None:
        command = [binary.path, "-m", str(model), "-c", str(context), "-np", "1", *arguments]
        yield Side(PLAIN, command)
        longer = [word for name in [name for name in LONG if name in binary.options][:2] for word in (name, LONG[name])]
        for kind in (kind for kind in N_GRAMS if kind in binary.kinds):
            yield Side(kind, [*command, "--spec-type", kind])
            yield Side(f"{kind}+", [*command, "--spec-type", kind, *longer])
    serve = [sys.executable, "-m", "rest_local", "serve", "-m", str(model), "-c", str(context), "--slots", "1"]
    serve += ["--no-history", "--no-code", "--sessions", "0", *arguments]
    yield Side("rest-local off", [*serve, "--policy", "off"])
    yield Side("rest-local", serve)
    yield Side("rest-local prediction", serve, predicts=True)


def timed(side: Side, answer: Recorded) -> tuple[float, list[int]]:
    """Seconds and tokens of one answer by a new server. The prompt was evaluated before. Raises ServerFailed."""
    body = {"prompt": answer.prompt, "temperature": 0, "return_tokens": True, "cache_prompt": True}
    body |= side.fields(answer)
    with Server(side.command) as server:
        server.start(START_SECONDS)
        server.post("/completion", {**body, "n_predict": 1}, ANSWER_SECONDS)
        found, seconds = server.post("/completion", {**body, "n_predict": len(answer.answer)}, ANSWER_SECONDS)
    return seconds, [int(token) for token in found["tokens"]]


def answers(repository: Path, vocabulary: Path, count: int, tokens: int, context: int) -> list[Recorded]:
    """Edits of which at least half of `tokens` tokens fit `context`. `category` holds the text of the prediction."""
    with Model.open(vocabulary, vocab_only=True) as model:
        found = []
        for each in load_edits(repository, model.vocabulary, 20 * count, predict=True):
            room = min(tokens, context - len(each.prompt) - 16)
            if room >= tokens // 2 and len(each.answer) >= tokens // 2:
                text = b"".join(map(model.vocabulary.piece, each.prediction)).decode("utf-8", "replace")
                found.append(Recorded(each.name, each.prompt, each.answer[:room], (), text))
        return found[:count]


def race(
    model: Path, racers: Sequence[Side], edits: Sequence[Recorded], rounds: int, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Run all. A side that fails or writes another text is left out from then on, with the reason."""
    seconds: dict[str, dict[tuple[int, int], float]] = defaultdict(dict)
    failed: dict[str, str] = {}
    order = random.Random(1)
    for number, answer in enumerate(edits):
        player.play(model, answer.prompt, answer.answer)
        for turn in range(rounds):
            for side in order.sample(racers, len(racers)):
                if (name := side.name) in failed:
                    continue
                try:
                    taken, tokens = timed(side, answer)
                except ServerFailed as error:
                    failed[name] = str(error)
                    continue
                if tokens[: len(answer.answer)] != answer.answer:
                    same = next((i for i, (a, b) in enumerate(zip(tokens, answer.answer, strict=False)) if a != b), -1)
                    failed[name] = f"writes another text than the recorded answer from token {same} of {answer.name}"
                    continue
                seconds[name][number, turn] = taken
                tell(f"{answer.name} round {turn + 1}: {name} {1000 * taken / len(answer.answer):.2f} ms a token")
    reference = seconds.get(PLAIN) or seconds["rest-local off"]
    return {
        "answers": [{"name": e.name, "prompt": len(e.prompt), "tokens": len(e.answer)} for e in edits],
        "rounds": rounds,
        "plain_ms_per_token": 1000 * statistics.median(reference[n, t] / len(edits[n].answer) for n, t in reference),
        "speed_up": {name: _speed_up(reference, runs) for name, runs in seconds.items()},
        "failed": failed,
    }


def _speed_up(reference: dict[tuple[int, int], float], runs: dict[tuple[int, int], float]) -> dict[str, float]:
    """Geometric mean over answers of the median time of `reference` by that of `runs`, its 95% interval, the worst."""
    logs = []
    for number in sorted({number for number, _ in runs}):
        here = [statistics.median(t for (n, _), t in each.items() if n == number) for each in (reference, runs)]
        logs.append(math.log(here[0] / here[1]))
    spread = 1.96 * statistics.stdev(logs) / math.sqrt(len(logs))
    middle = statistics.fmean(logs)
    low, high = (math.exp(middle + sign * spread) for sign in (-1, 1))
    return {"mean": math.exp(middle), "low": low, "high": high, "worst": math.exp(min(logs))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-server", metavar="PATH", help="without it only the sides of rest-local run")
    parser.add_argument("--vocab", type=Path, required=True, help="a GGUF with the vocabulary")
    parser.add_argument("--git", type=Path, required=True, help="repository whose edits are replayed")
    parser.add_argument("--edits", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=240, help="of an answer at most")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=3072, help="of the player; also its context in tokens")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--quant", default="Q4_0")
    parser.add_argument("--only", default="", help="names of sides, separated by commas; default: all")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("arguments", nargs="*", help="for both programs, after --, such as -ngl 99 or -t 2")
    args = parser.parse_args()
    if args.edits < 2:
        parser.error("an interval needs two edits at least")
    with tempfile.TemporaryDirectory() as folder:
        places = {"CACHE": "cache", "DATA": "data", "CONFIG": "none.toml"}
        os.environ.update({f"REST_LOCAL_{name}": str(Path(folder) / place) for name, place in places.items()})
        model = Path(folder) / "player.gguf"
        player.write(args.vocab, model, width=args.width, layers=args.layers, quant=args.quant)
        try:
            binary = Binary.of(args.llama_server) if args.llama_server else None
        except ServerFailed as error:
            parser.error(str(error))
        racers = list(sides(binary, model, args.width, args.arguments))
        only = set(filter(None, args.only.split(",")))
        racers = [racer for racer in racers if not only or racer.name in only]
        edits = answers(args.git, args.vocab, args.edits, args.tokens, args.width)
        if len(edits) < 2:
            parser.error(f"{args.git} has {len(edits)} edits of {args.tokens // 2} tokens that fit {args.width}")
        load = os.getloadavg()[0]
        found = race(model, racers, edits, args.rounds, lambda line: print(line, file=sys.stderr, flush=True))
    found |= {"load_before": load, "player": f"{args.layers}x{args.width} {args.quant}", "arguments": args.arguments}
    found["llama_server"] = binary.version if binary else None
    if not args.json:
        for name, each in found["speed_up"].items():
            print(f"{name:24} {each['mean']:.2f} ({each['low']:.2f} to {each['high']:.2f}), worst {each['worst']:.2f}")
        for name, reason in found["failed"].items():
            print(f"{name:24} left out: {reason}")
    print(json.dumps(found))
