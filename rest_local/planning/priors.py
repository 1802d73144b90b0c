"""Acceptance by evidence cell before anything was counted here: what ships with the package.

`priors.json` is written by `python -m benchmarks.priors`, from text that no benchmark tests; it says how much.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from rest_local.drafting.candidates import (
    CELLS_PER_SOURCE,
    N_LENGTHS,
    N_ROWS,
    N_SHARES,
    SOURCES,
    grammar_rates,
    model_rates,
)

PRIORS = Path(__file__).with_name("priors.json")
UNKNOWN = 0.2  # where the file is of another layout: never in a released package, but while one is being changed


@cache
def shipped_rates() -> tuple[float, ...]:
    """Probability by cell, N_CELLS of them. A millisecond, once a process."""
    data = json.loads(PRIORS.read_text("utf-8")) if PRIORS.exists() else {}
    if (data.get("lengths"), data.get("rows"), data.get("shares")) != (N_LENGTHS, N_ROWS, N_SHARES):
        return (UNKNOWN,) * (len(SOURCES) * CELLS_PER_SOURCE)
    rates = {**data["rates"], "model": model_rates(), "grammar": grammar_rates()}
    return tuple(rate for source in SOURCES for rate in rates[source])
