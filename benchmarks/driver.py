"""The driver's own time per step, with a vocabulary of 152k and 16 drafted nodes.

    python -m benchmarks driver [--steps N] [--nodes N] [--sequences N]... [--on cpu|device]... [--json]

- `cpu`: the time of a step outside `llama_decode`, which computes before it returns. The model is synthetic and small
  (random weights, Qwen's vocabulary size), because its own time does not count; the KV cache, the logits, the sources,
  the planner and the walk are real. Every step drafts the wanted number of nodes from a context that repeats itself.
  Most drafts are rejected, so that branches are detached and attached again.
- `device`: `critical_ms`, from the logits of a step to the next submission, on a backend that computes asynchronously
  for 4 ms (`benchmarks.device`), and `step_ms`, the whole step. Requests go through the scheduler. Each answer is the
  rest of a held-out module, and lookups search its own text and other modules.

The nodes are those of all sequences together, which the planner distributes.

- `drafted`: every sequence makes a lookup at every step, and all nodes are submitted regardless of their probability.
- `auto`: the unchanged policy, with the times of a model whose plain step takes 20 ms (`cpu`), or of a consumer GPU
  (`device`).
- `looking`: `auto` with a lookup at every step.
- `copy` (`device`): `auto` in a long copy: the prediction is the answer, and `nodes` nodes of each sequence cost a
  tenth of a plain step. All are accepted, so as many rows of logits are read, each from memory (0.04 ms and more).
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.device import Device
from benchmarks.library import held_out_modules, standard_library
from benchmarks.synthetic import Shape, synthetic
from benchmarks.wall import evaluate_prompt, step
from rest_local.calibration.cost import LARGEST, CostCurve
from rest_local.decoding.core import RequestState, StepResult
from rest_local.decoding.forward import Forward
from rest_local.decoding.request import Request
from rest_local.decoding.results import Statistics
from rest_local.decoding.scheduler import Scheduler
from rest_local.decoding.stream import Answer
from rest_local.decoding.verify import Verifier
from rest_local.drafting.sources import Sources
from rest_local.drafting.tree import Calibrated, Draft
from rest_local.kv_cache.backend import Capability
from rest_local.kv_cache.slot import Slot
from rest_local.llama.context import Context, ContextSettings
from rest_local.llama.model import Model
from rest_local.llama.options import Sampling
from rest_local.llama.sampler import Sampler
from rest_local.llama.vocabulary import Detokenizer
from rest_local.planning.acceptance import Acceptance, TokenCalibrator
from rest_local.planning.auto import Auto
from rest_local.planning.plan import Plan
from rest_local.planning.policy import Off, Policy, StepContext, StepCost
from rest_local.retrieval.segment import Segment

SUBMISSION = Shape(layers=1, width=32, heads=1, kv_heads=1, feed=32, vocab=4096, tied=True)
DEVICE_MS = 4.0
# The costs of an 8B Q4_0 on an RTX 3090, scaled to 4 ms.
DEVICE_COSTS = {1: 4.0, 2: 4.48, 4: 5.32, 8: 8.6, 16: 8.6, 64: 12.0}
SHAPE = Shape(layers=2, width=64, heads=2, kv_heads=1, feed=128, vocab=151_936, tied=True)


class HighAcceptance(Acceptance):
    """A policy that counts every candidate as likely, so that trees are full. It learns at the usual cost."""

    def __init__(self) -> None:
        super().__init__()
        self._prior, self._lift = [0.85] * len(self._prior), [1.0] * len(self._lift)
        self._learned = Acceptance()

    def learn(self, outcomes: Iterable[tuple[int, bool]]) -> None:
        self._learned.learn(outcomes)


class NoCalibration(TokenCalibrator):
    """A calibration that learns at the usual cost, and corrects nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._learned = TokenCalibrator()

    def learn(self, calibrations: Iterable[tuple[Iterable[Calibrated], int]]) -> None:
        self._learned.learn(calibrations)


