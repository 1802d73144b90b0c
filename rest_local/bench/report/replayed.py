"""The section on replays of recorded answers: one for all workloads, because they are read against each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rest_local.bench.report.shapes import Figure, Section, Series, Table
from rest_local.bench.results import Result

DRAWN = ("rtx4090-8b-iq3_xxs", "m2ultra-7b-q8_0", "xeon-amx-1.5b-q4_k", "cpu-2-cores-0.5b-q4_0")
"""Curves of the figure by category, from where drafts are cheap to where they are dear; the table has all."""

SOURCES_ON = "rtx3090-8b-q4_0"
"""The curve by which the origin of accepted tokens is shown."""


def section(results: Sequence[Result]) -> Section:
    """`rest_local.bench.replayed` describes the data. Raises KeyError, TypeError and others for damaged data."""
    data = [result.data for result in results]
    curves = _curves(data)
    return Section(
        title="Replay of recorded answers",
        command=results[0].command,
        words=list(_words(data, curves)),
        tables=list(_tables(data, curves)),
        figures=list(_figures(data, curves)),
        footnotes=[
            "The oracle knows the recorded continuation and the cost curve, and takes the fastest way through each "
            "answer that the sources allow. The fair bound knows which candidate is right, but not how long a copy is. "
            "With a prediction the share of the oracle can exceed 1: the rows depend on the time of the lookup.",
        ],
    )


def _curves(data: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the curves of any workload, in order."""
    return list(dict.fromkeys(name for each in data for name in each["curves"]))


def _words(data: Sequence[Mapping[str, Any]], curves: Sequence[str]) -> Iterator[str]:
    yield (
        "Answers that real models gave, replayed: drafting and planning run on the recorded tokens, and no model runs. "
        "A forward pass with n tokens costs what the cost curve of a machine gives for n. These figures depend on no "
        "clock, and a rerun gives the same. The answers do not depend on the drafts: "
        f"{_changed(data):,} tokens changed."
    )
    cells = [
        (row["speedup"], name, each["workload"])
        for each in data
        for name, row in each["curves"].items()
    ]  # fmt: skip
    if not cells:
        return
    most, least = max(cells), min(cells)
    yield (
        f"The greatest gain is {most[0]:.3f} times plain decoding ({most[2]} on {most[1]}), the least is "
        f"{least[0]:.3f} ({least[2]} on {least[1]})."
    )
    yield "Slower than plain decoding: " + _listed(_slower(data, curves)) + "."
    late = [
        (row["speedup_with_lookups"], name, each["workload"]) for each in data for name, row in each["curves"].items()
    ]
    yield "Slower with the time of lookups, as a whole: " + _listed([each for each in late if each[0] < 1]) + "."
    worst = min(
        (row["worst_answer"], row["worst_name"], name, each["workload"])
        for each in data
        for name, row in each["curves"].items()
    )
    yield f"The worst single answer: {worst[0]:.3f} times plain decoding ({worst[1]} of {worst[3]} on {worst[2]})."


def _slower(data: Sequence[Mapping[str, Any]], curves: Sequence[str]) -> list[tuple[float, str, str]]:
    """Speed-up, curve and category, where drafts lost."""
    rows = [
        (_of(each["curves"].get(name), category), name, label)
        for label, category, _, each in _categories(data)
        for name in curves
    ]
    return [(speedup, name, label) for speedup, name, label in rows if speedup is not None and speedup < 1]


def _listed(rows: Sequence[tuple[float, str, str]]) -> str:
    return ", ".join(f"{label} on {name} ({speedup:.3f})" for speedup, name, label in rows) or "none"


def _changed(data: Sequence[Mapping[str, Any]]) -> int:
    return sum(int(row["tokens_changed"]) for each in data for row in each["curves"].values())


