"""What the driver itself costs a step: everything outside `llama_decode`, with a 152k vocabulary and 16 drafted nodes.

    python -m rest_local.bench.driver [--steps N] [--nodes N] [--sequences N]... [--json]

The nodes are those of all sequences together, shared out by the planner. `drafted`: every sequence asks its sources at
every step and all nodes are submitted, whatever they promise. `auto`: the policy as it is, with the prices of a model
whose plain step takes 20 ms.

The model is synthetic and small (random weights, Qwen's vocabulary size), because its own time is left out; the cells,
the logits, the sources, the planner and the walk are the real ones. Every step drafts the wanted number of nodes from a
context that repeats itself; the draft is mostly rejected, so that branches have to be detached and attached again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from rest_local.bench.synthetic import Shape, synthetic
from rest_local.decoding.backend import Capability
from rest_local.decoding.forward import Forward, Running, evaluate_prompt
from rest_local.decoding.generation import Generation
from rest_local.decoding.slot import Slot
from rest_local.drafting.drafter import Judged
from rest_local.drafting.sources import Sources
from rest_local.llama.context import Context, ContextSettings
from rest_local.llama.model import Model
from rest_local.llama.sampler import Sampler
from rest_local.llama.sampling import Sampling
from rest_local.planning.acceptance import Acceptance
from rest_local.planning.auto import Auto, Plan
from rest_local.planning.cost import CostCurve
from rest_local.planning.off import Off
from rest_local.planning.policy import Policy, StepCost
from rest_local.planning.wording import Wording

SHAPE = Shape(layers=2, width=64, heads=2, kv_heads=1, feed=128, vocab=151_936, tied=True)


class Hopeful(Acceptance):
    """Learns and estimates at the usual cost, but takes every candidate for likely: trees come out wide and full."""

    def __init__(self) -> None:
        super().__init__()
        self._prior, self._lift = [0.85] * len(self._prior), [1.0] * len(self._lift)
        self._learned = Acceptance()

    def learn(self, outcomes: Iterable[tuple[int, bool]]) -> None:
        self._learned.learn(outcomes)


class Unmoved(Wording):
    """Likewise: learns at the usual cost, and corrects nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._learned = Wording()

    def learn(self, judgements: Iterable[tuple[Iterable[Judged], int]]) -> None:
        self._learned.learn(judgements)


class FixedBudget(Auto):
    """Always drafts `nodes` nodes, whatever they promise; learns as usual."""

    def __init__(self, nodes: int) -> None:
        super().__init__(CostCurve.from_points([0], [1, 64], [[20.0, 60.0]]))
        self.nodes = nodes
        self.acceptance = Hopeful()
        self.wording = Unmoved()

    def looks_up(self, n_ctx: int, repeats: Callable[[], bool]) -> bool:
        super().looks_up(n_ctx, repeats)
        return True

    def together(self, n_ctx: int, limit: int, beside: int) -> Plan:
        super().together(n_ctx, limit, beside)
        plan = Plan([20.0] * (self.nodes + 1), [0.0] * (self.nodes + 1))  # so slow that words are looked at
        plan.best_rate = 0.0
        return plan


class Patient(Auto):
    """Books a decode as what it would take of a model of that speed, not what the small one here took."""

    def __init__(self) -> None:
        super().__init__(CostCurve.from_points([0], [1, 64], [[20.0, 60.0]]))

    def book(self, done: StepCost) -> None:
        n_tokens = 1 + done.beside + done.n_nodes + done.nodes_beside
        super().book(done._replace(decode_ms=float(self.curve.at(0)[n_tokens - 1]), leads=False))


class _TimedDecode:
    """What the decodes of a context took. Only that one call goes a longer way: all others are the driver's own."""

    def __init__(self, context: Context) -> None:
        self.seconds = 0.0
        decode = type(context).decode

        def timed() -> int:
            begun = time.perf_counter()
            code = decode(context)
            self.seconds += time.perf_counter() - begun
            return code

        context.decode = timed  # type: ignore[method-assign]


def run(
    steps: int = 400, nodes: int = 16, context_tokens: int = 1000, sequences: Sequence[int] = (1, 2, 4, 8)
) -> dict[str, Any]:
    """Milliseconds a step outside `llama_decode`, by side and sequences: median, mean, 99th percentile."""
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
                    result["auto"][n] = _measure(model, context, Patient(), steps, context_tokens)
                    context.clear()
                    result["plain"][n] = _measure(model, context, Off(), steps, context_tokens)
    return result


def _measure(model: Model, context: Context, policy: Policy, steps: int, length: int) -> dict[str, float]:
    rng = np.random.default_rng(5)
    decoding = _TimedDecode(context)
    capability = Capability("none" if policy.name == "off" else "tree", "bench")
    slots = [Slot(context, n * context.n_branches) for n in range(context.n_slots)]
    with ExitStack() as stack:
        generations = []
        for slot in slots:
            sampler = stack.enter_context(Sampler(model.vocabulary, Sampling()))
            sources = Sources([], model.n_vocab)
            generation = Generation(context, slot, policy.fork(), sources, sampler, capability, lambda t: False)
            evaluate_prompt(generation, rng.choice(40, length, p=_zipf(40)).tolist())
            generations.append(generation)
        forward = Forward(context)
        times = []
        for _ in range(steps):
            before, begun = decoding.seconds, time.perf_counter()
            forward.step([Running(generation, 64) for generation in generations])
            times.append(1e3 * (time.perf_counter() - begun - (decoding.seconds - before)))
            # the text goes on as it began, whatever the model said: a draft has to be there at every step
            for generation in generations:
                generation.root = int(rng.choice(40, p=_zipf(40)))
    statistics = [generation.statistics for generation in generations]
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
    parser.add_argument("--sequences", type=int, action="append", help="may be repeated; 1, 2, 4 and 8 without it")
    parser.add_argument("--json", action="store_true", help="only the line of JSON")
    args = parser.parse_args()
    result = run(args.steps, args.nodes, sequences=args.sequences or (1, 2, 4, 8))
    if not args.json:
        for side in ("drafted", "auto", "plain"):
            for n, row in result[side].items():
                print(
                    f"{side:8} {n} sequences {row['nodes_per_step']:5} nodes  median {row['median_ms']} ms"
                    f"  p99 {row['p99_ms']} ms a step"
                )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
