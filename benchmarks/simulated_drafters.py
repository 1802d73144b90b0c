"""What the planner makes of a drafting model: recorded answers are replayed with a simulated one on the cost curves.

    python -m benchmarks simulated_drafters [--data FOLDER] [--curve NAME]... [--only WORKLOAD]... [--tokens N]
        [--mtp] [--block] [--constant] [--json]

Time is simulated: a step costs what the curve gives, a pass of the model a share of a plain step of that curve, and a
lookup `replay.LOOKUP_MS`. So every figure is repeatable, and none needs a model. Compared, on the same answers:

- `chain`: the best chain of fixed length, llama.cpp's way: k passes and k drafted tokens at every step. k = 0..16 is
  chosen for each cell with hindsight. It makes no lookups.
- `peer`: ngram-mod, and such a chain where that has no draft. This is llama-server's rule for two types.
- `retrieval`: `auto` without a drafting model.
- `model`: `auto` without retrieval.
- `all`: `auto` with both.

The simulated model knows the recorded answer. At each place it has a confidence, drawn from a beta distribution whose
mean is the given acceptance, so that it is sure at many places and has no idea at others. Its first candidate is right
with just that probability, so its confidences are calibrated. The second one gets half of what is left and the third
one a fifth, and they are right as often. Wrong tokens are other tokens of the same answer. On a path that has left the
answer it is as confident as on any other. Everything is drawn from a hash of the answer, the place and the path, so it
says the same to all policies. With `--block` it is a block drafter: a pass answers DEPTHS depths of the paths that its
own candidates make. `--constant` states the mean acceptance everywhere instead, and its second candidate is
never right. What it knows does not depend on what retrieval knows.

Workloads: those of `benchmarks.published`, `edits` (of this repository, from the context alone), and `unseen`, random
tokens in which retrieval finds nothing. `--data` (or REST_LOCAL_SHARED) names the folder of recorded answers; what is
missing is named and left out.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np

from benchmarks.curves import load_curve
from benchmarks.library import standard_library
from benchmarks.peers import NgramMod, chain
from benchmarks.published import EDITS, HISTORY, SETS
from benchmarks.recorded import Recorded, Workload, open_workload
from benchmarks.replay import Tally, counted, replay
from rest_local.calibration.cost import CostCurve
from rest_local.calibration.tuning import shipped
from rest_local.drafting.models.drafter import CONFIDENT, Drafter, DraftText, Likely, Query, share_time
from rest_local.drafting.sources import SourceRows, Sources
from rest_local.drafting.tree import Draft
from rest_local.llama.model import Model
from rest_local.planning.auto import Auto
from rest_local.planning.policy import StepContext, StepCost
from rest_local.retrieval import build_datastore

ACCEPTANCES = (0.6, 0.75, 0.9)
COSTS = (0.03, 0.1, 0.25)  # A pass of one row takes so many plain steps.
# With `--mtp`, a pass of an MTP layer of Qwen3.8-27B, on the curve of a machine like the measured one: what is left of
# a step with k drafted tokens, (1 + k acceptance) / speed-up plain steps, after the curve's t(k + 1), divided by k.
# github.com/sudoingX/qwen38-mtp, requests 15 and 43 (RTX 5090: 2.18 and 2.27 at k = 4, acceptance 0.64 and 0.69), 42
# (RTX 3090: 1.66 at 4, 0.65); github.com/ggml-org/llama.cpp 22673 (Qwen3.6-27B, Strix Halo: 2.10 at 3, 0.73)
MTP = {"rtx4090-8b-iq3_xxs": 0.065, "rtx3090-8b-q4_0": 0.157, "spark-7b-q8_0": 0.13}
# With `--block`, DFlash 2 for Qwen3.8-27B: 3.58 tokens a pass on all of speed-bench and 3.82 on code, with 7 drafted
# tokens, are these acceptances of each token (github.com/ggml-org/llama.cpp 27342). Five of the 64 layers and the
# output layer are a pass of 0.13 plain steps; a speed-up of 3.0 on a Strix Halo (github.com/peonist-ai/halogen-server)
# leaves 0.15 beside a batch of 8.
DEPTHS, BLOCK_ACCEPTANCES, BLOCK_COST = 7, (0.75, 0.77), 0.15
ROW_COST = 0.1  # Each further row adds so much of a pass.
CHAIN_LENGTHS = range(17)
PEER_LENGTH = 3  # llama-server's default.
SPREAD = 2.0  # The beta distribution of confidences has this a + b. With 0.75, 0.42 of them are above 0.9.
SECOND, THIRD = 0.5, 0.2  # Shares of the probability that the candidates before leave.
DRAWS = 1 << 14
TOKENS = 2500  # Each workload is cut to so many tokens of answers.
N_UNSEEN = 32_000  # `unseen` is drawn from so many tokens.
UNSEEN_ANSWER = 300


class Draw(NamedTuple):
    """The model's opinion at a place: its confidence, and which of its candidates is right, if any."""

    confidence: float
    right: int


