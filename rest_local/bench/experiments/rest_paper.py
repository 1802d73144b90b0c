"""REST's setting again: 64 nodes, suffixes of 16 to 2 tokens, by size of the datastore, next to the published figures.

REST (arXiv 2311.08252) verifies the 64 heaviest nodes of a trie from its datastore at every step. The policy `rest`
follows that rule; with the root, 63 nodes fill a pass of 64 tokens here. It often drafts fewer, where the datastore has
few matches. Our trees have as many nodes as it drafted in the mean, or fewer, where they have no more candidates, and
the same text to draft from: the datastore alone. A third side lets them use the request's own text as well, as `auto`
does.

What differs from the paper, and is said with the figures:

- The answers are recorded: those of Vicuna-7B to MT-Bench, which the paper measured too, and for HumanEval the
  canonical solutions, which people wrote, in place of CodeLlama's.
- The datastore is another one: installed Python sources in place of a part of The Stack, and AlpacaEval answers of
  another model in place of UltraChat; both are 10 to 1 000 times smaller.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import partial
from typing import Any

import numpy as np

from rest_local.bench.experiments.inputs import ANSWERS, Inputs, Text
from rest_local.bench.recorded import Recorded, load
from rest_local.bench.replay import FREE, Threshold, replay
from rest_local.bench.replay_report import at_nodes
from rest_local.bench.report.shapes import Figure, Section, Series, Table
from rest_local.bench.results import Journal, Result
from rest_local.drafting.candidates import SourceRows
from rest_local.drafting.sources import DEPTH, Sources
from rest_local.errors import InputInvalid
from rest_local.llama.vocabulary import Vocabulary
from rest_local.planning.published import REST_NODES, STORED, Rest

NAME = "rest-paper"
SUMMARY = "REST's 64 nodes by size of the datastore, next to the paper's figures and to our trees."

SETS = ("HumanEval", "MT-Bench")
SIZES = {
    "HumanEval": (30_000, 100_000, 300_000, 1_000_000, 3_000_000),
    "MT-Bench": (10_000, 30_000, 100_000, 300_000),
}
SIZES_QUICK = {"HumanEval": (10_000, 60_000), "MT-Bench": (60_000,)}
TESTED, TESTED_QUICK = {"HumanEval": 40, "MT-Bench": 8}, {"HumanEval": 6, "MT-Bench": 1}  # answers
BUDGETS = (16, 63)  # nodes of our trees; MAT at other numbers lies between
PUBLISHED: dict[str, dict[str, Any]] = {
    "HumanEval": {
        "mat": 2.65,
        "of": "CodeLlama 7B, greedy, largest datastore; tokens a step as the paper prints it",
        "speedup": 2.36,
    },
    "MT-Bench": {
        "mat": 1.82,
        "of": "Vicuna 7B, all of Spec-Bench, of which MT-Bench is a part; the paper's MT-Bench has no such figure here",
        "speedup": 1.69,
    },
}
"""Tokens a step and speed-up. HumanEval: the paper; MT-Bench: the board of Spec-Bench, and the paper's speed-up."""


class _Stored(Sources):
    """The datastore alone, as REST has it."""

    def rows(self, limit: int | None = None, depth: int = DEPTH, only: Container[str] = STORED) -> list[SourceRows]:
        return super().rows(limit, depth, [name for name in STORED if name in only])


def run(inputs: Inputs, journal: Journal) -> dict[str, Any]:
    """By set, a row for each size. About 2 minutes, quick: 10 s. A set whose files are missing is left out.

    Raises InputInvalid if that is both.
    """
    found: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for name in SETS:
        try:
            found[name] = _measured(inputs, journal, name)
        except InputInvalid as error:
            left_out[name] = str(error)
    if not found:
        missing = f"neither {' nor '.join(SETS)} is there; give `data`"
        raise InputInvalid("recorded answers", inputs.data or "no folder", missing)
    return {"sets": found, "left_out": left_out}


def _measured(inputs: Inputs, journal: Journal, name: str) -> dict[str, Any]:
    sizes = [size for size in (SIZES_QUICK if inputs.quick else SIZES)[name] if size <= (inputs.tokens or size)]
    sizes = sizes or [inputs.tokens or 0]
    with inputs.vocabulary(name) as model:
        tested = inputs.answers(name, model.vocabulary, (TESTED_QUICK if inputs.quick else TESTED)[name])
        units = [f"{name} {size}" for size in sizes]
        if any(unit not in journal for unit in (*units, f"{name} text")):
            text = _text(inputs, name, model.vocabulary, max(sizes))
            journal.put(f"{name} text", text.record())
            for size, unit in zip(sizes, units, strict=True):
                if unit not in journal:
                    journal.put(unit, _row(text.first(size), tested))
                    inputs.tell(f"replayed: {name}, {size:,} tokens")
    rows = {journal[unit]["tokens"]: journal[unit] for unit in units}  # text can have less than the largest sizes
    return {
        "answers": len(tested),
        "answer_tokens": sum(len(answer.answer) for answer in tested),
        "text": journal[f"{name} text"],
        "rows": [rows[size] for size in sorted(rows)],
    }


