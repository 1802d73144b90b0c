"""Calibration on a busy machine, the delay of the first run on a machine, and a replay by the refined curve.

    python -m benchmarks.calibration busy|first|replay [MODEL] [--length N]... [--repository PATH]

- `busy`: a thorough measurement on the quiet machine; then a first load with one endless process per processor; then,
  without these processes, 300 tokens. It reports the largest error of t(n)/t(1), n <= 16, after the load and after the
  tokens.
- `first`: the time from loading to the first token in the first and in the second run, and their difference in plain
  steps. In both runs the weights are in the page cache, and the file is known to be loadable.
- `replay`: edits from the history of a repository with real forward passes, at about 500 and 3 000 tokens of context,
  compared with what the refined curve implies. Before it, an engine answers the same prompts once and refines the
  curve.

Each part has its own cache directory; nothing else should run.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.busy import load
from rest_local.bench.recorded import Recorded
from rest_local.bench.wall import wall_clock
from rest_local.bench.workload import load_edits
from rest_local.calibration.cost import SIZES, CostCurve
from rest_local.decoding.engine import Engine
from rest_local.drafting.sources import Sources
from rest_local.errors import InputInvalid
from rest_local.llama.model import Model
from rest_local.paths import cache_dir, demo_model
from rest_local.planning.policies import make_policy

TOKENS = 300
PROMPT = "def main() -> None:\n"
LARGEST = 16
CONTEXTS = (500, 3000)
ANSWERS = 2
ANSWER_TOKENS = 96
REFINING_TOKENS = 200  # of each answer before the replay: 5% of their time is ten plain steps of measuring


def busy(model: str) -> dict[str, Any]:
    """The ratios after a first load on a busy machine, compared with those of the quiet machine."""
    with _own_cache(model), Engine.load(model) as engine:
        quiet_measurement = engine.tune()
        quiet = quiet_measurement.curve
    with _own_cache(model):
        with load(os.cpu_count() or 1):
            engine = Engine.load(model)
        with engine:
            loaded, after_load = engine.calibration["state"], _errors(engine.cost_curve, quiet)
            _generate(engine, TOKENS)
            result = {
                "quiet_complete": quiet_measurement.complete,
                "quiet_noise": round(quiet_measurement.noise, 4),
                "quiet_busy": round(quiet_measurement.busy, 4),
                "state_after_load": loaded,
                "state_after_tokens": engine.calibration["state"],
                "error_after_load": max(after_load.values()),
                "error_after_tokens": max(_errors(engine.cost_curve, quiet).values()),
                "ratios": _ratios(engine.cost_curve, quiet.contexts[0]),
                "quiet_ratios": _ratios(quiet, quiet.contexts[0]),
            }
    return result


def first(model: str) -> dict[str, Any]:
    """The delay of the first token in the first run, compared with the second."""
    rows = []
    with _own_cache(model):
        with Engine.load(model) as engine:
            _generate(engine, 2)  # the weights are in memory now
            plain_ms = _plain_ms(engine)
        for path in cache_dir().glob("tuning/*"):
            path.unlink()
        for _ in range(2):
            begun = time.perf_counter()
            with Engine.load(model) as engine:
                stream = engine.generate(PROMPT, max_tokens=2)
                next(iter(stream))
                rows.append((time.perf_counter() - begun, engine.calibration["seconds"]))
    (first_s, measuring), (second_s, reading) = rows
    return {
        "plain_ms": round(plain_ms, 2),
        "first_token_s": round(first_s, 3),
        "second_run_s": round(second_s, 3),
        "later_in_plain_steps": round(1e3 * (first_s - second_s) / plain_ms, 2),
        "measuring_in_plain_steps": round(1e3 * (measuring - reading) / plain_ms, 2),
    }


def replay(model: str, lengths: Sequence[int] = CONTEXTS, repository: Path = Path()) -> dict[str, Any]:
    """Replay with real forward passes at each of these context lengths."""
    with Model.open(model, vocab_only=True) as opened:
        recorded = load_edits(repository, opened.vocabulary, 60, predict=True)
        n_vocab = opened.n_vocab
    result = {}
    with _own_cache(model):
        for length in lengths:
            chosen = _near(recorded, length)
            _refine(model, chosen)
            sources = partial(Sources, [], n_vocab)
            report = wall_clock(model, chosen, sources, partial(make_policy, "auto"), tokens=ANSWER_TOKENS).report
            report["contexts"] = [len(answer.prompt) for answer in chosen]
            result[str(length)] = report
    return result


def _refine(model: str, answers: Sequence[Recorded]) -> None:
    """Answer each prompt in an engine, so that the stored curve is refined at these context lengths."""
    n_ctx = max(len(answer.prompt) for answer in answers) + REFINING_TOKENS + 1
    with Engine.load(model, n_ctx=n_ctx) as engine:
        for answer in answers:
            for _ in engine.generate(answer.prompt, max_tokens=REFINING_TOKENS):
                pass


def _near(recorded: Sequence[Recorded], length: int) -> list[Recorded]:
    """The long answers with the shortest prompts of at least `length` tokens, cut to the last `length` tokens."""
    long = [answer for answer in recorded if len(answer.answer) >= ANSWER_TOKENS // 2 and len(answer.prompt) >= length]
    if not long:
        raise InputInvalid("repository", "", f"no edit with a prompt of {length} tokens")
    nearest = sorted(long, key=lambda answer: len(answer.prompt))[:ANSWERS]
    return [Recorded(each.name, each.prompt[-length:], each.answer, each.prediction) for each in nearest]


def _errors(curve: CostCurve, quiet: CostCurve) -> dict[int, float]:
    """Relative error of t(n)/t(1) by n, at the shortest measured context length."""
    n_ctx = quiet.contexts[0]
    wanted = _ratios(quiet, n_ctx)
    return {n: round(abs(ratio / wanted[n] - 1), 4) for n, ratio in _ratios(curve, n_ctx).items()}


def _ratios(curve: CostCurve, n_ctx: int) -> dict[int, float]:
    """t(n)/t(1) by n, up to LARGEST."""
    line = curve.expected(n_ctx)
    return {n: round(float(line[n - 1] / line[0]), 4) for n in SIZES if 1 < n <= LARGEST}


def _generate(engine: Engine, tokens: int) -> None:
    """Generate `tokens` tokens, in several answers if one ends early."""
    while tokens > 0:
        stream = engine.generate(PROMPT, max_tokens=tokens)
        for _ in stream:
            pass
        tokens -= max(stream.statistics.generated, 1)


def _plain_ms(engine: Engine) -> float:
    """Median milliseconds of a token, driver included."""
    times = []
    stream = engine.generate(PROMPT, max_tokens=12, policy="off")
    begun = time.perf_counter()
    for _ in stream:
        times.append(time.perf_counter() - begun)
        begun = time.perf_counter()
    return 1e3 * median(times[1:])


@contextmanager
def _own_cache(model: str) -> Iterator[None]:
    """An empty cache directory, except that this file is known to be loadable."""
    before = os.environ.get("REST_LOCAL_CACHE")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["REST_LOCAL_CACHE"] = folder
        try:
            Model.open(model).close()
            yield
        finally:
            os.environ.pop("REST_LOCAL_CACHE")
            if before is not None:
                os.environ["REST_LOCAL_CACHE"] = before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("busy", "first", "replay"))
    parser.add_argument("model", nargs="?", help="a GGUF; default: the demo model")
    parser.add_argument("--length", type=int, action="append", help="context length of replay in tokens; repeatable")
    parser.add_argument("--repository", type=Path, default=Path(), help="of replay; default: the working directory")
    args = parser.parse_args()
    model = args.model or str(demo_model())
    parts = {"busy": busy, "first": first}
    if args.part in parts:
        result = parts[args.part](model)
    else:
        result = replay(model, args.length or CONTEXTS, args.repository)
    print(json.dumps({args.part: result}))


if __name__ == "__main__":
    main()
