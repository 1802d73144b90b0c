"""ReSpec's claims, each part alone and all together, on fresh and on repeated text.

ReSpec (arXiv 2511.01282) adds four parts to drafting from retrieved text: a trigger that looks up only where the model
is certain, a score of each place in the text by what was accepted from it, several candidates in one tree, and relaxed
verification of retrieved tokens. `policy` names below:

- `no part`: the newest place of the longest match, at every step
- `+ ...`: one part more than that. `+ score by match` keeps one score for each match length, not for each place
- `respec`: trigger, score and candidates, as the policy of that name; `respec + relaxed`: all four
- `rest`, `sam`, `auto`: for comparison

Recorded answers are replayed, with speed-ups by cost curves; a replay has no entropies and no distributions, so the
trigger and relaxed verification are left out there. A model generates greedily from prompts of four kinds
(`bench.kinds`), where all parts work. Every policy starts cold and gets the same answers or prompts in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from rest_local.bench.demo import repeated_share
from rest_local.bench.experiments.inputs import Inputs
from rest_local.bench.kinds import KINDS, prompts
from rest_local.bench.prompts import filters, standard_library, well_known_modules
from rest_local.bench.recorded import Recorded
from rest_local.bench.replay import replay
from rest_local.bench.report.shapes import Figure, Section, Series, Table
from rest_local.bench.results import Journal, Result
from rest_local.bench.transcripts import renames_of
from rest_local.bench.workload import whole_file_edit
from rest_local.calibration.cost import CostCurve
from rest_local.calibration.curves import load_curve
from rest_local.decoding.engine import Engine
from rest_local.decoding.request import STRICT, Strict
from rest_local.decoding.results import DraftStatistics
from rest_local.decoding.verify import Relaxed
from rest_local.drafting.sources import Sources
from rest_local.llama.model import Model
from rest_local.planning.policies import make_policy
from rest_local.planning.policy import Policy
from rest_local.planning.respec import ReSpec
from rest_local.retrieval.building.indexing import build_datastore

NAME = "respec-parts"
SUMMARY = "Each part of ReSpec alone and all together, on fresh and on repeated text."

CURVES = ("cpu-2-cores-0.5b-q4_0", "rtx3090-8b-q4_0")
Bare = partial(ReSpec, trigger=False, feedback=False, candidates=1)
BARE = "no part"
PARTS: dict[str, Callable[[], Policy]] = {
    BARE: Bare,
    "+ trigger": partial(Bare, trigger=True),
    "+ score": partial(Bare, feedback=True),
    "+ score by match": partial(Bare, feedback=True, by="match"),
    "+ candidates": partial(ReSpec, trigger=False, feedback=False),
    "respec": ReSpec,
}
RELAXED: dict[str, Callable[[], Policy]] = {"+ relaxed": Bare, "respec + relaxed": ReSpec}
OTHERS = ("rest", "sam", "auto")
IN_REPLAY = tuple(name for name in PARTS if name != "+ trigger")
REPEATED = ("edits", "edit", "copy", "stored")  # texts whose answers repeat their prompt or the datastore

ANSWERS, ANSWERS_QUICK = {"HumanEval": 40, "MT-Bench": 16, "edits": 10}, {"HumanEval": 5, "MT-Bench": 1, "edits": 1}
STORED, STORED_QUICK = 300_000, 30_000  # tokens of the datastore of HumanEval
PROMPTS, TOKENS = 4, 120  # of each kind; of an answer
KINDS_QUICK, PROMPTS_QUICK, TOKENS_QUICK = ("unseen", "stored"), 1, 60
CONTEXT = 2048


def run(inputs: Inputs, journal: Journal) -> dict[str, Any]:
    """Rows by text, of replay and of the model. About 2 minutes, quick: 10 s. Recorded answers may be missing."""
    texts = [name for name in ANSWERS if name == "edits" or inputs.has(name)]
    for name in texts:
        if f"replay {name}" not in journal:
            journal.put(f"replay {name}", _replayed(inputs, name))
            inputs.tell(f"replayed: {name}")
    if "model" not in journal:
        journal.put("model", _generated(inputs))
    return {
        "curves": list(CURVES),
        "replay": {name: journal[f"replay {name}"] for name in texts},
        "model": journal["model"],
        "left_out": [name for name in ANSWERS if name not in texts],
    }


def _policies(curve: Callable[[], CostCurve], parts: Sequence[str] = tuple(PARTS)) -> dict[str, Callable[[], Policy]]:
    def named(name: str) -> Callable[[], Policy]:
        return lambda: make_policy(name, curve())

    return {**{name: PARTS[name] for name in parts}, **{name: named(name) for name in OTHERS}}


def _replayed(inputs: Inputs, name: str) -> list[dict[str, Any]]:
    """A row for each policy: MAT, nodes a step, and the speed-up by curve."""
    most = (ANSWERS_QUICK if inputs.quick else ANSWERS)[name]
    model = inputs.vocabulary(name) if name != "edits" else _edit_vocabulary(inputs)
    with model as opened:
        vocabulary = opened.vocabulary
        stores: Any = []
        if name == "edits":
            changes = renames_of(standard_library(), 0, most)[:most]
            recorded: list[Recorded] = [whole_file_edit(*change, vocabulary) for change in changes]
            recorded = [Recorded(each.name, each.prompt, each.answer) for each in recorded]  # without the prediction
        else:
            recorded = inputs.answers(name, vocabulary, most)
        if name == "HumanEval":
            stores = [inputs.documents(vocabulary, STORED_QUICK if inputs.quick else STORED).segment()]
        make_sources = partial(Sources, stores, vocabulary.size)
        rows: dict[str, dict[str, Any]] = {}
        for curve in CURVES:
            for policy, make in _policies(partial(load_curve, curve), IN_REPLAY).items():
                tally = replay(recorded, make_sources, make(), load_curve(curve)).to_dict()
                row = rows.setdefault(policy, {"policy": policy, "speedup": {}})
                row["speedup"][curve] = tally["speedup"]
                row |= {key: tally[key] for key in ("mat", "nodes_per_step") if curve == CURVES[0]}
        return list(rows.values())


def _edit_vocabulary(inputs: Inputs) -> Any:
    if inputs.has("HumanEval"):
        return inputs.vocabulary("HumanEval")
    return Model.open(inputs.model_path, vocab_only=True)


def _generated(inputs: Inputs) -> list[dict[str, Any]]:
    """A row for each policy and kind of prompt, greedy, with trees, in one engine."""
    tokens = TOKENS_QUICK if inputs.quick else TOKENS
    kinds = KINDS_QUICK if inputs.quick else KINDS
    available = list(prompts())
    most = PROMPTS_QUICK if inputs.quick else PROMPTS
    texts = {kind: [p.text for p in available if p.kind == kind][:most] for kind in kinds}
    store = code_datastore(inputs)
    rows = []
    with Engine.load(inputs.model_path, datastores=[store], n_ctx=CONTEXT) as engine:
        plain = {kind: [_answer(engine, t, tokens, "off", STRICT)[0] for t in some] for kind, some in texts.items()}
        runs: list[tuple[str, Callable[[], Policy], Relaxed | Strict]] = [
            *((name, make, STRICT) for name, make in _policies(lambda: engine.cost_curve).items()),
            *((name, make, Relaxed()) for name, make in RELAXED.items()),
        ]
        for name, make, verify in runs:
            policy = make()
            for kind, some in texts.items():
                answers = [_answer(engine, text, tokens, policy, verify) for text in some]
                rows.append({"policy": name, "kind": kind, **_sums(answers, plain[kind])})
            inputs.tell(f"generated: {name}")
    return rows


def code_datastore(inputs: Inputs) -> str:
    """The path of a datastore of the standard library without its held-out modules, in the temporary folder. In a
    quick run: of its well-known modules.
    """
    path = inputs.folder / "standard-library"
    if not path.exists():
        include, exclude = filters()
        with Model.open(inputs.model_path, vocab_only=True) as model:
            build_datastore(
                path,
                [standard_library()],
                vocabulary=model.vocabulary,
                include=tuple(f"/{name}" for name in well_known_modules()) if inputs.quick else include,
                exclude=exclude,
            )
    return str(path)


def _answer(
    engine: Engine, text: str, tokens: int, policy: str | Policy, verify: Relaxed | Strict
) -> tuple[list[int], DraftStatistics]:
    stream = engine.generate(text, max_tokens=tokens, policy=policy, verify=verify)
    for _ in stream:
        pass
    return stream.result.tokens, stream.result.draft


def _sums(answers: Sequence[tuple[list[int], DraftStatistics]], plain: Sequence[list[int]]) -> dict[str, Any]:
    steps = max(1, sum(draft.steps for _, draft in answers))
    changed = sum(tokens != unrelaxed for (tokens, _), unrelaxed in zip(answers, plain, strict=True))
    return {
        "mat": round(sum(draft.generated for _, draft in answers) / steps, 4),
        "nodes_per_step": round(sum(draft.drafted for _, draft in answers) / steps, 3),
        "tokens": sum(len(tokens) for tokens, _ in answers),
        "repeated": round(fmean(repeated_share(tokens) for tokens, _ in answers), 3),
        "relaxed": sum(draft.relaxed for _, draft in answers),
        "answers": len(answers),
        "changed": changed,
    }


def section(result: Result) -> Section:
    """Words, a table of the replays by text, one of the model by kind, and MAT by part."""
    data = result.data
    curves: list[str] = data["curves"]
    replays: dict[str, list[dict[str, Any]]] = data["replay"]
    rows = [
        [name, row["policy"], row["mat"], row["nodes_per_step"], *(row["speedup"][curve] for curve in curves)]
        for name, found in replays.items()
        for row in found
    ]
    kinds = list(dict.fromkeys(row["kind"] for row in data["model"]))
    return Section(
        title="ReSpec's parts",
        command=result.command,
        words=[
            "Each part of ReSpec was added alone to the simplest drafting from retrieved text, and all together.",
            *_replay_words(replays, curves),
            *(_model_words([row for row in data["model"] if row["kind"] == kind], kind) for kind in kinds),
            _relaxed_words(data["model"]),
        ],
        tables=[
            Table("Replay", ("text", "policy", "MAT", "nodes a step", *curves), rows, note="Speed-up by cost curve."),
            Table(
                "Generated by the model",
                ("text", "policy", "MAT", "nodes a step", "relaxed tokens", "answers", "changed"),
                [
                    [
                        row["kind"],
                        row["policy"],
                        *(row[key] for key in ("mat", "nodes_per_step", "relaxed", "answers", "changed")),
                    ]
                    for kind in kinds
                    for row in data["model"]
                    if row["kind"] == kind
                ],
                note="Changed: answers that differ from plain decoding's. In fast mode near-ties change some, too.",
            ),
        ],
        figures=[_figure(data["model"], kinds)],
        machine=result.machine.line(),
        footnotes=[f"{name} is left out: its recorded answers were not given." for name in data["left_out"]],
    )


def _text(name: str) -> str:
    return f"{name} ({'repeated' if name in REPEATED else 'fresh'} text)"


def _replay_words(replays: dict[str, list[dict[str, Any]]], curves: Sequence[str]) -> list[str]:
    words = []
    for name, rows in replays.items():
        bare = next(row for row in rows if row["policy"] == BARE)
        parts = [row for row in rows if row["policy"].startswith("+")]
        more = _listed([row["policy"] for row in parts if row["mat"] > bare["mat"]])
        faster = {
            curve: _listed([row["policy"] for row in parts if row["speedup"][curve] > bare["speedup"][curve]])
            for curve in curves
        }
        best = {curve: max(rows, key=lambda row: float(row["speedup"][curve])) for curve in curves}
        words.append(
            f"Replay of {_text(name)}: MAT is {bare['mat']:.2f} with no part and rises with {more}. "
            + " ".join(
                f"On {curve} faster than with no part: {faster[curve]}; fastest is {best[curve]['policy']} "
                f"({best[curve]['speedup'][curve]:.2f} times plain)."
                for curve in curves
            )
        )
    return words


def _model_words(rows: Sequence[dict[str, Any]], kind: str) -> str:
    bare = next(row for row in rows if row["policy"] == BARE)
    parts = [row for row in rows if row["policy"].startswith("+")]
    more = _listed([f"{row['policy']} ({row['mat']:.2f})" for row in parts if row["mat"] > bare["mat"]])
    best = max(rows, key=lambda row: float(row["mat"]))
    return (
        f"The model on {_text(kind)}: MAT is {bare['mat']:.2f} with no part and rises with {more}; the highest is "
        f"{best['mat']:.2f} by {best['policy']} with {best['nodes_per_step']:.1f} nodes a step. Of the 8-grams of its "
        f"answers {bare['repeated']:.0%} repeat earlier ones; a model that loops flatters every drafter."
    )


def _relaxed_words(rows: Sequence[dict[str, Any]]) -> str:
    pairs = (("+ relaxed", BARE), ("respec + relaxed", "respec"))
    words = []
    for relaxed, strict in pairs:
        of = {name: [row for row in rows if row["policy"] == name] for name in (relaxed, strict)}
        count, tokens = (sum(row[key] for row in of[relaxed]) for key in ("relaxed", "tokens"))
        changed = sum(row["changed"] for row in of[relaxed])
        words.append(
            f"{relaxed}: {count} of {tokens:,} tokens are not the model's choice, {changed} of "
            f"{sum(row['answers'] for row in of[relaxed])} answers change, and MAT is {_mean(of[relaxed]):.2f} in "
            f"place of {_mean(of[strict]):.2f}."
        )
    return "Relaxed verification changes the output. " + " ".join(words)


def _mean(rows: Sequence[dict[str, Any]]) -> float:
    return sum(float(row["mat"]) for row in rows) / len(rows)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "no part alone"


def _figure(rows: Sequence[dict[str, Any]], kinds: Sequence[str]) -> Figure:
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    mats = {(row["policy"], row["kind"]): row["mat"] for row in rows}
    return Figure(
        name="respec-parts",
        title="Tokens a pass by part and kind of text",
        x="policy",
        y="tokens a forward pass",
        series=[Series(_text(kind), [mats[policy, kind] for policy in policies]) for kind in kinds],
        alt="Bars: mean accepted tokens for each part of ReSpec and for other policies, by kind of text.",
        categories=policies,
        level=1.0,
    )