def _tables(data: Sequence[Mapping[str, Any]], curves: Sequence[str]) -> Iterator[Table]:
    yield Table(
        "Workloads",
        ["workload", "answers", "tokens"],
        [[each["workload"], each["answers"], each["tokens"]] for each in data],
    )
    if not curves:
        return
    yield Table(
        "By workload and curve",
        [
            "workload", "curve", "speed-up", "with time of lookups", "oracle", "share of oracle", "share of fair bound",
            "tokens a pass", "nodes a pass", "worst answer",
        ],
        [
            [
                each["workload"], name, row["speedup"], row["speedup_with_lookups"], row["oracle"]["speedup"],
                row["share_of_oracle"], row["share_of_fair"], row["mat"], row["nodes_per_step"], row["worst_answer"],
            ]
            for each in data
            for name, row in each["curves"].items()
        ],
        note="Each lookup counts 0.15 ms in `with time of lookups`. Speed-ups are times plain decoding.",
    )  # fmt: skip
    yield Table(
        "Speed-up by category and by curve",
        ["category", "answers", *curves],
        [
            [label, answers, *(_of(each["curves"].get(name), category) for name in curves)]
            for label, category, answers, each in _categories(data)
        ],
    )


def _categories(data: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, int, Mapping[str, Any]]]:
    """Label, category, number of its answers, and the workload. A workload without categories is one itself."""
    for each in data:
        first: Mapping[str, Any] = next(iter(each["curves"].values()), {"by_category": {}})["by_category"]
        for category, row in first.items():
            label = f"{each['workload']}: {category}" if category else each["workload"]
            yield label, category, row["answers"], each


def _of(row: Mapping[str, Any] | None, category: str) -> float | None:
    found = row and row["by_category"].get(category)
    return None if not found else float(found["speedup"])


def _figures(data: Sequence[Mapping[str, Any]], curves: Sequence[str]) -> Iterator[Figure]:
    yield Figure(
        "mat-against-nodes", "Accepted tokens against drafted nodes", "drafted nodes a pass", "tokens a pass (MAT)",
        [
            Series(
                each["workload"],
                [1.0, *(row["mat"] for row in each["sweep"])],
                [0.0, *(row["nodes_per_step"] for row in each["sweep"])],
            )
            for each in data
        ],
        alt="Mean tokens of a forward pass against the mean number of drafted nodes, a line for each workload.",
    )  # fmt: skip
    if not curves:
        return
    yield _by_curve(data, curves, "speedup", "replay-speed-up", "Speed-up by cost curve", "times plain decoding")
    yield _by_curve(data, curves, "share_of_oracle", "share-of-oracle", "Share of the oracle", "share of its speed-up")
    drawn = [name for name in DRAWN if name in curves] or list(curves[: len(DRAWN)])
    rows = list(_categories(data))
    yield Figure(
        "replay-categories", "Speed-up by category and by curve", "", "times plain decoding",
        [Series(name, [_of(each["curves"].get(name), category) for _, category, _, each in rows]) for name in drawn],
        alt="The speed-up of each category of prompts, a bar for each cost curve.",
        categories=[label for label, *_ in rows],
        level=1.0,
    )  # fmt: skip
    yield from _sources(data, SOURCES_ON if SOURCES_ON in curves else curves[0])


def _by_curve(
    data: Sequence[Mapping[str, Any]], curves: Sequence[str], key: str, name: str, title: str, unit: str
) -> Figure:
    return Figure(
        name, title, "", unit,
        [Series(each["workload"], [each["curves"].get(curve, {}).get(key) for curve in curves]) for each in data],
        alt=f"{title}: a group of bars for each curve, a bar for each workload.",
        categories=list(curves),
        level=1.0,
    )  # fmt: skip


def _sources(data: Sequence[Mapping[str, Any]], curve: str) -> Iterator[Figure]:
    """Where accepted tokens came from, in shares of all accepted tokens of a workload."""
    on = [(each["workload"], each["curves"][curve]["by_source"]) for each in data if curve in each["curves"]]
    names = list(dict.fromkeys(name for _, sources in on for name in sources))
    totals = [sum(count["accepted"] for count in sources.values()) for _, sources in on]
    series = [
        Series(
            name,
            [
                sources.get(name, {"accepted": 0})["accepted"] / total if total else None
                for (_, sources), total in zip(on, totals, strict=True)
            ],
        )
        for name in names
    ]
    if series:
        yield Figure(
            "accepted-by-source", f"Where accepted tokens came from, on {curve}", "", "share of accepted tokens",
            series,
            alt="The sources of accepted draft tokens, a bar for each workload, a part for each source.",
            categories=[workload for workload, _ in on],
            stacked=True,
        )  # fmt: skip
