"""The results of a race: speed-ups with their intervals, a table, a picture, and the section of docs/BENCHMARKS.md.

    python -m benchmarks race_report FILE [--svg PICTURE] [--write]

- A speed-up is the time of llama-server without drafts over that of a side, in the same round of the same answer. That
  of a workload is the geometric mean, that of all is the geometric mean of the workloads.
- Intervals of 95% are those of a bootstrap: answers are drawn again, and the rounds of each.
- Runs on a busy machine do not count (`why_not`).
- `--write` puts table, picture and paragraph between the marks in docs/BENCHMARKS.md and README.md.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

PLAIN, OFF, COLD, STORED = "llama-server", "rest-local off", "rest-local", "rest-local stored"
OURS = (OFF, COLD, STORED)
ALL = "all"
OTHERS, HOST = 0.05, 0.05  # shares of the processors that other programs and the host may take
SAMPLES = 2000
ROOT = Path(__file__).parents[1]
PICTURE = "results/race.svg"  # in docs
COLOURS = {COLD: "#1b6ac9", STORED: "#12a594", "ngram-simple": "#e8a33d", "ngram-map-k": "#d9822b"}
MORE_COLOURS = ("#c05621", "#9c4221", "#b7791f", "#718096", "#a0aec0", "#805ad5", "#b794f4", "#38a169", "#68d391")


@dataclass(frozen=True)
class Gain:
    """A geometric mean, its interval of 95%, the worst answer, and the number of runs."""

    mean: float
    low: float
    high: float
    worst: float
    runs: int

    def __str__(self) -> str:
        return f"{self.mean:.2f} ({self.low:.2f} to {self.high:.2f})"


def why_not(run: Mapping[str, Any]) -> str:
    """Why a run does not count; empty if it does, also where the system says nothing of other programs."""
    causes = [("other programs", run.get("others", 0.0), OTHERS), ("the host", run.get("host", 0.0), HOST)]
    return ", ".join(f"{who} took {share:.0%} of the processors" for who, share, most in causes if share > most)


def gains(found: Mapping[str, Any]) -> dict[str, dict[str, Gain]]:
    """By workload, and for `ALL`: the gain of each side. All runs are taken where none of a workload counts."""
    reference = PLAIN if any(run["side"] == PLAIN for run in found["runs"]) else OFF
    counted = [run for run in found["runs"] if not why_not(run)]
    logs: dict[str, dict[str, dict[str, list[float]]]] = {}
    for workload in dict.fromkeys(task["workload"] for task in found["tasks"].values()):
        tasks = {name for name, task in found["tasks"].items() if task["workload"] == workload}
        runs = [run for run in counted if run["task"] in tasks] or [
            run for run in found["runs"] if run["task"] in tasks
        ]
        plain = {(run["task"], run["round"]): run["seconds"] for run in runs if run["side"] == reference}
        for run in runs:
            if (same := plain.get((run["task"], run["round"]))) is not None:
                of_side = logs.setdefault(workload, {}).setdefault(run["side"], {})
                of_side.setdefault(run["task"], []).append(math.log(same / run["seconds"]))
    result: dict[str, dict[str, Gain]] = {}
    drawn: dict[str, list[Any]] = {}
    for workload, by_side in logs.items():
        for side, by_task in by_side.items():
            means = [float(np.mean(each)) for each in by_task.values()]
            samples, count = _drawn(list(by_task.values())), sum(map(len, by_task.values()))
            result.setdefault(workload, {})[side] = _gain(float(np.mean(means)), samples, min(means), count)
            drawn.setdefault(side, []).append(samples)
    for side, samples_of in drawn.items():
        if len(samples_of) == len(logs) > 1:
            gains_of = [result[workload][side] for workload in logs]
            middle, worst = np.mean([math.log(gain.mean) for gain in gains_of]), min(gain.worst for gain in gains_of)
            count = sum(gain.runs for gain in gains_of)
            result.setdefault(ALL, {})[side] = _gain(float(middle), np.mean(samples_of, axis=0), math.log(worst), count)
    return {workload: result[workload] for workload in [*logs, ALL] if workload in result}


def _drawn(by_task: Sequence[Sequence[float]]) -> Any:
    """Means of samples with replacement: of the answers, and of the rounds of each."""
    rng = np.random.default_rng(1)
    means = np.stack([rng.choice(np.array(each), (SAMPLES, len(each))).mean(axis=1) for each in by_task], axis=1)
    picked = rng.integers(0, len(by_task), (SAMPLES, len(by_task)))
    return np.take_along_axis(means, picked, axis=1).mean(axis=1)


def _gain(middle: float, samples: Any, worst: float, runs: int) -> Gain:
    low, high = np.quantile(samples, (0.025, 0.975))
    return Gain(math.exp(middle), math.exp(low), math.exp(high), math.exp(worst), runs)


def over_best(by_side: Mapping[str, Gain], side: str) -> tuple[float, str]:
    """The gain of a side over that of the best peer, and the name of that peer."""
    peers = {name: gain.mean for name, gain in by_side.items() if name not in OURS}
    best = max(peers, key=peers.__getitem__)
    return by_side[side].mean / peers[best], best


def busy(found: Mapping[str, Any]) -> str:
    """A sentence if runs were left out, or if the figures do not count at all."""
    causes = [why for run in found["runs"] if (why := why_not(run))]
    bad, every = len(causes), len(found["runs"])
    why = " and ".join(name for name in ("other programs", "the host") if any(name in cause for cause in causes))
    if 2 * bad >= every > 0:
        return f"These figures do not count: {why} took processor time in {bad} of {every} runs. Nothing else may run."
    return f"{bad} of {every} runs do not count, because {why} took processor time." if bad else ""


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The results as text."""
    result = gains(found)
    for workload, by_side in result.items():
        yield f"{workload}:"
        for side, gain in by_side.items():
            more = ""
            if side in (COLD, STORED) and any(name not in OURS for name in by_side):
                ratio, best = over_best(by_side, side)
                more = f", {ratio:.2f} of {best}"
            yield f"  {side:18} {gain}, worst {gain.worst:.2f}, {gain.runs} runs{more}"
    yield from (f"{side} was left out: {reason}" for side, reason in found["failed"].items())
    if sentence := busy(found):
        yield sentence


