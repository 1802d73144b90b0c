"""The results of races: tokens per second, times to the first text, equal answers, and ratios to llama-server.

    python -m benchmarks race_report FILE... [--write]

- Ratios are of tokens per second of whole requests, paired by prompt: the geometric mean with its interval of 95%, and
  the worst prompt.
- Equal answers are compared with those that the same program gives without drafts in the same settings, or else with
  its plain answers.
- `--write` puts the tables between the marks in docs/BENCHMARKS.md and the headline between those in README.md.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

PLAIN, OURS = "llama-server", "rest-local"
ROOT = Path(__file__).parents[1]
Found = Mapping[str, Any]


@dataclass(frozen=True)
class Gain:
    """How one side compares with llama-server: a geometric mean over prompts, its interval of 95%, and the worst."""

    mean: float
    low: float
    high: float
    worst: float


@dataclass(frozen=True)
class Summary:
    """One side in one workload. `same` of `prompts` answers equal those without drafts; None: nothing to compare with.
    `repeats`: how much of what an answer should repeat it does repeat.
    """

    prompts: int
    decoding: float
    request: float
    first: float
    same: int | None
    repeats: float | None
    gain: Gain | None


def is_ours(side: str) -> bool:
    return side.startswith(OURS)


def plain_of(side: str, ran: Sequence[str]) -> str | None:
    """Return the side without drafts whose answers `side` should repeat."""
    if not is_ours(side):
        usual = [PLAIN]
    else:
        usual = [f"{OURS} --exact --policy off"] * side.startswith(f"{OURS} --exact") + [f"{OURS} --policy off"]
    return next((name for name in usual if name in ran), None)


def summaries(found: Found) -> dict[str, dict[str, Summary]]:
    """Summarize every side, by workload."""
    by: dict[str, dict[str, dict[str, Any]]] = {}
    for run in found["runs"]:
        by.setdefault(run["workload"], {}).setdefault(run["side"], {})[run["prompt"]] = run
    return {
        workload: {side: _summary(runs, sides, plain_of(side, list(sides))) for side, runs in sides.items()}
        for workload, sides in by.items()
    }


def _summary(runs: Mapping[str, Any], sides: Mapping[str, Mapping[str, Any]], reference: str | None) -> Summary:
    every = list(runs.values())
    decoding = sum(run["seconds"] - run["first"] for run in every)
    plain = sides.get(reference or "", {})
    ratios = [_speed(run) / _speed(sides[PLAIN][name]) for name, run in runs.items() if name in sides.get(PLAIN, {})]
    repeats = [run["repeats"] for run in every if run["repeats"] is not None]
    return Summary(
        len(every),
        sum(run["tokens"] - 1 for run in every) / decoding if decoding else math.nan,
        sum(run["tokens"] for run in every) / sum(run["seconds"] for run in every),
        median(run["first"] for run in every),
        sum(name in plain and run["answer"] == plain[name]["answer"] for name, run in runs.items()) if plain else None,
        fmean(repeats) if repeats else None,
        _gain([math.log(ratio) for ratio in ratios]) if ratios else None,
    )


def _speed(run: Mapping[str, Any]) -> float:
    speed: float = run["tokens"] / run["seconds"]
    return speed


def _gain(logs: Sequence[float]) -> Gain:
    middle = fmean(logs)
    error = 1.96 * stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0
    return Gain(*(math.exp(value) for value in (middle, middle - error, middle + error, min(logs))))


def best_peer(by_side: Mapping[str, Summary]) -> tuple[str, float] | None:
    """The other program's side with the greatest gain."""
    peers = {side: each.gain.mean for side, each in by_side.items() if each.gain and not is_ours(side)}
    return max(peers.items(), key=lambda peer: peer[1]) if peers else None


def lines(found: Found) -> Iterator[str]:
    """Every figure, as text."""
    yield about(found)
    for workload, by_side in summaries(found).items():
        load = found["loads"].get(workload, {})
        taken = ", ".join(f"{who} took {share:.1%} of the processors" for who, share in load.items())
        yield f"{workload}: {taken}"
        yield f"  {'':30} tokens/s  request  first ms     same  to llama-server (95%), worst"
        for side, each in sorted(by_side.items(), key=lambda pair: is_ours(pair[0])):
            same = "" if each.same is None else f"{each.same}/{each.prompts}"
            gain, repeats = each.gain, "" if each.repeats is None else f", repeats {each.repeats:.0%}"
            ratio = f"{gain.mean:.3f} ({gain.low:.3f} to {gain.high:.3f}), {gain.worst:.2f}" if gain else ""
            speeds = f"{each.decoding:8.1f} {each.request:8.1f} {1000 * each.first:9.0f}"
            yield f"  {side:30} {speeds} {same:>8}  {ratio}{repeats}"
    yield from (f"{side} was left out: {reason}" for side, reason in found["failed"].items())


