"""Plain and drafted speed on every held-out module and on well-known ones, with and without text to draft from.

    python -m benchmarks speed [--model GGUF | --layers N] [--tokens N] [--repeats N] [--mode exact|fast]...
        [--kind KIND]... [--json]

This is the demo's measurement on many modules, with the standard library without the held-out modules as datastore.
`benchmarks.workloads` makes the prompts, and says what their kinds are.

For each kind the result has the median, least and greatest ratio of drafted to plain speed, and the same without
answers that loop, because a model that loops flatters every drafter. With `--layers`, additional Q4_0 layers that
change nothing (`benchmarks.gguf_file.deepened`) give the demo model's text the step time of a larger model.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gguf_file import deepened
from benchmarks.workloads import KINDS, prompts
from rest_local.bench.demo import LOOPING, Comparison, compare, ensure
from rest_local.decoding.engine import Engine
from rest_local.paths import demo_model


def run(
    model: str | Path | None, tokens: int, repeats: int, modes: list[str], kinds: Sequence[str] = KINDS, layers: int = 0
) -> dict[str, Any]:
    """Measure every prompt of these kinds in every mode, about (2 * repeats + 3) * `tokens` tokens per prompt and mode.
    `layers`: number of layers of the demo model, including those that change nothing.
    """
    store = ensure(demo_model()) if model is None else None
    if layers:
        with tempfile.TemporaryDirectory() as folder:
            return _run(
                deepened(demo_model(), Path(folder) / "demo.gguf", layers, "Q4_0"), store, tokens, repeats, modes, kinds
            )
    return _run(model or demo_model(), store, tokens, repeats, modes, kinds)


def _run(
    model: str | Path, store: Path | None, tokens: int, repeats: int, modes: list[str], kinds: Sequence[str]
) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for mode in modes:
        with Engine.load(model, datastores=[store] if store else [], n_ctx=2048, exact=mode == "exact") as engine:
            rows = [compare(engine, p, mode, max_tokens=tokens, repeats=repeats) for p in prompts() if p.kind in kinds]
        rows = [row for row in rows if row.plain.result.tokens]  # without those that end at once, which have no time
        result[mode] = {kind: _summary([r for r in rows if r.prompt.kind == kind]) for kind in kinds}
    return result


def _summary(rows: list[Comparison]) -> dict[str, Any]:
    speedups = [row.speedup for row in rows]
    steady = [row.speedup for row in rows if not row.loops]
    worst = min(rows, key=lambda row: row.speedup)
    return {
        "prompts": len(rows),
        "speedup": {"median": _round(speedups), "least": round(min(speedups), 3), "greatest": round(max(speedups), 3)},
        "overall": round(_seconds(rows, "plain") / _seconds(rows, "drafted"), 3),
        "without_loops": {"prompts": len(steady), "median": _round(steady)},
        "mat": _round([row.drafted.result.draft.tokens_per_step for row in rows]),
        "worst": {
            "module": worst.prompt.title,
            "runs": [worst.plain.to_json()["runs"], worst.drafted.to_json()["runs"]],
        },
        "different": sum(not row.identical for row in rows),
        "sampled": sum(row.sampled for row in rows),
        "looping_above": LOOPING,
        "repeated_8grams": _round([row.plain.repeated for row in rows]),
    }


def _seconds(rows: list[Comparison], side: str) -> float:
    sides = [row.plain if side == "plain" else row.drafted for row in rows]
    return sum(len(s.result.tokens) / s.tokens_per_second for s in sides if s.tokens_per_second)


def _round(values: list[float]) -> float | None:
    return round(median(values), 3) if values else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the demo model, with the standard library as datastore")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--mode", action="append", choices=("exact", "fast"))
    parser.add_argument("--json", action="store_true", help="only the line of JSON")
    parser.add_argument("--kind", action="append", choices=KINDS)
    parser.add_argument(
        "--layers", type=int, default=0, help="layers of the demo model, for the step time of a larger model"
    )
    args = parser.parse_args()
    modes, kinds = args.mode or ["exact", "fast"], args.kind or KINDS
    result = run(args.model, args.tokens, args.repeats, modes, kinds, args.layers)
    if not args.json:
        for mode, kinds in result.items():
            for kind, row in kinds.items():
                s = row["speedup"]
                spread = f"median {s['median']} ({s['least']} to {s['greatest']})"
                print(
                    f"{mode:6} {kind:7} {row['prompts']} prompts  {spread}  overall {row['overall']}  MAT {row['mat']}"
                )
    print(json.dumps(result))
