"""How many requests of a batch to decode at a time, and how many cells they get: what the memory has room for.

Contract: gives an upper bound (`EngineConfig.slots`, `cells`); how many of the slots are used follows the cost curve
(`rest_local.decoding.batch`). Loads no weights. An estimate that is too low costs time, never an answer: requests then
wait until others have ended.

On a CPU flash attention is on, unless the user fixed it: it skips the cells of other sequences, and without it each
sequence passes over the cells of all. On one thread, 16 sequences of the demo model with 150 tokens each give 1.7 to
1.9 times the tokens of one with it, and 1.1 to 1.2 times without.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rest_local.batch.jobs import EMBEDDING, LIMITS, Job
from rest_local.catalog.describe import header_of
from rest_local.catalog.find import model_file
from rest_local.catalog.metadata import read_metadata, trained_context
from rest_local.decoding.config import EngineConfig
from rest_local.llama import library
from rest_local.llama.batch import MOST_IDS
from rest_local.llama.context import ContextSettings

MOST_SLOTS = MOST_IDS // ContextSettings().n_branches
MOST_ON_CPU = 16  # by the shipped curves of CPUs, 16 at a time give 3.3 and 5.9 times the tokens of one, 32 3.6 and 6.0
BYTES_PER_TOKEN = 3.0  # of the JSON of a prompt; code has 3 to 4 bytes a token
TEMPLATE_TOKENS = 64  # what a chat template adds
_SHARE = 0.5  # of the memory that is free: other programs want some as well, and so do buffers
_UNKNOWN = 2 << 30  # bytes of free memory where the system does not say
_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def fitted(config: EngineConfig, jobs: Sequence[Job], max_tokens: int | None = None) -> EngineConfig:
    """The config with slots and cells for these jobs. `max_tokens`: as for `Worker`. Raises ModelError, OptionError.

    An engine of exact settings decodes one request at a time, so its config is left as it is.
    """
    generating = [job for job in jobs if job.error is None and job.url != EMBEDDING]
    if config.exact or len(generating) < 2:
        return config
    path = model_file(config.model)
    header = header_of(read_metadata(path), path)
    n_ctx = config.context_length(trained_context(path, config.options))
    needs = sorted((cells_of(job, n_ctx, max_tokens) for job in generating), reverse=True)
    size = sum(file.stat().st_size for file in _files(path))
    memory = int(_SHARE * (free_memory(config) - size))
    on_cpu = not uses_gpu(config)
    slots, cells = room_for(needs[: MOST_ON_CPU if on_cpu else MOST_SLOTS], n_ctx, header.kv_bytes, memory)
    options = config.options
    if on_cpu and slots > 1 and options.flash_attention == "auto":
        options = replace(options, flash_attention="on")
    return replace(config, slots=slots, cells=cells, options=options)


def room_for(needs: Sequence[int], n_ctx: int, cell_bytes: int, memory: int) -> tuple[int, int]:
    """Slots and cells. `needs`: cells of each request that a slot may be for, the largest first; `memory`: bytes for
    all cells. At least one slot, with a whole context.
    """
    cells, slots = n_ctx, 1
    for count in range(2, len(needs) + 1):
        wanted = max(n_ctx, sum(needs[:count]))
        if wanted * cell_bytes > memory:
            break
        cells, slots = wanted, count
    return slots, -(-cells // 256) * 256


def cells_of(job: Job, n_ctx: int, max_tokens: int | None = None) -> int:
    """An estimate of the tokens of a request and one answer."""
    body = json.loads(job.body)
    given = next((body[name] for name in LIMITS if body.get(name) is not None), max_tokens)
    most = given if isinstance(given, int) and given >= 0 else n_ctx
    prompt = len(job.body) / BYTES_PER_TOKEN + TEMPLATE_TOKENS
    return min(round(prompt) + most, n_ctx)


def free_memory(config: EngineConfig) -> int:
    """Bytes that are free where the cells will be: on the GPU where the model's layers go there, else of the system."""
    if uses_gpu(config):
        return sum(device.free_bytes for device in library.devices() if device.name in library.gpus()) or _UNKNOWN
    return min(_available(), _cgroup_room())


def uses_gpu(config: EngineConfig) -> bool:
    """Whether layers of the model go to a GPU."""
    return library.supports_gpu() and config.n_gpu_layers != 0 and config.options.devices != ("none",)


def _available() -> int:
    with suppress(OSError, ValueError, IndexError):
        for line in _MEMINFO.read_text("ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return _UNKNOWN


def _cgroup_room() -> int:
    """What the limit of a container leaves; no limit is a large number."""
    with suppress(OSError, ValueError):
        limit = int((_CGROUP / "memory.max").read_text("ascii"))
        return max(limit - int((_CGROUP / "memory.current").read_text("ascii")), 0)
    return 1 << 62


def _files(path: Path) -> list[Path]:
    from rest_local.llama.gguf_header import check_headers

    return [file for file, _ in check_headers(path)]
