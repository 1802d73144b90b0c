"""The gain of a draft model: plain and drafted speed without one, with the target itself, and with a rough one.

    python -m benchmarks draft_model [--layers N] [--tokens N] [--prompts N] [--json]

The target is the demo model with additional Q4_0 layers that change nothing (`benchmarks.gguf_file.deepened`): real
text in the step time of a larger model.

- `none`: retrieval from the prompt alone, which the other two include.
- `same`: drafts with the demo model itself, which is right whenever sampling takes the likeliest token.
- `rough`: drafts with the demo model without its middle layer.

The prompts are beginnings of held-out modules. If greedy decoding loops, tokens are sampled with a fixed seed.
Identical means the same tokens in every run (in fast settings a near-tie may differ).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gguf_file import deepened, thinned
from benchmarks.workloads import prompts
from rest_local.bench.demo import Comparison, compare
from rest_local.decoding.engine import Engine
from rest_local.paths import demo_model

LAYERS = 40


def measure(layers: int, max_tokens: int, n_prompts: int, repeats: int) -> dict[str, Any]:
    """By drafter: the speed-up over plain decoding in the same engine, and the acceptance."""
    chosen = [prompt for prompt in prompts() if prompt.kind == "unseen"][:n_prompts]
    with tempfile.TemporaryDirectory() as folder:
        target = deepened(demo_model(), Path(folder) / "target.gguf", layers, "Q4_0")
        rough = thinned(demo_model(), Path(folder) / "rough.gguf", [0, 2])
        result: dict[str, Any] = {}
        for name, drafter in (("none", None), ("same", demo_model()), ("rough", rough)):
            with Engine.load(target, n_ctx=1024, draft_model=drafter) as engine:
                rows = [compare(engine, prompt, "fast", max_tokens=max_tokens, repeats=repeats) for prompt in chosen]
                result[name] = _summary([row for row in rows if row.plain.result.tokens], engine)
    return result


def _summary(rows: list[Comparison], engine: Engine) -> dict[str, Any]:
    speedups = [row.speedup for row in rows]
    drafts = [row.drafted.result.draft for row in rows]
    said = [draft.of_source("model") for draft in drafts]
    return {
        "speedup": {"median": round(median(speedups), 3), "least": round(min(speedups), 3), "all": speedups},
        "mat": round(median(draft.tokens_per_step for draft in drafts), 3),
        "by_the_draft_model": {key: sum(getattr(counts, key) for counts in said) for key in ("drafted", "accepted")},
        "draft_model_ms_per_step": round(median(draft.draft_model_ms_per_step for draft in drafts), 3),
        "plain_step_ms": round(float(engine.cost_curve.at(512)[0]), 3),
        "identical": sum(row.identical for row in rows),
        "sampled": sum(row.sampled for row in rows),
        "prompts": len(rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="only the line of JSON")
    args = parser.parse_args()
    result = measure(args.layers, args.tokens, args.prompts, args.repeats)
    if not args.json:
        for name, row in result.items():
            by = row["by_the_draft_model"]
            print(
                f"{name:6} speed-up {row['speedup']['median']} (least {row['speedup']['least']})  MAT {row['mat']}  "
                f"draft model: {by['accepted']} of {by['drafted']} accepted, {row['draft_model_ms_per_step']} ms a "
                f"step of {row['plain_step_ms']}  identical {row['identical']} of {row['prompts']}"
            )
    print(json.dumps(result))
