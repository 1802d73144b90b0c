"""The comparison in the report: what won and what lost, tables by workload, and speed-ups as bars."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rest_local.bench.comparing.engine_sides import PLAIN
from rest_local.bench.comparing.summary import SPEC_BENCH
from rest_local.bench.report.shapes import Cell, Figure, Section, Series, Table
from rest_local.bench.results import Result

OURS = "auto"
TIE = 0.02  # speeds within this share of each other are equal: one run is not more exact
NOISY = 0.1  # two plain runs of a prompt that differ by more, in the median, are said to be noisy

PLAIN_FIGURES = {
    "tokens_per_second": "tokens/s",
    "noise": "the two runs differ by",
    "repeated_8grams": "repeated 8-grams",
    "looping": "answers that loop",
    "joules_per_token": "joules a token",
}

Row = Mapping[str, Any]


def section(result: Result) -> Section:
    """See `bench.report`. The data is described in `measure.measured` and `summary`."""
    data = result.data
    return Section(
        title="Plain decoding, policies, drafters and other runtimes in turns",
        command=result.command,
        words=list(words(data)),
        tables=list(_tables(data)),
        figures=list(_figures(data)),
        machine=result.machine.line(),
        footnotes=_footnotes(data),
    )


def words(data: Mapping[str, Any]) -> Iterator[str]:
    """What was done, what won and what lost; from the data alone."""
    yield (
        f"The same prompts on every side in turns, with {_count(data['threads'], 'thread')}: plain decoding runs first "
        "and last for each prompt, the other sides between, in an order that rotates. A speed-up is relative to the "
        "mean of these two plain runs; figures are medians over the prompts of a workload."
    )
    for overall in data["overall"]:
        rows = [row for row in data["workloads"] if _kind(row) == _kind(overall) and not _category(row)]
        yield from _of_kind(overall, rows, data)


def _of_kind(overall: Row, rows: Sequence[Row], data: Mapping[str, Any]) -> Iterator[str]:
    if overall["settings"] == "exact":
        yield _identity(overall)
        return
    model = data["model"]
    if overall["mode"] == "replay":
        model = data["replay_model"] or model
        yield f"Replay: recorded answers, with the forward passes of {model} paid. The tokens are given."
    else:
        yield f"Real: {model} writes the answers itself, greedily."
    yield from _won_and_lost(rows)
    mine = overall["sides"].get(OURS)
    if mine:
        yield f"Worst prompt of `{OURS}`: {mine['least']:.2f} times plain decoding ({mine['least_of']})."
    if overall["mode"] == "real":
        changed = [f"{name} {side['differing']}" for name, side in overall["sides"].items() if side["differing"]]
        answers = max((side["answers"] for side in overall["sides"].values()), default=0)
        yield (
            f"In the default settings, where batches of other sizes round differently, these answers of {answers} at "
            f"most differ from plain decoding: {', '.join(changed) if changed else 'none'}."
        )
        looping, prompts = (sum(n) for n in zip(*((r["plain"]["looping"], r["prompts"]) for r in rows), strict=True))
        if looping:
            yield f"{looping} of {prompts} plain answers loop, which flatters every drafter; a table leaves them out."
    noise = max((row["plain"]["noise"] or 0.0 for row in rows), default=0.0)
    if noise > NOISY:
        yield f"The machine was noisy: two plain runs of a prompt differ by up to {noise:.0%} (median of a workload)."


def _won_and_lost(rows: Sequence[Row]) -> Iterator[str]:
    """Where `auto` is the fastest, where it is within TIE, and each loss with its size."""
    won, tied, lost = [], [], []
    for row in rows:
        mine = row["sides"].get(OURS, {}).get("speedup")
        others = {n: s["speedup"] for n, s in row["sides"].items() if n != OURS and s.get("speedup")}
        if not mine:
            continue
        others[PLAIN] = 1.0
        best = max(others, key=lambda name: others[name])
        ratio = others[best] / mine
        if ratio > 1 + TIE:
            lost.append(f"`{OURS}` lost to {best} on {row['workload']} by {1 - 1 / ratio:.0%}")
        elif ratio >= 1 - TIE:
            tied.append(row["workload"])
        else:
            won.append(f"{row['workload']} ({mine:.2f} x plain; next {best}, {others[best]:.2f})")
    if won:
        yield f"`{OURS}` won on {_count(len(won), 'workload')}: {', '.join(won)}."
    if tied:
        yield f"`{OURS}` and the best other side are within {TIE:.0%} on {', '.join(tied)}."
    if lost:
        yield f"What lost: {'; '.join(lost)}."


def _identity(overall: Row) -> str:
    changed = {name: side["differing"] for name, side in overall["sides"].items() if side["differing"]}
    total = sum(side["answers"] for side in overall["sides"].values())
    if changed:
        found = ", ".join(f"{name} {n}" for name, n in changed.items())
        return f"Exact settings: {sum(changed.values())} of {total} answers differ from plain decoding ({found})."
    names = ", ".join(overall["sides"])
    return f"Exact settings: all {total} answers of {names} have the tokens of plain decoding, one by one."


def _tables(data: Mapping[str, Any]) -> Iterator[Table]:
    for overall in data["overall"]:
        rows = [row for row in data["workloads"] if _kind(row) == _kind(overall)]
        what = _title(overall)
        if overall["settings"] != "exact":
            whole, categories = [r for r in rows if not _category(r)], [r for r in rows if _category(r)]
            yield _grid(f"Speed-up, {what}", whole, "speedup", f"Speed-up over plain decoding. {_mean(overall)}")
            if categories:
                yield _grid(f"Speed-up by category of Spec-Bench, {what}", categories, "speedup", "")
            if any(row["plain"]["looping"] for row in whole):
                note = "A prompt loops where more than 0.3 of the 8-grams of its plain answer repeat."
                yield _grid(f"Speed-up over the prompts that do not loop, {what}", whole, "steady", note)
            yield _plain(f"Plain decoding, {what}", whole)
            yield _grid(f"Tokens for each forward pass (MAT), {what}", whole, "mat", "")
            yield _grid(f"Accepted share of the drafted tokens, {what}", whole, "acceptance", "")
        yield _by_side(what, overall, rows)
    left = [[row.get("workload") or row["side"], row.get("prompts") or None, row["reason"]] for row in data["left_out"]]
    left += [[f"{row['side']} ({row['stage']})", None, row["reason"]] for row in data["failed"]]
    if left:
        yield Table("Left out", ["what", "prompts", "reason"], left)


def _grid(title: str, rows: Sequence[Row], figure: str, note: str) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in row["sides"]))
    cells: list[list[Cell]] = [
        [row["workload"], row["prompts"], *(row["sides"].get(name, {}).get(figure) for name in names)] for row in rows
    ]
    best = list(range(2, 2 + len(names))) if figure in ("speedup", "steady") else ()
    return Table(title, ["workload", "prompts", *names], cells, note, best)


def _plain(title: str, rows: Sequence[Row]) -> Table:
    cells: list[list[Cell]] = [
        [row["workload"], row["prompts"], *(row["plain"][name] for name in PLAIN_FIGURES)] for row in rows
    ]
    return Table(title, ["workload", "prompts", *PLAIN_FIGURES.values()], cells)


def _mean(overall: Row) -> str:
    """The geometric means over the workloads that all sides have."""
    means = [f"{name} {side['mean']:.3f}" for name, side in overall["sides"].items() if side["mean"]]
    if not means:
        return "No workload has figures of every side."
    return f"Geometric mean over {', '.join(overall['workloads'])}: {', '.join(means)}."


def _by_side(what: str, overall: Row, rows: Sequence[Row]) -> Table:
    table: list[list[Cell]] = []
    for name, side in overall["sides"].items():
        spent = [found for row in rows if (found := row["sides"].get(name, {}).get("joules_per_token"))]
        mean = sum(spent) / len(spent) if spent else None
        table.append([name, side["mean"], side["least"], side["least_of"], side["answers"], side["differing"], mean])
    columns = ["side", "mean speed-up", "worst prompt", "which", "answers", "differ from plain", "joules a token"]
    return Table(f"By side, {what}", columns, table)


def _figures(data: Mapping[str, Any]) -> Iterator[Figure]:
    for overall in data["overall"]:
        if overall["settings"] == "exact":
            continue
        kind = f"compare-{overall['mode']}"
        rows = [row for row in data["workloads"] if _kind(row) == _kind(overall)]
        whole, categories = [r for r in rows if not _category(r)], [r for r in rows if _category(r)]
        yield _bars(kind, f"Speed-up by workload, {_title(overall)}", whole)
        if categories:
            yield _bars(f"{kind}-spec-bench", f"Speed-up on Spec-Bench, {_title(overall)}", categories)


def _bars(name: str, title: str, rows: Sequence[Row]) -> Figure:
    sides = list(dict.fromkeys(side for row in rows for side in row["sides"]))
    series = [Series(side, [row["sides"].get(side, {}).get("speedup") for row in rows]) for side in sides]
    categories = [row["workload"].rpartition("/")[2] for row in rows]
    alt = f"Groups of bars: for {', '.join(categories)} the speed-up over plain decoding of {', '.join(sides)}."
    return Figure(name, title, "workload", "times plain decoding", series, alt, categories, level=1.0)


def _footnotes(data: Mapping[str, Any]) -> list[str]:
    notes = []
    if any(overall["mode"] == "replay" for overall in data["overall"]):
        notes.append(
            "In a replay, the logits are those of the paying model. The entropies that trigger `respec` and the "
            "recycled logits are not those of the model that gave the answers."
        )
    if data["energy"]:
        notes.append(f"No energy: {data['energy']}.")
    return notes


def _title(overall: Row) -> str:
    return f"{overall['mode']}, exact settings" if overall["settings"] == "exact" else str(overall["mode"])


def _kind(row: Row) -> tuple[str, str]:
    return row["mode"], row["settings"]


def _category(row: Row) -> bool:
    return str(row["workload"]).startswith(f"{SPEC_BENCH}/")


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"
