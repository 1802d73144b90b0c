"""What a cost curve means, in sentences: what a token costs, and from how many accepted tokens on a draft pays."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from rest_local.calibration.cost import CostCurve

DRAFTS = (1, 3, 7, 15, 31, 63)  # drafted tokens; the batch has one more


def advantages(curve: CostCurve, n_ctx: int) -> list[dict[str, Any]]:
    """For each draft of DRAFTS: {"draft", "steps": its cost in plain steps, "least_accepted": tokens of it from which
    on it pays, or None where it never does}.
    """
    line = curve.expected(n_ctx)
    rows = []
    for draft in DRAFTS:
        steps = float(line[draft] / line[0])
        least = math.floor(steps - 1.0) + 1  # a step of `accepted` + 1 tokens has to cost less than so many steps
        rows.append({
            "draft": draft, "steps": round(steps, 2), "least_accepted": least if least <= draft else None,
        })  # fmt: skip
    return rows


def explain(curve: CostCurve, n_ctx: int) -> Iterator[str]:
    """One sentence for a plain step at this length, and one for each draft."""
    line = curve.expected(n_ctx)
    yield f"At {n_ctx} tokens of context one token takes {line[0]:.3g} ms, {1e3 / line[0]:.3g} tokens a second."
    for row in advantages(curve, n_ctx):
        draft, least = row["draft"], row["least_accepted"]
        tokens = "1 token" if draft == 1 else f"{draft} tokens"
        if least is None:
            pays = "it never pays"
        elif draft == 1:
            pays = f"it pays when over {math.ceil(100 * (row['steps'] - 1))}% are accepted"
        else:
            pays = f"it pays when at least {least} in {draft} are accepted"
        yield f"A draft of {tokens} costs {row['steps']:.1f} plain steps; {pays}."
