"""What a comparison measures: the choice of a command, and the names of workloads."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rest_local.errors import OptionError

WORKLOADS = ("completion", "edit", "chat", "json", "batch", "humaneval", "mt-bench", "spec-bench", "replay")
DATA = {
    "humaneval": "HumanEval.jsonl.gz",
    "mt-bench": "mt_bench_questions.jsonl",
    "spec-bench": "spec_bench_questions.jsonl",
}
"""Files that workloads take from the folder of --data."""
HEAD_BYTES = 1 << 20


@dataclass(frozen=True)
class Size:
    """How much is measured.

    prompts      of a workload; `by_category`: of a category of Spec-Bench; `exact`: of a workload in exact settings
    answers      of a set of recorded answers, replayed up to `replayed` tokens: a real model may take seconds for each
    tokens       of an answer
    at_once      requests of the workload "batch"
    """

    prompts: int
    by_category: int
    exact: int
    answers: int
    replayed: int
    tokens: int
    at_once: int


DEFAULT = Size(prompts=8, by_category=3, exact=3, answers=3, replayed=96, tokens=128, at_once=8)
QUICK = Size(prompts=1, by_category=1, exact=1, answers=1, replayed=24, tokens=24, at_once=4)


@dataclass(frozen=True)
class Choice:
    """model, llama_server, data, git, replay_model: paths; None: without (replay_model: the model). replay: files of
    recorded answers. threads, n_gpu_layers: the same for all sides. workloads: of `selected`.
    """

    model: Path
    threads: int
    size: Size = DEFAULT
    workloads: Sequence[str] = WORKLOADS
    draft_models: Sequence[Path] = ()
    llama_server: str | None = None
    data: Path | None = None
    git: Path | None = None
    replay: Sequence[Path] = ()
    replay_model: Path | None = None
    n_ctx: int | None = None
    n_gpu_layers: int | None = None
    quick: bool = False

    def key(self) -> dict[str, Any]:
        """What the figures depend on besides sides and tasks."""
        return {
            "model": fingerprint(self.model),
            "drafters": [fingerprint(path) for path in self.draft_models],
            "replay_model": self.replay_model and fingerprint(self.replay_model),
            "threads": self.threads,
            "gpu_layers": self.n_gpu_layers,
            "workloads": list(self.workloads),
        }


def selected(names: Sequence[str]) -> tuple[str, ...]:
    """The workloads that names stand for, `a,b` for two; all for none. A category of Spec-Bench is `spec-bench/qa`.
    Raises OptionError with what is meant perhaps.
    """
    given = [name.strip().lower() for text in names for name in text.split(",") if name.strip()]
    for name in given:
        family, _, rest = name.partition("/")
        if family not in WORKLOADS or (rest and family not in ("spec-bench", "replay")):
            close = get_close_matches(name, WORKLOADS, 1)
            hint = f"do you mean {close[0]}? " if close else ""
            raise OptionError(f"workload {name}: {hint}choose from {', '.join(WORKLOADS)}")
    return tuple(dict.fromkeys(given)) or WORKLOADS


def wants(chosen: Sequence[str], workload: str) -> bool:
    """Whether a workload, or a family of them, was chosen."""
    family = workload.partition("/")[0]
    return any(name in (workload, family) or name.startswith(f"{workload}/") for name in chosen)


def fingerprint(path: Path) -> str:
    """Name, size and a digest of the first megabyte: enough to tell models from each other. Raises OSError."""
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(HEAD_BYTES)).hexdigest()[:12]
    return f"{path.name}, {path.stat().st_size} bytes, {digest}"