def _text(inputs: Inputs, name: str, vocabulary: Vocabulary, tokens: int) -> Text:
    """Installed sources for code; AlpacaEval answers of another model, in a random order, for chat."""
    if ANSWERS[name].kind == "code":
        return inputs.documents(vocabulary, tokens)
    answers = load(inputs.file(ANSWERS["AlpacaEval"].file), vocabulary)
    order = inputs.random(3).permutation(len(answers)).tolist()
    documents = [np.array(answers[number].answer, np.int32) for number in order]
    whole = Text(documents, vocabulary.size, sum(map(len, documents)), "AlpacaEval answers of Llama-3-8B-Instruct")
    return whole.first(min(tokens, whole.tokens))


def _row(text: Text, tested: Sequence[Recorded]) -> dict[str, Any]:
    """MAT and nodes of `rest`, and of our trees at its nodes."""
    stores: Any = [text.segment()]
    rest = replay(tested, partial(_Stored, stores, text.vocab_size), Rest(), FREE).to_dict()
    nodes = rest["nodes_per_step"]
    row: dict[str, Any] = {"tokens": text.tokens, "rest": {"mat": rest["mat"], "nodes_per_step": nodes}}
    for side, kind in (("stored", _Stored), ("all", Sources)):
        points = [
            replay(tested, partial(kind, stores, text.vocab_size), Threshold(0.0, budget), FREE).to_dict()
            for budget in BUDGETS
        ]
        kept = [{key: point[key] for key in ("nodes_per_step", "mat")} for point in points]
        largest = max(point["nodes_per_step"] for point in kept)
        row[side] = {
            "nodes_per_step": min(nodes, largest),
            "mat": at_nodes(kept, min(nodes, largest)),
            "budgets": kept,
        }
    return row


def section(result: Result) -> Section:
    """Words, a table for each set with the published figure, and MAT by size."""
    sets: dict[str, Any] = result.data["sets"]
    return Section(
        title="REST's 64 nodes",
        command=result.command,
        words=[
            f"The policy `rest` drafts the {REST_NODES - 1} most frequent beginnings of what follows the longest match "
            "of 16 to 2 tokens. Our trees had the same datastore and as many nodes.",
            *(_word(name, report) for name, report in sets.items()),
            "The published figures are of other answers and other datastores: the paper lets CodeLlama write, where we "
            "replay solutions that people wrote, and its datastores have 0.46 to 27 GB.",
        ],
        tables=[_table(name, report) for name, report in sets.items()],
        figures=[_figure(name, report) for name, report in sets.items()],
        machine=result.machine.line(),
        footnotes=[f"{name} is left out: {reason}." for name, reason in result.data["left_out"].items()],
    )


def _word(name: str, report: dict[str, Any]) -> str:
    last = report["rows"][-1]
    rest, ours = last["rest"], last["stored"]
    change = ours["mat"] / rest["mat"] - 1
    order = "more" if change >= 0 else "less"
    return (
        f"{name}: with {last['tokens']:,} tokens of text `rest` reaches {rest['mat']:.2f} tokens a pass with "
        f"{rest['nodes_per_step']:.1f} nodes; published are {PUBLISHED[name]['mat']} ({PUBLISHED[name]['of']}). Our "
        f"trees reach {ours['mat']:.2f} with {ours['nodes_per_step']:.1f} nodes, {abs(change):.1%} {order}."
    )


def _table(name: str, report: dict[str, Any]) -> Table:
    rows: list[list[Any]] = [
        [
            f"{row['tokens']:,}",
            row["rest"]["nodes_per_step"],
            row["rest"]["mat"],
            row["stored"]["nodes_per_step"],
            row["stored"]["mat"],
            row["all"]["nodes_per_step"],
            row["all"]["mat"],
        ]
        for row in report["rows"]
    ]
    rows.append(["published", float(REST_NODES), PUBLISHED[name]["mat"], *[None] * 4])
    text = report["text"]
    copies = f", {text['edited_copies']:.0%} of it edited copies" if text["edited_copies"] else ""
    return Table(
        f"{name}: tokens a pass by size of the datastore",
        ("tokens stored", "nodes", "rest", "nodes", "ours, the same text", "nodes", "ours, with the request's text"),
        rows,
        note=f"{report['answers']} answers, {report['answer_tokens']:,} tokens. Text: {text['source']}{copies}. "
        f"Published: {PUBLISHED[name]['of']}.",
        best=(2, 4, 6),
    )


def _figure(name: str, report: dict[str, Any]) -> Figure:
    sizes = [row["tokens"] for row in report["rows"]]
    return Figure(
        name=f"rest-paper-{name.lower()}",
        title=f"{name}: tokens a pass by size of the datastore",
        x="tokens in the datastore",
        y="tokens a pass",
        series=[
            Series("rest", [row["rest"]["mat"] for row in report["rows"]], sizes),
            Series("ours, the same text", [row["stored"]["mat"] for row in report["rows"]], sizes),
            Series("ours, with the request's text", [row["all"]["mat"] for row in report["rows"]], sizes),
            Series("published", [PUBLISHED[name]["mat"]] * len(sizes), sizes),
        ],
        alt=f"Lines: tokens a pass on {name} against the size of the datastore, for rest, our trees and the paper.",
        log_x=True,
    )
