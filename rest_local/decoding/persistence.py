"""What an engine keeps for later runs: a model's answers to draft from, and how often drafts were accepted.

Contract:

- `open` when an engine opens, `add` after each answer, `close` when it closes.
- The vocabulary and the model's own description decide where the files are, not the model's path. So a model file that
  was moved keeps them, and quantizations with the same name share them.
- Errors are never fatal and never change an answer. The history and the memory of the planner warn where something is
  wrong with their files, and the engine goes on without them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path

from rest_local.llama.model import Model
from rest_local.paths import cache_dir
from rest_local.planning.acceptance import Acceptance
from rest_local.planning.memory import recall, remember
from rest_local.retrieval.format import VocabularyId
from rest_local.retrieval.history import History, history_home

log = logging.getLogger("rest_local.history")

NAME_LENGTH = 40
MODEL_LENGTH = 200  # a file can call itself anything


class PersistedLearning:
    """That of one engine. `history`: earlier answers, to search."""

    def __init__(self, history: History, acceptance: Acceptance, memory: Path) -> None:
        self.history = history
        self._acceptance, self._memory = acceptance, memory

    @classmethod
    def open(cls, model: Model, acceptance: Acceptance) -> PersistedLearning | None:
        """Open what there is for a model, and add the stored counts to `acceptance`. None where no directory can be
        made. Reads up to 32 MB.
        """
        key = key_of(model)
        try:
            path, memory = history_home() / key, acceptance_path(key)
        except OSError as error:
            log.warning("no history is kept: %s: %s", error.filename, error.strerror)
            return None
        recall(memory, acceptance)
        about = {"model": model.name[:MODEL_LENGTH], "description": model.description}
        identity = VocabularyId(*model.vocabulary.identity)
        return cls(History.open(path, identity, about, mmap=model.options.mmap), acceptance, memory)

    def add(self, answer: Sequence[int]) -> None:
        """Add the tokens of one answer, complete or not. Writes now and then, which takes some 50 ms."""
        self.history.add(answer)

    def close(self) -> None:
        """Write what is new; a second call does nothing. Waits a few seconds at most for other processes."""
        self.history.close()
        remember(self._memory, self._acceptance)


def key_of(model: Model) -> str:
    """The name of a model's files: legible; another one for another vocabulary, name or shape, and with adapters."""
    shape: list[object] = [model.vocabulary.hash, model.name, model.n_params, model.n_layer, model.n_embd]
    if model.adapters.identity:  # not without adapters: keys of older versions stay valid
        shape.append(model.adapters.identity)
    legible = re.sub(r"[^a-z0-9]+", "-", model.name.lower())[:NAME_LENGTH].strip("-") or "model"
    return f"{legible}-{hashlib.sha256(json.dumps(shape).encode()).hexdigest()[:12]}"


def acceptance_path(key: str) -> Path:
    """Where the planner's memory of a model is. Raises OSError where the cache directory cannot be made."""
    return cache_dir() / "acceptance" / f"{key}.json"