def draws(acceptance: float, constant: bool) -> list[Draw]:
    """Make DRAWS opinions."""
    rng = np.random.default_rng(5)
    if constant:
        confidence = np.full(DRAWS, acceptance)
    else:
        confidence = rng.beta(SPREAD * acceptance, SPREAD * (1.0 - acceptance), DRAWS)
    confidence = np.clip(confidence, 0.01, 0.9999)
    chance = rng.random(DRAWS)
    rest = 1.0 - confidence
    bounds = np.stack([confidence, confidence + SECOND * rest, confidence + (SECOND + THIRD) * rest], axis=1)
    right = (chance[:, None] >= bounds).sum(axis=1)
    if constant:
        right[right > 0] = 3
    return [Draw(float(c), int(r)) for c, r in zip(confidence, right, strict=True)]


class SimulatedDrafter(Drafter):
    """A drafting model that knows the answers. A pass of n rows takes `pass_ms(n)`, which its texts share, and answers
    `depths` depths.
    """

    name = path = "simulated"

    def __init__(self, answers: Iterable[Recorded], drawn: Sequence[Draw], one_ms: float, depths: int = 1) -> None:
        self.depths = depths
        self.answers = {tuple(answer.prompt): (number, answer) for number, answer in enumerate(answers)}
        self.drawn = drawn
        self.passes = 0
        self._one_ms = one_ms

    def text(self) -> SimulatedText:
        """Begin a new text."""
        return SimulatedText(self)

    def pass_ms(self, n: int) -> float:
        return self._one_ms * (1.0 + ROW_COST * (n - 1))

    def answer(self, queries: Sequence[Query]) -> list[Sequence[Likely]]:
        self.passes += 1
        share_time({id(query.text): query.text for query in queries}.values(), self.pass_ms(len(queries)))
        texts = [(_text_of(query), query.path) for query in queries]
        return [(text.following or text.likely)(path) for text, path in texts]

    def close(self) -> None:
        """Free nothing."""


class SimulatedText(DraftText):
    """The text of one request. It begins with one of the prompts."""

    can_ask = True

    def __init__(self, drafter: SimulatedDrafter) -> None:
        super().__init__(drafter)
        self._drafter = drafter
        if drafter.depths > 1:
            self.following = self._in_block
        self._number, self._n_prompt, self._answer = 0, 0, list[int]()

    def restart(self, text: Sequence[int], same: int) -> None:
        super().restart(text, same)
        self._n_prompt = len(text)
        self._number, answer = self._drafter.answers[tuple(text)]
        self._answer = answer.answer

    def caught_up(self, saves_ms: float) -> bool:
        return True

    def passes(self, path: Sequence[int]) -> int:
        return 1

    def _in_block(self, path: tuple[int, ...]) -> Sequence[Likely]:
        """Return the candidates after a path of candidates; nothing after another, or beyond the block."""
        candidates = (dict(self.likely(path[:n])) for n in range(len(path)))
        inside = len(path) < self._drafter.depths and all(map(dict.__contains__, candidates, path))
        return self.likely(path) if inside else ()

    def likely(self, path: tuple[int, ...]) -> list[Likely]:
        """Return the candidates after a path, the likeliest first."""
        at = len(self._text) - self._n_prompt
        end = at + len(path)
        follows = end < len(self._answer) and self._answer[at:end] == [*path]
        return candidates_at(self._drafter.drawn, self._number, self._answer, end, () if follows else (at, *path))


