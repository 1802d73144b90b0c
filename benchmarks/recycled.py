"""What recycled logits (source `logits`) gain, and what reading a row of logits costs.

    python -m benchmarks.recycled [--curve NAME]... [--side NAME]... [--kind KIND]... [--prompts N] [--tokens N]
        [--learned N] [--datastore] [--save FILE]
    python -m benchmarks.recycled --rows

The demo model answers its prompts once, plainly. Then it evaluates these answers again with drafts, whatever it would
choose by now, so that all sides have the same text, and the rows of logits of rejected nodes are real. What a pass
takes is what a curve says, a row of logits takes ROW_MS, and no time is measured: a run gives the same figures on any
machine. `flat` is a curve on which 64 tokens take 1.3 plain steps.

- `none`: without the table. The others are compared with it, prompt by prompt.
- `auto`: as shipped. `kept 4`, `kept 16`: with so many successors of a token. `single`, `pairs`: one of the two tables.
- `all rows`: every row of a step is read, at its price.

`--learned N`: every side first answers N other prompts. `--datastore`: with the standard library as a datastore.
`--rows`: milliseconds of finding the top 8 in a row, and of the whole update, on this machine: with the row in the
cache and not.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.clocked import Said
from benchmarks.workloads import prompts
from rest_local.bench.demo import choose_sampling
from rest_local.bench.prompts import ensure
from rest_local.calibration.cost import LARGEST, CostCurve
from rest_local.calibration.curves import load_curve
from rest_local.decoding import sequence as decoding
from rest_local.decoding.counts import Statistics
from rest_local.decoding.engine import Engine
from rest_local.decoding.forward import Forward
from rest_local.decoding.request import Request
from rest_local.decoding.stream import Answer
from rest_local.drafting.candidates import PrecedingBigram
from rest_local.drafting.growth import Draft
from rest_local.drafting.recycled import KEPT, PAIR, LogitsRow, Successor, SuccessorTable, likeliest
from rest_local.drafting.sources import Sources
from rest_local.kv_cache.backend import Capability
from rest_local.kv_cache.slot import Slot
from rest_local.llama.context import Context, ContextSettings
from rest_local.llama.model import Model
from rest_local.llama.vocabulary import Detokenizer
from rest_local.paths import demo_model
from rest_local.planning.auto import Auto
from rest_local.planning.policy import StepCost
from rest_local.retrieval.datastore import Datastore

CURVES = ("rtx3090-8b-q4_0", "rtx4090-8b-iq3_xxs", "assumed-flat-to-8", "flat")
KINDS = ("stored", "unseen")
FLAT = CostCurve.from_points([0], [1, LARGEST], [[10.0, 13.0]])
DRIVER_MS = (0.05, 0.15)  # what a plain step and one with a draft are said to take in addition
LOOKUP_MS = 0.15
ROW_MS = 0.04  # a row of 152k logits: `--rows`
SHORTEST = 20  # tokens of an answer that counts


class Table(SuccessorTable):
    """A row takes ROW_MS."""

    def __init__(self, n_vocab: int, kept: int = KEPT) -> None:
        super().__init__(n_vocab, kept)
        self.row_ms = ROW_MS

    def _now(self) -> float:
        return 1e-3 * ROW_MS * self.rows_read


class Single(Table):
    """By the newest token alone."""

    def successors(self, pair: PrecedingBigram) -> list[Successor]:
        return super().successors((-1, pair[1]))


class Pairs(Table):
    """By the newest two tokens alone."""

    def successors(self, pair: PrecedingBigram) -> list[Successor]:
        return [each for each in super().successors(pair) if each[3] == PAIR]


class OnCurve(Auto):
    """`auto` that takes the price of every step from its curve. `ms`: what all steps took, and what their tokens take
    in plain steps. Forks share it."""

    def __init__(self, curve: CostCurve, table: SuccessorTable | None) -> None:
        super().__init__(curve)
        self.successors = table
        self.ms = {"drafted": 0.0, "plain": 0.0}

    def learn(self, drafted: Draft, tokens: Sequence[int], done: StepCost) -> None:
        """As `auto` does, with the curve's times in place of this machine's."""
        cost = self.curve.at(done.n_ctx)
        decode_ms, driver_ms = float(cost[done.n_nodes]), DRIVER_MS[done.n_nodes > 0]
        lookup_ms = None if done.lookup_ms is None else LOOKUP_MS
        self.ms["drafted"] += decode_ms + driver_ms + (lookup_ms or 0.0)
        self.ms["plain"] += (1 + done.n_accepted) * (float(cost[0]) + DRIVER_MS[0])
        told = done._replace(decode_ms=decode_ms, driver_ms=driver_ms, lookup_ms=lookup_ms, updates_curve=False)
        super().learn(drafted, tokens, told)

    def learn_logits(self, rows: Iterable[LogitsRow]) -> None:
        """As `auto` does; a row takes ROW_MS."""
        assert self.successors is not None
        before = self.successors.rows_read
        self._read(rows)
        self.ms["drafted"] += ROW_MS * (self.successors.rows_read - before)

    def _read(self, rows: Iterable[LogitsRow]) -> None:
        super().learn_logits(rows)


class AllRows(OnCurve):
    """Reads every row."""

    @property
    def logits_ms(self) -> float:
        return 1.0

    def _read(self, rows: Iterable[LogitsRow]) -> None:
        assert self.successors is not None
        for pair, row in rows:
            self.successors.read(pair, row)


Make = Callable[[CostCurve, int], OnCurve]
SIDES: dict[str, Make] = {
    "none": lambda curve, n_vocab: OnCurve(curve, None),
    "auto": lambda curve, n_vocab: OnCurve(curve, Table(n_vocab)),
    "kept 4": lambda curve, n_vocab: OnCurve(curve, Table(n_vocab, 4)),
    "kept 16": lambda curve, n_vocab: OnCurve(curve, Table(n_vocab, 16)),
    "single": lambda curve, n_vocab: OnCurve(curve, Single(n_vocab)),
    "pairs": lambda curve, n_vocab: OnCurve(curve, Pairs(n_vocab)),
    "all rows": lambda curve, n_vocab: AllRows(curve, Table(n_vocab)),
}


@dataclass(frozen=True)
class Recording:
    """A prompt and the model's plain answer, greedy or, where that loops, sampled with a seed."""

    kind: str
    title: str
    prompt: list[int]
    answer: list[int]


