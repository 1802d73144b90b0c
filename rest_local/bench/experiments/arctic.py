"""ArcticInference's suffix decoding, run by its own code, against our trees at the same number of nodes a step.

Edits in three forms, each replayed cold by both sides:

- `commits`: changes of files in the history of a repository, the whole new file after the old one
- `renames`: in installed packages, a name of a file changed, in the same form
- `agents`: both kinds as coding agents write them (`bench.transcripts`): the file is read with line numbers, then calls
  or patches change it

and, where the data folder has them, answers to MT-Bench as text that is no edit.

The peer drafts its tree at three factors of the match length, and its default, a chain. Ours drafts every node whose
joint probability reaches a threshold; MAT between two thresholds is interpolated at the peer's nodes. Each side learns
only from the answers that it replays. The request's own text is all that either may draft from. What the source `edit`
makes of this text is ours; in the forms of agents our trees are shown with and without it, in the others it has nothing
to do, since old and new text have the same spelling.

No draft of n nodes gives more than n + 1 tokens. So where the peer is within 5% of that, 1.05 times its MAT is out of
reach for any drafter, and the table says how much is left.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from rest_local.bench.experiments.inputs import Inputs, by_name
from rest_local.bench.peers import ARCTIC_VARIANTS, Arctic, why_no_arctic
from rest_local.bench.prompts import standard_library
from rest_local.bench.recorded import Recorded
from rest_local.bench.replay import FREE, replay, sweep
from rest_local.bench.replay_report import at_nodes
from rest_local.bench.report.shapes import Figure, Section, Series, Table
from rest_local.bench.results import Journal, Result
from rest_local.bench.transcripts import FORMATS, Change, changes_of, renames_of, transcripts
from rest_local.bench.workload import EDITS, load_edits, whole_file_edit
from rest_local.drafting.sources import Sources
from rest_local.errors import InputInvalid, RestLocalError
from rest_local.llama.model import Model
from rest_local.llama.vocabulary import Vocabulary
from rest_local.retrieval.sources.git import git_command, git_environment

NAME = "arctic"
SUMMARY = "ArcticInference's own suffix decoding, and ours at as many nodes a step."
ASKED = 1.05  # times its MAT, on edits
INSTALL = (
    "pip install arctic-inference; where its other parts do not build, build csrc/suffix_decoding of its source "
    "archive with cmake and nanobind, and put arctic_inference/suffix_decoding with that library on PYTHONPATH"
)
MOST = {"commits": 16, "renames": 12, "agents": 2, "MT-Bench": 16}
"""Answers; of agents: commits and renames, each in every format."""
QUICK = {"commits": 2, "renames": 2, "agents": 1, "MT-Bench": 2}
LEAST, LEAST_QUICK = (0.85, 0.5, 0.2, 0.1, 0.06, 0.03), (0.5, 0.1, 0.03)  # probabilities of nodes, for our trees
WITH_EDITS = "with the source edit"
ALONE = "context alone"


def run(inputs: Inputs, journal: Journal) -> dict[str, Any]:
    """By workload, both sides. About 2 minutes, quick: 10 s. Without ArcticInference our side alone, and the reason."""
    reason = why_no_arctic()

    def measure(name: str) -> Any:
        return _measured(inputs, name, WORKLOADS[name], reason is None)

    found, left_out = by_name(inputs, journal, WORKLOADS, measure, reasons=(RestLocalError,))
    return {"why_not": reason, "version": _version(), "workloads": found, "left_out": left_out}


def _version() -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("arctic-inference")
    except PackageNotFoundError:  # only its suffix decoding is there
        return None


def _measured(
    inputs: Inputs, name: str, make: Callable[[Inputs, Vocabulary, int], list[Recorded]], with_arctic: bool
) -> dict[str, Any]:
    most = QUICK[name] if inputs.quick else MOST[name]
    with _vocabulary(inputs, name) as model:
        recorded, vocabulary = make(inputs, model.vocabulary, most), model.vocabulary
        sides: dict[str, Callable[[], Sources]] = {ALONE: partial(Sources, [], vocabulary.size)}
        if name == "agents":
            sides[WITH_EDITS] = partial(Sources, [], vocabulary.size, spelling=vocabulary)
        thresholds = LEAST_QUICK if inputs.quick else LEAST
        ours = {side: sweep(recorded, make_sources, thresholds) for side, make_sources in sides.items()}
    rows = []
    for options in ARCTIC_VARIANTS if with_arctic else ():
        peer = Arctic(**options)
        row = replay(recorded, partial(_itself, peer), peer, FREE).to_dict()
        kept: dict[str, Any] = {"name": peer.name, **{key: row[key] for key in ("mat", "nodes_per_step")}}
        kept["ours"] = {side: at_nodes(points, row["nodes_per_step"]) for side, points in ours.items()}
        rows.append(kept)
    return {
        "answers": len(recorded),
        "tokens": sum(len(answer.answer) for answer in recorded),
        "commit": _head(inputs) if name in ("commits", "agents") else None,
        "arctic": rows,
        "ours": {
            side: [{key: point[key] for key in ("threshold", "nodes_per_step", "mat")} for point in points]
            for side, points in ours.items()
        },
    }


def _itself(peer: Arctic) -> Arctic:
    return peer


def _vocabulary(inputs: Inputs, name: str) -> Any:
    """Of the answers' model; of code models for edits, of the model under test without a data folder."""
    answers = "MT-Bench" if name == "MT-Bench" else "HumanEval"
    if name != "MT-Bench" and not inputs.has(answers):
        return Model.open(inputs.model_path, vocab_only=True)
    return inputs.vocabulary(answers)