def _text_of(query: Query) -> SimulatedText:
    assert isinstance(query.text, SimulatedText)
    return query.text


def candidates_at(
    drawn: Sequence[Draw], number: int, answer: Sequence[int], at: int, astray: tuple[int, ...] = ()
) -> list[Likely]:
    """Return the candidates for place `at` of answer `number`, or for a path that has gone `astray` from it."""
    key = hash((number, at, *astray))
    confidence, right = drawn[_mixed(key)]
    truth = -1 if astray else answer[at]
    tokens: list[int] = []
    for place in range(1 if confidence > CONFIDENT else 3):
        token = truth
        while place != right and (token == truth or token in tokens):
            key += 1
            token = answer[_mixed(key) % len(answer)] if key & 7 else -1 - (key & DRAWS)
        tokens.append(token)
    rest = 1.0 - confidence
    return list(zip(tokens, (confidence, SECOND * rest, THIRD * rest), strict=False))


def draw_at(drawn: Sequence[Draw], number: int, at: int) -> Draw:
    """Return the model's opinion at place `at` of answer `number`."""
    return drawn[_mixed(hash((number, at)))]


def _mixed(key: int) -> int:
    """Hash a key to a number below DRAWS."""
    return (key * 0x9E3779B97F4A7C15 >> 31) % DRAWS


class Unmatched(Sources):
    """Sources without retrieval."""

    def rows(self, *_: Any, **__: Any) -> list[SourceRows]:
        return []

    def rows_after(self, *_: object, **__: object) -> list[SourceRows]:
        return []

    def repeats(self, n: int = 8) -> bool:
        return False


class Together(NgramMod):
    """llama-server's `--spec-type draft-mtp,ngram-mod` or `draft-dflash,ngram-mod`, whatever the order.

    The types are asked in a fixed order, ngram-mod before all that compute, and the first one with a draft gives it
    (`common_speculative_draft`). A model then drafts a chain of `length` tokens. ngram-mod learns from its own drafts
    only. Lookups take no time here, nor do the passes in which the model catches up.
    """

    name = "ngram-mod and a model"

    def __init__(self, drafter: SimulatedDrafter, length: int, history: Sequence[Sequence[int]] = ()) -> None:
        super().__init__(history)
        self._model, self._length, self._is_found = drafter.text(), length, False
        self.draft_text = self._model

    def draft(self, sources: object, at: StepContext) -> Draft:
        tree = self.propose(at.limit)
        self._is_found = bool(len(tree))
        if not self._is_found:
            drafter = self._model.drafter
            drafted: list[int] = []
            while len(drafted) < min(self._length, at.limit):
                if len(drafted) % drafter.depths == 0:
                    share_time([self._model], drafter.pass_ms(1))
                drafted.append(self._model.likely(tuple(drafted))[0][0])
            tree = chain(drafted)
        return Draft(tree)

    def learn(self, drafted: Draft, tokens: Sequence[int], done: StepCost) -> None:
        if self._is_found:
            super().learn(drafted, tokens, done)