def record(kinds: Sequence[str], most: int, tokens: int) -> list[Recording]:
    """Answers to at most `most` prompts of each kind."""
    found = []
    with Engine.load(demo_model(), n_ctx=2048, policy="off", history=False) as engine:
        for kind in kinds:
            for prompt in [prompt for prompt in prompts() if prompt.kind == kind][:most]:
                sampling = choose_sampling(engine, prompt, tokens)
                stream = engine.generate(prompt.text, max_tokens=tokens, sampling=sampling)
                for _ in stream:
                    pass
                text = engine.model.vocabulary.tokenize(prompt.text).tolist()
                found.append(Recording(kind, prompt.title, text, list(stream.result.tokens)))
    return [each for each in found if len(each.answer) >= SHORTEST]


def evaluate(
    model: Model, context: Context, policy: OnCurve, stores: Sequence[Datastore], recorded: Recording
) -> dict[str, Any]:
    """One answer again, with drafts: counts, and its time by the curve."""
    wanted = len(recorded.answer)
    answer = Answer(Statistics(), Detokenizer(model.vocabulary.piece), wanted, (), _never)
    sources = Sources(stores, model.n_vocab)
    request = Request(recorded.prompt, max_tokens=wanted)
    sequence = decoding.Sequence(request, policy.fork(), Said(recorded.answer), answer, lambda slot: sources, _never)
    context.clear()
    forward = Forward(context, Capability("tree", "bench"), overlaps=False)
    before = dict(policy.ms)
    sequence.admit(Slot(context))
    while (said := len(sequence.tokens) - len(recorded.prompt)) < wanted:
        sequence.answer.left = wanted - said
        forward.step_alone(sequence)
    if sequence.tokens[len(recorded.prompt) :] != recorded.answer:
        raise RuntimeError(f"{recorded.title}: another answer than the recorded one")
    counts = sequence.statistics
    return {
        "title": recorded.title,
        "steps": counts.steps,
        "generated": counts.generated,
        "drafted": counts.drafted,
        "logits": dict(counts.by_source.get("logits", {"drafted": 0, "accepted": 0})),
        "drafted_ms": policy.ms["drafted"] - before["drafted"],
        "plain_ms": policy.ms["plain"] - before["plain"],
    }


def _never(token: int) -> bool:
    return False


def compare(
    recorded: Sequence[Recording],
    first: Sequence[Recording],
    curves: Sequence[str],
    sides: Sequence[str],
    stores: Sequence[Datastore],
) -> list[dict[str, Any]]:
    """A row for each curve and side. `first`: answers that every side evaluates before."""
    rows: list[dict[str, Any]] = []
    with Model.open(demo_model()) as model, Context(model, ContextSettings(n_ctx=2048, threads=1)) as context:
        for name in curves:
            base: list[dict[str, Any]] = []
            for side in sides:
                policy = SIDES[side](FLAT.copy() if name == "flat" else load_curve(name), model.n_vocab)
                for each in first:
                    evaluate(model, context, policy, stores, each)
                before = policy.successors.rows_read if policy.successors else 0
                answers = [evaluate(model, context, policy, stores, each) for each in recorded]
                read = policy.successors.rows_read - before if policy.successors else 0
                base = base or answers
                rows.append({"curve": name, "side": side, **_summary(answers, base, read)})
                _print(rows[-1])
    return rows


