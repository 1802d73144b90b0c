"""The replays whose figures the README and docs/LOG.md quote.

    python -m benchmarks published [--data FOLDER] [--edits REPOSITORY]... [--quick] [--only WORKLOAD]... [--disturbed]

The recorded answers are not part of the project. `--data` (or REST_LOCAL_SHARED) names the folder that holds them under
the names below; a missing file is named and left out. Edits come from the given repositories, else from this checkout.
`--quick` takes a part of the answers. The last table has for each workload and curve the speed-up, its shares of the
oracle and of the fair bound (`benchmarks.bounds`), the worst answer, and the speed-up of the first 160 tokens, ours
and that of the bound.
HumanEval drafts from the running interpreter's standard library without its tests. `--disturbed` lets the policy see
times as on a machine that other work slows now and then, and counts those of the curve.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.bounds import compare_with_bounds
from benchmarks.curves import load_curve
from benchmarks.library import standard_library
from benchmarks.peers import compare_peers
from benchmarks.recorded import open_workload
from rest_local.calibration.cost import CostCurve
from rest_local.calibration.tuning import shipped
from rest_local.drafting.tree import Draft
from rest_local.llama.model import Model
from rest_local.planning.auto import Auto
from rest_local.planning.policy import StepCost
from rest_local.retrieval import build_datastore

SETS = {
    "MT-Bench": ("mt_bench_answers_vicuna-7b-v1.5.jsonl", "ggml-vocab-llama-spm.gguf"),
    "chat": ("alpaca_eval_outputs_llama-3-8b-instruct.jsonl", "ggml-vocab-llama-bpe.gguf"),
    "HumanEval": ("HumanEval.jsonl.gz", "ggml-vocab-qwen2.gguf"),
    "agents": ("agents_mini_swe_gemini3.jsonl.gz", "ggml-vocab-qwen2.gguf"),
}
HISTORY = {"chat": "150:"}  # The first 150 answers are tested, and the others are history.
EDITS = 25
QUICK = 40
QUICK_EDITS = 8
KEPT = (
    "speedup", "speedup_with_lookups", "worst_answer", "share_of_oracle", "share_of_fair", "first_tokens_speedup",
    "mat", "nodes_per_step", "draft_ms",
)  # fmt: skip


class Disturbed(Auto):
    """`auto` with times that vary by some 10%. Every 50th step or so begins a row of 18 that take 1 to 4 times as
    long.
    """

    def __init__(self, curve: CostCurve) -> None:
        super().__init__(curve)
        self._random, self._slowed = random.Random(1), 0

    def learn(self, drafted: Draft, tokens: Sequence[int], done: StepCost) -> None:
        draw = self._random
        if not self._slowed and draw.random() < 0.02:
            self._slowed = 3 + int(draw.expovariate(1 / 15))
        factor = math.exp(abs(draw.gauss(0.5, 0.5) if self._slowed else draw.gauss(0.0, 0.08)))
        self._slowed = max(0, self._slowed - 1)
        super().learn(drafted, tokens, done._replace(decode_ms=done.decode_ms * factor))


def _curves_of(args: argparse.Namespace, name: str, folder: Path, edits: tuple[str, ...]) -> dict[str, Any]:
    """Return the results of `auto` by curve."""
    file, vocabulary = SETS[name]
    with Model.open(args.data / vocabulary, vocab_only=True) as model:
        stores: list[str] = []
        if name == "HumanEval" and not edits:
            library = standard_library()
            excluded = ("test/**", "tests/**", "site-packages/**", "**/idle_test/**")
            built = build_datastore(
                folder / "stdlib", [library], vocabulary=model.vocabulary, include=("*.py",), exclude=excluded
            )
            stores = [str(built.path)]
        with open_workload(
            model.vocabulary,
            files=() if edits else (args.data / file,),
            repositories=tuple(map(Path, edits)),
            edits=QUICK_EDITS if args.quick else EDITS,
            predict=bool(edits) and not args.context_alone,
            datastores=stores,
            history=None if edits else HISTORY.get(name),
            limit=QUICK if args.quick and not edits else None,
        ) as workload:
            rows = compare_with_bounds(
                workload, Disturbed if args.disturbed else Auto, {name: load_curve(name) for name in shipped()}
            )
            found: dict[str, Any] = {curve: {key: row[key] for key in KEPT} for curve, row in rows.items()}
            for curve, row in found.items():
                row["first_of_fair"] = rows[curve]["fair"]["first_tokens_speedup"]
            peers = compare_peers(workload, shipped())
            for curve, row in found.items():
                best = max(peers, key=lambda name: peers[name][curve])
                row["best_peer"], row["over_best_peer"] = best, round(row["speedup"] / peers[best][curve], 4)
            return found


def _print_table(result: dict[str, Any]) -> None:
    """Print a row for each workload and curve, then the mean shares of edits and of the other workloads."""
    shares: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for label, rows in result.items():
        for curve, row in rows.items():
            print(
                f"{label:20} {curve:24} {row['speedup']:7.3f}  {row['share_of_oracle']:4.0%} of the oracle "
                f"{row['share_of_fair']:4.0%} of the bound  worst {row['worst_answer']:.3f}  "
                f"first 160 {row['first_tokens_speedup']:.3f}, bound {row['first_of_fair']:.3f}  "
                f"with lookups {row['speedup_with_lookups']:.3f}  "
                f"{row['over_best_peer']:.3f} of {row['best_peer']}"
            )
            shares[label.startswith("edits")].append((row["share_of_oracle"], row["share_of_fair"]))
    for is_edit, found in shares.items():
        if found:
            oracle, fair = (sum(column) / len(found) for column in zip(*found, strict=True))
            print(f"{'edits' if is_edit else 'others'}: {oracle:.1%} of the oracle, {fair:.1%} of the bound")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("REST_LOCAL_SHARED"))
    parser.add_argument("--edits", action="append", metavar="REPOSITORY")
    parser.add_argument("--quick", action="store_true", help="a part of the answers")
    parser.add_argument("--only", action="append", metavar="WORKLOAD", help="MT-Bench, chat, HumanEval, agents, edits")
    parser.add_argument("--context-alone", action="store_true", help="edits without the old file as prediction")
    parser.add_argument("--disturbed", action="store_true", help="times as on a machine that does other work")
    args = parser.parse_args()
    result: dict[str, Any] = {}
    repositories = tuple(args.edits or [str(Path(__file__).parents[1])])
    with tempfile.TemporaryDirectory() as folder:
        for name, edits in (*((name, ()) for name in SETS), *(("HumanEval", (each,)) for each in repositories)):
            label = f"edits {Path(edits[0]).name}" if edits else name
            if args.only and label.split()[0] not in args.only:
                continue
            needed = [SETS[name][1]] if edits else SETS[name]
            if args.data is None or any(not (args.data / file).exists() for file in needed):
                print(f"{label}: left out, {' or '.join(needed)} is not there; give --data FOLDER")
                continue
            result[label] = _curves_of(args, name, Path(folder), edits)
            for curve, row in result[label].items():
                print(f"{label}, {curve}: {row}")
    _print_table(result)
    print(json.dumps(result))
