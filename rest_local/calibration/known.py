"""Say which model files have a cost curve on this machine, and which vocabulary, without loading anything.

`rest_local.calibration.tuning` writes it with each curve. Reads those files, a few kB each; imports nothing heavy.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rest_local.paths import cache_dir

if TYPE_CHECKING:
    from rest_local.llama.model import Model

FOLDER = "tuning"  # a folder in the cache directory
FIELD = "model"  # a field in a curve's file


@dataclass(frozen=True)
class Known:
    """A model file that was used here. `vocabulary` is a hash. If `final`, a whole curve was measured."""

    vocabulary: str
    final: bool


def note_of(model: Model) -> dict[str, Any]:
    """Return what a curve's file says of its model: all its files with size and time, and the hash of its vocabulary.
    Return nothing if keys are overridden: they can change the vocabulary.
    """
    if model.options.override_kv:
        return {}
    return {"files": model.cache_key, "vocabulary": model.vocabulary.hash}


def known_models() -> dict[tuple[str, int, int], Known]:
    """Return the known models by real path, size in bytes and modification time in ns of the (first) file."""
    found: dict[tuple[str, int, int], Known] = {}
    with suppress(OSError):
        for path in sorted((cache_dir() / FOLDER).glob("*.json")):
            with suppress(OSError, ValueError, KeyError, TypeError, IndexError, RecursionError):
                data = json.loads(path.read_bytes())
                note: Mapping[str, Any] = data[FIELD]
                real, size, time = note["files"][0]
                key = (str(real), int(size), int(time))
                final = bool(data["final"]) or (key in found and found[key].final)
                found[key] = Known(str(note["vocabulary"]), final)
    return found


def key_of(path: Path) -> tuple[str, int, int]:
    """Return the key of a file in `known_models`. Raises OSError."""
    status = path.stat()
    return os.path.realpath(path), status.st_size, status.st_mtime_ns