def repository(inputs: Inputs) -> Path:
    """The first given folder with a history, else this project's checkout. Raises InputInvalid."""
    for folder in (*inputs.text, Path(__file__).parents[3]):
        if (folder / ".git").exists():
            return folder
    raise InputInvalid("repository", Path(__file__).parents[3], "no git history; give --text FOLDER of a repository")


def _head(inputs: Inputs) -> str:
    """The newest commit, by which the same edits are found again."""
    command = git_command(repository(inputs), "rev-parse", "--short=12", "HEAD")
    done = subprocess.run(command, capture_output=True, check=False, timeout=60, env=git_environment())
    return done.stdout.decode().strip()


def _commits(inputs: Inputs, vocabulary: Vocabulary, most: int) -> list[Recorded]:
    return load_edits(repository(inputs), vocabulary, min(most, EDITS))


def _renames(inputs: Inputs, vocabulary: Vocabulary, most: int) -> list[Recorded]:
    return [replace(whole_file_edit(*change, vocabulary), prediction=()) for change in _renamed(most)]


def _renamed(most: int) -> list[Change]:
    return renames_of(standard_library(), 0, most)[:most]


def _agents(inputs: Inputs, vocabulary: Vocabulary, most: int) -> list[Recorded]:
    """`most` commits and `most` renames in each format."""
    kinds = (changes_of(repository(inputs), 0, most), renames_of(standard_library(), 0, most))
    formats = FORMATS[::4] if inputs.quick else FORMATS
    return [answer for form in formats for changes in kinds for answer in transcripts(changes, form, vocabulary)]


def _chat(inputs: Inputs, vocabulary: Vocabulary, most: int) -> list[Recorded]:
    return inputs.answers("MT-Bench", vocabulary, most)


WORKLOADS: dict[str, Callable[[Inputs, Vocabulary, int], list[Recorded]]] = {
    "commits": _commits,
    "renames": _renames,
    "agents": _agents,
    "MT-Bench": _chat,
}


def ratios(report: dict[str, Any], side: str) -> list[float]:
    """Our MAT over its own at as many nodes, for each of its trees that our sweep reaches."""
    trees = [row for row in report["arctic"] if "tree" in row["name"]]
    return [row["ours"][side] / row["mat"] for row in trees if row["ours"].get(side) is not None]


def most_possible(report: dict[str, Any]) -> float:
    """What any drafter could have over its MAT, in the mean of its trees: n nodes give at most n + 1 tokens."""
    return mean(float((row["nodes_per_step"] + 1) / row["mat"]) for row in report["arctic"] if "tree" in row["name"])


def section(result: Result) -> Section:
    """Words, a table of both sides at equal nodes, and MAT against nodes."""
    data = result.data
    workloads: dict[str, Any] = data["workloads"]
    tables = []
    if data["why_not"] is None:
        rows = [
            [
                name,
                row["name"],
                row["nodes_per_step"],
                round(row["nodes_per_step"] + 1, 3),
                row["mat"],
                *(row["ours"].get(side) for side in (ALONE, WITH_EDITS)),
            ]
            for name, report in workloads.items()
            for row in report["arctic"]
        ]
        sides = [f"ours, {side}" for side in (ALONE, WITH_EDITS)]
        note = "Ours at as many nodes, between two thresholds. A dash: not measured, or never as many nodes."
        columns = ("workload", "ArcticInference", "nodes a step", "most possible", "its MAT", *sides)
        tables.append(Table("MAT at equal nodes", columns, rows, note=note, best=(4, 5, 6)))
    return Section(
        title="ArcticInference at equal nodes",
        command=result.command,
        words=list(_words(data)),
        tables=tables,
        figures=[_figure(name, report) for name, report in workloads.items()],
        machine=result.machine.line(),
        footnotes=[f"{name} is left out: {reason}." for name, reason in data["left_out"].items()],
    )


def _words(data: Any) -> list[str]:
    if data["why_not"] is not None:
        return [f"Only our side was measured. {data['why_not']}.", f"To install it: {INSTALL}."]
    version = f" {data['version']}" if data["version"] else ""
    words = [
        f"ArcticInference{version} drafts by its own code from the request's text; our trees draft from the same text. "
        f"Asked were {ASKED} times its MAT at as many nodes on edits."
    ]
    for name, report in data["workloads"].items():
        shown = []
        for side in (ALONE, WITH_EDITS):
            if found := ratios(report, side):
                shown.append(f"{mean(found):.3f} ({min(found):.3f} to {max(found):.3f}) {side}")
        best = ratios(report, WITH_EDITS) or ratios(report, ALONE)
        verdict = ""
        if best and name != "MT-Bench":
            verdict = (
                " Reached." if mean(best) >= ASKED else f" Missed; {most_possible(report):.3f} is the most possible."
            )
        what = f"{report['answers']} answers, {report['tokens']:,} tokens"
        words.append(f"{name} ({what}): {', '.join(shown) or 'no equal nodes'} times its trees' MAT.{verdict}")
    return words


def _figure(name: str, report: dict[str, Any]) -> Figure:
    series = [
        Series(f"ours, {side}", [point["mat"] for point in points], [point["nodes_per_step"] for point in points])
        for side, points in report["ours"].items()
    ]
    trees: Sequence[dict[str, Any]] = [row for row in report["arctic"] if "tree" in row["name"]]
    if trees:
        series.append(
            Series("ArcticInference", [row["mat"] for row in trees], [row["nodes_per_step"] for row in trees])
        )
    return Figure(
        name=f"arctic-{name.lower()}",
        title=f"MAT against drafted nodes: {name}",
        x="nodes a step",
        y="tokens a forward pass",
        series=series,
        alt=f"Lines: MAT against nodes a step on {name}, our trees and those of ArcticInference.",
    )
