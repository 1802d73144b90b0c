"""Replay recorded answers with real forward passes, in a context of a real or synthetic model.

    python -m benchmarks wall -m GGUF [--vocab GGUF] [FILE]... [--git REPOSITORY]... [-d DATASTORE]... [--json]

- FILE is in a format of `benchmarks.recorded`, or edits come from the history of a repository (`--git`).
- Every step decodes the root and the tree in llama.cpp, with the slots, the sources and the policy of a real
  generation. Only the model's tokens come from the recording, so the weights may be random.
- Plain and drafted runs of an answer alternate, and the first side changes from answer to answer. The prefill is not
  timed.
- A first round, which is not reported, refines the cost curve.
- The report also holds the speed-up that the same replay implies by the refined curve.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.curves import curve_file
from benchmarks.recorded import EDITS, Recorded, open_workload
from benchmarks.replay import MakePolicy, Predictable, begin, counted
from benchmarks.replay import replay as replay_by_curve
from rest_local.calibration.cost import CostCurve
from rest_local.calibration.settings import capability_of
from rest_local.calibration.tuning import load_meter, tune
from rest_local.decoding.core import Outcome, Part, Pass, RequestState
from rest_local.decoding.forward import Forward, RequestFailed
from rest_local.decoding.request import Request
from rest_local.decoding.results import Statistics
from rest_local.decoding.stream import Answer, Piece
from rest_local.decoding.verify import Verifier
from rest_local.errors import OptionError, RestLocalError
from rest_local.kv_cache.slot import Slot
from rest_local.llama.context import ContextSettings
from rest_local.llama.model import Model
from rest_local.llama.vocabulary import Detokenizer
from rest_local.planning.policies import make_policy
from rest_local.planning.policy import Off, Policy

TOKENS = 160  # number of tokens to replay from each answer
ROUNDS = 3
Measured = tuple[float, float, Statistics]  # (plain ms, drafted ms, counts of the drafted run) of an answer
MAX_CONTEXT = 16384  # longer prompts are left out, because their prefill alone takes minutes on a CPU


class Recording:
    """A sampler that reads the logits like greedy sampling, and then returns the recorded token."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self._next = 0

    def sample(self, logits: NDArray[np.float32]) -> int:
        logits.argmax()
        self._next += 1
        return self._tokens[self._next - 1]

    def accept(self, token: int) -> None:
        """Do nothing: the sampler keeps no state."""

    def close(self) -> None:
        """Do nothing: there is nothing to free."""


def step(forward: Forward, running: Sequence[RequestState], parts: Sequence[Part] = ()) -> list[Outcome]:
    """Do one pass without a scheduler. Raises DecodeFailed, RequestFailed."""
    at_work = Pass(running, parts)
    try:
        forward.draft(at_work)
        forward.submit(at_work)
        return forward.verify(at_work, forward.logits(at_work))
    except BaseException:
        forward.undo(at_work)
        raise


def evaluate_prompt(forward: Forward, state: RequestState) -> None:
    """Evaluate what an admitted request has pending; an interrupt keeps what is done. Raises DecodeFailed."""
    while state.text.is_prefilling:
        (error,) = step(forward, [], [(state, min(state.text.n_pending, forward.backend.n_batch))])
        if isinstance(error, RestLocalError):
            raise error


def step_alone(forward: Forward, state: RequestState) -> Piece:
    """Do one pass for one request, which gives a token or more. Raises DecodeFailed, the cells being cleared, and what
    the sampler raises.
    """
    evaluate_prompt(forward, state)
    begun = time.perf_counter()
    try:
        (outcome,) = step(forward, [state])
    except RequestFailed as failed:
        raise failed.error from failed
    if isinstance(outcome, RestLocalError):
        raise outcome
    assert outcome is not None
    state.answer.receive(outcome.verdict.tokens, begun)
    return state.speculation.finish(outcome)


@dataclass
class Runner:
    """A context that runs one answer at a time."""

    model: Model
    forward: Forward
    slot: Slot

    def run(self, answer: Recorded, sources: Predictable, policy: Policy) -> tuple[float, Statistics]:
        """Return milliseconds from the first token of the answer to the last, and the statistics of its steps."""
        ids = answer.answer[1:]
        request = Request([*answer.prompt, answer.answer[0]], max_tokens=len(ids))
        recording = Answer(Statistics(), Detokenizer(self.model.vocabulary.piece), len(ids), (), lambda token: False)
        verifier = Verifier(Recording(ids), lambda token: False)
        sequence = RequestState(request, policy, verifier, recording, lambda _: sources)
        sequence.admit(self.slot)
        evaluate_prompt(self.forward, sequence)
        begin(sources, answer)
        decoded: list[int] = []
        begun = time.perf_counter()
        while len(decoded) < len(ids):
            decoded.extend(step_alone(self.forward, sequence).tokens)
        ms = 1e3 * (time.perf_counter() - begun)
        if decoded != ids:
            raise AssertionError(f"answer {answer.name}: the step loop changed a recorded token")
        return ms, sequence.statistics


