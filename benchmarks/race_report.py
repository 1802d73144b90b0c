"""The results of races: tokens per second, times to the first text, equal answers, and ratios to llama-server.

    python -m benchmarks race_report FILE... [--write]

- Ratios are of speeds, of whole requests and of decoding alone, paired by prompt: the geometric mean with its interval
  of 95%, and the worst prompt. Where answers differ in length, the time of a whole request is that for as many tokens
  as llama-server wrote, so that a short answer does not count as a slow one. Pairs with an answer of fewer than SHORT
  tokens have no ratio, because their time is too short to be measured.
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
SHORT = 16
ROOT = Path(__file__).parents[1]
Found = Mapping[str, Any]


@dataclass(frozen=True)
class Gain:
    """One side compared with llama-server: a geometric mean over prompts, its interval of 95%, and the worst."""

    mean: float
    low: float
    high: float
    worst: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} ({self.low:.3f} to {self.high:.3f}), {self.worst:.2f}"


@dataclass(frozen=True)
class Summary:
    """One side in one workload. `same` of `prompts` answers equal those without drafts; None means nothing to compare
    with.

    `repeats` says how much of the text that an answer should repeat it does repeat. All requests took `seconds`, and
    `evaluated` tokens of their prompts were not cached.
    """

    prompts: int
    decoding: float
    request: float
    first: float
    same: int | None
    repeats: float | None
    seconds: float
    evaluated: int
    gain: Gain | None
    decoding_gain: Gain | None


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
    both = [(run, sides[PLAIN][name]) for name, run in runs.items() if name in sides.get(PLAIN, {})]
    pairs = [(run, usual) for run, usual in both if min(run["tokens"], usual["tokens"]) >= SHORT]
    repeats = [run["repeats"] for run in every if run["repeats"] is not None]
    return Summary(
        len(every),
        sum(run["tokens"] - 1 for run in every) / decoding if decoding else math.nan,
        sum(run["tokens"] for run in every) / sum(run["seconds"] for run in every),
        median(run["first"] for run in every),
        sum(name in plain and run["answer"] == plain[name]["answer"] for name, run in runs.items()) if plain else None,
        fmean(repeats) if repeats else None,
        sum(run["seconds"] for run in every),
        sum(run.get("evaluated", 0) for run in every),
        _gain([usual["seconds"] / (run["first"] + _decoding(run) * (usual["tokens"] - 1)) for run, usual in pairs]),
        _gain([_decoding(usual) / _decoding(run) for run, usual in pairs]),
    )


def _decoding(run: Mapping[str, Any]) -> float:
    """Return the seconds for each token after the first one."""
    taken: float = (run["seconds"] - run["first"]) / (run["tokens"] - 1)
    return taken


def _gain(ratios: Sequence[float]) -> Gain | None:
    if not ratios:
        return None
    logs = [math.log(ratio) for ratio in ratios]
    middle = fmean(logs)
    error = 1.96 * stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0
    return Gain(*(math.exp(value) for value in (middle, middle - error, middle + error, min(logs))))


def best_peer(by_side: Mapping[str, Summary]) -> tuple[str, float] | None:
    """Return the other program's side with the greatest gain."""
    peers = {side: each.gain.mean for side, each in by_side.items() if each.gain and not is_ours(side)}
    return max(peers.items(), key=lambda peer: peer[1]) if peers else None


def lines(found: Found) -> Iterator[str]:
    """Yield every figure as text."""
    yield about(found)
    for workload, by_side in summaries(found).items():
        load = found["loads"].get(workload, {})
        taken = ", ".join(f"{who} took {share:.1%} of the processors" for who, share in load.items())
        yield f"{workload}: {taken}"
        yield f"  {'':31} tokens/s  request first ms    same  request to llama-server's | decoding (95%), worst"
        for side, each in sorted(by_side.items(), key=lambda pair: (is_ours(pair[0]), pair[0])):
            same = "" if each.same is None else f"{each.same}/{each.prompts}"
            repeats = "" if each.repeats is None else f", repeats {each.repeats:.0%}"
            ratios = " | ".join(str(gain) for gain in (each.gain, each.decoding_gain) if gain)
            speeds = f"{each.decoding:8.1f} {each.request:8.1f} {1000 * each.first:8.0f}"
            whole = f", {each.seconds:.1f} s in all, {each.evaluated} tokens of prompts evaluated"
            yield f"  {side:31} {speeds} {same:>7}  {ratios}{repeats}{whole}"
    yield from (f"{side} was left out: {reason}" for side, reason in found["failed"].items())


def about(found: Found) -> str:
    """Say what was measured, on which machine and with which versions."""
    ran = ", next to a busy process" * found["neighbour"] + ", ahead of other programs (chrt)" * found["real_time"]
    server = f"llama-server {found['llama_server']}" if found["llama_server"] else "no llama-server"
    return f"{found['model']} on {found['machine']}{ran}; {server}; commit {found['revision']}."


def section(races: Sequence[Found]) -> str:
    """Return the tables for docs/BENCHMARKS.md."""
    parts, results = [], dict[str, dict[str, dict[str, Summary]]]()
    for found in races:
        result = results.setdefault(about(found), {})
        for workload, by_side in summaries(found).items():
            result.setdefault(workload, {}).update(by_side)
    for head, result in results.items():
        sides = {side for by_side in result.values() for side in by_side} - {PLAIN}
        names = sorted(sides, key=lambda side: (not is_ours(side), side))
        parts.append(head)
        for what in ("Whole requests", "Decoding alone"):
            parts.append(f"{what}: times the speed of llama-server, in the mean and for the worst prompt.")
            rows = [["", *(f"`{name}`" for name in names)]]
            for workload, by_side in result.items():
                gains = {
                    side: each.gain if what == "Whole requests" else each.decoding_gain
                    for side, each in by_side.items()
                }
                best = max((gain.mean for side, gain in gains.items() if gain and side in names), default=0.0)
                rows.append([workload, *(_cell(gains.get(name), best) for name in names)])
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
    for found in races:
        parts += [f"`{side}` was left out: {reason.splitlines()[0]}." for side, reason in found["failed"].items()]
    return "\n\n".join(parts)


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *others = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|---|" + "---:|" * (len(rows[0]) - 1), *others])


def _cell(gain: Gain | None, best: float) -> str:
    if gain is None:
        return ""
    mean = f"**{gain.mean:.2f}**" if gain.mean == best else f"{gain.mean:.2f}"
    return f"{mean} ({gain.worst:.2f})"


def headline(races: Sequence[Found]) -> str:
    """Return the table of the README, and how many answers were those of plain decoding."""
    told, same, prompts = [], 0, 0
    models = {found["model"] for found in races}
    for found in races:
        for workload, by_side in summaries(found).items():
            side = next((name for name in (f"{OURS} -d", OURS) if workload.endswith("code") and name in by_side), OURS)
            if side in by_side and (gain := by_side[side].gain) and (peer := best_peer(by_side)):
                request = f"{workload}, {found['model']}" if len(models) > 1 else workload
                told.append([request, f"{gain.mean:.2f}", f"{peer[1]:.2f} (`{peer[0]}`)"])
                if (equal := by_side[side].same) is not None:
                    same, prompts = same + equal, prompts + by_side[side].prompts
    head = ["request", "rest-local", "best of llama-server"]
    ran = f"{' and '.join(sorted(models))} on {races[0]['machine']}, commit {races[0]['revision']}"
    kept = f"\n\n{same} of {prompts} answers were those of plain decoding." if prompts else ""
    return f"Whole requests, times the speed of llama-server without drafts ({ran}):\n\n{_table([head, *told])}{kept}"


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
