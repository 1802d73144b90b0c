"""What earlier runs leave to the next: a model's answers to draft from, and how often drafts were accepted.

Contract: `open` when an engine opens, `add` after each answer, `close` when it closes. Where they lie is decided by the
vocabulary and the model's own description of itself, not by its path: a file that was moved keeps them, and
quantizations that carry the same name share them. Never fatal, never a part of what is generated: the history and the
memory of the planner warn where something is wrong with their files, and the engine goes on without.
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


class Earlier:
    """One engine's: `history` to search, `acceptance` to add to."""

    def __init__(self, history: History, acceptance: Acceptance, memory: Path) -> None:
        self.history = history
        self._acceptance, self._memory = acceptance, memory

    @classmethod
    def open(cls, model: Model, acceptance: Acceptance) -> Earlier | None:
        """Opens what there is for a model and adds what was accepted to `acceptance`; None where no directory can be
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
        """The tokens of one generation, whole or broken off. Writes now and then, which takes some 50 ms."""
        self.history.add(answer)

    def close(self) -> None:
        """Writes what is new; again does nothing. Waits a few seconds at most for other processes."""
        self.history.close()
        remember(self._memory, self._acceptance)


def key_of(model: Model) -> str:
    """Names a model's files: legible, and different for another vocabulary, name or shape, and with LoRA adapters."""
    shape: list[object] = [model.vocabulary.hash, model.name, model.n_params, model.n_layer, model.n_embd]
    if model.adapters.identity:  # else as before there were any: what was kept stays found
        shape.append(model.adapters.identity)
    legible = re.sub(r"[^a-z0-9]+", "-", model.name.lower())[:NAME_LENGTH].strip("-") or "model"
    return f"{legible}-{hashlib.sha256(json.dumps(shape).encode()).hexdigest()[:12]}"


def acceptance_path(key: str) -> Path:
    """Where the planner's memory of a model lies. Raises OSError where the cache directory cannot be made."""
    return cache_dir() / "acceptance" / f"{key}.json"
