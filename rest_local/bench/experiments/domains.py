"""How large a datastore should be, by domain: the size after which doubling it gains less than 1%.

Each domain has texts under test and documents of the same kind, which are halved again and again at random
(`bench.sizes`). A domain is one of:

- `code`: HumanEval answers; installed Python sources
- `library`: modules of the standard library that are held out; the same sources
- `chat`, `instructions`: a part of MT-Bench and AlpacaEval answers; the others, and for MT-Bench those of AlpacaEval
- `JSON`, `prose`: installed JSON, and Markdown, reStructuredText and plain text; other files of that kind

A file under test is cut: what comes first is the prompt. The speed-up is that of `auto` on a shipped cost curve. No
domain has more text than this machine and the data folder hold, so where the gain is still above 1% at the largest
size, no size is enough, and the result says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from math import log2
from typing import Any

import numpy as np

from rest_local.bench.experiments.inputs import ANSWERS, Inputs, by_name
from rest_local.bench.experiments.retrieval_quality import up_to_tokens
from rest_local.bench.generated import up_to
from rest_local.bench.prompts import held_out_modules, standard_library
from rest_local.bench.recorded import Recorded, load
from rest_local.bench.report.shapes import Figure, Section, Series, Table
from rest_local.bench.results import Journal, Result
from rest_local.bench.sizes import Corpus, measure
from rest_local.errors import CorpusEmpty, InputInvalid
from rest_local.llama.vocabulary import Vocabulary
from rest_local.retrieval.rows import Int32Array

NAME = "domains"
SUMMARY = "The size of a datastore after which doubling it gains less than 1%, by domain."

CURVE = "rtx3090-8b-q4_0"
LEAST_GAIN = 0.01  # of the speed-up, for a doubling
SHARES = tuple(2.0**-n for n in range(6, -1, -1))
SHARES_QUICK = (1 / 16, 1 / 4, 1.0)
TOKENS, TOKENS_QUICK = 2_000_000, 100_000  # of a domain's documents, at most
TESTED, TESTED_QUICK = 3000, 800  # tokens under test
DRAWS = 2
PROMPT, ANSWER = 300, 200  # tokens of a file under test
PROSE = ("*.md", "*.rst", "*.txt")
VOCABULARY = "HumanEval"  # the set whose vocabulary the domains made of files take

Domain = tuple[Sequence[Int32Array], list[Recorded], str]
"""Documents, what is tested, and what the documents are."""


def _code(inputs: Inputs, vocabulary: Vocabulary, tokens: int) -> Domain:
    text = inputs.documents(vocabulary, tokens)
    return text.documents, inputs.answers("HumanEval", vocabulary), text.source


def _library(inputs: Inputs, vocabulary: Vocabulary, tokens: int) -> Domain:
    text = inputs.documents(vocabulary, tokens)
    paths = [standard_library() / module for module in held_out_modules()]
    files = [vocabulary.tokenize(path.read_text("utf-8")) for path in paths if path.is_file()]
    return text.documents, cut(files, [path.name for path in paths if path.is_file()]), text.source


def _mt_bench(inputs: Inputs, vocabulary: Vocabulary, tokens: int) -> Domain:
    """Its own answers are few, so those of another model to other questions are documents, too."""
    answers = inputs.answers("MT-Bench", vocabulary)
    half = len(answers) // 2
    others = load(inputs.file(ANSWERS["AlpacaEval"].file), vocabulary) if inputs.has("AlpacaEval") else []
    documents = [np.array(each.answer, np.int32) for each in (*answers[half:], *others)]
    what = "other answers of this model" + (" and AlpacaEval answers of another one" if others else "")
    return documents, answers[:half], what


def _alpaca_eval(inputs: Inputs, vocabulary: Vocabulary, tokens: int) -> Domain:
    answers = inputs.answers("AlpacaEval", vocabulary)
    tested = up_to_tokens(answers, TESTED)
    return [np.array(each.answer, np.int32) for each in answers[len(tested) :]], tested, "other answers of this model"


def _files(suffixes: tuple[str, ...]) -> Callable[[Inputs, Vocabulary, int], Domain]:
    def domain(inputs: Inputs, vocabulary: Vocabulary, tokens: int) -> Domain:
        """Every tenth of the long files is tested; none of its tokens is a document."""
        text = inputs.documents(vocabulary, tokens, suffixes, copies=False)
        long = [number for number, document in enumerate(text.documents) if len(document) >= PROMPT + ANSWER]
        chosen = long[::10]
        tested = cut([text.documents[number] for number in chosen], list(map(str, chosen)))
        documents = [document for number, document in enumerate(text.documents) if number not in set(chosen)]
        return documents, tested, text.source

    return domain


DOMAINS: dict[str, tuple[str, Callable[[Inputs, Vocabulary, int], Domain]]] = {
    "code": ("HumanEval", _code),
    "library": (VOCABULARY, _library),
    "chat": ("MT-Bench", _mt_bench),
    "instructions": ("AlpacaEval", _alpaca_eval),
    "JSON": (VOCABULARY, _files(("*.json",))),
    "prose": (VOCABULARY, _files(PROSE)),
}
"""By name: the set whose vocabulary it takes, and what makes it."""


def cut(files: Sequence[Int32Array], names: Sequence[str]) -> list[Recorded]:
    """Of each file that is long enough, PROMPT tokens as the prompt and the next ANSWER as the answer."""
    return [
        Recorded(name, tokens[:PROMPT].tolist(), tokens[PROMPT : PROMPT + ANSWER].tolist())
        for name, tokens in zip(names, files, strict=True)
        if len(tokens) >= PROMPT + ANSWER
    ]


def run(inputs: Inputs, journal: Journal) -> dict[str, Any]:
    """The report of `bench.sizes` for each domain. About 2 minutes, quick: 15 s.

    A domain of which something is missing is left out with the reason. Raises InputInvalid if that is all of them.
    """
    reasons = (InputInvalid, CorpusEmpty)
    found, left_out = by_name(inputs, journal, DOMAINS, partial(_measured, inputs), reasons=reasons)
    if not found:
        raise InputInvalid("recorded answers", inputs.data or "-", "; ".join(left_out.values()))
    return {"curve": CURVE, "least_gain": LEAST_GAIN, "domains": found, "left_out": left_out}


def _measured(inputs: Inputs, name: str) -> dict[str, Any]:
    answers, make = DOMAINS[name]
    most = inputs.tokens or (TOKENS_QUICK if inputs.quick else TOKENS)
    with inputs.vocabulary(answers) as model:
        documents, tested, what = make(inputs, model.vocabulary, most)
        documents = [document for document in up_to(documents, most) if len(document)]
        tested = _first(tested, TESTED_QUICK if inputs.quick else TESTED)
        if not documents or not tested:
            raise CorpusEmpty(what, "no text, or none to test")
        report = measure(
            Corpus(documents, model.vocabulary.size),
            tested,
            curves=[CURVE],
            draws=1 if inputs.quick else DRAWS,
            shares=SHARES_QUICK if inputs.quick else SHARES,
            targets=[],
            seed=inputs.seed,
        )
    return {**report, "what": what, "best": best_size(report["points"], CURVE)}


def _first(answers: Sequence[Recorded], tokens: int) -> list[Recorded]:
    sizes = np.cumsum([len(answer.answer) for answer in answers])
    return list(answers[: int(np.searchsorted(sizes, tokens)) + 1])


def best_size(points: Sequence[dict[str, Any]], curve: str) -> dict[str, Any]:
    """The smallest size from which no doubling gains LEAST_GAIN of the speed-up: {"tokens", "enough", "gain"}.

    points: of `bench.sizes`, the first one without a datastore. gain: of the last doubling that was measured; between
    sizes that are further apart, the gain of one of the doublings. Where the last doubling still gains more, `enough`
    is False and `tokens` the largest size. A datastore that never gains LEAST_GAIN has the size 0.
    """
    none, *sizes = [(point["tokens"], point["speedup"][curve]["mean"]) for point in points]
    gains = [
        (large[1] / small[1]) ** (1 / max(log2(large[0] / small[0]), 1e-9)) - 1 for small, large in pairwise(sizes)
    ]
    last = round(gains[-1], 4) if gains else None
    greatest = max(speedup for _, speedup in sizes)
    if greatest < none[1] * (1 + LEAST_GAIN):
        return {"tokens": 0, "enough": True, "gain": last}
    at = next((number + 1 for number in reversed(range(len(gains))) if gains[number] >= LEAST_GAIN), 0)
    return {"tokens": sizes[at][0], "enough": at < len(sizes) - 1, "gain": last}


def section(result: Result) -> Section:
    """Words, a table of domains and the speed-up by size."""
    data = result.data
    domains: dict[str, Any] = data["domains"]
    rows = []
    for name, report in domains.items():
        none, *_, whole = report["points"]
        best = report["best"]
        rows.append(
            [
                name,
                report["tokens"],
                whole["mat"]["mean"],
                none["speedup"][data["curve"]]["mean"],
                whole["speedup"][data["curve"]]["mean"],
                best["tokens"] if best["enough"] else f"more than {best['tokens']:,}",
                best["gain"],
            ]
        )
    return Section(
        title="Size by domain",
        command=result.command,
        words=[
            "Recorded answers and files were replayed with datastores of the same kind of text, each half as large as "
            f"the next. The best size is the one after which a doubling gains less than {data['least_gain']:.0%}.",
            *_words(domains),
        ],
        tables=[
            Table(
                "Best size by domain",
                ("domain", "tokens of all", "MAT", "speed-up without", "speed-up with all", "best size", "last gain"),
                rows,
                note=f"auto on the cost curve {data['curve']}. Last gain: of the last doubling, 0.01 is 1%.",
            )
        ],
        figures=[
            Figure(
                name="domains",
                title="Speed-up by size of the datastore",
                x="tokens in the datastore",
                y="times plain decoding",
                series=[
                    Series(
                        name,
                        [point["speedup"][data["curve"]]["mean"] for point in report["points"][1:]],
                        [point["tokens"] for point in report["points"][1:]],
                    )
                    for name, report in domains.items()
                ],
                alt="Lines: speed-up against the size of the datastore, one for each domain.",
                log_x=True,
                level=1.0,
            )
        ],
        machine=result.machine.line(),
        footnotes=[f"{name} is left out: {reason}." for name, reason in data["left_out"].items()],
    )


def _words(domains: dict[str, Any]) -> list[str]:
    words = []
    for name, report in domains.items():
        best, what, title = report["best"], report["what"], name[0].upper() + name[1:]
        if not best["tokens"]:
            words.append(f"{title}: no size gains 1% over the request's own text ({what}).")
        elif best["enough"]:
            words.append(f"{title}: {best['tokens']:,} tokens are enough ({what}).")
        else:
            words.append(
                f"{title}: {best['tokens']:,} tokens are not enough, the last doubling gains "
                f"{best['gain'] or 0.0:.1%} ({what})."
            )
    return words
