"""A replay as a result for the report: `rest-local bench replay --out DIR`.

`data` of the kind "replay", without any time that was measured, so that a rerun gives the same figures:

- "workload": its name; "answers" and "tokens" that were replayed; "inputs": the beginning of the hash of each file,
  and the commit of each repository
- "sweep": [{"threshold", "nodes_per_step", "mat"}], drafts above thresholds, on no curve
- "curves": by name {"speedup", "mat", "nodes_per_step", "worst_answer", "worst_name", "oracle", "share_of_oracle",
  "fair", "share_of_fair", "by_source", "by_category", "tokens_changed", "lookups", "speedup_with_lookups"}
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rest_local
from rest_local.bench.report.text import slug
from rest_local.bench.results import Result, now, this_machine
from rest_local.errors import ResultInvalid
from rest_local.retrieval.sources.git import git_command, git_environment

KIND = "replay"
SWEEP = ("threshold", "nodes_per_step", "mat")
CURVE = (
    "speedup", "speedup_with_lookups", "mat", "nodes_per_step", "worst_answer", "worst_name", "oracle",
    "share_of_oracle", "fair", "share_of_fair", "by_source", "by_category", "tokens_changed", "lookups",
)  # fmt: skip


WORKLOADS = {
    "mt_bench_answers_vicuna-7b-v1.5.jsonl": "MT-Bench",
    "alpaca_eval_outputs_llama-3-8b-instruct.jsonl": "AlpacaEval",
    "HumanEval.jsonl.gz": "HumanEval",
}
"""Names of known files of recorded answers."""


EDITS_FILE = "replay-edits.json"


def file_name(files: Sequence[Path], repositories: Sequence[Path], *, predict: bool, history: str | None) -> str:
    """The name of the result in its folder."""
    if repositories and not files:
        return EDITS_FILE if predict else "replay-edits-without-prediction.json"
    words = ["replay", *(WORKLOADS.get(path.name, path.name.split(".")[0]) for path in files)]
    words += ["edits"] * bool(repositories) + ["predict"] * predict + ["history"] * (history is not None)
    return f"{slug('-'.join(words))}.json"


def data_of(report: Mapping[str, Any], paths: Sequence[Path], vocabularies: Sequence[str | Path]) -> dict[str, Any]:
    """What is kept of a report of `bench replay` on these files and repositories. Raises OSError."""
    files = [Path(path) for path in (*paths, *vocabularies) if Path(path).is_file()]
    commits = {f"REPO {n}": head_of(path) for n, path in enumerate(filter(Path.is_dir, paths), 1)}
    return {
        "workload": " and ".join(WORKLOADS.get(path.name, path.name) if path.is_file() else "edits" for path in paths),
        "answers": report["answers"],
        "tokens": report["tokens"],
        "inputs": {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in files} | commits,
        "sweep": [{key: row[key] for key in SWEEP} for row in report["sweep"]],
        "curves": {name: {key: row[key] for key in CURVE} for name, row in report["curves"].items()},
    }


def head_of(repository: Path) -> str:
    """The commit that a repository is at, "" if git does not say."""
    command = git_command(repository, "rev-parse", "HEAD")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=git_environment())
    return done.stdout.strip()[:16]


def save(path: Path, command: str, seconds: float, data: Mapping[str, Any], *, quick: bool) -> Result:
    """Write the result. Raises OSError."""
    result = Result(
        kind=KIND,
        command=command,
        machine=this_machine(),
        version=rest_local.__version__,
        started=now(),
        seconds=round(seconds, 1),
        quick=quick,
        data=data,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    result.save(path)
    return result


def check_place(path: Path, command: str) -> None:
    """Refuse to replace the result of another command. Raises ResultInvalid."""
    if path.exists() and (found := Result.load(path).command) != command:
        raise ResultInvalid(path, f"made by another command ({found}); remove it, or give another folder")
