"""Fit the acceptance priors that ship with the package, on text that no benchmark tests.

Recorded chat answers (without the tested ones), Python source of installed packages and edits from the history of
repositories go in. The share of right candidates in each evidence cell comes out, as `rest_local/planning/priors.json`.
Four replays are counted: chat from its own context; chat with other answers as history; code with a datastore of other
code; edits with the old file as prediction. They draft every candidate down to a low threshold, so that rare cells
occur, and count each candidate as often as it occurs.

    python -m benchmarks priors --chat ANSWERS --chat-vocab GGUF --code DIR --code-vocab GGUF -d DATASTORE
    python -m benchmarks priors --code-vocab GGUF --edits REPOSITORY...    # only those of the prediction
    python -m benchmarks priors --code-vocab GGUF --agents REPOSITORY SITE_PACKAGES    # only those of edits of agents
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.recorded import Recorded, load, load_edits
from benchmarks.replay import FREE, replay
from benchmarks.transcripts import FORMATS, changes_of, renames_of, transcripts
from rest_local.calibration.cost import LARGEST
from rest_local.drafting.sources import (
    CELLS_PER_SOURCE,
    DEPTH,
    N_CELLS,
    N_LENGTHS,
    N_ROWS,
    N_SHARES,
    SOURCES,
    Lookup,
    Sources,
)
from rest_local.drafting.tree import Draft, Growth
from rest_local.llama.model import Model
from rest_local.llama.vocabulary import Vocabulary
from rest_local.planning.acceptance import PRIORS, Acceptance, TokenCalibrator
from rest_local.planning.plan import grow
from rest_local.planning.policy import Policy, StepContext, StepCost
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.growing import GrowingText
from rest_local.retrieval.home import datastore_path

TESTED = 150  # Benchmarks test so many answers at the beginning of the chat file.
THRESHOLD = 0.03
LEAST = 0.002  # Every rate keeps this distance from 0 and 1.
STRENGTH = 4.0  # In a cell, the coarser rate counts for so many observations.
FILES, PROMPT_TOKENS, ANSWER_TOKENS = 220, 400, 500
EDITS = 40  # From each repository.
COMMITS, RENAMES = (300, 16), (60, 8)  # So many changes are left to the benchmark, and so many are taken.
WHOLE_FILE = 0.3  # The weight of formats that write whole files, whose answers are long.

Floats = NDArray[np.float64]


class Threshold(Policy):
    """A policy that drafts every node whose joint probability reaches `least`, and at most the `nodes` likeliest."""

    name = "threshold"

    def __init__(self, least: float, nodes: int = LARGEST - 1) -> None:
        self.least = least
        self.nodes = nodes
        self.acceptance = Acceptance()
        self.calibrator = TokenCalibrator()
        self._depth = DEPTH

    def draft(self, sources: Lookup, at: StepContext) -> Draft:
        """Draft the largest tree that the threshold and the budget allow."""
        limit = min(self.nodes, at.limit)
        begun = time.perf_counter()
        rows = sources.rows(depth=self._depth)
        lookup_us = 1e6 * (time.perf_counter() - begun)
        growth = Growth(rows, self.acceptance.estimate, limit, at.leaves, self.calibrator.calibrate, newest=at.newest)
        grow([growth], lambda p: p >= self.least, limit)
        growth.draft.lookup_us = lookup_us
        return growth.draft

    def learn(self, drafted: Draft, tokens: Sequence[int], done: StepCost) -> None:
        """Learn like `auto`."""
        self._depth = LARGEST - 1 if done.n_accepted >= DEPTH else DEPTH
        self.acceptance.learn(drafted.outcomes(tokens))
        self.calibrator.learn(drafted.calibrations(tokens))


class Counting(Threshold):
    """Sources that count the outcome of every proposal by cell."""

    def __init__(self) -> None:
        super().__init__(THRESHOLD)
        self.seen: Floats = np.zeros(N_CELLS)
        self.hits: Floats = np.zeros(N_CELLS)

    def learn(self, drafted: Draft, tokens: Sequence[int], done: StepCost) -> None:
        super().learn(drafted, tokens, done)
        for cell, hit in drafted.outcomes(tokens):
            self.seen[cell] += 1
            self.hits[cell] += hit


def rates(seen: Floats, hits: Floats) -> dict[str, list[float]]:
    """Return the rate of every cell by source, backed off where a cell has few observations.

    A cell backs off to its length and share, and those to the next shorter length. A source without observations takes
    the rates of the context.
    """
    shape = (len(SOURCES), N_LENGTHS, N_ROWS, N_SHARES)
    s, h = seen.reshape(shape), hits.reshape(shape)
    cell: Floats = np.empty(shape)
    shorter = (h.sum((1, 2)) + 1) / (s.sum((1, 2)) + 4)  # [source, share]
    for length in range(N_LENGTHS):
        shorter = (h[:, length].sum(1) + STRENGTH * shorter) / (s[:, length].sum(1) + STRENGTH)
        cell[:, length] = (h[:, length] + STRENGTH * shorter[:, None]) / (s[:, length] + STRENGTH)
    known = {name: cell[i].reshape(CELLS_PER_SOURCE) for i, name in enumerate(SOURCES)}
    known.update({name: known["context"] for i, name in enumerate(SOURCES) if not s[i].any()})
    return {name: np.clip(known[name], LEAST, 1 - LEAST).round(4).tolist() for name in SOURCES}


def code_of(directory: Path, vocabulary: Vocabulary) -> list[Recorded]:
    """Return a regular sample of the medium-sized Python files as (beginning, continuation), in order of names."""
    files = [f for f in sorted(directory.rglob("*.py")) if 4_000 < f.stat().st_size < 60_000 and "test" not in str(f)]
    found = []
    for file in files[:: max(1, len(files) // FILES)]:
        ids = vocabulary.tokenize(file.read_text("utf-8", "replace"), special=False).tolist()
        answer = ids[PROMPT_TOKENS : PROMPT_TOKENS + ANSWER_TOKENS]
        found.append(Recorded(file.name, ids[:PROMPT_TOKENS], answer))
    return found


def edit_rates(repositories: Sequence[Path], vocab: Path) -> list[float]:
    """Return the rates of the prediction's cells over edits of each repository, [CELLS_PER_SOURCE]."""
    with Model.open(vocab, vocab_only=True) as model:
        vocabulary = model.vocabulary
        edits = [edit for path in repositories for edit in load_edits(path, vocabulary, EDITS, predict=True)]
        return rates(*count(edits, lambda: Sources([], vocabulary.size)))["prediction"]


