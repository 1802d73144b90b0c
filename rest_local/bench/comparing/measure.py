"""Runs a comparison: plan, journal, result, and where both lie. A second call goes on after an interruption."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rest_local.bench.comparing.choice import Choice
from rest_local.bench.comparing.energy import Energy
from rest_local.bench.comparing.plan import Plan, make_plan
from rest_local.bench.comparing.run import failures, run
from rest_local.bench.comparing.summary import summarize
from rest_local.bench.results import Journal, Result, this_machine

KIND = "compare"


def result_path(folder: Path) -> Path:
    """Where the result lies."""
    return folder / f"{KIND}.json"


def journal_path(folder: Path) -> Path:
    """Where the finished units of an unfinished run lie."""
    return folder / f"{KIND}.journal"


def measure(choice: Choice, folder: Path, command: str, say: Callable[[str], None] = lambda line: None) -> Result:
    """Measure, write the result into `folder`, which is made, and remove the journal.

    Raises ResultInvalid for the journal of another run, InputInvalid, OptionError, ModelError, DatastoreError, OSError,
    and RestLocalError where plain decoding fails. Finished units stay in the journal then.
    """
    machine, key = this_machine(), choice.key()
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        plan = make_plan(choice, stack, say)
        journal = Journal(journal_path(folder), {**key, **plan.key()})
        if len(journal):
            say(f"goes on after {len(journal)} finished units")
        data = measured(choice, plan, journal, say)
    return journal.finish(
        result_path(folder), kind=KIND, command=command, machine=machine, quick=choice.quick, data=data
    )


def measured(choice: Choice, plan: Plan, journal: Journal, say: Callable[[str], None]) -> dict[str, Any]:
    """The data of the result.

    model, threads, n_ctx, size   what was run
    workloads, overall            see `summary`
    left_out, failed              what has no figures, and why
    energy                        why there are no joules; None where there are
    units                         the records of all units (`run`)
    """
    units = run(plan.stages, journal, say)
    return {
        "model": choice.model.name,
        "replay_model": choice.replay_model.name if choice.replay_model else None,
        "threads": choice.threads,
        "n_ctx": plan.n_ctx,
        "size": asdict(choice.size),
        "sides": {stage.name: {side.name: side.options for side in stage.sides} for stage in plan.stages},
        **summarize(units),
        "left_out": plan.left_out,
        "failed": failures(plan.stages, journal),
        "energy": Energy().reason,
        "units": units,
    }
