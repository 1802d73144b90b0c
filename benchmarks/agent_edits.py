"""What the source `edit` gives to coding agents: replay of their transcripts, with it and with the context alone.

Two kinds of changes (`benchmarks.transcripts`), each in the formats of aider, Cline, Claude Code and Codex:
commits of a repository, which hold much new text, and names that are changed in the files of a folder. Recorded answers
are replayed, no model runs. The speed-ups are those of the cost curves, with the time of lookups at a fixed 0.15 ms.
`new`: share of the tokens of the answers that stand in no line of the conversation. `least`: the smallest ratio of one
answer.

    python -m benchmarks.agent_edits --vocab GGUF --git REPOSITORY --folder SITE_PACKAGES
    python -m benchmarks.agent_edits --vocab GGUF --cost ANSWERS    # microseconds where nothing is edited
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from math import exp, log
from pathlib import Path
from typing import Any

from benchmarks.transcripts import FORMATS, OTHER_CALLS, Change, changes_of, renames_of, transcripts
from rest_local.bench.recorded import Recorded, load
from rest_local.bench.replay import Tally, counted, replay
from rest_local.calibration.curves import load_curve
from rest_local.drafting.edits import Edits
from rest_local.drafting.sources import DEPTH, Sources
from rest_local.llama.model import Model
from rest_local.llama.vocabulary import Vocabulary
from rest_local.planning.policies import make_policy


def speedups(recorded: Sequence[Recorded], curve: str, vocabulary: Vocabulary) -> tuple[Tally, Tally]:
    """The replay with the context alone, and with the source `edit`, each from a cold start."""
    alone, both = (
        replay(
            recorded,
            lambda: Sources([], vocabulary.size, spelling=spelling),  # noqa: B023
            make_policy("auto", load_curve(curve)),
            load_curve(curve),
        )
        for spelling in (None, vocabulary)
    )
    assert not alone.changed + both.changed
    return alone, both


def row_of(alone: Tally, both: Tally) -> dict[str, float]:
    """Speed-ups with lookups, their ratio, and the smallest ratio of one answer."""
    pairs = zip(alone.by_answer, both.by_answer, strict=True)
    return {
        "context": round(alone.speedup_with_lookups, 3),
        "edit": round(both.speedup_with_lookups, 3),
        "ratio": round(both.speedup_with_lookups / alone.speedup_with_lookups, 3),
        "least": round(min(after / before for (before, _), (after, _) in pairs), 3),
        "passes": round(both.steps / alone.steps, 3),
    }


def new_share(changes: Sequence[Change]) -> float:
    """Share of the characters of the new files whose lines are not in the old ones."""
    new = total = 0
    for change in changes[:-1]:
        old = set(change.old.splitlines())
        lines = change.new.splitlines()
        changed = [line for line in lines if line not in old]
        new += sum(map(len, changed))
        total += sum(map(len, lines))
    return new / max(total, 1)


def mean(ratios: Sequence[float]) -> float:
    """Geometric."""
    return round(exp(sum(map(log, ratios)) / len(ratios)), 3)


def table(
    changes: Sequence[Change], curves: Sequence[str], vocabulary: Vocabulary, others: bool
) -> dict[str, dict[str, dict[str, float]]]:
    """By format and curve."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for form in OTHER_CALLS if others else FORMATS:
        recorded = list(transcripts(changes, form, vocabulary))
        found[form.name] = {}
        for curve in curves:
            row = found[form.name][Path(curve).stem] = row_of(*speedups(recorded, curve, vocabulary))
            print(
                f"{form.name:24} {Path(curve).stem:22}" + "".join(f" {name} {row[name]:6.3f}" for name in row),
                flush=True,
            )
    return found


def means(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, Any]:
    """The ratio over all formats by curve, over all curves by format, and over all."""
    curves = next(iter(found.values()))
    return {
        "by_curve": {curve: mean([rows[curve]["ratio"] for rows in found.values()]) for curve in curves},
        "by_format": {form: mean([row["ratio"] for row in rows.values()]) for form, rows in found.items()},
        "all": mean([row["ratio"] for rows in found.values() for row in rows.values()]),
    }


def cost(path: Path, vocabulary: Vocabulary, most: int) -> dict[str, float]:
    """CPU microseconds a token of answers that edit nothing: of a lookup in the request's own text, and of the source
    `edit` in addition, with what it reads of the prompt.
    """
    spent = {"context": 0.0, "edit": 0.0}
    tokens = 0
    for answer in counted(load(path, vocabulary))[:most]:
        sources, edits = Sources([], vocabulary.size), Edits(vocabulary)
        sources.restart(answer.prompt)
        edits.restart(answer.prompt, 0)
        for number, token in enumerate(answer.answer):
            begun = time.thread_time()
            sources.extend([token])
            sources.rows(depth=DEPTH)
            middle = time.thread_time()
            edits.extend([token])
            edits.rows(answer.answer[max(0, number - 31) : number + 1], DEPTH)
            spent["edit"] += time.thread_time() - middle
            spent["context"] += middle - begun
        tokens += len(answer.answer)
    return {name: round(1e6 * seconds / tokens, 2) for name, seconds in spent.items()}


def main() -> None:
    """Tables, then one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=Path, required=True, help="GGUF whose vocabulary splits the transcripts")
    parser.add_argument("--git", type=Path, help="repository whose commits are the changes")
    parser.add_argument("--folder", type=Path, help="Python files in which names are changed")
    parser.add_argument("--curves", nargs="+", default=["rtx3090-8b-q4_0", "xeon-amx-1.5b-q4_k"])
    parser.add_argument("--skip", type=int, default=0, help="changes at the beginning that are left out")
    parser.add_argument("-n", type=int, default=16, help="changes of each kind")
    parser.add_argument("--calls", action="store_true", help="calls of other models in place of the clients' formats")
    parser.add_argument("--cost", type=Path, help="recorded answers in which nothing is edited")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    with Model.open(args.vocab, vocab_only=True) as model:
        vocabulary = model.vocabulary
        kinds = {
            "commits": changes_of(args.git, args.skip, args.n) if args.git else [],
            "renames": renames_of(args.folder, args.skip, args.n) if args.folder else [],
        }
        for kind, changes in kinds.items():
            if changes:
                print(f"\n{kind}: {len(changes) - 1} changes, {new_share(changes):.0%} new text")
                rows = table(changes, args.curves, vocabulary, args.calls)
                found[kind] = {"means": means(rows), "rows": rows}
        if args.cost:
            found["us_a_token"] = cost(args.cost, vocabulary, args.n)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
