"""Acceptance and lookup time by the size of the datastore, from SMALLEST tokens on.

Texts of growing sizes, each the beginning of the next, are the datastore of a replay of recorded answers, one after
another. The text is installed Python sources; where they end, edited copies follow (`bench.generated`), which cost time
to search and can hardly give more accepted tokens. `edited_copies` of each size says how much of it they are.

- `mat`, `accepted_per_lookup`: with a lookup at every step and up to NODES nodes, as many as are not hopeless
- `speedup`: of the policy `auto` on a shipped cost curve, which decides when to look up and how much to draft
- `lookup_us`: median CPU time of a lookup, with the same contexts in all sizes in turn

The replay searches the request's own text, too; size 0 is that text alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from math import log2
from typing import Any

from rest_local.bench.experiments.inputs import Inputs, Text
from rest_local.bench.recorded import Recorded
from rest_local.bench.replay import LOOKUP_MS, Threshold, replay
from rest_local.bench.report.shapes import Figure, Section, Series, Table
from rest_local.bench.results import Journal, Result
from rest_local.bench.sizes import lookup_times
from rest_local.calibration.curves import load_curve
from rest_local.drafting.sources import Sources
from rest_local.planning.policies import make_policy
from rest_local.retrieval.segment import Segment

NAME = "datastore-size"
SUMMARY = "Acceptance and lookup time by the size of the datastore, 0.1 M to 100 M tokens."

SET = "HumanEval"
SMALLEST = 100_000
STEPS = (1, 3)  # in each decade
LARGEST, LARGEST_QUICK = 10_000_000, 300_000  # without `Inputs.tokens`
NODES = 63  # a step of 64 tokens, as in the REST paper
CURVE = "rtx3090-8b-q4_0"
ANSWERS, ANSWERS_QUICK = 82, 12


def sizes(largest: int) -> list[int]:
    """0.1 M, 0.3 M, 1 M, and so on, up to `largest`, which is the last one."""
    found, decade = [], SMALLEST
    while decade < largest:
        found += [decade * step for step in STEPS if decade * step < largest]
        decade *= 10
    return [*found, largest]


def run(inputs: Inputs, journal: Journal) -> dict[str, Any]:
    """A row for each size. About 2 minutes for 10 M tokens, quick: 15 s; more tokens take longer.

    Raises InputInvalid without the recorded answers.
    """
    with inputs.vocabulary(SET) as model:
        vocabulary = model.vocabulary
        answers = inputs.answers(SET, vocabulary, ANSWERS_QUICK if inputs.quick else ANSWERS)
        wanted = sizes(inputs.tokens or (LARGEST_QUICK if inputs.quick else LARGEST))
        text = inputs.documents(vocabulary, wanted[-1])
    segments: list[Segment] = []
    for tokens in (0, *wanted):
        segments += [part.segment()] if (part := text.first(tokens)).documents and tokens else []
        if (unit := f"size/{tokens}") not in journal:
            journal.put(unit, measured(answers, segments[-1] if tokens else None, part, text.vocab_size))
            inputs.tell(f"replayed: {tokens:,} tokens")
    rows = [{"tokens": tokens, **journal[f"size/{tokens}"]} for tokens in (0, *wanted)]
    for row, micros in zip(rows[1:], lookup_times(segments, answers), strict=True):
        row["lookup_us"] = micros
    return {
        "set": SET,
        "answers": len(answers),
        "answer_tokens": sum(len(answer.answer) for answer in answers),
        "nodes": NODES,
        "curve": CURVE,
        "text": text.record(),
        "sizes": rows,
    }


def measured(answers: Sequence[Recorded], segment: Segment | None, text: Text, vocab_size: int) -> dict[str, Any]:
    """The row of one size, without the time of a lookup."""
    stores: Any = [] if segment is None else [segment]  # a segment has the `rows` of a datastore
    make = partial(Sources, stores, vocab_size)
    curve = load_curve(CURVE)
    fixed = replay(answers, make, Threshold(0.0, NODES), load_curve(CURVE))
    auto = replay(answers, make, make_policy("auto", load_curve(CURVE)), curve)
    stored = fixed.accepted_by_source["datastore"]
    return {
        "edited_copies": round(1 - text.real / text.tokens, 4) if text.documents else 0.0,
        "mat": round(fixed.tokens / max(fixed.steps, 1), 4),
        "accepted_per_lookup": round(fixed.accepted / max(round(fixed.looked_ms / LOOKUP_MS), 1), 4),
        "of_datastore": round(stored / max(fixed.accepted, 1), 4),
        "auto_mat": round(auto.tokens / max(auto.steps, 1), 4),
        "speedup": round(auto.speedup, 4),
        "lookup_us": None,
    }


def section(result: Result) -> Section:
    """Words, the table of sizes, and a figure of acceptance and one of lookup time."""
    data = result.data
    none, *rows = data["sizes"]
    columns = ("tokens", "copies", "MAT", "accepted a lookup", "of the datastore", "auto MAT", "speed-up", "lookup us")
    keys = ("edited_copies", "mat", "accepted_per_lookup", "of_datastore", "auto_mat", "speedup", "lookup_us")
    return Section(
        title="Size of the datastore",
        command=result.command,
        words=[
            f"{data['answers']} {data['set']} answers were replayed with datastores of growing size, made of "
            f"{data['text']['source']}. Each size contains the smaller ones.",
            *_words(none, rows),
        ],
        tables=[
            Table(
                "Acceptance and lookup time by size",
                columns,
                [[row["tokens"], *(row[key] for key in keys)] for row in data["sizes"]],
                note=f"Tokens a pass (MAT) with up to {data['nodes']} nodes a step; auto and speed-up on the cost "
                f"curve {data['curve']}, without lookup times. Lookups are in memory.",
            )
        ],
        figures=[
            Figure(
                name="datastore-size-mat",
                title="Accepted tokens by size of the datastore",
                x="tokens in the datastore",
                y="tokens a pass",
                series=[
                    Series("up to 63 nodes", [row["mat"] for row in rows], [row["tokens"] for row in rows]),
                    Series("auto", [row["auto_mat"] for row in rows], [row["tokens"] for row in rows]),
                ],
                alt="Lines: tokens a pass against the size of the datastore, for up to 63 nodes a step and for auto.",
                log_x=True,
                level=none["mat"],
            ),
            Figure(
                name="datastore-size-lookup",
                title="Time of a lookup by size of the datastore",
                x="tokens in the datastore",
                y="microseconds",
                series=[Series("lookup", [row["lookup_us"] for row in rows], [row["tokens"] for row in rows])],
                alt="A line: median CPU time of a lookup against the size of the datastore.",
                log_x=True,
            ),
        ],
        machine=result.machine.line(),
    )


def _words(none: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[str]:
    best = max(rows, key=lambda row: row["mat"])
    first, last = rows[0], rows[-1]
    words = [
        f"Without a datastore {none['mat']:.2f} tokens a pass are accepted, with {best['tokens']:,} tokens "
        f"{best['mat']:.2f}, the most. `auto` is {none['speedup']:.2f} times as fast as plain decoding without a "
        f"datastore and {max(row['speedup'] for row in rows):.2f} times at best."
    ]
    grown = [
        (small, large, (large["mat"] - small["mat"]) / log2(large["tokens"] / small["tokens"]))
        for small, large in pairwise(rows)
    ]
    if grown:
        words.append(
            "A doubling gives "
            + ", ".join(f"{gain:+.3f} from {small['tokens']:,} to {large['tokens']:,}" for small, large, gain in grown)
            + " tokens a pass."
        )
    if first["lookup_us"] and last["lookup_us"]:
        words.append(
            f"A lookup takes {first['lookup_us']:.0f} us in {first['tokens']:,} tokens and {last['lookup_us']:.0f} us "
            f"in {last['tokens']:,}."
        )
    if any(row["edited_copies"] for row in rows):
        words.append("Sizes with edited copies say what a lookup takes there, not what more real text would give.")
    return words
