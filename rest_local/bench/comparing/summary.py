"""From the records of units to the figures of a comparison, by workload and side.

- Speed-ups are medians over the units of a workload. A unit's speed-up is its speed over that of the plain runs around
  it (`run`).
- MAT is tokens for each forward pass: 1 + accepted / passes, over all units. Acceptance is accepted / drafted.
- `differing` counts answers whose tokens are not those of plain decoding; in a replay the tokens are given, so it is
  None.
- A unit whose plain answer repeats more than LOOPING of its 8-grams loops, which flatters every drafter; `steady` is
  the median speed-up over the other units.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, log
from statistics import median
from typing import Any

from rest_local.bench.demo import LOOPING

Record = Mapping[str, Any]
SPEC_BENCH = "spec-bench"


def summarize(records: Sequence[Record]) -> dict[str, Any]:
    """{"workloads": rows, "overall": rows}: by mode, settings and workload; Spec-Bench also as a whole."""
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        workload = record["workload"]
        for name in dict.fromkeys((workload, workload.partition("/")[0])):
            if name in (workload, SPEC_BENCH):
                groups.setdefault((record["mode"], record["settings"], name), []).append(record)
    rows = [
        {"mode": mode, "settings": settings, "workload": workload, **_workload(found)}
        for (mode, settings, workload), found in groups.items()
    ]
    kinds = dict.fromkeys((row["mode"], row["settings"]) for row in rows)
    return {"workloads": rows, "overall": [_overall(rows, mode, settings) for mode, settings in kinds]}


def _workload(records: Sequence[Record]) -> dict[str, Any]:
    plain = [record["plain"] for record in records]
    speeds = [row["tokens_per_second"] for row in plain if min(row["tokens_per_second"]) > 0]
    names = dict.fromkeys(name for record in records for name in record["sides"])
    return {
        "prompts": len(records),
        "plain": {
            "tokens_per_second": _median([sum(pair) / 2 for pair in speeds], 2),
            "noise": _median([abs(pair[1] / pair[0] - 1) for pair in speeds], 4),
            "repeated_8grams": _median([row["repeated_8grams"] for row in plain], 4),
            "looping": sum(row["repeated_8grams"] > LOOPING for row in plain),
            "differing": sum(not row["same"] for row in plain),
            "joules_per_token": _median([row["joules_per_token"] for row in plain if row["joules_per_token"]], 4),
        },
        "sides": {name: _side(name, records) for name in names},
    }


def _side(name: str, records: Sequence[Record]) -> dict[str, Any]:
    """`left_out`: the reason, for a side without any figure here."""
    found = [(record, record["sides"][name]) for record in records if name in record["sides"]]
    reasons = [row["left_out"] for _, row in found if "left_out" in row]
    done = [(record, row) for record, row in found if row.get("speedup")]
    if not done:
        return {"prompts": 0, "left_out": reasons[0] if reasons else "no answer of two tokens"}
    rows = [row for _, row in done]
    worst, least = min(done, key=lambda pair: pair[1]["speedup"])[0], min(row["speedup"] for row in rows)
    steps, drafted = (sum(row[key] for row in rows) for key in ("steps", "drafted"))
    accepted = sum(row["accepted"] for row in rows)
    steady = [row["speedup"] for record, row in done if record["plain"]["repeated_8grams"] <= LOOPING]
    differing = [place is not None for row in rows for place in row["differs_at"]]
    replayed = records[0]["mode"] == "replay"
    return {
        "prompts": len(rows),
        "speedup": _median([row["speedup"] for row in rows], 4),
        "steady": _median(steady, 4),
        "least": least,
        "least_of": f"{worst['workload']} {worst['task']}",
        "tokens_per_second": _median([row["tokens_per_second"] for row in rows], 2),
        "mat": round(1 + accepted / steps, 4) if steps else None,
        "acceptance": round(accepted / drafted, 4) if drafted else None,
        "answers": len(differing),
        "differing": None if replayed else sum(differing),
        "repeated_8grams": _median([row["repeated_8grams"] for row in rows], 4),
        "joules_per_token": _median([row["joules_per_token"] for row in rows if row["joules_per_token"]], 4),
        **({"left_out": reasons[0]} if reasons else {}),
    }


def _overall(rows: Sequence[Mapping[str, Any]], mode: str, settings: str) -> dict[str, Any]:
    """Over the workloads of one mode and settings that every side with figures has: the geometric mean of a side's
    speed-ups, and its worst prompt anywhere. Spec-Bench counts once.
    """
    mine = [
        row
        for row in rows
        if (row["mode"], row["settings"]) == (mode, settings) and not row["workload"].startswith(f"{SPEC_BENCH}/")
    ]
    known = {row["workload"]: {name: side for name, side in row["sides"].items() if side["prompts"]} for row in mine}
    names = dict.fromkeys(name for sides in known.values() for name in sides)
    shared = [workload for workload, sides in known.items() if set(sides) == set(names)]
    return {
        "mode": mode,
        "settings": settings,
        "workloads": shared,
        "sides": {
            name: {
                "mean": round(exp(sum(log(known[w][name]["speedup"]) for w in shared) / len(shared)), 4)
                if shared
                else None,
                **_worst([sides[name] for sides in known.values() if name in sides]),
                "answers": sum(sides[name]["answers"] for sides in known.values() if name in sides),
                "differing": None
                if mode == "replay"
                else sum(sides[name]["differing"] for sides in known.values() if name in sides),
            }
            for name in names
        },
    }


def _worst(sides: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    worst = min(sides, key=lambda side: float(side["least"]))
    return {"least": worst["least"], "least_of": worst["least_of"]}


def _median(values: Sequence[float], digits: int) -> float | None:
    return round(median(values), digits) if values else None
