"""What the policy `auto` adds to a step in which it looks nothing up, on any machine, busy or not.

    python -m benchmarks.quiet_steps [--rounds N] [--steps N] [--texts N]

Held-out modules of the standard library are the answers, and no model runs: a decode sweeps over 6 MB, so that the
driver finds caches as cold as after a forward pass. The clock that the driver reads is scripted (a call, a lookup, a
node and a decode take fixed times, a plain step 0.6 ms), so every round makes the same steps. The result has the CPU
time of the decoding thread in a step, without the decode: of each step the least of all rounds, as a mean over the
steps by kind: policy `off`; `auto` without a lookup, with one, and with a draft.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from rest_local.bench.prompts import held_out_modules, standard_library
from rest_local.calibration.cost import CostCurve
from rest_local.calibration.measuring import LoadMeter
from rest_local.decoding import sequence as decoding
from rest_local.decoding.counts import Statistics
from rest_local.decoding.request import Request
from rest_local.decoding.scheduler import Scheduler
from rest_local.decoding.stream import Answer
from rest_local.drafting.growth import Growth
from rest_local.drafting.sources import Sources
from rest_local.kv_cache.backend import Backend, Capability
from rest_local.llama.batch import Batch
from rest_local.llama.model import Model
from rest_local.llama.sampler import Sampler
from rest_local.llama.sampling import Sampling
from rest_local.llama.vocabulary import Detokenizer, Vocabulary
from rest_local.paths import demo_model
from rest_local.planning.auto import Auto
from rest_local.planning.policy import Off, Policy

PROMPT = 300
CALL_MS, LOOKUP_MS, GROWTH_MS, NODE_MS, ENTROPY_MS = 0.002, 0.07, 0.025, 0.008, 0.012  # of the scripted clock
SIZES, COSTS = [1, 2, 3, 4, 8, 16, 32, 64], [0.6, 0.8, 1.0, 1.1, 1.6, 2.4, 4.2, 8.0]


def curve() -> CostCurve:
    """The costs of the demo model on two cores; attention adds 8% in 1 024 tokens."""
    return CostCurve.from_points([0, 1024], SIZES, [COSTS, [1.08 * ms for ms in COSTS]])


class Clock:
    """In place of `time.perf_counter`: every call takes CALL_MS, and scripted work adds its own time."""

    def __init__(self) -> None:
        self.ms = 0.0

    def __call__(self) -> float:
        self.ms += CALL_MS
        return 1e-3 * self.ms

    def lasting(self, ms: float, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            self.ms += ms
            return work(*args, **options)

        return timed

    @contextmanager
    def used(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(patch.object(time, "perf_counter", self))
            for owner, name, ms in (
                (Sources, "rows", LOOKUP_MS),
                (Growth, "__init__", GROWTH_MS),
                (Growth, "grow", NODE_MS),
                (decoding, "entropy_of", ENTROPY_MS),
            ):
                stack.enter_context(patch.object(owner, name, self.lasting(ms, getattr(owner, name))))
            yield


class Scripted:
    """Logits whose arg-max is the next token of `text`. `own_ns`: CPU time of the decodes."""

    def __init__(self, text: Sequence[int], n_vocab: int, clock: Clock) -> None:
        self.n_ctx = self.n_cells = 1 << 16
        self.n_batch, self.n_branches, self.n_slots, self.n_vocab, self.max_outputs = 512, 8, 1, n_vocab, 64
        self.n_swa = 0
        self.batch = Batch(self.n_batch, self.n_branches)
        self.own_ns = 0
        self._text, self._clock, self._costs = text, clock, curve().at(0).tolist()
        self._rows: NDArray[np.float32] = np.zeros((self.max_outputs, n_vocab), np.float32)
        self._likeliest: list[tuple[int, int]] = []
        self._sweep = np.ones(6 << 17)

    def decode(self) -> int:
        begun, batch, n = time.thread_time_ns(), self.batch, self.batch.n_tokens
        for row, token in self._likeliest:
            self._rows[row, token] = 0.0
        after = (batch.pos[:n][batch.output[:n] == 1] + 1).tolist()
        self._likeliest = [(row, self._text[pos % len(self._text)]) for row, pos in enumerate(after)]
        for row, token in self._likeliest:
            self._rows[row, token] = 20.0
        self._sweep.sum()
        self._clock.ms += self._costs[min(n, 64) - 1]
        self.own_ns += time.thread_time_ns() - begun
        return 0

    def synchronize(self) -> None: ...

    def logits(self, n_outputs: int) -> NDArray[np.float32]:
        return self._rows[:n_outputs]

    def remove(self, seq: int, p0: int, p1: int = -1) -> bool:
        return True

    def copy(self, source: int, target: int, p0: int, p1: int) -> None: ...

    def clear(self) -> None: ...


def one_round(texts: Sequence[list[int]], vocabulary: Vocabulary) -> list[tuple[str, int]]:
    """(kind, nanoseconds) of every step: each text with `off`, then with `auto`."""
    clock, known = Clock(), curve()
    policies: dict[str, Policy] = {"off": Off(), "auto": Auto(known)}
    known.busy_now = LoadMeter(lambda: 0).busy  # asks the system, and decides nothing by it
    with clock.used():
        return [
            step
            for text in texts
            for side, policy in policies.items()
            for step in _steps(side, policy, text, vocabulary, known, clock)
        ]


def _steps(
    side: str, policy: Policy, text: list[int], vocabulary: Vocabulary, known: CostCurve, clock: Clock
) -> Iterator[tuple[str, int]]:
    backend, n = Scripted(text, vocabulary.size, clock), len(text) - PROMPT
    answer = Answer(Statistics(), Detokenizer(vocabulary.piece), n, (), _never)
    sources = Sources([], vocabulary.size)
    with Sampler(vocabulary, Sampling()) as sampler:
        request = Request(text[:PROMPT], max_tokens=n)
        sequence = decoding.Sequence(request, policy.fork(), sampler, answer, lambda slot: sources, _never)
        scheduler = Scheduler(cast(Backend, backend), Capability("tree", "bench"), known, overlaps=False)
        scheduler.submit(sequence)
        scheduler.step()
        counts = sequence.statistics
        while not sequence.done:
            lookups, drafts, own, begun = len(counts.lookup_us), counts.drafts, backend.own_ns, time.thread_time_ns()
            scheduler.step()
            ns = time.thread_time_ns() - begun - (backend.own_ns - own)
            sequence.read()
            looked = "draft" if counts.drafts > drafts else "lookup" if len(counts.lookup_us) > lookups else "none"
            yield side if side == "off" else f"auto, {looked}", ns


def _never(token: int) -> bool:
    return False


def run(rounds: int, steps: int, n_texts: int) -> dict[str, Any]:
    """By kind of step: how many, and microseconds of the driver (mean and median of the least times)."""
    library = standard_library()
    with Model.open(demo_model(), vocab_only=True) as model:
        vocabulary = model.vocabulary
        files = [library / name for name in held_out_modules() if (library / name).is_file()]
        read = (vocabulary.tokenize(file.read_text("utf-8"), special=False).tolist() for file in files)
        texts = [tokens[: PROMPT + steps] for tokens in read if len(tokens) >= PROMPT + steps][:n_texts]
        one_round(texts[:1], vocabulary)
        repeated = [one_round(texts, vocabulary) for _ in range(rounds)]
    least = defaultdict(list)
    for same in zip(*repeated, strict=True):
        assert len({kind for kind, _ in same}) == 1, "rounds that differ"
        least[same[0][0]].append(1e-3 * min(ns for _, ns in same))
    result: dict[str, Any] = {
        kind: {"steps": len(us), "mean_us": round(float(np.mean(us)), 1), "median_us": round(float(np.median(us)), 1)}
        for kind, us in sorted(least.items())
    }
    for value in ("mean_us", "median_us"):
        result[f"without a lookup, more than off: {value}"] = round(
            result["auto, none"][value] - result["off"][value], 1
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--texts", type=int, default=4)
    args = parser.parse_args()
    result = run(args.rounds, args.steps, args.texts)
    for name, value in result.items():
        print(f"{name}: {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
