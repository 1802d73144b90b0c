"""The section on a run of the suite: what was measured, and what was not and why."""

from __future__ import annotations

from rest_local.bench.report.shapes import Section, Table
from rest_local.bench.report.text import duration
from rest_local.bench.results import Result
from rest_local.bench.suite.record import MEASURED


def section(result: Result) -> Section:
    """`rest_local.bench.suite.record` describes the data. Raises KeyError, TypeError and others for damaged data."""
    parts = dict(result.data["parts"])
    absent = [(name, row) for name, row in parts.items() if row["state"] != MEASURED]
    words = [f"{len(parts) - len(absent)} of {len(parts)} parts were measured."]
    if absent:
        words.append("Not measured: " + "; ".join(f"{name} ({row['reason']})" for name, row in absent) + ".")
    rows = [
        [name, row["state"], duration(row["seconds"]) if row["seconds"] else None, row["reason"] or None]
        for name, row in parts.items()
    ]
    table = Table("Parts of the suite", ["part", "state", "took", "reason"], rows)
    return Section(title="What was measured", command=result.command, words=words, tables=[table])