def agent_rates(repository: Path, folder: Path, vocab: Path) -> list[float]:
    """Return the rates of the cells of `edit` over transcripts of agents in all formats, [CELLS_PER_SOURCE]."""
    seen, hits = np.zeros(N_CELLS), np.zeros(N_CELLS)
    with Model.open(vocab, vocab_only=True) as model:
        vocabulary = model.vocabulary
        for changes in (changes_of(repository, *COMMITS), renames_of(folder, *RENAMES)):
            for form in FORMATS:
                recorded = list(transcripts(changes, form, vocabulary))
                weight = WHOLE_FILE if "whole" in form.name or "rite" in form.name else 1.0
                counted = count(recorded, lambda: Sources([], vocabulary.size, spelling=vocabulary))
                seen, hits = seen + weight * counted[0], hits + weight * counted[1]
    return rates(seen, hits)["edit"]


def count(recorded: Sequence[Recorded], sources: Callable[[], Sources]) -> tuple[Floats, Floats]:
    """Return the observations and hits by cell, float64 [N_CELLS] each."""
    policy = Counting()
    replay(recorded, sources, policy, FREE)
    return policy.seen, policy.hits


def fit(args: argparse.Namespace) -> dict[str, Any]:
    """Return the contents of `priors.json`, without the prediction's rates."""
    with Model.open(args.chat_vocab, vocab_only=True) as model:
        chat, n_chat = load(args.chat, model.vocabulary)[TESTED:], model.n_vocab
    half = len(chat) // 2
    history = GrowingText()
    for answer in chat[half:]:
        history.extend([*answer.answer, -1])
    with Model.open(args.code_vocab, vocab_only=True) as model:
        code, n_code, identity = code_of(args.code, model.vocabulary), model.n_vocab, model.vocabulary.identity
    path = datastore_path(args.datastore)
    with Datastore.open(path, vocabulary_hash=identity.hash, vocabulary_name=identity.name) as store:
        counted = [
            count(chat, lambda: Sources([], n_chat)),
            count(chat[:half], lambda: Sources([], n_chat, history)),
            count(code, lambda: Sources([store], n_code)),
        ]
    table = rates(sum(seen for seen, _ in counted), sum(hits for _, hits in counted))  # type: ignore[arg-type]
    return {
        "fitted_on": {"chat answers": len(chat), "with history": half, "code files": len(code)},
        "sources": {"chat": args.chat.name, "code": args.code.name, "datastore": path.name},  # Names, without folders.
        "observations": int(sum(seen.sum() for seen, _ in counted)),
        "lengths": N_LENGTHS,
        "rows": N_ROWS,
        "shares": N_SHARES,
        "rates": table,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chat", type=Path, help="recorded answers; the first 150 are never read")
    parser.add_argument("--chat-vocab", type=Path)
    parser.add_argument("--code", type=Path, help="folder of Python source that is in no benchmark")
    parser.add_argument("--code-vocab", type=Path, required=True)
    parser.add_argument("-d", "--datastore", help="of other code, in the vocabulary of --code-vocab")
    parser.add_argument(
        "--edits", type=Path, nargs="+", default=(), metavar="REPOSITORY", help="repositories in no benchmark"
    )
    parser.add_argument(
        "--agents", type=Path, nargs=2, default=(), metavar=("REPOSITORY", "FOLDER"), help="of edits of agents"
    )
    args = parser.parse_args()
    given = (args.chat, args.chat_vocab, args.code, args.datastore)
    if (any(given) and not all(given)) or (not any(given) and not args.edits and not args.agents):
        parser.error("give --chat, --chat-vocab, --code and -d together, or --edits or --agents alone")
    known = json.loads(PRIORS.read_text("utf-8"))
    priors = fit(args) if any(given) else known
    priors["rates"]["edit"] = known["rates"]["edit"]
    if args.agents:
        repository, folder = args.agents
        priors["rates"]["edit"] = agent_rates(repository, folder, args.code_vocab)
    if args.edits:
        priors["rates"]["prediction"] = edit_rates(args.edits, args.code_vocab)
        priors["sources"]["edits"] = [path.name for path in args.edits]
    PRIORS.write_text(json.dumps(priors))
    print(json.dumps({name: value for name, value in priors.items() if name != "rates"}))