def _summary(answers: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]], read: int) -> dict[str, Any]:
    def total(key: str) -> float:
        return float(sum(answer[key] for answer in answers))

    ratios = [other["drafted_ms"] / one["drafted_ms"] for one, other in zip(answers, base, strict=True)]
    return {
        "answers": len(answers),
        "passes": round(total("steps")),
        "mat": round(total("generated") / total("steps"), 3),
        "nodes_per_step": round(total("drafted") / total("steps"), 2),
        "rows_per_step": round(read / total("steps"), 2),
        "logits": {key: sum(answer["logits"][key] for answer in answers) for key in ("drafted", "accepted")},
        "speedup": round(total("plain_ms") / total("drafted_ms"), 4),
        "of_none": {
            "median": round(median(ratios), 4),
            "mean": round(fmean(ratios), 4),
            "least": round(min(ratios), 3),
        },
    }


def _print(row: dict[str, Any]) -> None:
    of = row["of_none"]
    print(
        f"{row.get('kind', ''):7}{row['curve']:19} {row['side']:9} passes {row['passes']:5} MAT {row['mat']:6.3f} "
        f"nodes {row['nodes_per_step']:5.2f} rows {row['rows_per_step']:5.2f} speed-up {row['speedup']:7.4f}  "
        f"of none: median {of['median']:.4f} mean {of['mean']:.4f} least {of['least']:.3f}",
        flush=True,
    )


def row_times(repeats: int = 60) -> list[dict[str, Any]]:
    """Median milliseconds by size of the vocabulary: `likeliest`, its alternatives, and `SuccessorTable.read`."""
    random, evict = np.random.default_rng(1), np.zeros(40_000_000, np.uint8)
    found = []
    for n in (4096, 32_000, 151_936):
        rows = [(3 * random.standard_normal(n)).astype(np.float32) for _ in range(repeats)]
        table = SuccessorTable(n)
        table.read((0, 1), rows[0])
        ways: dict[str, Callable[[NDArray[np.float32]], object]] = {
            "likeliest": lambda row: likeliest(row, KEPT),
            "argpartition": lambda row: np.argpartition(row, len(row) - KEPT)[-KEPT:],
            "greatest alone": lambda row: row.argmax(),
            "read": lambda row, table=table: table.read((2, 3), row),  # type: ignore[misc]
        }
        for name, way in ways.items():
            times: dict[str, list[float]] = {"warm": [], "cold": []}
            for row in rows:
                for state in times:
                    if state == "cold":
                        evict += 1
                    else:
                        row.argmax()
                    begun = time.perf_counter()
                    way(row)
                    times[state].append(1e3 * (time.perf_counter() - begun))
            found.append({"n_vocab": n, "way": name, **{state: round(median(ms), 4) for state, ms in times.items()}})
            shown = found[-1]
            print(f"{n:7} {name:15} warm {shown['warm']:.4f} ms, cold {shown['cold']:.4f} ms", flush=True)
    return found


def main() -> None:
    """A table, then one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--curve", action="append", help=f"repeatable; default: {', '.join(CURVES)}")
    parser.add_argument("--side", action="append", choices=list(SIDES), help="repeatable; default: none and auto")
    parser.add_argument("--kind", action="append", choices=KINDS)
    parser.add_argument("--prompts", type=int, default=15, help="of each kind")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--learned", type=int, default=0)
    parser.add_argument("--datastore", action="store_true")
    parser.add_argument("--save", type=Path, help="keep the recorded answers in this file, or read them from it")
    parser.add_argument("--rows", action="store_true")
    args = parser.parse_args()
    if args.rows:
        print(json.dumps(row_times()))
        return
    kinds = args.kind or KINDS
    if args.save and args.save.exists():
        recorded = [Recording(*each) for each in json.loads(args.save.read_text())]
    else:
        recorded = record([*dict.fromkeys((*kinds, "unseen"))], args.prompts + args.learned, args.tokens)
        if args.save:
            args.save.write_text(json.dumps([astuple(each) for each in recorded]))
    unseen = [each for each in recorded if each.kind == "unseen"]
    result = {}
    with ExitStack() as stack:
        stores = [stack.enter_context(Datastore.open(ensure(demo_model())))] if args.datastore else []
        for kind in kinds:
            chosen = [each for each in recorded if each.kind == kind][: args.prompts]
            first = unseen[args.prompts : args.prompts + args.learned]
            print(f"{kind}: {len(chosen)} answers, {len(first)} before")
            sides = args.side or ("none", "auto")
            result[kind] = compare(chosen, first, args.curve or CURVES, sides, stores)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
