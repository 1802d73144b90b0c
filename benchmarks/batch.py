"""A batch of 200 requests: tokens per second at many requests at a time, relative to one after another.

    python -m benchmarks batch [--part wall|replay]... [--model GGUF] [--data FOLDER] [--requests N] [--json]

- `wall`: the requests of a batch file, answered by an engine with the slots that `rest-local batch` chooses, and by an
  engine of one slot as `rest-local generate` opens it. Both draft, and both answer in the order of the batch. Rounds
  alternate; the ratio is the median of the rounds. `off`: the same without drafts.
- `replay`: recorded answers of a chat model, decoded by the engine's own scheduler on a simulated clock: a forward pass
  takes what a shipped cost curve gives for its tokens, and the driver what it takes here in processor time. The curves
  are of one context length, so the attention of many long texts is not in them. `--data` (or REST_LOCAL_SHARED) names
  the folder of the answers (see `benchmarks.published`); without it, this part is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.curves import load_curve
from benchmarks.many import _texts
from benchmarks.published import SETS
from benchmarks.recorded import Recorded, load
from benchmarks.wall import Recording
from rest_local.batch.jobs import COMPLETION, Job, in_order
from rest_local.batch.worker import MOST_SLOTS, Worker, fitted
from rest_local.calibration.cost import LARGEST
from rest_local.decoding.batch import PATIENT_MS, WIDTHS, best_width
from rest_local.decoding.config import EngineConfig
from rest_local.decoding.core import RequestState
from rest_local.decoding.engine import Engine
from rest_local.decoding.request import Request
from rest_local.decoding.results import Statistics
from rest_local.decoding.scheduler import Scheduler
from rest_local.decoding.stream import Answer
from rest_local.decoding.verify import Verifier
from rest_local.drafting.sources import Sources
from rest_local.kv_cache.backend import Capability
from rest_local.llama.context import Batch
from rest_local.llama.model import Model
from rest_local.llama.vocabulary import Detokenizer
from rest_local.planning.auto import Auto
from rest_local.planning.policy import Off, Policy

REQUESTS = 200
TOKENS = 100
CHARACTERS = 300  # About 100 tokens.
CURVES = ("rtx3090-8b-q4_0", "xeon-amx-1.5b-q4_k")


def wall(model: str | None, requests: int, rounds: int = 3) -> dict[str, Any]:
    """Return the total tokens per second by policy, and the ratio."""
    jobs = in_order([_job(number, text[-CHARACTERS:]) for number, text in enumerate(_texts(requests))])
    config = EngineConfig(model=model)
    together = fitted(config, jobs)
    result: dict[str, Any] = {"requests": requests, "tokens": TOKENS, "slots": together.slots, "cells": together.cells}
    with Engine(config) as one, Engine(together) as many:
        for policy in ("off", "auto"):
            speeds: dict[str, list[float]] = {"one_by_one": [], "together": []}
            for _ in range(rounds):
                for name, engine in (("one_by_one", one), ("together", many)):
                    speeds[name].append(_tokens_per_second(engine, jobs, policy))
            ratios = [b / a for a, b in zip(speeds["one_by_one"], speeds["together"], strict=True)]
            medians = {name: round(median(values), 2) for name, values in speeds.items()}
            result[policy] = {**medians, "ratio": round(median(ratios), 3), "ratios": [round(r, 3) for r in ratios]}
    return result


def _job(number: int, prompt: str) -> Job:
    body = {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
    return Job(number, f"r{number}", f"batch_req_{number}", COMPLETION, json.dumps(body).encode())


def _tokens_per_second(engine: Engine, jobs: Sequence[Job], policy: str) -> float:
    engine.decoder.forget()
    given = [_with_policy(job, policy) for job in jobs]
    begun = time.perf_counter()
    with Worker(engine) as worker:
        tokens = sum(answer.timings.predicted_tokens for answer in worker.answers(given))
    return tokens / (time.perf_counter() - begun)


def _with_policy(job: Job, policy: str) -> Job:
    body = json.loads(job.body) | {"rest_local": {"policy": policy}}
    return Job(job.number, job.custom_id, job.id, job.url, json.dumps(body).encode())


class SimulatedBackend:
    """A backend that computes nothing. A decode takes the time of the curve, on the clock of `simulated_clock`."""

    def __init__(self, clock: Clock, costs: NDArray[np.float64], n_vocab: int, n_slots: int, n_ctx: int) -> None:
        self.n_ctx, self.n_cells, self.n_slots, self.n_branches = n_ctx, n_ctx * n_slots, n_slots, 8
        self.n_batch, self.max_outputs, self.n_vocab, self.n_swa, self.rollback = 512, LARGEST, n_vocab, 0, LARGEST
        self.batch = Batch(self.n_batch, self.n_branches)
        self.passes = 0
        self._clock, self._costs = clock, costs
        self._logits = np.zeros((LARGEST, n_vocab), np.float32)

    def decode(self) -> int:
        n = self.batch.n_tokens
        self.passes += 1
        self._clock.advance(float(self._costs[min(n, LARGEST) - 1]) * max(n / LARGEST, 1.0))
        return 0

    def synchronize(self) -> None:
        """Do nothing: a decode is complete when it returns."""

    def logits(self, n_outputs: int) -> NDArray[np.float32]:
        return self._logits[:n_outputs]

    def remove(self, seq: int, p0: int, p1: int = -1) -> bool:
        return True

    def copy(self, source: int, target: int, p0: int, p1: int) -> None:
        """Do nothing: there are no cells."""

    def begin(self, seq: int) -> int:
        return -1

    def state_size(self, seq: int) -> int:
        return 0

    def save(self, seq: int, **how: bool) -> bytes:
        return b""

    def restore(self, seq: int, state: bytes | memoryview, **how: bool) -> bool:
        return False

    def clear(self) -> None:
        """Do nothing: there are no cells."""


class Clock:
    """A clock of this thread's processor time plus the simulated time of the forward passes, in seconds."""

    def __init__(self) -> None:
        self._simulated = 0.0

    def __call__(self) -> float:
        return time.thread_time() + self._simulated

    def advance(self, ms: float) -> None:
        """Let `ms` pass."""
        self._simulated += ms / 1e3