@dataclass
class Chains:
    """The steps of chains of fixed length on some answers."""

    steps: list[list[int]]  # By length, the tokens of context at each step.

    @classmethod
    def of(cls, answers: Sequence[Recorded], drawn: Sequence[Draw]) -> Chains:
        steps: list[list[int]] = [[] for _ in CHAIN_LENGTHS]
        for number, answer in enumerate(answers):
            n = len(answer.answer)
            runs = [0] * (n + 1)  # How many right tokens follow each place.
            for at in range(n - 1, 0, -1):
                runs[at] = 1 + runs[at + 1] if draw_at(drawn, number, at).right == 0 else 0
            for length in CHAIN_LENGTHS:
                at = 1
                while at < n:
                    steps[length].append(len(answer.prompt) + at)
                    at += 1 + min(length, runs[at])
        return cls(steps)

    def best(self, curve: CostCurve, pass_ms: float, depths: int = 1) -> tuple[float, int]:
        """Return the least milliseconds, and the length that takes them: one pass for each token, or for a block."""
        cost = {n_ctx: curve.at(n_ctx) for n_ctx in set(self.steps[0])}
        longest = depths if depths > 1 else CHAIN_LENGTHS[-1]
        return min(
            (sum(float(cost[n_ctx][length]) + -(-length // depths) * pass_ms for n_ctx in places), length)
            for length, places in enumerate(self.steps[: longest + 1])
        )


class Cell(NamedTuple):
    """A result: speed-ups over plain decoding, with the time of passes and lookups."""

    workload: str
    curve: str
    acceptance: float
    cost: float
    chain: float
    length: int
    peer: float
    retrieval: float
    model: float
    all: float
    passes: float  # Per step, as `nodes`.
    nodes: float

    @property
    def to_chain(self) -> float:
        return self.all / self.chain

    @property
    def to_peer(self) -> float:
        return self.all / self.peer

    @property
    def to_retrieval(self) -> float:
        return self.all / self.retrieval

    @property
    def to_better(self) -> float:
        """Return the speed-up over the better of the two parts, each of which is planned here."""
        return self.all / max(self.retrieval, self.model)


def speedup(tally: Tally) -> float:
    return tally.plain_ms / (tally.drafted_ms + tally.looked_ms)


def measure(
    label: str, workload: Workload, name: str, constant: bool, costs: Sequence[float], depths: int = 1
) -> list[Cell]:
    """Return the cells of one workload on one curve, with a model whose pass answers so many depths."""
    answers = counted(workload.tested)
    curve = load_curve(name)
    retrieval = speedup(replay(answers, workload.sources, Auto(load_curve(name)), curve))
    cells = []
    for acceptance in ACCEPTANCES if depths == 1 else BLOCK_ACCEPTANCES:
        drawn = draws(acceptance, constant)
        chains = Chains.of(answers, drawn)
        for cost in costs:
            plain_ms = float(curve.at(512)[0])
            found = []
            for make in (lambda: Unmatched([], workload.n_vocab), workload.sources):
                drafter = SimulatedDrafter(answers, drawn, cost * plain_ms, depths)
                tally = _replayed(answers, make, drafter, name)
                found.append(speedup(tally))
            best, length = chains.best(curve, cost * plain_ms, depths)
            peer = 0.0
            for each in {length, PEER_LENGTH}:
                together = Together(
                    SimulatedDrafter(answers, drawn, cost * plain_ms, depths), each, workload.earlier or ()
                )
                peer = max(peer, speedup(replay(answers, partial(_itself, together), together, curve)))
            cells.append(
                Cell(
                    label, name, acceptance, cost, tally.plain_ms / best, length, peer, retrieval, found[0], found[1],
                    drafter.passes / tally.steps, tally.drafted / tally.steps,
                )
            )  # fmt: skip
    return cells


def _itself(peer: Together) -> Together:
    return peer


def _replayed(answers: Sequence[Recorded], make: Callable[[], Sources], drafter: SimulatedDrafter, curve: str) -> Tally:
    def sources() -> Sources:
        made = make()
        made.draft_text = drafter.text()
        return made

    policy = Auto(load_curve(curve))
    policy.shared.drafter = drafter
    return replay(answers, sources, policy, load_curve(curve))


def unseen(tokens: int) -> Workload:
    """Return a workload of random tokens."""
    rng = np.random.default_rng(3)
    answers = []
    for number in range(tokens // UNSEEN_ANSWER):
        text = rng.integers(0, N_UNSEEN, 100 + UNSEEN_ANSWER).tolist()
        answers.append(Recorded(f"unseen {number}", text[:100], text[100:]))
    return Workload(answers, None, N_UNSEEN)


def recorded(data: Path, name: str, folder: Path, tokens: int, stack: ExitStack) -> Workload:
    """Return a workload of `benchmarks.published`, cut to about so many tokens of answers."""
    file, vocabulary = SETS["HumanEval" if name == "edits" else name]
    with Model.open(data / vocabulary, vocab_only=True) as model:
        stores: list[str] = []
        if name == "HumanEval":
            path = folder / "stdlib"
            if not path.exists():
                excluded = ("test/**", "tests/**", "site-packages/**", "**/idle_test/**")
                build_datastore(
                    path, [standard_library()], vocabulary=model.vocabulary, include=("*.py",), exclude=excluded
                )
            stores = [str(path)]
        if name == "edits":
            given: dict[str, Any] = {"repositories": (Path(__file__).parents[1],), "edits": EDITS, "predict": False}
        else:
            given = {"files": [data / file], "datastores": stores, "history": HISTORY.get(name)}
        workload = stack.enter_context(open_workload(model.vocabulary, **given))
    kept, total = [], 0
    for answer in workload.tested:
        if total >= tokens:
            break
        kept.append(answer)
        total += len(answer.answer)
    workload.tested = kept
    return workload


_workloads: dict[str, Workload] = {}  # `main` fills it before it starts processes, so they have it too.


def _job(job: tuple[str, str, bool, Sequence[float], int]) -> list[Cell]:
    label, curve, constant, costs, depths = job
    return measure(label, _workloads[label], curve, constant, costs, depths)


def summary(cells: Sequence[Cell]) -> dict[str, list[tuple[float, float]]]:
    """Return, by workload and for all, (mean, least) of all/chain, all/peer, all/retrieval, and all/the better part."""
    found = {}
    for label in [*dict.fromkeys(cell.workload for cell in cells), "all"]:
        own = [cell for cell in cells if label in (cell.workload, "all")]
        shares = [(cell.to_chain, cell.to_peer, cell.to_retrieval, cell.to_better) for cell in own]
        found[label] = [(mean(column), min(column)) for column in zip(*shares, strict=True)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("REST_LOCAL_SHARED"))
    parser.add_argument("--curve", action="append")
    parser.add_argument("--only", action="append", metavar="WORKLOAD")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of answers, for each workload")
    parser.add_argument("--mtp", action="store_true", help="an MTP layer on the curves that are like measured machines")
    parser.add_argument("--block", action="store_true", help=f"a drafter of {DEPTHS} tokens a pass, as DFlash 2")
    parser.add_argument("--constant", action="store_true", help="the model states the mean acceptance everywhere")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--json", action="store_true", help="only the line of JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        for label in args.only or ("unseen", "edits", *SETS):
            needed = SETS.get(label, SETS["HumanEval"])
            if label == "unseen":
                _workloads[label] = unseen(args.tokens)
            elif args.data is None or any(not (Path(args.data) / file).exists() for file in needed):
                print(f"{label}: left out, {' or '.join(needed)} is not there; give --data FOLDER")
            else:
                _workloads[label] = recorded(Path(args.data), label, Path(folder), args.tokens, stack)
        curves: dict[str, tuple[float, ...]] = dict.fromkeys(args.curve or shipped(), COSTS)
        if args.mtp:
            curves = {name: (cost,) for name, cost in MTP.items()}
        if args.block:
            curves = dict.fromkeys(curves, (BLOCK_COST,))
        depths = DEPTHS if args.block else 1
        jobs = [(label, curve, args.constant, costs, depths) for label in _workloads for curve, costs in curves.items()]
        with ProcessPoolExecutor(args.jobs, get_context("fork")) as pool:
            cells = [cell for found in pool.map(_job, jobs) for cell in found]
    if not args.json:
        print(*cells, sep="\n")
        print("(mean, least) of all/chain, all/peer, all/retrieval, all/better part:", summary(cells))
    print(json.dumps([cell._asdict() for cell in cells]))
