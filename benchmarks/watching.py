"""How long after a save its text can be drafted from, and what following a datastore costs while nothing happens.

    python -m benchmarks.watching [--tokens N | --store PATH] [--model GGUF] [--saves N] [--json]

An index of `--tokens` tokens, or a copy by hard links of the one at `--store`, which has to be of the vocabulary of
`--model`, records a folder of one file as its source. A child process keeps it up to date, as `serve --code` does, and
a follower opens its commits. Each save replaces a file by a new one with text that occurs nowhere else; then lookups of
its beginning run every millisecond until one finds how it goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rest_local.bench.generated import sources_and_edits
from rest_local.cli.indexer import Indexer
from rest_local.decoding.following import Follower
from rest_local.decoding.offers import Offers
from rest_local.llama.model import Model
from rest_local.llama.vocabulary import Vocabulary
from rest_local.paths import demo_model
from rest_local.retrieval.building.build import build
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.format import MANIFEST, VocabularyId
from rest_local.retrieval.home import read_manifest

SAVES = 50
PAUSE_S = 0.3  # between two saves, so that each is a batch of its own
LOOKUP_S = 0.001
IDLE_LOOKS = 2000


class Searching:
    """What a follower sees of an engine. Its steps are lookups."""

    def __init__(self, model: Model, path: Path) -> None:
        self.model, self.offers = model, Offers()
        self.datastores = [Datastore.open(path, vocabulary_hash=model.vocabulary.hash)]
        self.exchange_s: list[float] = []

    def finds(self, context: list[int], following: list[int]) -> bool:
        """Whether a lookup now gives these tokens after the context."""
        if self.offers:
            began = time.perf_counter()
            self.datastores = self.offers.take(self.datastores)
            self.exchange_s.append(time.perf_counter() - began)
        rows = self.datastores[0].rows(context, 8, len(following))
        return any(row.tolist() == following for row in rows.continuations)


def run(tokens: int, store: Path | None, model: Path, saves: int) -> dict[str, Any]:
    """Times in milliseconds: `save_to_lookup`, and its share `exchange` in the thread that decodes."""
    with tempfile.TemporaryDirectory() as folder, Model.open(model, vocab_only=True) as opened:
        source, path = Path(folder) / "src", Path(folder) / "store"
        source.mkdir()
        (source / "first.py").write_text("first = 1\n")
        _prepare(path, source, store, tokens, opened.vocabulary, model)
        engine = Searching(opened, path)
        follower = Follower(engine)
        idle = _idle(follower)
        with _following(engine, follower, path, model) as settled:
            assert settled.wait(600)
            waited = [_save(engine, source, number) for number in range(saves)]
        held = engine.datastores[0].info()
        for each in engine.datastores:
            each.close()
    exchange = np.array(engine.exchange_s) * 1e3
    return {
        "tokens": held["tokens"],
        "segments": held["segments"],
        "saves": saves,
        "save_to_lookup_ms": _quantiles(np.array(waited) * 1e3),
        "exchange_ms": _quantiles(exchange),
        "idle_cpu_us_a_look": idle,
    }


def _prepare(path: Path, source: Path, store: Path | None, tokens: int, vocabulary: Vocabulary, model: Path) -> None:
    recipe = {"paths": [str(source)], "model": str(model.absolute())}
    if store is None:
        texts, _ = sources_and_edits(vocabulary, tokens, np.random.default_rng(0))
        documents = [(str(number), text) for number, text in enumerate(texts)]
        build(path, documents, vocabulary=VocabularyId(*vocabulary.identity), recipe=recipe)
        return
    shutil.copytree(store, path, copy_function=os.link, ignore=shutil.ignore_patterns(MANIFEST, "lock"))
    held = read_manifest(store)
    (path / MANIFEST).write_bytes(replace(held, recipe=recipe, revision=held.revision + 1).to_bytes())


def _idle(follower: Follower) -> float:
    """Microseconds of a look at a datastore without news."""
    follower.look()
    began = time.process_time()
    for _ in range(IDLE_LOOKS):
        follower.look()
    return round((time.process_time() - began) / IDLE_LOOKS * 1e6, 1)


@contextmanager
def _following(engine: Searching, follower: Follower, path: Path, model: Path) -> Iterator[threading.Event]:
    """Follow, with a child that updates; the event tells that the first update is done."""
    settled = threading.Event()
    indexer = Indexer(model, [str(path)])

    def committed() -> None:
        settled.set()
        follower.look_soon()

    indexer.committed = committed
    follower.start()
    try:
        yield settled
    finally:
        indexer.close()
        follower.close()
        engine.offers.close()


def _save(engine: Searching, source: Path, number: int) -> float:
    """Seconds from the save of a file to the first lookup that finds its text."""
    words = " ".join(f"w{number}x{part * 7919 % 1000}" for part in range(60))
    tokens = engine.model.vocabulary.tokenize(f"{words}\n").tolist()
    context, following = tokens[8:40], tokens[40:48]
    new = source / ".new"
    new.write_text(f"{words}\n")
    os.replace(new, source / f"saved{number % 5}.py")
    began = time.perf_counter()
    while not engine.finds(context, following):
        time.sleep(LOOKUP_S)
        if time.perf_counter() - began > 60:
            raise TimeoutError(f"save {number} was not found after a minute")
    taken = time.perf_counter() - began
    time.sleep(PAUSE_S)
    return taken


def _quantiles(values: Any) -> dict[str, float]:
    return {name: round(float(np.quantile(values, q)), 3) for name, q in (("median", 0.5), ("p99", 0.99), ("max", 1))}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.watching")
    parser.add_argument("--tokens", type=int, default=20_000_000)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--model", type=Path, default=demo_model())
    parser.add_argument("--saves", type=int, default=SAVES)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = run(arguments.tokens, arguments.store, arguments.model, arguments.saves)
    print(json.dumps(result) if arguments.json else "\n".join(f"{name}: {value}" for name, value in result.items()))


if __name__ == "__main__":
    main()
