"""Say which vocabularies the model files have that were used on this machine, without loading anything.

`rest_local.calibration.tuning` writes it with each curve. Reads those files, a few kB each; imports nothing heavy.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rest_local.paths import cache_dir

if TYPE_CHECKING:
    from rest_local.llama.model import Model

FOLDER = "tuning"  # a folder in the cache directory
FIELD = "model"  # a field in a curve's file


def note_of(model: Model) -> dict[str, Any]:
    """Return what a curve's file says of its model: all its files with size and time, and the hash of its vocabulary.
    Return nothing if keys are overridden: they can change the vocabulary.
    """
    if model.options.override_kv:
        return {}
    return {"files": model.cache_key, "vocabulary": model.vocabulary.hash}


def known_vocabularies() -> dict[tuple[str, int, int], str]:
    """Return hashes of vocabularies by real path, size in bytes and modification time in ns of the (first) file."""
    found: dict[tuple[str, int, int], str] = {}
    with suppress(OSError):
        for path in sorted((cache_dir() / FOLDER).glob("*.json")):
            with suppress(OSError, ValueError, KeyError, TypeError, IndexError, RecursionError):
                data = json.loads(path.read_bytes())
                note: Mapping[str, Any] = data[FIELD]
                real, size, time = note["files"][0]
                found[str(real), int(size), int(time)] = str(note["vocabulary"])
    return found


def key_of(path: Path) -> tuple[str, int, int]:
    """Return the key of a file in `known_vocabularies`. Raises OSError."""
    status = path.stat()
    return os.path.realpath(path), status.st_size, status.st_mtime_ns