def about(found: Found) -> str:
    """What was measured, on which machine and with which versions."""
    ran = ", next to a busy process" * found["neighbour"] + ", ahead of other programs (chrt)" * found["real_time"]
    server = f"llama-server {found['llama_server']}" if found["llama_server"] else "no llama-server"
    return f"{found['model']} on {found['machine']}{ran}; {server}; commit {found['revision']}."


def section(races: Sequence[Found]) -> str:
    """The tables for docs/BENCHMARKS.md."""
    parts = []
    for found in races:
        result = summaries(found)
        names = list(dict.fromkeys(side for by in result.values() for side in by))
        names = sorted((side for side in names if side != PLAIN), key=lambda side: not is_ours(side))
        parts += [about(found), "Tokens per second over those of llama-server, in the mean and for the worst prompt:"]
        rows = [["", *(f"`{name}`" for name in names)]]
        for workload, by_side in result.items():
            best = max((each.gain.mean for side, each in by_side.items() if each.gain and side in names), default=0.0)
            rows.append([workload, *(_cell(by_side.get(name), best) for name in names)])
        parts.append(_table(rows))
        rows = [["", "prompts", "llama-server: tokens/s", "first text", "rest-local: tokens/s", "first text", "same"]]
        for workload, by_side in result.items():
            if PLAIN in by_side and OURS in by_side:
                plain, ours = by_side[PLAIN], by_side[OURS]
                speeds = [f"{each.request:.1f}" for each in (plain, ours)]
                firsts = [f"{1000 * each.first:.0f} ms" for each in (plain, ours)]
                same = "" if ours.same is None else f"{ours.same} of {ours.prompts}"
                rows.append([workload, f"{plain.prompts}", speeds[0], firsts[0], speeds[1], firsts[1], same])
        parts.append(_table(rows))
        parts += [f"`{side}` was left out: {reason.splitlines()[0]}." for side, reason in found["failed"].items()]
    return "\n\n".join(parts)


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *others = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|---|" + "---:|" * (len(rows[0]) - 1), *others])


def _cell(each: Summary | None, best: float) -> str:
    if each is None or each.gain is None:
        return ""
    mean = f"**{each.gain.mean:.2f}**" if each.gain.mean == best else f"{each.gain.mean:.2f}"
    return f"{mean} ({each.gain.worst:.2f})"


def headline(races: Sequence[Found]) -> str:
    """The sentences of the README."""
    told = []
    for found in races:
        for workload, by_side in summaries(found).items():
            side = next((name for name in (f"{OURS} -d", OURS) if workload.endswith("code") and name in by_side), OURS)
            if side in by_side and (gain := by_side[side].gain) and (peer := best_peer(by_side)):
                told.append([workload, found["model"], f"{gain.mean:.2f}", f"{peer[1]:.2f} (`{peer[0]}`)"])
    head = ["", "model", "rest-local", "best of llama-server"]
    ran = f"{races[0]['machine']}, commit {races[0]['revision']}"
    return f"Times the speed of llama-server as it comes ({ran}):\n\n{_table([head, *told])}"


def put(path: Path, name: str, text: str) -> None:
    """Replace what stands between `<!-- NAME -->` and `<!-- /NAME -->`. Raises ValueError without these marks."""
    content = path.read_text("utf-8")
    begin, end = f"<!-- {name} -->\n", f"\n<!-- /{name} -->"
    if begin not in content or end not in content:
        raise ValueError(f"{path} lacks the marks of {name}")
    before, rest = content.split(begin, 1)
    path.write_text(before + begin + text + end + rest.split(end, 1)[1], "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--write", action="store_true", help="write tables and headline into docs and README")
    args = parser.parse_args()
    races = [json.loads(path.read_text()) for path in args.files]
    if args.write:
        put(ROOT / "docs/BENCHMARKS.md", "race", section(races))
        put(ROOT / "README.md", "race", headline(races))
    print("\n".join(line for found in races for line in lines(found)))
