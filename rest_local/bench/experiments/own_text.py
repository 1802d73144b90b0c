"""A model's own earlier answers against text of people as a datastore, of equal numbers of tokens.

The answers of a model are split into those under test and earlier ones. Texts of TOKENS tokens, or of as many as the
earlier answers have, are the datastore of a replay, one after another:

- `own`: the earlier answers
- `people`: text that people wrote. For chat the questions and documents of Spec-Bench (without MT-Bench's), else the
  Markdown and plain text of installed packages; for code the Python sources of this machine. `Inputs.text`, if given,
  takes the place of all of them
- `other model`: answers of the model of another set
- `half and half`: the first halves of `own` and `people`, so of the same number of tokens
- `own + people`: all of both, so of twice as many tokens
- `people x 10`: ten times as many tokens of people, where there are so many

All of them are searched as datastores, in the same way, and so differ in nothing but their text. The text of the
request is searched, too. `none` is that alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from rest_local.bench.experiments.domains import PROSE
from rest_local.bench.experiments.generations import generate
from rest_local.bench.experiments.inputs import ANSWERS, SOURCE, Inputs, by_name
from rest_local.bench.experiments.retrieval_quality import up_to_tokens
from rest_local.bench.generated import up_to
from rest_local.bench.recorded import Recorded, load
from rest_local.bench.replay import Threshold, replay
from rest_local.bench.report.shapes import Figure, Section, Series, Table
from rest_local.bench.results import Journal, Result
from rest_local.calibration.curves import load_curve
from rest_local.drafting.sources import Sources
from rest_local.errors import InputInvalid
from rest_local.llama.model import Model
from rest_local.llama.vocabulary import Vocabulary
from rest_local.planning.policies import make_policy
from rest_local.retrieval.rows import Int32Array
from rest_local.retrieval.segment import Segment

NAME = "own-text"
SUMMARY = "A model's earlier answers against text of people as a datastore, of equal sizes."

SETS = ("MT-Bench", "AlpacaEval")
OTHER = {"MT-Bench": "AlpacaEval", "AlpacaEval": "MT-Bench"}
PEOPLE_FILE = "spec_bench_questions.jsonl"
PEOPLE = ("translation", "summarization", "qa", "math_reasoning", "rag")  # its categories that MT-Bench does not have
CURVE = "rtx3090-8b-q4_0"
NODES = 63
TESTED, TESTED_QUICK = 8000, 800  # tokens of answers
TOKENS = 100_000
GENERATED, GENERATED_TESTED, GENERATED_TOKENS = 26, 10, 192
GENERATED_NAME = "model, modules"
VARIANTS = ("none", "own", "people", "other model", "half and half", "own + people", "people x 10")

Documents = Sequence[Int32Array]


def texts(own: Documents, people: Documents, other: Documents, most: int) -> dict[str, list[Int32Array]]:
    """The documents of each variant. Those of one size have as many tokens as the shorter of `own` and `people`, and
    `most` at most. A variant for which there is too little text is left out.
    """
    tokens = min(_tokens(own), _tokens(people), most)
    found = {
        "none": [],
        "own": list(up_to(own, tokens)),
        "people": list(up_to(people, tokens)),
        "half and half": [*up_to(own, tokens // 2), *up_to(people, tokens - tokens // 2)],
        "own + people": [*up_to(own, tokens), *up_to(people, tokens)],
    }
    if _tokens(other) >= tokens:
        found["other model"] = list(up_to(other, tokens))
    if _tokens(people) >= 10 * tokens:
        found["people x 10"] = list(up_to(people, 10 * tokens))
    return {name: found[name] for name in VARIANTS if name in found}


def _tokens(documents: Documents) -> int:
    return sum(map(len, documents))


def compare(tested: Sequence[Recorded], variants: Mapping[str, Documents], vocab_size: int) -> dict[str, Any]:
    """By variant: tokens of its text, tokens a pass with up to NODES nodes a step, and the speed-up of `auto`."""
    found = {}
    for name, documents in variants.items():
        kept = [document for document in documents if len(document)]
        stores: Any = [Segment.of(kept, vocab_size)] if kept else []
        make = partial(Sources, stores, vocab_size)
        fixed = replay(tested, make, Threshold(0.0, NODES), load_curve(CURVE))
        auto = replay(tested, make, make_policy("auto", load_curve(CURVE)), load_curve(CURVE))
        found[name] = {
            "tokens": _tokens(kept),
            "mat": round(fixed.tokens / max(fixed.steps, 1), 4),
            "of_datastore": round(fixed.accepted_by_source["datastore"] / max(fixed.accepted, 1), 4),
            "auto_mat": round(auto.tokens / max(auto.steps, 1), 4),
            "speedup": round(auto.speedup, 4),
        }
    return found


def run(inputs: Inputs, journal: Journal) -> dict[str, Any]:
    """By set and variant. About 90 s, quick: 15 s. Sets of which files are missing are left out with the reason.

    Raises InputInvalid if a folder of recorded answers was given and has none of the sets.
    """
    found, left_out = by_name(inputs, journal, SETS, partial(_recorded, inputs))
    if inputs.data is not None and not found:
        raise InputInvalid("recorded answers", inputs.data, "; ".join(left_out.values()))
    if GENERATED_NAME not in journal:
        journal.put(GENERATED_NAME, _generated(inputs, journal))
        inputs.tell(f"replayed: {GENERATED_NAME}")
    found[GENERATED_NAME] = journal[GENERATED_NAME]
    return {"curve": CURVE, "nodes": NODES, "sets": found, "left_out": left_out}


def _recorded(inputs: Inputs, name: str) -> dict[str, Any]:
    inputs.file(ANSWERS[name].file)
    with inputs.vocabulary(name) as model:
        answers = inputs.answers(name, model.vocabulary)
        tested = up_to_tokens(answers, TESTED_QUICK if inputs.quick else TESTED)
        own = arrays([answer.answer for answer in answers[len(tested) :]])
        file = ANSWERS[OTHER[name]].file
        others = load(inputs.file(file), model.vocabulary) if inputs.has(OTHER[name]) else []
        most = TOKENS // (20 if inputs.quick else 1)
        people, source = _people(inputs, model.vocabulary, 10 * min(most, _tokens(own)))
        variants = texts(own, people, arrays([answer.answer for answer in others]), most)
        found = compare(tested, variants, model.vocabulary.size)
    return {"variants": found, "answers": len(tested), "people": source}


def _generated(inputs: Inputs, journal: Journal) -> dict[str, Any]:
    number, n_tested, tokens = (4, 2, 48) if inputs.quick else (GENERATED, GENERATED_TESTED, GENERATED_TOKENS)
    answers = generate(inputs, journal, "unseen", number, tokens)
    tested, earlier = answers[:n_tested], arrays([answer.answer for answer in answers[n_tested:]])
    with Model.open(inputs.model_path, vocab_only=True) as model:
        text = inputs.documents(model.vocabulary, 10 * max(_tokens(earlier), 1))
        found = compare(tested, texts(earlier, text.documents, [], TOKENS), model.vocabulary.size)
    return {"variants": found, "answers": len(tested), "people": text.source}


def _people(inputs: Inputs, vocabulary: Vocabulary, tokens: int) -> tuple[Documents, str]:
    """Text that people wrote, `tokens` tokens at most, and what it is."""
    if not inputs.text and inputs.data is not None and (inputs.data / PEOPLE_FILE).is_file():
        return read_questions(inputs, vocabulary), f"{PEOPLE_FILE}, {', '.join(PEOPLE)}"
    text = inputs.documents(vocabulary, tokens, SOURCE if inputs.text else PROSE, copies=False)
    return text.documents, text.source


def read_questions(inputs: Inputs, vocabulary: Vocabulary) -> list[Int32Array]:
    """The texts of Spec-Bench that are no questions of MT-Bench. Raises InputInvalid."""
    path = inputs.file(PEOPLE_FILE)
    try:
        lines = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
        turns = [turn for line in lines if line["category"] in PEOPLE for turn in line["turns"]]
        return [vocabulary.tokenize(turn) for turn in turns]
    except (ValueError, KeyError, TypeError) as error:
        raise InputInvalid("questions", path, f"no lines of Spec-Bench ({error!r})") from error


def arrays(answers: Sequence[Sequence[int]]) -> list[Int32Array]:
    """Documents of token ids."""
    return [np.asarray(answer, np.int32) for answer in answers]


def section(result: Result) -> Section:
    """Words, a table by set and variant, and a figure."""
    data = result.data
    sets: dict[str, Any] = data["sets"]
    keys = ("tokens", "mat", "of_datastore", "auto_mat", "speedup")
    return Section(
        title="Text of people or of the model",
        command=result.command,
        words=[
            "Datastores of the model's own earlier answers and of text that people wrote, with equal numbers of "
            "tokens, were compared by replay.",
            *(_words(name, found) for name, found in sets.items()),
        ],
        tables=[
            Table(
                "Tokens a pass by text of the datastore",
                ("answers, text", "tokens", "MAT", "of the datastore", "auto MAT", "speed-up"),
                [
                    [f"{name}, {variant}", *(row[key] for key in keys)]
                    for name, found in sets.items()
                    for variant, row in found["variants"].items()
                ],
                note=f"MAT with up to {data['nodes']} nodes a step; of the datastore: share of the accepted tokens; "
                f"auto and speed-up on the cost curve {data['curve']}.",
            )
        ],
        figures=[
            Figure(
                name="own-text",
                title="What to draft from: own answers or text of people",
                x="text of the datastore",
                y="tokens a pass",
                series=[
                    Series(name, [found["variants"].get(variant, {}).get("mat") for variant in VARIANTS])
                    for name, found in sets.items()
                ],
                alt="Bars: tokens a pass with datastores of own answers, of people's text and of both, by set.",
                categories=VARIANTS,
                level=1.0,
            )
        ],
        machine=result.machine.line(),
        footnotes=[
            *(f"{name}: text of people is {found['people']}." for name, found in sets.items()),
            *(f"{name} is left out: {reason}." for name, reason in data["left_out"].items()),
        ],
    )


def _words(name: str, found: dict[str, Any]) -> str:
    variants = found["variants"]
    none, own, people = (variants[key]["mat"] for key in ("none", "own", "people"))
    both, half = variants["own + people"]["mat"], variants["half and half"]["mat"]
    ahead = own / people - 1
    winner = "neither is ahead by 1%" if abs(ahead) < 0.01 else f"{'own answers' if ahead > 0 else 'people'} are ahead"
    sentence = (
        f"{name}: {variants['own']['tokens']:,} tokens of own answers give {own:.2f} tokens a pass, as many of people "
        f"{people:.2f}, without either it is {none:.2f}; {winner}. Half of each gives {half:.2f}, all of both "
        f"{both:.2f}."
    )
    if "other model" in variants:
        sentence += f" Answers of another model give {variants['other model']['mat']:.2f}."
    if "people x 10" in variants:
        more = variants["people x 10"]["mat"]
        sentence += f" Ten times as much text of people gives {more:.2f}" + (
            ", more than own answers." if more > own else ", still less than own answers." if more < own else "."
        )
    return sentence