def wall_clock(
    path: str,
    recorded: Sequence[Recorded],
    make_sources: Callable[[], Predictable],
    make_policy: MakePolicy,
    *,
    tokens: int = TOKENS,
    rounds: int = ROUNDS,
) -> tuple[CostCurve, dict[str, Any]]:
    """Run the first `tokens` tokens of every answer `rounds` times, in a context for the longest answer. Return the
    model's cost curve after these runs, which is kept for later ones, and the object that `main` prints. Raises
    ModelError, DecodeFailed, OptionError if no answer fits or ids are those of another vocabulary.
    """
    cut = [replace(answer, answer=answer.answer[:tokens]) for answer in counted(recorded)]
    with Model.open(path) as model:
        most = min(model.n_ctx_train or MAX_CONTEXT, MAX_CONTEXT)
        fitting = [answer for answer in cut if len(answer.prompt) + len(answer.answer) <= most]
        _check(fitting, model, most)
        longest = max(len(answer.prompt) + len(answer.answer) for answer in fitting)
        n_ctx = min(most, max(1024, (longest + 64 + 255) // 256 * 256))  # few different sizes, as each is tuned once
        context, tuning = tune(model, ContextSettings(n_ctx=n_ctx), "fast")
        with context:
            curve = tuning.curve
            curve.busy_now = load_meter(model, context).busy
            runner = Runner(model, Forward(context, capability_of(model, context, "fast")), Slot(context))
            _round(runner, fitting, make_sources, make_policy, curve, -1)  # only refines the curve
            measured = [_round(runner, fitting, make_sources, make_policy, curve, number) for number in range(rounds)]
            # A policy refines its curve, so each gets a copy.
            settled = CostCurve(curve.contexts, curve.ms.copy())
            implied = replay_by_curve(fitting, make_sources, make_policy(settled.copy()), settled).to_dict()
            report = _report(model.name, context.settings, measured, implied)
        tuning.store()
    return curve, report | {"answers": len(fitting), "left_out": len(cut) - len(fitting)}


def _check(answers: Sequence[Recorded], model: Model, most: int) -> None:
    if not answers:
        raise OptionError(f"no recorded answer fits the {most} tokens of context of model {model.path}")
    if max(max([*answer.prompt, *answer.answer]) for answer in answers) >= model.n_vocab:
        raise OptionError(
            f"model {model.path} has {model.n_vocab} tokens, --vocab gives larger ids; use the model's own vocabulary"
        )


def _round(
    runner: Runner,
    answers: Sequence[Recorded],
    make_sources: Callable[[], Predictable],
    make_policy: MakePolicy,
    curve: CostCurve,
    number: int,
) -> list[Measured]:
    """Run all answers with a new policy, as in `replay`; plain and drafted runs alternate."""
    plain, drafted = (make_sources(), Off()), (make_sources(), make_policy(curve))
    measured = []
    for index, answer in enumerate(answers):
        first = None if (index + number) % 2 == 0 else runner.run(answer, *plain)
        ms, statistics = runner.run(answer, *drafted)
        plain_ms, _ = first or runner.run(answer, *plain)
        measured.append((plain_ms, ms, statistics))
    return measured


def _report(
    name: str, settings: ContextSettings, rounds: Sequence[Sequence[Measured]], implied: dict[str, Any]
) -> dict[str, Any]:
    """Return the object that `main` prints. Each answer counts with the median of its rounds."""
    plain, drafted = (sum(median(run[side] for run in each) for each in zip(*rounds, strict=True)) for side in (0, 1))
    runs = [run[2] for row in rounds for run in row]
    tokens, steps = sum(run[2].generated for run in rounds[0]), sum(run.steps for run in runs)
    return {
        "model": name,
        "settings": settings.to_dict(),
        "tokens": tokens,
        "plain_ms_per_token": round(plain / tokens, 4),
        "drafted_ms_per_token": round(drafted / tokens, 4),
        "mat": round(len(rounds) * tokens / steps, 4),
        "nodes_per_step": round(sum(run.drafted for run in runs) / steps, 3),
        "speedup": round(plain / drafted, 4),
        "rounds": [round(sum(run[0] for run in row) / sum(run[1] for run in row), 4) for row in rounds],
        "implied": {key: implied[key] for key in ("speedup", "mat", "nodes_per_step")},
        "implied_over_wall": round(implied["speedup"] * drafted / plain, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("-m", "--model", required=True, metavar="GGUF", help="its forward passes are run")
    parser.add_argument("--vocab", metavar="GGUF", help="tokenize with this vocabulary; default: the model's")
    parser.add_argument("--git", action="append", default=[], type=Path, metavar="REPOSITORY")
    parser.add_argument("--edits", type=int, default=EDITS, metavar="N", help="edits of each repository")
    parser.add_argument("--predict", action="store_true", help="give the old file of an edit as its prediction")
    parser.add_argument("-d", "--datastore", action="append", default=[])
    parser.add_argument("--history", metavar="N|FILE", help="replay N answers and draft from the rest, or from FILE")
    parser.add_argument("--limit", type=int, default=4, metavar="N", help="answers to replay")
    parser.add_argument("--save-curve", type=Path, metavar="FILE", help="write the cost curve that was measured")
    parser.add_argument("--json", action="store_true", help="only the line of JSON")
    args = parser.parse_args()
    with (
        Model.open(args.vocab or args.model, vocab_only=True) as opened,
        open_workload(
            opened.vocabulary, files=args.files, repositories=args.git, edits=args.edits, predict=args.predict,
            datastores=args.datastore, history=args.history, limit=args.limit,
        ) as workload,
    ):  # fmt: skip
        curve, report = wall_clock(args.model, workload.tested, workload.sources, partial(make_policy, "auto"))
    if args.save_curve:
        args.save_curve.write_text(curve_file(curve, f"measured: {report['model']}"), "utf-8")
    if not args.json:
        print(f"{report['model']}: {report['speedup']:.3f} times plain decoding, rounds {report['rounds']}")
    print(json.dumps(report))
