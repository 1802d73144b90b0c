"""Retrieved continuations against the continuation that the model really gave, by source and by length of the match.

At every place of an answer each source is searched alone: the text of the request (`context`), other answers of the
same set (`history`) and installed Python sources (`datastore`). A retrieval is a search that finds something. Counted
for each, by the length of its longest match:

- `prefix`: how many tokens the first row (the longest match) has in common with the answer from there on, of DEPTH
- `next_1`, `next_4`, `next_8`: whether so many of its tokens are the answer's next ones. Places with fewer tokens left
  do not count.
- `useful`: whether any of the rows begins with the next token, so that verifying all of them gives an accepted token
- `best`: the common prefix of the row that has the longest one, which is what a tree of all rows would give

The answers are recorded ones of real models, and generations of the model under test. No step is skipped after an
accepted draft: each place counts once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rest_local.bench.experiments.generations import generate
from rest_local.bench.experiments.inputs import ANSWERS, Inputs, by_name
from rest_local.bench.recorded import Recorded
from rest_local.bench.report.shapes import Figure, Section, Series, Table
from rest_local.bench.results import Journal, Result
from rest_local.drafting.sources import (
    CONTEXT_ROWS,
    CONTEXT_TOKENS,
    DATASTORE_ROWS,
    DEPTH,
    HISTORY_ROWS,
    Searchable,
)
from rest_local.errors import InputInvalid
from rest_local.llama.model import Model
from rest_local.llama.vocabulary import Vocabulary
from rest_local.retrieval.growing import GrowingText
from rest_local.retrieval.rows import Rows
from rest_local.retrieval.segment import Segment

NAME = "retrieval-quality"
SUMMARY = "How well retrieved text continues answers, by source and by length of the match."

ROWS = {"context": CONTEXT_ROWS, "history": HISTORY_ROWS, "datastore": DATASTORE_ROWS}  # as a draft searches them
SEARCHED = tuple(ROWS)
LENGTHS = (1, 2, 4, 8, 16)  # upper ends of the groups of match lengths; the last group has no end
AHEAD = (1, 4, 8)
DATASTORE = 1_000_000  # tokens
ANSWER_TOKENS = 12_000  # of each set: all places of so many tokens of answers
GENERATED, GENERATED_TOKENS = 12, 128
FIELDS = ("count", "prefix", "useful", "best")


def groups() -> list[str]:
    """Names of the groups of match lengths."""
    starts = [1, *(end + 1 for end in LENGTHS)]
    names = [str(end) if start == end else f"{start}-{end}" for start, end in zip(starts, LENGTHS, strict=False)]
    return [*names, f"{starts[-1]}+"]


def agreement(rows: Rows, following: Sequence[int]) -> NDArray[np.intp]:
    """For each row, how many tokens it has in common with `following` before the first other one."""
    known = np.asarray(following, np.int32)[: rows.depth]
    same = rows.continuations[:, : len(known)] == known
    agreeing: NDArray[np.intp] = np.logical_and.accumulate(same, axis=1).sum(axis=1)
    return agreeing


class Counts:
    """Sums over the retrievals of one source, by group of match lengths."""

    def __init__(self) -> None:
        self.by_group = [dict.fromkeys((*FIELDS, *_ahead()), 0) for _ in groups()]
        self.places = 0

    def add(self, match: int, agreeing: Sequence[int], left: int) -> None:
        """One retrieval. agreeing: of each row; left: tokens of the answer from this place on."""
        row = self.by_group[int(np.searchsorted(LENGTHS, match))]
        row["count"] += 1
        row["prefix"] += int(agreeing[0])
        row["useful"] += max(agreeing) > 0
        row["best"] += int(max(agreeing))
        for ahead in AHEAD:
            if left >= ahead:
                row[f"of_{ahead}"] += 1
                row[f"next_{ahead}"] += int(agreeing[0]) >= ahead

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready sums."""
        return {"places": self.places, "groups": self.by_group}


def _ahead() -> list[str]:
    return [f"{word}_{ahead}" for ahead in AHEAD for word in ("next", "of")]


