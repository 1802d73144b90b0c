"""Retrieval, recycled logits, EAGLE-3 heads and MTP layers in one tree, alone and together.

    python -m benchmarks.drafters [--prompts N] [--tokens N] [--repeats N] [--curves NAME...] [--shares SHARE...]

Two targets: the demo model, which has an EAGLE-3 head, and the same weights as mimo2 with an MTP layer in the file
(`models/mimo2.py`). Prompts of the kinds `stored` and `unseen` of `benchmarks.speed`; the datastore is the standard
library without the held-out modules. If greedy decoding loops, tokens are sampled with a fixed seed.

Each setup has a policy of its own, which learns from one prompt to the next, first from two that are not counted:

- `retrieval`: datastore and context; the head is not loaded.
- `logits`: the table of recycled logits alone; lookups find nothing.
- `eagle3`, `mtp`: the head alone. Nothing is looked up.
- `retrieval + eagle3`, `retrieval + mtp`: without recycled logits.
- `all (...)`: all together, which is what an engine does.

Measured: each drafted run follows a plain run of the same target without a head; the speed-up is the ratio of the two,
by the clock and by the CPU time of the process (one thread), which other programs change less. The prompt is evaluated
anew each time, so a head pays for reading it.

Simulated (`clock`): the heads draft and the target verifies, but the tokens are those of the plain run, so that all
setups have the same text. Each forward pass of the target takes what the curve of a larger model says, and each pass of
a head the given share of that, for as many tokens as it had. The driver and a lookup take fixed times. Passes, drafts
and acceptance are real; only milliseconds are replaced, for the planner as well, so that it plans for that machine.
Reading rows of logits is not charged: 0.01 ms a row here.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import numpy as np

from benchmarks.clocked import Chosen, Clock, Said, Setup, Simulated
from benchmarks.workloads import prompts
from models.mimo2 import convert
from rest_local.bench.demo import choose_sampling
from rest_local.bench.prompts import Prompt, ensure
from rest_local.calibration.cost import LARGEST
from rest_local.calibration.curves import load_curve
from rest_local.decoding.engine import Engine
from rest_local.decoding.stream import Result
from rest_local.decoding.streaming import Stream
from rest_local.drafting.models.heads import Head
from rest_local.llama.sampling import Sampling
from rest_local.paths import demo_model
from rest_local.planning.policy import Policy

KINDS = ("stored", "unseen")
CURVES = ("rtx3090-8b-q4_0", "rtx4090-8b-iq3_xxs")
SHARES = (0.1,)  # of a step that a pass of the head takes. An MTP layer and the output matrix of an 8B model are
# some 10% of its weights; the heads of the demo model, which has six layers, some 25%
FIGURES = ("speedup", "speedup_by_cpu_time", "mean_by_cpu_time")
NEAR_TIE = 0.1  # nats between two tokens, of which another batch can make the other one the likeliest


SETUPS = (
    Setup("retrieval", "demo", retrieval=True),
    Setup("logits", "demo", logits=True),
    Setup("eagle3", "demo", head=True),
    Setup("retrieval + eagle3", "demo", retrieval=True, head=True),
    Setup("all (eagle3)", "demo", retrieval=True, head=True, logits=True),
    Setup("retrieval (mimo2)", "mimo2", retrieval=True),
    Setup("mtp", "mimo2", head=True),
    Setup("retrieval + mtp", "mimo2", retrieval=True, head=True),
    Setup("all (mtp)", "mimo2", retrieval=True, head=True, logits=True),
)


def parts_of(whole: Setup) -> list[Setup]:
    """The setups of the same target that have some of its sources."""
    own = _sources(whole)
    return [each for each in SETUPS if each.target == whole.target and _sources(each) < own]


SOURCES = ("retrieval", "head", "logits")


def _sources(setup: Setup) -> set[str]:
    return {name for name in SOURCES if getattr(setup, name)}


WHOLE = tuple(setup for setup in SETUPS if len(_sources(setup)) == len(SOURCES))


@dataclass
class Run:
    """One answer, by tokens per second of wall and of CPU time after its first piece."""

    result: Result
    speed: float
    cpu_speed: float


@dataclass
class Row:
    """What one setup did on one prompt: ratios to plain, of the last run."""

    prompt: Prompt
    sampled: bool
    wall: float
    cpu: float
    result: Result
    leaves: float | None = None  # nats of the first other token below plain's; None for the same output, inf if sampled
    head_ms: float = 0.0  # simulated: of a step

    @property
    def same(self) -> bool:
        return self.leaves is None


@dataclass
class Bench:
    """Engines, policies and what was measured. `rows`: by setup, or (setup, curve, share)."""

    engines: dict[str, Engine]
    tokens: int
    rows: dict[Any, list[Row]] = field(default_factory=dict)

    def run(
        self, setup: Setup, prompt: Prompt, sampling: Sampling, policy: Policy | str, said: Sequence[int] = ()
    ) -> Run:
        """Generate once, with the prompt evaluated anew. `said`: the answer, whatever the logits are."""
        engine = self.engines[setup.engine]
        request = engine.request(
            prompt.text, max_tokens=self.tokens, sampling=sampling, policy=policy, keep_prefix=False, ignore_end=True
        )
        sequence = engine._core.prepare(request)
        if said:
            sequence.chooser.close()
            sequence.chooser = Said([*said, *[0] * LARGEST])  # a draft may be longer than what is left of the answer
        stream = engine._begin(Stream(sequence, engine._step_until, engine._core.cancel))
        first, begun, cpu = 0, 0.0, 0.0
        for piece in stream:
            if not first:
                first, begun, cpu = max(len(piece.tokens), 1), time.perf_counter(), time.process_time()
        wall, own = time.perf_counter() - begun, time.process_time() - cpu
        n = len(stream.result.tokens) - first
        return Run(stream.result, n / wall, n / own)

    def policy(self, setup: Setup) -> Chosen:
        """With what this engine has measured."""
        lane = self.engines[setup.engine]._core.lane
        return Chosen(lane.tuning.curve, setup, lane.model.n_vocab, lane.drafter if setup.head else None)

    def clock(self, setup: Setup, curve: str, share: float) -> Clock:
        """A clock for its engine."""
        head = self.engines[setup.engine]._core.lane.drafter if setup.head else None
        assert head is None or isinstance(head, Head)
        return Clock(load_curve(curve), share if setup.head else 0.0, head)

    def leaves(self, setup: Setup, prompt: Prompt, sampling: Sampling, plain: Result, drafted: Result) -> float | None:
        """`Row.leaves`, by one more plain run where the outputs differ."""
        pairs = enumerate(zip(plain.tokens, drafted.tokens, strict=False))
        place = next((at for at, (one, other) in pairs if one != other), None)
        if place is None:
            return None
        if not sampling.is_greedy:
            return math.inf
        stream = self.engines[setup.engine].generate(
            prompt.text, max_tokens=place + 1, policy="off", keep_prefix=False, ignore_end=True, logprobs=20
        )
        for _ in stream:
            pass
        at = stream.result.logprobs[place]
        known = dict(at.top)
        return abs(at.top[0][1] - known.get(drafted.tokens[place], -math.inf))


def measure(
    prompts_of: Sequence[Prompt], bench: Bench, repeats: int, simulated: Sequence[tuple[str, float]], minutes: float
) -> None:
    """Fill `bench.rows`, prompt by prompt, and begin no prompt after `minutes`. `simulated`: curves and shares."""
    over = time.monotonic() + 60 * minutes
    real = {setup: bench.policy(setup) for setup in SETUPS}
    clocks = {
        (setup, curve, share): bench.clock(setup, curve, share)
        for setup in SETUPS
        for curve, share in simulated
        if setup.head or share == simulated[0][1]  # the share changes nothing without a head
    }
    n_vocab = next(iter(bench.engines.values())).model.n_vocab
    policies = {key: Simulated(clock, key[0], n_vocab) for key, clock in clocks.items()}
    _warm_up(bench, real if repeats else {}, clocks, policies)
    for number, prompt in enumerate(prompts_of):
        if time.monotonic() > over:
            break
        plain = {target: _first(target) for target in {setup.target for setup in SETUPS}}
        sampling = choose_sampling(bench.engines[plain["demo"].engine], prompt, bench.tokens)
        texts = {
            target: bench.run(setup, prompt, sampling, "off").result for target, setup in plain.items()
        }  # these warm the caches, too
        for setup in (SETUPS[number % len(SETUPS) :] + SETUPS[: number % len(SETUPS)]) if repeats else ():
            pairs = []
            for _ in range(repeats):
                base = bench.run(plain[setup.target], prompt, sampling, "off")
                pairs.append((base, bench.run(setup, prompt, sampling, real[setup].fork())))
            base, drafted = pairs[-1]
            row = Row(
                prompt,
                not sampling.is_greedy,
                median(mine.speed / other.speed for other, mine in pairs),
                median(mine.cpu_speed / other.cpu_speed for other, mine in pairs),
                drafted.result,
                bench.leaves(plain[setup.target], prompt, sampling, base.result, drafted.result),
            )
            bench.rows.setdefault(setup, []).append(row)
        for key, clock in clocks.items():
            setup = key[0]
            with clock:
                drafted = bench.run(setup, prompt, sampling, policies[key].fork(), texts[setup.target].tokens)
            result, n_ctx = drafted.result, drafted.result.timings.prompt_tokens
            ratio = clock.plain_ms(n_ctx, result.draft.generated) / clock.ms
            assert result.tokens == texts[setup.target].tokens
            head_ms = clock.head_ms / max(result.draft.steps, 1)
            row = Row(prompt, not sampling.is_greedy, ratio, ratio, result, head_ms=head_ms)
            bench.rows.setdefault(key, []).append(row)
        print(f"{number + 1} of {len(prompts_of)}: {prompt.kind} {prompt.title}", file=sys.stderr, flush=True)


def _warm_up(
    bench: Bench,
    real: Mapping[Setup, Chosen],
    clocks: Mapping[tuple[Setup, str, float], Clock],
    policies: Mapping[tuple[Setup, str, float], Simulated],
) -> None:
    """Let every policy learn from prompts that are not counted."""
    for kind in ("copy", "edit"):
        prompt = next(prompt for prompt in prompts() if prompt.kind == kind)
        for setup, policy in real.items():
            bench.run(setup, prompt, Sampling(), policy.fork())
        for key, clock in clocks.items():
            with clock:
                bench.run(key[0], prompt, Sampling(), policies[key].fork())


def _first(target: str) -> Setup:
    """The setup whose engine decodes plainly."""
    return next(setup for setup in SETUPS if setup.target == target and not setup.head)


def summary(rows: Sequence[Row], simulated: bool = False) -> dict[str, Any]:
    """Of one setup and kind: medians over the prompts, and the worst."""
    drafts = [row.result.draft for row in rows]
    accepted: Counter[str] = Counter()
    for draft in drafts:
        accepted.update({name: counts.accepted for name, counts in draft.by_source.items()})
    leaves = [row.leaves for row in rows if row.leaves is not None and row.leaves < math.inf]
    by_prompt = {row.prompt.title: [round(row.wall, 3), round(row.result.draft.tokens_per_step, 2)] for row in rows}
    worst = min(rows, key=lambda row: row.wall)
    result = {
        "prompts": len(rows),
        "by_prompt": by_prompt,  # speed-up, MAT
        "mat": round(median(draft.tokens_per_step for draft in drafts), 3),
        "speedup": round(median(row.wall for row in rows), 3),
        "mean": round(geometric_mean(row.wall for row in rows), 3),
        "least": round(worst.wall, 3),
        "least_of": worst.prompt.title,
        "nodes_per_step": round(float(np.mean([draft.drafted / max(draft.steps, 1) for draft in drafts])), 3),
        "head_ms_per_step": round(
            float(np.mean([row.head_ms if simulated else row.result.draft.draft_model_ms_per_step for row in rows])), 4
        ),
        "accepted_by_source": {
            name: round(count / max(accepted.total(), 1), 3) for name, count in accepted.most_common()
        },
        "identical": sum(row.same for row in rows),
        "near_ties": sum(gap <= NEAR_TIE for gap in leaves),
        "sampled_otherwise": sum(row.leaves == math.inf for row in rows),
        "greatest_gap": round(max(leaves), 4) if leaves else 0.0,
        "sampled": sum(row.sampled for row in rows),
    }
    if not simulated:
        result |= {
            "speedup_by_cpu_time": round(median(row.cpu for row in rows), 3),
            "mean_by_cpu_time": round(geometric_mean(row.cpu for row in rows), 3),
            "least_by_cpu_time": round(min(row.cpu for row in rows), 3),
        }
    return result


def together(found: dict[str, dict[str, Any]], name: str) -> dict[str, dict[str, Any]]:
    """All together over the best of its parts, by setup and kind, from the figures called `name`."""
    result: dict[str, dict[str, Any]] = {}
    for whole in WHOLE:
        for kind in KINDS:
            if kind not in found[whole.name]:
                continue
            best = max(parts_of(whole), key=lambda part: found[part.name][kind][name])
            ratio = found[whole.name][kind][name] / found[best.name][kind][name]
            result.setdefault(whole.name, {})[kind] = {"over_best_part": round(ratio, 3), "best_part": best.name}
    return result


def report(bench: Bench, simulated: Sequence[tuple[str, float]]) -> dict[str, Any]:
    """The figures of all setups, kinds and clocks."""

    def by_kind(rows: Sequence[Row], on_clock: bool) -> dict[str, Any]:
        chosen = {kind: [row for row in rows if row.prompt.kind == kind] for kind in KINDS}
        return {kind: summary(rows, on_clock) for kind, rows in chosen.items() if rows}

    result: dict[str, Any] = {"clock": {}}
    if bench.rows.get(SETUPS[0]):
        measured = {setup.name: by_kind(bench.rows[setup], False) for setup in SETUPS}
        result["measured"] = measured
        result["together"] = {name: together(measured, name) for name in FIGURES}
    for curve, share in simulated:
        rows = {
            setup.name: by_kind(bench.rows[setup, curve, share if setup.head else simulated[0][1]], True)
            for setup in SETUPS
        }
        own = {name: together(rows, name) for name in ("speedup", "mean")}
        result["clock"][f"{curve}, {share:.0%}"] = {**rows, "together": own}
    return result


def run(
    n_prompts: int, tokens: int, repeats: int, curves: Sequence[str], shares: Sequence[float], minutes: float
) -> dict[str, Any]:
    """All of it. `n_prompts`: of each kind. Raises what loading and generating raise."""
    store = ensure(demo_model())
    by_kind = {kind: [prompt for prompt in prompts() if prompt.kind == kind][:n_prompts] for kind in KINDS}
    chosen = [prompt for pair in _zipped(*by_kind.values()) for prompt in pair]  # kinds alternate
    simulated = [(curve, share) for curve in curves for share in shares]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        models = demo_model().parent
        both = Path(folder) / "mimo2.gguf"
        convert(demo_model(), both, models / "demo-mtp.gguf")
        heads: dict[str, dict[bool, str | Path | None]] = {
            "demo": {False: "none", True: models / "demo-eagle3.gguf"},
            "mimo2": {False: "none", True: None},
        }
        engines = {}
        for setup in SETUPS:
            if setup.engine not in engines:
                engines[setup.engine] = stack.enter_context(
                    Engine.load(
                        both if setup.target == "mimo2" else demo_model(),
                        datastores=[store],
                        n_ctx=1024,
                        threads=1,
                        draft_model=heads[setup.target][setup.head],
                    )
                )
                assert (engines[setup.engine]._core.lane.drafter is not None) == setup.head
        bench = Bench(engines, tokens)
        measure(chosen, bench, repeats, simulated, minutes)
        return {"tokens": tokens, "repeats": repeats, **report(bench, simulated)}


def _zipped(*lists: Sequence[Prompt]) -> Iterator[tuple[Prompt, ...]]:
    for at in range(max(map(len, lists))):
        yield tuple(each[at] for each in lists if at < len(each))


def _print(title: str, rows: dict[str, Any]) -> None:
    print(f"\n{title}")
    print(f"  {'':20}{'':8}{'MAT':>6}{'speed-up':>10}{'CPU':>7}{'least':>7}{'nodes':>7}{'head ms':>9}  same  accepted")
    for name, kinds in rows.items():
        if name == "together":
            continue
        for kind, row in kinds.items():
            cpu = row.get("speedup_by_cpu_time", "")
            sources = ", ".join(f"{source} {share:.0%}" for source, share in row["accepted_by_source"].items())
            print(
                f"  {name:20}{kind:8}{row['mat']:6.2f}{row['speedup']:10.3f}{cpu:>7}{row['least']:7.3f}"
                f"{row['nodes_per_step']:7.2f}{row['head_ms_per_step']:9.3f}{row['identical']:4}/{row['prompts']:<3}{sources}"
            )


def _print_together(rows: dict[str, Any]) -> None:
    for name, by_whole in rows.items():
        for whole, kinds in by_whole.items():
            for kind, row in kinds.items():
                print(f"  {whole} over its best part ({row['best_part']}), {kind}, {name}: {row['over_best_part']}")


def main() -> None:
    """Tables, then one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=15, help="of each kind")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3, help="pairs of a plain and a drafted run; 0: only clocks")
    parser.add_argument("--curves", nargs="*", default=CURVES, metavar="NAME")
    parser.add_argument("--shares", nargs="*", type=float, default=SHARES, metavar="SHARE")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no prompt after so long")
    parser.add_argument("--json", action="store_true", help="only the line of JSON")
    args = parser.parse_args()
    result = run(args.prompts, args.tokens, args.repeats, args.curves, args.shares, args.minutes)
    if not args.json:
        if "measured" in result:
            _print("measured", result["measured"])
            _print_together(result["together"])
        for title, rows in result["clock"].items():
            _print(f"simulated clock: {title} of a step for a pass of the head", rows)
            _print_together(rows["together"])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