class AlwaysLooksUp(Auto):
    """`auto` with a lookup at every step."""

    def looks_up(self, at: StepContext, repeats: Callable[[int], bool]) -> bool:
        super().looks_up(at, repeats)
        return True


class FixedBudget(AlwaysLooksUp):
    """A policy that always drafts `nodes` nodes, regardless of their probability, and learns as usual."""

    def __init__(self, nodes: int) -> None:
        super().__init__(CostCurve.from_points([0], [1, 64], [[20.0, 60.0]]))
        self.nodes = nodes
        self.shared.acceptance = HighAcceptance()
        self.shared.calibrator = NoCalibration()

    def plan(self, n_ctx: int, limit: int, n_other: int) -> Plan:
        """Return a plan for the same number of nodes at the usual cost, whatever the budget."""
        super().plan(n_ctx, limit, n_other)
        self.budget.credit = 20.0
        free = [0.0] * (self.nodes + 1)
        plan = Plan([20.0] * len(free), free, 1.0)  # Such slow steps are calibrated by token.
        plan.best_rate = 0.0
        return plan


class SlowModel(Auto):
    """A model that accounts for each decode with the time of one whose plain step takes 20 ms."""

    def __init__(self) -> None:
        super().__init__(CostCurve.from_points([0], [1, 64], [[20.0, 60.0]]))

    def account(self, drafted: Draft, done: StepCost) -> None:
        n_tokens = 1 + done.n_other + done.n_nodes + done.n_other_nodes
        super().account(
            drafted, done._replace(decode_ms=float(self.shared.curve.at(0)[n_tokens - 1]), updates_curve=False)
        )


class _TimedDecode:
    """A context whose decodes are timed. Only `decode` is wrapped; all other calls count as the driver's time."""

    def __init__(self, context: Context) -> None:
        self.seconds = 0.0
        decode = type(context).decode

        def timed() -> int:
            begun = time.perf_counter()
            code = decode(context)
            self.seconds += time.perf_counter() - begun
            return code

        context.decode = timed  # type: ignore[method-assign]


def on_device(
    steps: int = 400, nodes: int = 16, context_tokens: int = 1000, sequences: Sequence[int] = (1, 8)
) -> dict[str, Any]:
    """Return the milliseconds from logits to the next submission, by side and sequences: median and 90th percentile."""
    result: dict[str, Any] = {"vocabulary": SHAPE.vocab, "nodes": nodes, "steps": steps, "device_ms": DEVICE_MS}
    curve = CostCurve.from_points([0], list(DEVICE_COSTS), [list(DEVICE_COSTS.values())])
    policies: dict[str, Callable[[], Policy]] = {
        "drafted": lambda: FixedBudget(nodes),
        "looking": lambda: AlwaysLooksUp(curve),
        "auto": lambda: Auto(curve),
        "plain": Off,
    }
    result |= {side: {} for side in (*policies, "copy")}
    per_step = max(12, nodes + 2)
    stored, texts = _modules(max(sequences), context_tokens + per_step * steps)
    with tempfile.TemporaryDirectory() as directory:
        path = synthetic(SUBMISSION, "Q8_0", Path(directory) / "small.gguf")
        with Model.open(path) as model:
            for n in sequences:
                settings = ContextSettings(n_ctx=1024 + n * (context_tokens + per_step * steps), n_slots=n, threads=1)
                copying: Callable[[], Policy] = partial(Auto, _copying(nodes, n))
                for side, policy in [*policies.items(), ("copy", copying)]:
                    with Context(model, settings) as context:
                        result[side][n] = _serve(
                            model, context, policy(), steps, context_tokens, texts[:n], stored, side == "copy"
                        )
    return result


def _copying(nodes: int, n: int) -> CostCurve:
    """Return a curve on which `nodes` nodes for each of `n` sequences are cheap, and more nodes cost too much."""
    most = min(n * (1 + nodes), LARGEST - 1)
    costs = [DEVICE_MS, 1.1 * DEVICE_MS, 10 * DEVICE_MS]
    return CostCurve.from_points([0], [1, most, most + 1], [costs])


