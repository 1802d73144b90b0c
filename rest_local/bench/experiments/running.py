"""Runs one experiment: the journal, the result and where both lie. A second call goes on after an interruption."""

from __future__ import annotations

from pathlib import Path

from rest_local.bench.experiments.catalog import load
from rest_local.bench.experiments.inputs import Inputs
from rest_local.bench.results import Journal, Result, this_machine


def result_path(folder: Path, name: str) -> Path:
    """Where the result of an experiment lies."""
    return folder / f"experiment-{name}.json"


def journal_path(folder: Path, name: str) -> Path:
    """Where the finished units of an unfinished run lie."""
    return folder / f"experiment-{name}.journal"


def measure(name: str, inputs: Inputs, folder: Path, command: str) -> Result:
    """Run the experiment, write its result into `folder`, which is made, and remove its journal.

    Raises KeyError for an unknown name, ResultInvalid for the journal of another run, OSError, and what the experiment
    raises. Finished units stay in the journal then.
    """
    experiment = load(name)
    folder.mkdir(parents=True, exist_ok=True)
    journal = Journal(journal_path(folder, name), inputs.key(name))
    machine = this_machine()
    data = experiment.run(inputs, journal)
    return journal.finish(
        result_path(folder, name),
        kind=f"experiment/{name}",
        command=command,
        machine=machine,
        quick=inputs.quick,
        data=data,
    )
