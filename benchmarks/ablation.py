"""The effect of each part of `respec` alone, compared with `rest`, `sam` and `auto`.

    python -m benchmarks.ablation FILE... --vocab GGUF [-d NAME] [--history N|FILE] [--limit N] [--json]
    python -m benchmarks.ablation [--model GGUF] [-d NAME] [--tokens N] [--limit N] [--json]

With recorded answers, it replays them. A replay has no entropies, so the trigger would always fire and is left out.
Without files, it generates greedily with a model from the held-out modules, where the trigger and relaxed verification
work. It reports MAT and drafted nodes per step; the speed-up on the reference curve (replay); the relaxed tokens and
the share of answers that they change (model). Every policy starts cold and gets the same prompts in the same order.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.speed import KINDS, prompts
from rest_local.bench.prompts import ensure
from rest_local.bench.replay import replay
from rest_local.bench.workload import open_workload
from rest_local.calibration.cost import CostCurve
from rest_local.calibration.curves import load_curve
from rest_local.decoding.engine import Engine
from rest_local.decoding.request import STRICT, Strict
from rest_local.decoding.results import DraftStatistics
from rest_local.decoding.verify import Relaxed
from rest_local.llama.model import Model
from rest_local.paths import demo_model
from rest_local.planning.policies import make_policy
from rest_local.planning.policy import Policy
from rest_local.planning.respec import ReSpec

CURVE = "cpu-2-cores-0.5b-q4_0"
Bare = partial(ReSpec, trigger=False, feedback=False, candidates=1)

PARTS: dict[str, Callable[[], Policy]] = {
    "respec, no part": Bare,
    "+ trigger": partial(Bare, trigger=True),
    "+ score": partial(Bare, feedback=True),
    "+ score by match": partial(Bare, feedback=True, by="match"),
    "+ candidates": partial(ReSpec, trigger=False, feedback=False),
    "respec": ReSpec,
    "respec by match": partial(ReSpec, by="match"),
}
Run = tuple[str, Callable[[], Policy], Relaxed | Strict]
RELAXED: dict[str, Callable[[], Policy]] = {"+ relaxed": Bare, "respec + relaxed": ReSpec}
OTHERS = ("rest", "sam", "auto")

Row = dict[str, Any]


def on_recorded(
    files: list[Path], vocabulary: str, datastores: list[str], history: str | None, limit: int | None
) -> list[Row]:
    """A row for each policy over the same recorded answers."""
    with Model.open(vocabulary, vocab_only=True) as model:
        workload = open_workload(model.vocabulary, files=files, datastores=datastores, history=history, limit=limit)
    rows = []
    with workload:
        for name, make in _policies(lambda: load_curve(CURVE)).items():
            if "trigger" in name:
                continue
            tally = replay(workload.tested, workload.sources, make(), load_curve(CURVE)).to_dict()
            rows.append({"policy": name, **{key: tally[key] for key in ("mat", "nodes_per_step", "speedup")}})
    return rows


def with_model(path: str | None, datastores: list[str], tokens: int, limit: int | None) -> list[Row]:
    """A row for each policy and kind of prompt, greedy, with trees, in one engine. The demo model drafts from the
    standard library.
    """
    if path is None and not datastores:
        datastores = [str(ensure(demo_model()))]
    with Engine.load(path or demo_model(), datastores=datastores, n_ctx=2048) as engine:
        available = list(prompts())
        texts = {kind: [p.text for p in available if p.kind == kind][:limit] for kind in KINDS}
        plain = {kind: [_answer(engine, t, tokens, "off", STRICT)[0] for t in some] for kind, some in texts.items()}
        rows = []
        runs: list[Run] = [(name, make, STRICT) for name, make in _policies(lambda: engine.cost_curve).items()]
        runs += [(name, make, Relaxed()) for name, make in RELAXED.items()]
        for name, make, verify in runs:
            policy = make()
            for kind, some in texts.items():
                answers = [_answer(engine, text, tokens, policy, verify) for text in some]
                rows.append({"policy": name, "kind": kind, **_sums(answers, plain[kind])})
    return rows


def _policies(curve: Callable[[], CostCurve]) -> dict[str, Callable[[], Policy]]:
    def named(name: str) -> Callable[[], Policy]:
        return lambda: make_policy(name, curve())

    return {**PARTS, **{name: named(name) for name in OTHERS}}


def _answer(
    engine: Engine, text: str, tokens: int, policy: str | Policy, verify: Relaxed | Strict
) -> tuple[list[int], DraftStatistics]:
    stream = engine.generate(text, max_tokens=tokens, policy=policy, verify=verify)
    for _ in stream:
        pass
    return stream.result.tokens, stream.result.draft


def _sums(answers: list[tuple[list[int], DraftStatistics]], plain: list[list[int]]) -> Row:
    steps = sum(draft.steps for _, draft in answers)
    changed = sum(tokens != unrelaxed for (tokens, _), unrelaxed in zip(answers, plain, strict=True))
    return {
        "mat": round(sum(draft.generated for _, draft in answers) / steps, 4),
        "nodes_per_step": round(sum(draft.drafted for _, draft in answers) / steps, 3),
        "relaxed": sum(draft.relaxed for _, draft in answers),
        "answers_changed": round(changed / len(answers), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--vocab")
    parser.add_argument("-d", "--datastore", action="append", default=[])
    parser.add_argument("--history")
    parser.add_argument("--model", help="default: the demo model")
    parser.add_argument("--tokens", type=int, default=150)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--json", action="store_true", help="a line of JSON instead of the table")
    args = parser.parse_args()
    if args.files and not args.vocab:
        parser.error("FILE needs --vocab")
    if args.files:
        rows = on_recorded(args.files, args.vocab, args.datastore, args.history, args.limit)
    else:
        rows = with_model(args.model, args.datastore, args.tokens, args.limit)
    if args.json:
        print(json.dumps(rows))
        return
    print("  ".join(rows[0]))
    for row in rows:
        print("  ".join(f"{value:<18}" if isinstance(value, str) else f"{value:>9}" for value in row.values()))


if __name__ == "__main__":
    main()