def _modules(n: int, length: int) -> tuple[Segment, list[list[int]]]:
    """Return modules of the standard library and `n` held-out texts of `length` tokens, which are numbered words."""
    library, number = standard_library(), dict[str, int]()

    def tokens_of(name: str) -> list[int]:
        words = re.findall(r"[^\S\n]*\w+|[^\S\n]*[^\w\s]|\s*\n", (library / name).read_text("utf-8"))
        return [number.setdefault(word, len(number)) % SUBMISSION.vocab for word in words]

    held_out = [name for name in held_out_modules() if (library / name).is_file()]
    others = (path.name for path in sorted(library.glob("*.py")) if path.name not in held_out)
    stored = Segment.of([np.array(tokens_of(name), np.int32) for name in others], SUBMISSION.vocab)
    texts = []
    for first in range(n):
        text: list[int] = []
        while len(text) < length:
            for name in held_out[first:] + held_out[:first]:
                text += tokens_of(name)
        texts.append(text)
    return stored, texts


def _serve(
    model: Model,
    context: Context,
    policy: Policy,
    steps: int,
    length: int,
    texts: Sequence[Sequence[int]],
    stored: Segment,
    predicted: bool = False,
) -> dict[str, float]:
    """Decode a request for each text at the same time, for `steps` steps or until the shortest text ends."""
    capability = Capability("none" if policy.name == "off" else "tree", "bench")
    with Device(context, DEVICE_MS, SHAPE.vocab, texts) as device, ExitStack() as stack:
        scheduler = Scheduler(device, capability, CostCurve.from_points([0], [1, 64], [[20.0, 60.0]]))
        sequences = []
        for text in texts:
            sampler = stack.enter_context(Sampler(model.vocabulary, Sampling()))
            sources = Sources([], SHAPE.vocab, stored)
            n = len(text) - length - 64
            sequences.append(
                _sequence(model, policy, sampler, sources, text[:length], n, text[length:] if predicted else ())
            )
            scheduler.submit(sequences[-1])
        while any(not sequence.answer.begun for sequence in sequences):
            scheduler.step()
        device.critical_ms.clear()
        times = []
        for _ in range(steps):
            begun = time.perf_counter()
            scheduler.step()
            times.append(1e3 * (time.perf_counter() - begun))
            for sequence in sequences:
                sequence.outbox.read()
            if any(sequence.done for sequence in sequences):
                break
        scheduler.cancel_all()
    statistics = [sequence.statistics for sequence in sequences]
    return {
        "critical_ms": round(median(device.critical_ms), 4),
        "critical_p90_ms": round(float(np.percentile(device.critical_ms, 90)), 4),
        "step_ms": round(median(times), 4),
        "nodes_per_step": round(sum(s.drafted for s in statistics) / statistics[0].steps, 2),
        "accepted_per_step": round(sum(s.accepted for s in statistics) / statistics[0].steps, 3),
        "lookup_us": round(float(np.median([us for s in statistics for us in s.lookup_us] or [0.0])), 1),
    }


def _sequence(
    model: Model,
    policy: Policy,
    sampler: Sampler,
    sources: Sources,
    prompt: Sequence[int],
    n: int,
    prediction: Sequence[int] = (),
) -> RequestState:
    answer = Answer(Statistics(), Detokenizer(model.vocabulary.piece), n, (), _never)
    request = Request(prompt, max_tokens=n, prediction=prediction)
    return RequestState(request, policy.fork(), Verifier(sampler, _never), answer, lambda slot: sources)


def _never(token: int) -> bool:
    return False


