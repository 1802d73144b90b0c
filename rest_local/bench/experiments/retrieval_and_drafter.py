"""Retrieval and a model's own drafting head, each alone and both together.

Two targets: the demo model with its EAGLE-3 head, and the same weights with an MTP layer, which `models/mimo2.py`
writes. Both need files that only a checkout has; without them the experiment is refused. A model given with
`Inputs.model` is measured instead, with the MTP layers of its file.

The answers are plain generations of the model under test: prompts `stored` go on with modules that the datastore holds
and the model has memorised, `unseen` with held-out ones. All setups have this text, decoded on a simulated clock
(`bench.clocked`): heads draft and the target verifies, a forward pass takes what a shipped cost curve says, and a pass
of the head SHARE of that. So tokens a pass and speed-ups are the same on every machine, up to the last bits of logits.
A policy learns from one answer to the next; the first answer of each kind is not counted.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rest_local.bench.clocked import Clock, Said, Setup, Simulated
from rest_local.bench.experiments.generations import generate
from rest_local.bench.experiments.inputs import Inputs
from rest_local.bench.recorded import Recorded
from rest_local.bench.report.shapes import Figure, Section, Series, Table
from rest_local.bench.results import Journal, Result
from rest_local.calibration.cost import LARGEST
from rest_local.calibration.curves import load_curve
from rest_local.decoding.engine import Engine
from rest_local.decoding.streaming import Stream
from rest_local.drafting.models.heads import Head
from rest_local.errors import InputInvalid, ModelInvalid
from rest_local.llama.model import Model
from rest_local.paths import demo_model
from rest_local.retrieval.building.build import build
from rest_local.retrieval.documents import Document
from rest_local.retrieval.format import VocabularyId

NAME = "retrieval-and-drafter"
SUMMARY = "Retrieval, a model's drafting head, and both together."

KINDS = ("stored", "unseen")
WAYS = {"retrieval": (True, False), "head": (False, True), "both": (True, True)}
CURVES = ("rtx3090-8b-q4_0", "cpu-2-cores-0.5b-q4_0")
CURVES_QUICK = CURVES[:1]
SHARE = 0.1  # of a step, for a pass of the head: an MTP layer and the output matrix of an 8B model are some 10% of it
PROMPTS, PROMPTS_QUICK = 6, 2  # of each kind
TOKENS, TOKENS_QUICK = 96, 32
DATASTORE, DATASTORE_QUICK = 1_000_000, 100_000  # tokens
CONTEXT = 1024
CONVERTING_S = 120.0


def targets(inputs: Inputs) -> tuple[dict[str, tuple[Path, Path | None]], dict[str, str]]:
    """By name of the head: the model and the file of the head, None where it is in the model's own file; and why a head
    is left out. Raises InputInvalid that names the missing file.
    """
    if inputs.model is not None:
        return {"mtp": (inputs.model, None)}, {}
    folder = demo_model().parent
    needed = {name: folder / name for name in ("demo-eagle3.gguf", "demo-mtp.gguf", "mimo2.py")}
    for path in needed.values():
        if not path.is_file():
            cause = "the heads of the demo model are in a checkout only; or give a model with MTP layers"
            raise InputInvalid("drafting head", path, cause)
    found: dict[str, tuple[Path, Path | None]] = {"eagle3": (demo_model(), needed["demo-eagle3.gguf"])}
    both = inputs.folder / "demo-with-mtp.gguf"
    try:
        _convert(needed["mimo2.py"], needed["demo-mtp.gguf"], both)
    except InputInvalid as error:  # the library gguf is not installed everywhere
        return found, {"mtp": str(error)}
    return {**found, "mtp": (both, None)}, {}


def _convert(program: Path, layer: Path, output: Path) -> None:
    """Write the demo model with its MTP layer. Raises InputInvalid, for instance without the library gguf."""
    command = [
        sys.executable,
        str(program),
        "--model",
        str(demo_model()),
        "--head",
        str(layer),
        "--output",
        str(output),
    ]
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=CONVERTING_S, text=True)
    except subprocess.TimeoutExpired as error:
        raise InputInvalid("drafting head", layer, f"{program.name} takes longer than {CONVERTING_S:.0f} s") from error
    if done.returncode:
        output.unlink(missing_ok=True)
        lines = done.stderr.strip().splitlines() or [f"{program.name} exits with {done.returncode}"]
        raise InputInvalid("drafting head", layer, lines[-1])


def run(inputs: Inputs, journal: Journal) -> dict[str, Any]:
    """By head, curve and way: what each kind of prompt gave. About 2 minutes, quick: 20 s.

    Raises InputInvalid without heads, ModelInvalid for a model without MTP layers, and the errors of `Engine`.
    """
    models, left_out = targets(inputs)
    number, tokens = (PROMPTS_QUICK, TOKENS_QUICK) if inputs.quick else (PROMPTS, TOKENS)
    answers = {kind: generate(inputs, journal, kind, number + 1, tokens) for kind in KINDS}
    curves = CURVES_QUICK if inputs.quick else CURVES
    found: dict[str, Any] = {}
    for head, (model, file) in models.items():
        units = {(curve, way): f"{head}/{curve}/{way}" for curve in curves for way in WAYS}
        if any(unit not in journal for unit in units.values()):
            with _engines(inputs, model, file) as engines:
                for (curve, way), unit in units.items():
                    if unit not in journal:
                        journal.put(unit, _clocked(engines[WAYS[way][1]], Setup(way, head, *WAYS[way]), curve, answers))
                        inputs.tell(f"decoded: {unit}")
        found[head] = {curve: {way: journal[units[curve, way]] for way in WAYS} for curve in curves}
    return {"heads": found, "share": SHARE, "prompts": number, "tokens": tokens, "left_out": left_out}


@contextmanager
def _engines(inputs: Inputs, model: Path, head: Path | None) -> Iterator[dict[bool, Engine]]:
    """With and without the head, over one datastore. Raises ModelInvalid if there is no head."""
    store = inputs.folder / f"datastore-{model.stem}"
    if not store.exists():
        _build(inputs, store, model)
    common: dict[str, Any] = {"datastores": [store], "n_ctx": CONTEXT, "threads": 1}
    with (
        Engine.load(model, draft_model="none", **common) as without,
        Engine.load(model, draft_model=head, **common) as having,
    ):
        if having._core.lane.drafter is None:
            raise ModelInvalid(model, "has no MTP layer to draft with; give a model that has one")
        yield {False: without, True: having}


def _build(inputs: Inputs, path: Path, model: Path) -> None:
    with Model.open(model, vocab_only=True) as opened:
        vocabulary = opened.vocabulary
        text = inputs.documents(vocabulary, inputs.tokens or (DATASTORE_QUICK if inputs.quick else DATASTORE))
        identity = VocabularyId(vocabulary.hash, vocabulary.size, vocabulary.name)
        named = (Document(f"{number}.py", tokens) for number, tokens in enumerate(text.documents))
        build(path, named, vocabulary=identity, recipe={})


def _clocked(engine: Engine, setup: Setup, curve: str, answers: dict[str, list[Recorded]]) -> dict[str, Any]:
    """Decode all answers with one policy, the kinds in turn, and without the first of each. By kind: sums."""
    drafter = engine._core.lane.drafter if setup.head else None
    clock = Clock(load_curve(curve), SHARE if setup.head else 0.0, drafter if isinstance(drafter, Head) else None)
    policy = Simulated(clock, setup, engine.model.n_vocab)
    found = {kind: _Sums() for kind in answers}
    for number, together in enumerate(zip(*answers.values(), strict=False)):
        for kind, answer in zip(answers, together, strict=True):
            with clock:
                result = _decode(engine, answer, policy)
            if result.tokens != answer.answer:
                raise AssertionError(f"answer {answer.name}: the decoder changed a recorded token")
            if number:
                found[kind].add(result, clock, clock.plain_ms(len(answer.prompt), result.draft.generated))
    return {kind: sums.to_dict() for kind, sums in found.items()}


@dataclass
class _Sums:
    """Over the answers of one kind."""

    counts: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    plain_ms: float = 0.0
    clock_ms: float = 0.0
    head_ms: float = 0.0

    def add(self, result: Any, clock: Clock, plain_ms: float) -> None:
        draft = result.draft
        self.counts.update(answers=1, steps=draft.steps, tokens=draft.generated, drafted=draft.drafted)
        self.accepted.update({name: counts.accepted for name, counts in draft.by_source.items()})
        self.plain_ms += plain_ms
        self.clock_ms += clock.ms
        self.head_ms += clock.head_ms

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            **self.counts,
            "mat": round(self.counts["tokens"] / max(self.counts["steps"], 1), 4),
            "speedup": round(self.plain_ms / self.clock_ms, 4),
            "head_share": round(self.head_ms / self.clock_ms, 4),
            "accepted_by_source": dict(self.accepted),
        }


def _decode(engine: Engine, answer: Recorded, policy: Simulated) -> Any:
    """Generate what was recorded, with the prompt evaluated anew."""
    request = engine.request(
        answer.prompt, max_tokens=len(answer.answer), policy=policy.fork(), keep_prefix=False, ignore_end=True
    )
    sequence = engine._core.prepare(request)
    sequence.chooser.close()
    sequence.chooser = Said([*answer.answer, *[0] * LARGEST])  # a draft may be longer than what is left of the answer
    stream = engine._begin(Stream(sequence, engine._step_until, engine._core.cancel))
    for _ in stream:
        pass
    return stream.result


def section(result: Result) -> Section:
    """Words, a table, and bars of the speed-up by way."""
    data = result.data
    rows, names, bars = [], [], {way: list[float]() for way in WAYS}
    for head, curves in data["heads"].items():
        for curve, ways in curves.items():
            for kind in KINDS:
                names.append(f"{head}, {kind}, {curve}")
                for way in WAYS:
                    row = ways[way][kind]
                    bars[way].append(row["speedup"])
                    rows.append([f"{names[-1]}: {way}", row["mat"], row["speedup"], row["head_share"], _sources(row)])
    return Section(
        title="Retrieval and a drafting head",
        command=result.command,
        words=[
            f"{data['prompts']} answers of each kind were decoded on a simulated clock, with retrieval, with the head "
            f"and with both. A pass of the head takes {data['share']:.0%} of a step.",
            *_words(data["heads"]),
        ],
        tables=[
            Table(
                "Tokens a pass and speed-up",
                ("head, prompts, curve", "MAT", "speed-up", "time of the head", "accepted tokens from"),
                rows,
                note="Speed-up over plain decoding on the clock; time of the head: its share of all time.",
            )
        ],
        figures=[
            Figure(
                name="retrieval-and-drafter",
                title="Retrieval, the head, and both",
                x="head, prompts, cost curve",
                y="times plain decoding",
                series=[Series(way, values) for way, values in bars.items()],
                alt="Bars: speed-up of retrieval, of the head and of both, by head, kind of prompt and cost curve.",
                categories=names,
                level=1.0,
            )
        ],
        machine=result.machine.line(),
        footnotes=[f"{head} is left out: {reason}." for head, reason in data["left_out"].items()],
    )


def _sources(row: dict[str, Any]) -> str:
    accepted = {name: count for name, count in row["accepted_by_source"].items() if count}
    total = sum(accepted.values())
    parts = sorted(accepted.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {count / total:.0%}" for name, count in parts)


def _words(heads: dict[str, Any]) -> Sequence[str]:
    words = []
    for head, curves in heads.items():
        for kind in KINDS:
            cells = [ways for curve, ways in curves.items()]
            over = [
                ways["both"][kind]["speedup"] / max(ways[way][kind]["speedup"] for way in ("retrieval", "head"))
                for ways in cells
            ]
            won = sum(ratio > 1.0 for ratio in over)
            words.append(
                f"{head}, {kind} prompts: both together are {min(over):.2f} to {max(over):.2f} times as fast as the "
                f"better one alone; ahead on {won} of {len(over)} cost curves."
            )
    return words
