"""The cells of a slot in a file, so that a later process goes on with a text without evaluating it again.

- `PATH` is llama.cpp's own file of a sequence: its tokens and its cells, so it is about as large as they are.
- `PATH.about` is JSON: what the cells were computed with (`made_with`), and the digest of `PATH`.
- Both are replaced as a whole. Where one is missing, damaged, of another model, of other settings or of another build
  of llama.cpp, nothing is loaded. llama.cpp reads nothing before the digest was compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rest_local.kv_cache.slot import Slot
from rest_local.llama import library
from rest_local.llama.context import ContextSettings
from rest_local.llama.model import Model
from rest_local.paths import replacing, write_atomically

FORMAT = 2
_CHUNK = 1 << 20


def made_with(model: Model, settings: ContextSettings, exact: bool) -> dict[str, str]:
    """What the bits in the cells depend on, each as a digest. The number and the length of texts, and
    the number of threads, are no part of it."""
    computing = replace(
        settings, n_ctx=8, n_batch=1, n_ubatch=0, n_slots=1, n_cells=0, n_branches=1, threads=0, threads_batch=0
    )
    parts = {
        "another model": [model.cache_key, model.adapters.identity, asdict(model.options)],
        "other settings": [computing.to_dict(), model.n_gpu_layers, exact],
        "another build of llama.cpp": [FORMAT, library.fingerprint()],
    }
    return {what: hashlib.sha256(json.dumps(part, default=str).encode()).hexdigest() for what, part in parts.items()}


def save(slot: Slot, path: Path, made: Mapping[str, str]) -> bool:
    """Write the cells of a slot. False where there are none, or llama.cpp cannot write them; what was there before is
    then intact. Raises OSError.
    """
    if not slot.n_past:
        return False
    about: dict[str, Any] = {}
    with contextlib.suppress(_Unsaved), replacing(path) as file:
        new = Path(file.name)
        if not slot.save_file(new):  # llama.cpp opens it by its name, and keeps the mode
            raise _Unsaved
        about = {"made_with": dict(made), "digest": _digest(new), "tokens": slot.n_past}
    if about:
        write_atomically(_about(path), json.dumps(about).encode())
    return bool(about)


class _Unsaved(Exception):
    """llama.cpp cannot write the cells."""


def load(slot: Slot, path: Path, made: Mapping[str, str]) -> str:
    """Have the cells of a file in a slot, in the place of what it held. Returns what is wrong with the files; nothing
    where there is nothing wrong, or there are none. Reads the file twice.
    """
    try:
        about = json.loads(_about(path).read_bytes())
        if differs := next((what for what in made if about["made_with"].get(what) != made[what]), None):
            return f"they are of {differs}"
        if about["digest"] != _digest(path):
            return "they are damaged"
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"they cannot be read ({error})"
    return "" if slot.load_file(path) else "they do not fit this context"


def _about(path: Path) -> Path:
    return path.with_name(f"{path.name}.about")


def _digest(path: Path) -> str:
    digest = hashlib.sha256()  # processors have instructions for it: 0.9 GB/s here, BLAKE2b 0.3 GB/s
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
