"""Estimates of the memory that a model needs, from the header of its file and the settings.

The estimate is the size of its files, the KV cache of all slots, and PROCESS_BYTES for the process with the buffers of
a forward pass. Memory on a GPU is counted too, so a limit applies to both together.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rest_local.catalog.describe import header_of, snapshots_of
from rest_local.catalog.quantization import in_bytes
from rest_local.catalog.stores import projector_of
from rest_local.decoding.config import AUTO_PROJECTOR, NO_DRAFT_MODEL, NO_PROJECTOR, EngineConfig
from rest_local.llama.gguf import read_gguf, shards_of

PROCESS_BYTES = 300 << 20
_CGROUP = Path("/sys/fs/cgroup")
DEFAULT_SHARE = 0.8


@dataclass(frozen=True)
class Need:
    """The bytes that a model needs for its files, its KV cache and its process."""

    files: int
    cache: int
    process: int = PROCESS_BYTES

    @property
    def total(self) -> int:
        return self.files + self.cache + self.process

    def __str__(self) -> str:
        return f"about {in_bytes(self.total)} ({in_bytes(self.files)} of files, {in_bytes(self.cache)} of KV cache)"


def need_of(config: EngineConfig, memory: int | None = None) -> Need:
    """Estimate the memory for the model of `config`, whose `model` must be a file, with the default context that fits
    into `memory` bytes. Raises ModelError, OSError.
    """
    path = Path(config.model or "")
    metadata = read_gguf(path)
    if metadata.is_encoder:
        return Need(_bytes_of(path), 0)
    header = header_of(metadata, path)
    if memory is not None:
        config = config.sized(header.n_ctx_train, header.kv_bytes, memory - _bytes_of(path) - PROCESS_BYTES)
    cells = config.cells or config.slots * config.context_length(header.n_ctx_train)
    states = config.slots * (1 + snapshots_of(header, config.options.rollback)) * header.state_bytes
    need = Need(_bytes_of(path) + _projector_bytes(config, path), cells * header.kv_bytes + states)
    if config.draft_model is None or config.draft_model == NO_DRAFT_MODEL:
        return need
    draft = Path(config.draft_model)
    cache = cells * header_of(read_gguf(draft), draft).kv_bytes
    return Need(need.files + _bytes_of(draft), need.cache + cache)


def _bytes_of(path: Path) -> int:
    return sum(part.stat().st_size for part in shards_of(path))


def _projector_bytes(config: EngineConfig, model: Path) -> int:
    if config.mmproj is None or config.mmproj == NO_PROJECTOR:
        return 0
    found = projector_of(model) if config.mmproj == AUTO_PROJECTOR else Path(config.mmproj)
    return 0 if found is None else found.stat().st_size


def default_limit() -> int:
    """Return DEFAULT_SHARE of the bytes of memory that the machine or container has."""
    memory = physical()
    with suppress(OSError, ValueError):  # the container has no limit, or there is none
        memory = min(memory, int((_CGROUP / "memory.max").read_text("ascii")))
    return int(DEFAULT_SHARE * memory)


def physical() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
