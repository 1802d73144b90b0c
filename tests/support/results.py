"""Results of benchmarks for tests, written by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import rest_local
from rest_local.bench.results import Machine, Result

MACHINE = Machine("Test CPU", 4, 16.0, "Linux x86_64", "3.12.1", 0.1, ("avx2",), "", {"numpy": "2.0"})


def curve(speedup: float, **more: Any) -> dict[str, Any]:
    """One curve of a replay."""
    return {
        "speedup": speedup, "speedup_with_lookups": speedup - 0.01, "mat": 1.5, "nodes_per_step": 2.0,
        "worst_answer": 0.9, "worst_name": "7", "oracle": {"speedup": 2.0}, "share_of_oracle": speedup / 2,
        "fair": {"speedup": 1.8}, "share_of_fair": speedup / 1.8,
        "by_source": {"context": {"drafted": 40, "accepted": 30}, "history": {"drafted": 20, "accepted": 10}},
        "by_category": {"math": {"answers": 3, "speedup": speedup}, "": {"answers": 1, "speedup": 1.1}},
        "tokens_changed": 0, "lookups": 5, **more,
    }  # fmt: skip


def replay_data(workload: str = "chat", **more: Any) -> dict[str, Any]:
    """The data of a replay on two curves; drafts lose on one of them."""
    return {
        "workload": workload, "answers": 4, "tokens": 1234, "inputs": {},
        "sweep": [{"threshold": 0.2 / n, "nodes_per_step": 1.0 * n, "mat": 1.2 + 0.1 * n} for n in (1, 2)],
        "curves": {"rtx4090-8b-iq3_xxs": curve(1.62), "cpu-2-cores-0.5b-q4_0": curve(0.99)}, **more,
    }  # fmt: skip


def result(data: Mapping[str, Any] | None = None, **more: Any) -> Result:
    """A result of a replay unless `more` says otherwise."""
    made = Result(
        kind="replay",
        command="rest-local bench replay answers.jsonl --out DIR",
        machine=MACHINE,
        version=rest_local.__version__,
        started="2026-11-22T18:00:00Z",
        seconds=75.0,
        quick=False,
        data=replay_data() if data is None else data,
    )
    return replace(made, **more)


def folder_of(path: Path, **results: Result) -> Path:
    """A folder with these results; "a_b" becomes "a-b.json"."""
    path.mkdir(exist_ok=True)
    for name, each in results.items():
        each.save(path / f"{name.replace('_', '-')}.json")
    return path