def run(
    steps: int = 400, nodes: int = 16, context_tokens: int = 1000, sequences: Sequence[int] = (1, 2, 4, 8)
) -> dict[str, Any]:
    """Return the milliseconds per step outside `llama_decode`, by side and sequences: median, mean, 99th percentile."""
    result: dict[str, Any] = {"vocabulary": SHAPE.vocab, "nodes": nodes, "steps": steps}
    result |= {"drafted": {}, "auto": {}, "plain": {}}
    with tempfile.TemporaryDirectory() as directory:
        path = synthetic(SHAPE, "Q8_0", Path(directory) / "wide.gguf")
        with Model.open(path) as model:
            for n in sequences:
                settings = ContextSettings(n_ctx=1024 + 2 * n * (context_tokens + steps), n_slots=n)
                with Context(model, settings) as context:
                    result["drafted"][n] = _measure(model, context, FixedBudget(nodes), steps, context_tokens)
                    context.clear()
                    result["auto"][n] = _measure(model, context, SlowModel(), steps, context_tokens)
                    context.clear()
                    result["plain"][n] = _measure(model, context, Off(), steps, context_tokens)
    return result


def _measure(model: Model, context: Context, policy: Policy, steps: int, length: int) -> dict[str, float]:
    rng = np.random.default_rng(5)
    timed = _TimedDecode(context)
    capability = Capability("none" if policy.name == "off" else "tree", "bench")
    slots = [Slot(context, n) for n in range(context.n_slots)]
    with ExitStack() as stack:
        forward = Forward(context, capability)
        sequences = []
        for slot in slots:
            sampler = stack.enter_context(Sampler(model.vocabulary, Sampling()))
            prompt = rng.choice(40, length, p=_zipf(40)).tolist()
            sequence = _sequence(model, policy, sampler, Sources([], model.n_vocab), prompt, 64)
            sequence.admit(slot)
            evaluate_prompt(forward, sequence)
            sequences.append(sequence)
        times = []
        for _ in range(steps):
            before, begun = timed.seconds, time.perf_counter()
            for sequence, outcome in zip(sequences, step(forward, sequences), strict=True):
                assert isinstance(outcome, StepResult)
                sequence.speculation.finish(outcome)
            times.append(1e3 * (time.perf_counter() - begun - (timed.seconds - before)))
            # The text continues as it began, regardless of the model, so that every step finds a draft.
            for sequence in sequences:
                sequence.text.tokens[-1] = int(rng.choice(40, p=_zipf(40)))
    statistics = [sequence.statistics for sequence in sequences]
    return {
        "median_ms": round(median(times), 4),
        "mean_ms": round(float(np.mean(times)), 4),
        "p99_ms": round(float(np.percentile(times, 99)), 4),
        "nodes_per_step": round(sum(s.drafted for s in statistics) / steps, 2),
        "accepted_per_step": round(sum(s.accepted for s in statistics) / steps, 3),
        "lookup_us": round(float(np.median([us for s in statistics for us in s.lookup_us] or [0.0])), 1),
    }


def _zipf(n: int) -> Any:
    weights = 1.0 / np.arange(1, n + 1)
    return weights / weights.sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument(
        "--sequences", type=int, action="append", help="repeatable; default: 1, 2, 4 and 8, or 1 and 8 on the device"
    )
    parser.add_argument("--on", choices=("cpu", "device"), action="append", help="repeatable; default: both")
    parser.add_argument("--json", action="store_true", help="only the line of JSON")
    args = parser.parse_args()
    measure = {"cpu": run, "device": on_device}
    result = {where: measure[where](args.steps, args.nodes, **_given(args.sequences)) for where in args.on or measure}
    if not args.json:
        for where, found in result.items():
            for side in [side for side in ("drafted", "looking", "auto", "copy", "plain") if side in found]:
                for n, row in found[side].items():
                    print(f"{where:6} {side:8} {n} sequences {row['nodes_per_step']:5} nodes  {_shown(row)}")
    print(json.dumps(result))


def _given(sequences: list[int] | None) -> dict[str, Any]:
    return {"sequences": sequences} if sequences else {}


def _shown(row: dict[str, float]) -> str:
    if "critical_ms" in row:
        return f"critical {row['critical_ms']} ms  p90 {row['critical_p90_ms']} ms  of a step of {row['step_ms']} ms"
    return f"median {row['median_ms']} ms  p99 {row['p99_ms']} ms a step"
