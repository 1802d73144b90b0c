"""The number of steps until drafting finds the place again where an answer continues the text that it copies.

The edits in the histories of git repositories go in. A diff of old and new tokens shows where the answer diverges and
where it continues with at least SETTLED old tokens. `auto` replays the edit on a curve. The count is the number of
forward passes after a change and before the first pass that accepts at least FOUND drafted tokens, by kind of edit.

    python -m benchmarks.divergence --vocab GGUF [--curve NAME] [--no-predict] REPOSITORY...
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from pathlib import Path

import numpy as np

from rest_local.bench.recorded import Recorded
from rest_local.bench.replay import counted, replay
from rest_local.bench.workload import load_edits
from rest_local.calibration.cost import CostCurve
from rest_local.calibration.curves import load_curve
from rest_local.drafting.growth import Draft
from rest_local.drafting.sources import Sources
from rest_local.llama.model import Model
from rest_local.planning.auto import Auto
from rest_local.planning.policy import StepCost

Steps = list[tuple[int, int]]  # (tokens of the answer before a step, drafted tokens that it accepted)

SETTLED = 16  # consecutive old tokens after a change that count as a copied run
FOUND = 4  # accepted tokens that show that drafting has found the place
SHORT = 8  # tokens from which on a change counts as long


def changes(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[str, int, int]]:
    """(kind, begin, end) of every copied run of `new` after a change; begin and end are indices into `new`."""
    before = ""
    for tag, i1, i2, j1, j2 in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag != "equal":
            longest = max(i2 - i1, j2 - j1)
            before = f"{tag} {'1' if longest == 1 else f'2-{SHORT - 1}' if longest < SHORT else f'{SHORT}+'}"
        elif before and j2 - j1 >= SETTLED:
            yield before, j1, j2


def steps_to_find(steps: Steps, begin: int, end: int) -> int:
    """The passes in the run begin..end before one that accepts FOUND tokens; 0 if an earlier draft reaches into it."""
    if any(at < begin and at + accepted >= begin + FOUND for at, accepted in steps):
        return 0
    inside = [accepted >= FOUND for at, accepted in steps if begin <= at < end]
    return inside.index(True) if True in inside else len(inside)


class Recording(Auto):
    """`auto` that records its steps by answer."""

    def __init__(self, curve: CostCurve) -> None:
        super().__init__(curve)
        self.steps: list[Steps] = []
        self._n_prompt = 0

    def begin(self, n_ctx: int) -> None:
        super().begin(n_ctx)
        self.steps.append([])
        self._n_prompt = n_ctx

    def learn(self, drafted: Draft, tokens: Sequence[int], done: StepCost) -> None:
        super().learn(drafted, tokens, done)
        self.steps[-1].append((done.n_ctx - self._n_prompt, done.n_accepted))


def measure(edits: Sequence[Recorded], olds: Sequence[Sequence[int]], n_vocab: int, curve: str) -> dict[str, list[int]]:
    """By kind of edit, the steps to find the place, one number per change. `olds`: the old text of each edit."""
    found: dict[str, list[int]] = defaultdict(list)
    policy = Recording(load_curve(curve))
    replay(edits, lambda: Sources([], n_vocab), policy, load_curve(curve))
    for edit, old, steps in zip(edits, olds, policy.steps, strict=True):
        for kind, begin, end in changes(old, edit.answer):
            found[kind].append(steps_to_find(steps, begin, end))
    return dict(sorted(found.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repositories", type=Path, nargs="+", metavar="REPOSITORY")
    parser.add_argument("--vocab", required=True, metavar="GGUF")
    parser.add_argument("--curve", default="rtx3090-8b-q4_0")
    parser.add_argument("--edits", type=int, default=12, help="edits of each repository")
    parser.add_argument("--no-predict", action="store_true", help="draft only from the context")
    args = parser.parse_args()
    with Model.open(args.vocab, vocab_only=True) as model:
        vocabulary = model.vocabulary
        edits = counted([e for r in args.repositories for e in load_edits(r, vocabulary, args.edits, predict=True)])
        olds = [list(edit.prediction) for edit in edits]
        if args.no_predict:
            edits = [replace(edit, prediction=()) for edit in edits]
        found = measure(edits, olds, vocabulary.size, args.curve)
    rows = {**found, "all": [steps for kind in found.values() for steps in kind]}
    print(f"{'change':16}{'number':>7}{'mean':>7}{'within 1':>10}{'2':>6}{'4 steps':>9}")
    report = {}
    for kind, steps in rows.items():
        within = [round(float(np.mean(np.array(steps) <= most)), 3) for most in (1, 2, 4)]
        report[kind] = {"changes": len(steps), "mean": round(float(np.mean(steps)), 2), "within_1_2_4": within}
        print(f"{kind:16}{len(steps):7}{np.mean(steps):7.2f}{within[0]:10.0%}{within[1]:6.0%}{within[2]:9.0%}")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