def table(result: Mapping[str, Mapping[str, Gain]]) -> Iterator[str]:
    """A Markdown table: a row for each workload, a column for each side but plain decoding."""
    names = [side for side in dict.fromkeys(s for by in result.values() for s in by) if side not in (PLAIN, OFF)]
    names.sort(key=lambda side: (side not in (COLD, STORED), side.startswith("prompt"), side))
    yield "| | " + " | ".join(f"`{name}`" for name in names) + " |"
    yield "|---|" + "---:|" * len(names)
    for workload, by_side in result.items():
        best = max((gain.mean for side, gain in by_side.items() if side in names), default=0.0)
        cells = [_cell(by_side.get(name), best) for name in names]
        yield f"| {'**all**' if workload == ALL else workload} | " + " | ".join(cells) + " |"


def _cell(gain: Gain | None, best: float) -> str:
    if gain is None:
        return ""
    mean = f"**{gain.mean:.2f}**" if gain.mean == best else f"{gain.mean:.2f}"
    return f"{mean} ({gain.low:.2f} to {gain.high:.2f})"


def picture(result: Mapping[str, Mapping[str, Gain]], title: str) -> str:
    """An SVG: a group of bars for each workload, a colour for each side, intervals, and a line at plain decoding."""
    names = [side for side in dict.fromkeys(s for by in result.values() for s in by) if side not in (PLAIN, OFF)]
    names.sort(key=lambda side: (side not in (COLD, STORED), side.startswith("prompt"), side))
    more = iter(MORE_COLOURS)
    colour = {name: COLOURS.get(name) or next(more) for name in names}
    left, bar, gap, top, right = 150, 11, 16, 58 + 16 * -(-len(names) // 4), 800
    most = max(gain.high for by in result.values() for side, gain in by.items() if side in names)
    parts: list[str] = []
    y = top

    def x(value: float) -> float:
        return left + value * (right - left) / most

    for workload, by_side in result.items():
        shown = [name for name in names if name in by_side]
        middle = y + bar * len(shown) / 2 + 4
        weight = ' font-weight="bold"' if workload == ALL else ""
        parts.append(f'<text x="{left - 8}" y="{middle:.0f}" text-anchor="end"{weight}>{escape(workload)}</text>')
        for name in shown:
            gain = by_side[name]
            parts.append(
                f'<rect x="{left}" y="{y}" width="{x(gain.mean) - left:.1f}" height="{bar - 2}" fill="{colour[name]}"/>'
                f'<path d="M{x(gain.low):.1f} {y + bar / 2 - 1}H{x(gain.high):.1f}" stroke="#1a202c"/>'
                f'<text x="{x(gain.high) + 5:.1f}" y="{y + bar - 3}" font-size="9">{gain.mean:.2f}</text>'
            )
            y += bar
        y += gap
    for value in range(int(most) + 1):
        look = 'stroke="#1a202c" stroke-dasharray="3 2"' if value == 1 else 'stroke="#e2e8f0"'
        parts.insert(0, f'<path d="M{x(value):.1f} {top - 6}V{y - gap + 6}" {look}/>')
        label = "1: plain decoding" if value == 1 else str(value)
        parts.append(f'<text x="{x(value):.1f}" y="{y + 4}" text-anchor="middle" font-size="10">{label}</text>')
    for number, name in enumerate(names):
        at, line = left + 165 * (number % 4), 40 + 16 * (number // 4)
        parts.append(f'<rect x="{at}" y="{line - 9}" width="10" height="10" fill="{colour[name]}"/>')
        parts.append(f'<text x="{at + 15}" y="{line}">{escape(name)}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 {y + 14}" font-family="sans-serif" font-size="12">'
        f'<rect width="860" height="{y + 14}" fill="#fff"/><text x="8" y="20" font-size="14">{escape(title)}</text>'
        + "\n".join(parts)
        + "</svg>\n"
    )


def paragraph(found: Mapping[str, Any], result: Mapping[str, Mapping[str, Gain]]) -> str:
    """What the figures are, and what they say."""
    every = result.get(ALL) or next(iter(result.values()))
    texts = [
        f"Speed-up over llama-server's plain decoding, by the clock: {found['machine']}, {found['threads']} threads"
    ]
    texts[0] += f", a model of {found['player']} ({found['llama_server'] or 'no llama-server'}; commit "
    texts[0] += (
        f"{', '.join(found['revisions'])}). All programs wrote the same recorded texts, each run with a new server."
    )
    if OFF in every and PLAIN in every:
        texts.append(f"Plain decoding of rest-local runs at {every[OFF].mean:.3f} of llama-server's.")
    for side, what in ((COLD, "From the request's text alone"), (STORED, "With stored text, history or a prediction")):
        of_side = {name: over_best(by, side) for name, by in result.items() if side in by and set(by) - set(OURS)}
        if of_side:
            least = min(of_side, key=lambda name: of_side[name][0])
            ratio, best = of_side.get(ALL, of_side[least])
            ending = f" ({least}, next to {of_side[least][1]})"
            texts.append(
                f"{what}, {side} has {ratio:.2f} of the best peer's ({best}), {of_side[least][0]:.2f} at least{ending}."
            )
    texts.append("In brackets are intervals of 95% over answers and rounds.")
    return " ".join([*texts, busy(found)]).strip()


def section(found: Mapping[str, Any]) -> str:
    """The text between the marks of docs/BENCHMARKS.md."""
    result = gains(found)
    shown = f"![Speed-up by workload and program]({PICTURE})"
    left_out = [f"- `{side}` was left out: {reason.splitlines()[0]}" for side, reason in found["failed"].items()]
    return "\n\n".join(filter(None, (shown, "\n".join(table(result)), paragraph(found, result), "\n".join(left_out))))


def headline(found: Mapping[str, Any]) -> str:
    """The sentences of the README."""
    result = gains(found)
    name = next(name for name in ("whole-file edits", *result) if STORED in result.get(name, {}))
    told = []
    for by_side in (result[name], result.get(ALL, result[name])):
        ratio, best = over_best(by_side, STORED)
        told.append((by_side[STORED].mean, by_side[STORED].mean / ratio, best))
    (gain, peer, best), (every, every_peer, every_best) = told
    return (
        f"**In a race of whole programs that write the same text, {name} ran {gain:.1f} times as fast** as without\n"
        f"drafting, with `{best}`, the best rule of other programs there, {peer:.1f} times (a model of "
        f"{found['player']},\n{found['machine']}). Over all {len(result) - (ALL in result)} kinds of text it was "
        f"{every:.2f} times, with `{every_best}` {every_peer:.2f} times."
    )


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
    parser.add_argument("file", type=Path)
    parser.add_argument("--svg", type=Path, help="write the picture there")
    parser.add_argument("--write", action="store_true", help="write picture, section and headline into docs and README")
    args = parser.parse_args()
    found = json.loads(args.file.read_text())
    drawn = picture(gains(found), f"Times plain decoding of llama-server, a model of {found['player']}")
    for path in [args.svg] * bool(args.svg) + [ROOT / "docs" / PICTURE] * args.write:
        path.write_text(drawn)
    if args.write:
        put(ROOT / "docs/BENCHMARKS.md", "race", section(found))
        put(ROOT / "README.md", "race", headline(found))
    print("\n".join(lines(found)))