def compare(answers: Sequence[Recorded], store: Segment | None, earlier: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Sums by source over all places of all answers. earlier: other answers, the history."""
    stores: dict[str, Searchable] = {"context": GrowingText()}
    if earlier:
        stores["history"] = history = GrowingText()
        for answer in earlier:
            history.extend([*answer, -1])
    if store is not None:
        stores["datastore"] = store
    counts = {name: Counts() for name in stores}
    for each in answers:
        stores["context"] = own = GrowingText()
        own.extend([*each.prompt, *each.answer[:1]])
        text = [*each.prompt, *each.answer]
        for at in range(1, len(each.answer)):
            end = len(each.prompt) + at
            context = text[max(end - CONTEXT_TOKENS, 0) : end]
            for name, searched in stores.items():
                rows = searched.rows(context, ROWS[name], DEPTH)
                counts[name].places += 1
                if len(rows):
                    agreeing = agreement(rows, text[end : end + DEPTH]).tolist()
                    counts[name].add(rows.matches()[0], agreeing, len(text) - end)
            own.extend(text[end : end + 1])
    return {name: each.to_dict() for name, each in counts.items()}


def run(inputs: Inputs, journal: Journal) -> dict[str, Any]:
    """Sums by set and source; `figures` divides them. Sets of which files are missing are left out with the reason.

    About a minute, quick: 15 s. Raises InputInvalid if a folder of recorded answers was given and has none of the sets.
    """
    recorded, left_out = by_name(inputs, journal, ANSWERS, partial(_recorded, inputs), unit="set/")
    sets = {name: each["sources"] for name, each in recorded.items()}
    text = {name: each["datastore"] for name, each in recorded.items()}
    if inputs.data is not None and not sets:
        raise InputInvalid("recorded answers", inputs.data, "; ".join(left_out.values()))
    for kind in ("unseen", "stored"):
        if (unit := f"set/generated {kind}") not in journal:
            journal.put(unit, _generated(inputs, journal, kind))
            inputs.tell(f"compared: generated {kind}")
        sets[f"model, {kind}"], text[f"model, {kind}"] = journal[unit]["sources"], journal[unit]["datastore"]
    return {
        "groups": groups(),
        "depth": DEPTH,
        "sets": sets,
        "datastores": text,
        "left_out": left_out,
        "kinds": {name: ANSWERS[name].kind for name in sets if name in ANSWERS},
    }


def _recorded(inputs: Inputs, name: str) -> dict[str, Any]:
    inputs.file(ANSWERS[name].file)
    with inputs.vocabulary(name) as model:
        answers = inputs.answers(name, model.vocabulary)
        tested = up_to_tokens(answers, ANSWER_TOKENS // (12 if inputs.quick else 1))
        earlier = [answer.answer for answer in answers[len(tested) :]]
        return _compared(inputs, model.vocabulary, tested, earlier)


def _generated(inputs: Inputs, journal: Journal, kind: str) -> dict[str, Any]:
    number, tokens = (2, 48) if inputs.quick else (GENERATED, GENERATED_TOKENS)
    answers = generate(inputs, journal, kind, 2 * number, tokens)
    with Model.open(inputs.model_path, vocab_only=True) as model:
        earlier = [answer.answer for answer in answers[number:]]
        return _compared(inputs, model.vocabulary, answers[:number], earlier)


def _compared(
    inputs: Inputs, vocabulary: Vocabulary, tested: Sequence[Recorded], earlier: Sequence[Sequence[int]]
) -> dict[str, Any]:
    text = inputs.documents(vocabulary, inputs.tokens or DATASTORE // (10 if inputs.quick else 1))
    sources = compare(tested, text.segment(), earlier)
    record = {**text.record(), "answers": len(tested), "earlier_tokens": sum(map(len, earlier))}
    return {"sources": sources, "datastore": record}


def up_to_tokens(answers: Sequence[Recorded], tokens: int) -> list[Recorded]:
    """The first answers, until they have `tokens` tokens, and about half of all at most. The turns of a conversation
    stay together, because the answer of a turn often repeats the one before.
    """
    kept: list[Recorded] = []
    for answer in answers:
        enough = sum(len(each.answer) for each in kept) >= tokens or 2 * len(kept) >= len(answers)
        if kept and enough and answer.name.partition(".")[0] != kept[-1].name.partition(".")[0]:
            break
        kept.append(answer)
    return kept


def figures(source: dict[str, Any]) -> dict[str, Any]:
    """Means of one source over all groups, None without a retrieval: shares of retrievals, tokens for prefixes."""
    return _means({name: sum(group[name] for group in source["groups"]) for name in source["groups"][0]}) | {
        "found": sum(group["count"] for group in source["groups"]) / source["places"] if source["places"] else None
    }


def _means(sums: dict[str, int]) -> dict[str, float | None]:
    def over(name: str, count: str) -> float | None:
        return sums[name] / sums[count] if sums[count] else None

    return {
        **{name: over(name, "count") for name in FIELDS[1:]},
        **{f"next_{ahead}": over(f"next_{ahead}", f"of_{ahead}") for ahead in AHEAD},
    }


def section(result: Result) -> Section:
    """Words, a table by set and source, a table and a figure by length of the match."""
    data = result.data
    rows = []
    for name, sources in data["sets"].items():
        for source, sums in sources.items():
            mean = figures(sums)
            values = [mean[key] for key in ("found", "useful", "next_1", "next_4", "next_8", "prefix", "best")]
            rows.append([f"{name}, {source}", *(None if value is None else round(value, 4) for value in values)])
    columns = ("answers, source", "found", "useful", "next 1", "next 4", "next 8", "prefix", "best row")
    by_length = {source: _by_length(data, source) for source in SEARCHED}
    lengths = [
        [group, *(None if mean is None else round(mean["next_1"] or 0.0, 4) for mean in each)]
        for group, each in zip(data["groups"], zip(*by_length.values(), strict=True), strict=True)
    ]
    return Section(
        title="Retrieval quality",
        command=result.command,
        words=_words(data, by_length),
        tables=[
            Table(
                "Retrieved and generated continuations",
                columns,
                rows,
                note="Shares of all places (found) and of retrievals; prefix and best row in tokens, "
                f"of {data['depth']}.",
            ),
            Table(
                "Share of first rows whose next token is right, by length of the match",
                ("tokens of the match", *SEARCHED),
                lengths,
                note="All sets together.",
            ),
        ],
        figures=[
            Figure(
                name="retrieval-quality",
                title="The longer the match, the more of its continuation is right",
                x="tokens of the match",
                y="tokens in common with the answer",
                series=[
                    Series(source, [None if mean is None else mean["prefix"] for mean in by_length[source]])
                    for source in SEARCHED
                ],
                alt="Bars: common prefix of the first retrieved row and the answer, by length of the match and source.",
                categories=data["groups"],
            )
        ],
        machine=result.machine.line(),
        footnotes=[f"Left out: {reason}." for reason in data["left_out"].values()],
    )


def _by_length(data: Mapping[str, Any], source: str) -> list[dict[str, float | None] | None]:
    """By group, over all sets: means, None where there was no retrieval."""
    found: list[dict[str, float | None] | None] = []
    for number in range(len(data["groups"])):
        sums = [sources[source]["groups"][number] for sources in data["sets"].values() if source in sources]
        added = {name: sum(each[name] for each in sums) for name in (sums[0] if sums else ())}
        found.append(_means(added) if added.get("count") else None)
    return found


def _words(data: Mapping[str, Any], by_length: dict[str, list[dict[str, float | None] | None]]) -> list[str]:
    words = [
        "At every place of an answer the text of the request, earlier answers and a datastore of Python sources were "
        "searched, each alone, and what was found was compared with what the model wrote next."
    ]
    useful: dict[str, tuple[float, str]] = {}
    least: dict[str, tuple[float, str]] = {}
    for name, sources in data["sets"].items():
        for source, sums in sources.items():
            value = figures(sums)["useful"]
            if value is not None:
                useful[source] = max(useful.get(source, (value, name)), (value, name))
                least[source] = min(least.get(source, (value, name)), (value, name))
    for source, (value, name) in useful.items():
        low, where = least[source]
        words.append(
            f"{source.capitalize()}: {value:.0%} of its retrievals hold the next token in the best set ({name}), "
            f"{low:.0%} in the worst ({where})."
        )
    for source, means in by_length.items():
        known = [(group, mean) for group, mean in zip(data["groups"], means, strict=True) if mean is not None]
        if len(known) > 1:
            (short, first), (long, last) = known[0], known[-1]
            words.append(
                f"{source.capitalize()}: after a match of {short} tokens the first row is right in "
                f"{first['next_1'] or 0.0:.0%} of the cases, after {long} in {last['next_1'] or 0.0:.0%}."
            )
    return words