@contextmanager
def simulated_clock() -> Iterator[Clock]:
    """Replace `time.perf_counter`, by which the decoder measures its passes, with a simulated clock."""
    clock, real = Clock(), time.perf_counter
    time.perf_counter = clock
    try:
        yield clock
    finally:
        time.perf_counter = real


def replay(data: Path, requests: int) -> dict[str, Any]:
    """Return the ratio of simulated tokens per second by curve, with drafts on both sides and on none."""
    file, vocabulary = SETS["chat"]
    result: dict[str, Any] = {}
    with Model.open(data / vocabulary, vocab_only=True) as model:
        answers = load(data / file, model.vocabulary)[:requests]
        answers = sorted((a for a in answers if a.prompt and a.answer), key=lambda answer: answer.prompt)
        for name in CURVES:
            result[name] = {"requests": len(answers)}
            for policy in ("off", "auto"):
                one = _simulated(model, answers, name, policy, 1)
                many = _simulated(model, answers, name, policy, MOST_SLOTS)
                ratio = round(many["tokens_per_second"] / one["tokens_per_second"], 3)
                result[name][policy] = {"one_by_one": one, "together": many, "ratio": ratio}
    return result


def _simulated(model: Model, answers: Sequence[Recorded], curve_name: str, policy: str, slots: int) -> dict[str, Any]:
    """Decode all answers, as many at a time as pay by the curve and `slots` at most."""
    curve = load_curve(curve_name)
    costs = load_curve(curve_name).expected(0).copy()
    width = best_width(curve, 0, [n for n in WIDTHS if n <= slots])
    with simulated_clock() as clock:
        longest = max(len(answer.prompt) + len(answer.answer) for answer in answers) + 1
        backend = SimulatedBackend(clock, costs, model.n_vocab, width, longest)
        scheduler = Scheduler(backend, Capability("tree", "simulated"), curve)
        scheduler.prefill.stall_ms = PATIENT_MS if slots > 1 else scheduler.prefill.stall_ms
        chosen: Policy = Auto(curve) if policy == "auto" else Off()
        begun, waiting = clock(), list(reversed(answers))
        running: list[RequestState] = []
        while waiting or running:
            while waiting and len(running) < width:
                running.append(_sequence(model, waiting.pop(), chosen))
                scheduler.submit(running[-1])
            scheduler.step()
            running = [sequence for sequence in running if not sequence.done]
        seconds = clock() - begun
    tokens = sum(len(answer.answer) for answer in answers)
    return {
        "at_once": width,
        "tokens": tokens,
        "passes": backend.passes,
        "tokens_per_second": round(tokens / seconds, 2),
    }


def _sequence(model: Model, answer: Recorded, policy: Policy) -> RequestState:
    request = Request(answer.prompt, max_tokens=len(answer.answer))
    recording = Answer(Statistics(), Detokenizer(model.vocabulary.piece), len(answer.answer), (), lambda token: False)
    sources = Sources([], model.n_vocab)
    verifier = Verifier(Recording(answer.answer), lambda token: False)
    return RequestState(request, policy.fork(), verifier, recording, lambda slot: sources)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=("wall", "replay"), help="repeatable; default: both")
    parser.add_argument("--model", help="a GGUF; default: the demo model")
    parser.add_argument("--data", type=Path, default=os.environ.get("REST_LOCAL_SHARED"))
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="only the line of JSON")
    args = parser.parse_args()
    result: dict[str, Any] = {}
    for part in args.part or ("wall", "replay"):
        if part == "wall":
            result[part] = wall(args.model, args.requests, args.rounds)
        elif args.data is not None and all((Path(args.data) / name).exists() for name in SETS["chat"]):
            result[part] = replay(Path(args.data), args.requests)
        else:
            print("replay: left out, its answers are not there; give --data FOLDER")
            continue
        if not args.json:
            print(f"{part}: {json.dumps(result[part])}", flush=True)
    print(json.dumps(result))
