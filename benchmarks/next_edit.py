"""Milliseconds per keystroke in an editor that asks for the next edit, in the prompts that Zed sends to Sweep's model.

    python -m benchmarks next_edit [-m GGUF] [--git REPOSITORY]... [--places 12] [--vocab GGUF] [--json]

- Places that changed in the history of a repository (default: this checkout) are typed again. After each of a few
  letters comes a request: the window around the cursor as it then is, the place before the change, and the last diff.
  The recorded answer is the window with the whole change. Long changes are left out.
- One slot answers the keystrokes of a place in turn. The first of them, which reads the whole prompt, is not counted.
- Forward passes are those of a model (`-m`), or cost what a curve says: a prompt the share of a batch of 64, which is
  dearer than larger batches. Curves of other models are scaled to 1.5B parameters by size and memory bandwidth.
- Sides: plain decoding; drafts from the prompt alone; with the window as prediction, which is what `serve` does; with
  earlier answers as well, which is what `serve` does with its history; and llama-server's rules (`benchmarks.peers`).
  Here the same answer is given four times, which flatters sides that know earlier answers: history and ngram-mod.
  So ngram-mod runs as "ngram-mod anew" too, with an empty table for each keystroke: that is its draft from the prompt.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from itertools import islice
from pathlib import Path

import numpy as np

from benchmarks.curves import load_curve
from benchmarks.peers import NgramMod, NgramSimple
from benchmarks.recorded import Recorded, edits_of
from benchmarks.replay import Predictable, replay
from benchmarks.wall import Runner
from rest_local.api.next_edit import window_of
from rest_local.calibration.cost import LARGEST, CostCurve
from rest_local.calibration.settings import capability_of
from rest_local.calibration.tuning import load_meter, tune
from rest_local.decoding.forward import Forward
from rest_local.drafting.sources import Sources
from rest_local.kv_cache.slot import Slot
from rest_local.llama.context import ContextSettings
from rest_local.llama.model import Model
from rest_local.llama.placeholders import common_prefix
from rest_local.llama.vocabulary import Vocabulary
from rest_local.planning.auto import Auto
from rest_local.planning.policy import Off, Policy
from rest_local.retrieval.growing import GrowingText

FILE = "<|file_sep|>"
CODE = (".py", ".js", ".ts", ".c", ".h", ".cpp", ".rs", ".go", ".java", ".css", ".sh")
AROUND = 10  # Lines of the window above and below the cursor, as in Zed.
NEAR = 3  # Unchanged lines on both sides of a diff.
HEAD = 30  # Lines of the file's beginning, which stand first, as an excerpt of a related file.
LETTERS = (2, 3, 4, 5)  # A request is sent after so many letters of what changes in a line.
MOST_LINES = 8  # Of a change.
PER_FILE = 2  # Places of one file.
N_CTX = 4096

CURVES = {  # (curve, factor): a 1.5B in Q4_0 has 0.93 GB; an RTX 3060 reads 360 GB/s, a 3090 936.
    "RTX 3060, 1.5B": ("rtx3090-8b-q4_0", 0.93 / 4.66 * 936 / 360),
    "M1 Pro, 1.5B": ("m1pro-13b-q4_0", 0.93 / 7.37),
    "2 CPU cores, 0.5B": ("cpu-2-cores-0.5b-q4_0", 1.0),
}
Times = dict[str, list[tuple[float, float]]]  # By side: milliseconds of the prompt and of the answer of each keystroke.


def places_of(repository: Path) -> Iterator[list[tuple[str, str]]]:
    """Yield the keystrokes of each place, the newest change first: prompt and answer."""
    for _, _, path, old, new in edits_of(repository):
        if not path.endswith(CODE):
            continue
        a, b, found = old.splitlines(), new.splitlines(), 0
        for kind, i1, i2, j1, j2 in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
            if kind == "equal" or j1 == j2 or max(i2 - i1, j2 - j1) > MOST_LINES or found == PER_FILE:
                continue
            typed = begun(a[i1] if i2 > i1 else "", b[j1])
            if len(typed) == len(LETTERS):
                found += 1
                yield [keystroke(path, b[:j1], a[i1:i2], line, b[j1:j2], a[i2:]) for line in typed]


def begun(old: str, new: str) -> list[str]:
    """Return a changed line after each of LETTERS, without the end of the old line; fewer if it is shorter."""
    same = max(common_prefix([*map(ord, old)], [*map(ord, new)]), len(new) - len(new.lstrip()))
    return [new[: same + letters] for letters in LETTERS if same + letters < len(new)]


def keystroke(
    path: str, before: Sequence[str], old: Sequence[str], line: str, new: Sequence[str], after: Sequence[str]
) -> tuple[str, str]:
    """Return the prompt and its answer where `line` is typed in the place of the first line of `old`."""
    now, above, below = [line, *old[1:]], before[-AROUND:], after[: AROUND + 1 - max(len(old), 1)]
    parts = {
        path: before[:HEAD],
        f"{path}.diff": [
            "original:", *before[-NEAR:], *old, *after[:NEAR], "updated:", *before[-NEAR:], *now, *after[:NEAR],
        ],
        f"original/{path}": [*above, *old, *below],
        f"current/{path}": [*above, *now, *below],
        f"updated/{path}": [],
    }  # fmt: skip
    return "".join(f"{FILE}{name}\n{text_of(lines)}" for name, lines in parts.items()), text_of([*above, *new, *below])


def text_of(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def tokenized(place: Sequence[tuple[str, str]], vocabulary: Vocabulary) -> list[Recorded]:
    """Return the keystrokes of a place with the window as the prediction."""
    prompts = [vocabulary.tokenize(prompt, special=True).tolist() for prompt, _ in place]
    answers = [vocabulary.tokenize(answer).tolist() for _, answer in place]
    windows = [vocabulary.tokenize(window_of(prompt)).tolist() for prompt, _ in place]
    return [Recorded("", *texts) for texts in zip(prompts, answers, windows, strict=True)]


class Side:
    """One way to draft: from the window or not, and from earlier answers or not; or the rule of a peer."""

    def __init__(self, policy: Policy, sources: Predictable, *, window: bool = False, history: bool = False) -> None:
        self.policy, self.sources, self._window, self._remembers = policy, sources, window, history
        self.history = GrowingText() if history and isinstance(sources, Sources) else None
        if isinstance(sources, Sources):
            sources.use((), self.history)

    def asked(self, recorded: Recorded) -> Recorded:
        return recorded if self._window else replace(recorded, prediction=())

    def answered(self, recorded: Recorded) -> None:
        if self.history is not None:
            self.history.extend([*recorded.answer, -1])
        elif isinstance(self.sources, NgramMod) and not self._remembers:
            self.sources.forget()


def sides_of(curve: CostCurve, n_vocab: int) -> dict[str, Side]:
    """Return the sides by name, each with a curve of its own."""

    def auto(**how: bool) -> Side:
        return Side(Auto(curve.copy()), Sources((), n_vocab), **how)

    simple, mod, anew = NgramSimple(), NgramMod(), NgramMod()
    return {
        "plain": Side(Off(), Sources((), n_vocab)),
        "prompt alone": auto(),
        "window": auto(window=True),
        "window and history": auto(window=True, history=True),
        "ngram-simple": Side(simple, simple),
        "ngram-mod": Side(mod, mod, history=True),
        "ngram-mod anew": Side(anew, anew),
    }


def by_curve(places: Sequence[Sequence[Recorded]], curve: CostCurve, n_vocab: int) -> Times:
    """Replay on a cost curve."""
    found: Times = defaultdict(list)
    for name, side in sides_of(curve, n_vocab).items():
        for place in places:
            before: list[int] = []
            for number, recorded in enumerate(place):
                tally = replay([side.asked(recorded)], lambda side=side: side.sources, side.policy, curve)  # type: ignore[misc]
                fresh = len(recorded.prompt) - common_prefix(before, recorded.prompt)
                before = recorded.prompt
                side.answered(recorded)
                if number:
                    prompt_ms = fresh * float(curve.at(len(before))[LARGEST - 1]) / LARGEST
                    found[name].append((prompt_ms, tally.drafted_ms + tally.looked_ms))
    return found


def by_model(places: Sequence[Sequence[Recorded]], path: Path, n_vocab: int) -> Times:
    """Run the forward passes of a model, in the settings in which `serve` runs it. Sides take turns at every place."""
    found: Times = defaultdict(list)
    with Model.open(path) as model:
        context, tuning = tune(model, ContextSettings(n_ctx=N_CTX), "same")
        with context:
            tuning.curve.busy_now = load_meter(model, context).busy
            capability = capability_of(model, context, tuning.fidelity, tuning.longest)
            runner = Runner(model, Forward(context, capability), Slot(context))
            sides = list(sides_of(tuning.curve, n_vocab).items())
            for turn, place in enumerate(places):
                for name, side in sides[turn % len(sides) :] + sides[: turn % len(sides)]:
                    runner.slot.clear()
                    for number, recorded in enumerate(place):
                        begin = time.perf_counter()
                        ms, _ = runner.run(side.asked(recorded), side.sources, side.policy)
                        side.answered(recorded)
                        if number:
                            found[name].append((1e3 * (time.perf_counter() - begin) - ms, ms))
                print(f"place {turn + 1} of {len(places)}", file=sys.stderr, flush=True)
    return found


def summary(pairs: Sequence[tuple[float, float]]) -> list[float]:
    """Return the medians of prompt, answer and both, and the 95th percentile of both."""
    found, both = np.array(pairs), np.sum(pairs, axis=1)
    return [*np.median(found, axis=0).tolist(), float(np.median(both)), float(np.percentile(both, 95))]


def table(title: str, times: Times) -> list[str]:
    """Return the rows of a table: milliseconds, and the median of what keystrokes and answers take of plain ones."""
    rows = [f"{title:20} {'prompt':>8} {'answer':>8} {'both':>8} {'95%':>8} {'of plain':>10} {'answers':>8}"]
    plain = np.array(times["plain"])
    for name, pairs in times.items():
        both = np.median(np.sum(pairs, axis=1) / plain.sum(axis=1))
        answers = np.median(np.array(pairs)[:, 1] / plain[:, 1])
        cells = "".join(f" {value:8.0f}" for value in summary(pairs))
        rows.append(f"  {name:18}{cells} {both:10.3f} {answers:8.3f}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, metavar="GGUF", help="its forward passes are run; default: curves")
    parser.add_argument(
        "--vocab", type=Path, metavar="GGUF", help="tokenize with this vocabulary; default: the model's"
    )
    parser.add_argument("--git", action="append", type=Path, metavar="REPOSITORY", help="default: this checkout")
    parser.add_argument("--places", type=int, default=12, help="changed places of each repository (default: 12)")
    args = parser.parse_args()
    if not (args.model or args.vocab):
        parser.error("give a model with -m, or a vocabulary with --vocab")
    with Model.open(args.vocab or args.model, vocab_only=True) as opened:
        n_vocab, places = opened.vocabulary.size, list[list[Recorded]]()
        for repository in args.git or [Path(__file__).parents[1]]:
            found = (tokenized(place, opened.vocabulary) for place in places_of(repository))
            fitting = (place for place in found if max(len(k.prompt) + len(k.answer) for k in place) < N_CTX - LARGEST)
            places += islice(fitting, args.places)
    measured = {args.model.stem: by_model(places, args.model, n_vocab)} if args.model else {}
    for name, (shipped, factor) in CURVES.items():
        curve = load_curve(shipped)
        measured[name] = by_curve(places, CostCurve(curve.contexts, factor * curve.ms), n_vocab)
    report: dict[str, dict[str, list[float]]] = {}
    for name, times in measured.items():
        print("\n".join(table(name, times)))
        report[name] = {side: [round(float(value), 1) for value in summary(pairs)] for side, pairs in times.items()}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
