"""Finds settings in which llama.cpp works with a model, so that it does not crash this process.

Contract: the settings that the user wants go in. If a child process can compute with them (`trial`), they come out
unchanged. If the child crashes, hangs, or runs out of memory, safer settings are tried in turn: weights not repacked,
flash attention off, fewer layers on the GPU, the CPU alone.

- The choice is remembered in the cache directory, for each set of model files, settings, llama.cpp and machine.
- One warning names the cause and the remedy.
- The choice overrides the user's: `--flash-attn on` that crashes is turned off, because a slow answer is better than
  none.
- If no settings work, the model is refused.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rest_local import paths
from rest_local.errors import ModelInvalid
from rest_local.llama import library, probe, trial
from rest_local.llama.context import ContextSettings
from rest_local.llama.gguf_header import Files, check_headers, identity_of
from rest_local.llama.model import Model
from rest_local.llama.options import FLOAT_CACHE_TYPES, ModelOptions
from rest_local.llama.parameters import LoadParameters

log = logging.getLogger("rest_local.loading")
progress = logging.getLogger("rest_local.tuning.progress")

FORMAT = 1
TIMEOUT_SECONDS = 120.0  # for a small file
SECONDS_PER_BYTE = 4e-8  # in addition: 280 s for 4 GB, which are read at 25 MB/s in 160 s
ALL_LAYERS = -1
MEMORY_CHANGE = 0.1  # the choice is tried again after such a relative change in the free memory of a GPU

Wanted = Callable[[ModelOptions], Sequence[ContextSettings]]


@dataclass(frozen=True)
class Rung:
    """A step of the ladder: the features that are given up. `n_gpu_layers`: None for as many as the user wants."""

    repack: bool = True
    flash: bool = True
    n_gpu_layers: int | None = None

    def applied(self, options: ModelOptions, n_gpu_layers: int) -> tuple[ModelOptions, int]:
        """The options, and the layers on the GPU."""
        if not self.repack:
            options = replace(options, repack=False)
        if not self.flash:
            cache_type_v = options.cache_type_v if options.cache_type_v in FLOAT_CACHE_TYPES else None
            options = replace(options, flash_attention="off", cache_type_v=cache_type_v)
        if self.n_gpu_layers == 0:  # do not use a GPU that fails at all, not even for long prompts
            options = replace(options, devices=("none",), kv_offload=False, tensor_split=(), override_tensor=())
        return options, n_gpu_layers if self.n_gpu_layers is None else self.n_gpu_layers

    def __str__(self) -> str:
        given_up = ["weights not repacked"] if not self.repack else []
        given_up += ["flash attention off"] if not self.flash else []
        if self.n_gpu_layers is not None:
            given_up.append(f"{self.n_gpu_layers} layers on the GPU" if self.n_gpu_layers else "on the CPU alone")
        return ", ".join(given_up)


@dataclass(frozen=True)
class LoadChoice:
    """How to load the model. `warning`: empty if the wanted settings work."""

    options: ModelOptions
    n_gpu_layers: int
    warning: str = ""


def choose(
    path: str | os.PathLike[str],
    n_gpu_layers: int | None,
    options: ModelOptions,
    wanted: Wanted,
    n_ctx: int | None = None,
) -> LoadChoice:
    """Find settings that work. The first time they are tried in child processes, which takes the load time and about 16
    plain steps for each of the settings.

    `wanted`: gives the settings of all contexts that may be made with given options. `n_ctx`: as for `trial.attempt`.
    Raises ModelNotFound, OptionError, and ModelInvalid for a model that `Model.open` refuses or that crashes in all
    settings."""
    file = Path(path).expanduser()
    files = check_headers(file)
    requested = ALL_LAYERS if n_gpu_layers is None else n_gpu_layers
    layers = requested if library.supports_gpu() and options.devices != ("none",) else 0
    LoadParameters.of(options, layers, vocab_only=False)  # raises OptionError for a device that does not exist
    probe.ensure_loadable(files, False, options)
    record = _record(files, layers, options, wanted(options), n_ctx)
    free = [device.free_bytes for device in library.devices() if device.name in library.gpus()] if layers else []
    rung, failure = _remembered(record, free) or _climb(files, layers, options, wanted, n_ctx)
    if failure is None or failure.kind != "refused":
        _remember(record, rung, failure, free)
    warning = _warning(file, rung, failure) if rung != Rung() and failure else ""
    return LoadChoice(*rung.applied(options, layers), warning)


def _climb(
    files: Files, layers: int, options: ModelOptions, wanted: Wanted, n_ctx: int | None
) -> tuple[Rung, trial.Failure | None]:
    """The first settings that work, and the failure of the wanted settings. Raises ModelInvalid."""
    path = files[0][0]
    progress.info("%s is new here and is tried in a child process first", path.name)
    first = _tried(files, Rung(), layers, options, wanted, n_ctx)
    if first is None or (first.kind == "refused" and (not layers or first.during.startswith(trial.CONTEXT))):
        return Rung(), first  # llama.cpp refuses it without a crash, and will do so again with the right message
    if first.without_flash:
        return Rung(flash=False), first
    last = first
    for rung in safer(first, layers, options):
        log.info("model %s: %s while %s; trying %s", path, last.cause, last.during, rung)
        failed = _tried(files, rung, layers, options, wanted, n_ctx)
        if failed is None:
            return rung, first
        last = failed
    if last.kind == "refused" and layers:
        return Rung(n_gpu_layers=0), first
    raise ModelInvalid(
        path,
        f"llama.cpp {first.cause} while {first.during}, and in all safer settings as well ({last.cause})",
        "get the file again, or build llama-cpp-python with another compiler or version",
    )


def safer(failure: trial.Failure, layers: int, options: ModelOptions) -> Iterator[Rung]:
    """The settings to try in turn after the wanted ones failed: at most eight, after a hang at most two."""
    repacks, flashes = options.repack, options.flash_attention != "off"
    plainer = [Rung(repack=False)] if repacks else []
    plainer += [Rung(flash=False)] if flashes else []
    plainer += [Rung(repack=False, flash=False)] if repacks and flashes else []
    on_cpu = [replace(rung, n_gpu_layers=0) for rung in (Rung(), *plainer)]
    if failure.kind == "hang":
        yield from [on_cpu[0], on_cpu[-1]] if layers and len(on_cpu) > 1 else on_cpu[-1:] if layers else plainer[-1:]
        return
    if failure.kind == "crash" or not layers:
        yield from plainer
    if layers:
        most = failure.n_layer + 1 if layers < 0 else min(layers, failure.n_layer + 1 or layers)
        yield from (Rung(n_gpu_layers=most // part) for part in (2, 4) if most // part > 0)
        yield from on_cpu


def timeout_seconds(files: Files) -> float:
    """The time limit for loading the files and computing with them."""
    return TIMEOUT_SECONDS + SECONDS_PER_BYTE * sum(status.st_size for _, status in files)


def works(model: Model, settings: ContextSettings) -> bool:
    """Whether a child process can compute with an open model in these settings. The result is not remembered. Raises
    OSError if no child can be started.
    """
    files = check_headers(model.path)
    failed = trial.attempt(
        model.path, model.n_gpu_layers, model.options, [settings], settings.n_ctx, timeout_seconds(files)
    )
    if failed is not None:
        log.warning(
            "model %s: llama.cpp %s while %s; these settings are not used", model.path, failed.cause, failed.during
        )
    return failed is None


def _tried(
    files: Files, rung: Rung, layers: int, options: ModelOptions, wanted: Wanted, n_ctx: int | None
) -> trial.Failure | None:
    tried, n_gpu_layers = rung.applied(options, layers)
    try:
        return trial.attempt(files[0][0], n_gpu_layers, tried, wanted(tried), n_ctx, timeout_seconds(files))
    except OSError as error:
        log.warning("model %s: not tried in a child process: %s", files[0][0], error)
        return None


def _warning(path: Path, rung: Rung, failure: trial.Failure) -> str:
    """Cause and remedy in one line."""
    if failure.kind == "memory":
        remedy = "to choose yourself, free memory, or lower `n_gpu_layers` or `n_ctx`"
    elif rung.n_gpu_layers is not None:
        remedy = "update the GPU's driver or llama-cpp-python"
    else:
        remedy = "build llama-cpp-python with another compiler (gcc 13 or newer, clang 16 or newer) or version"
    return f"model {path}: llama.cpp {failure.cause} while {failure.during}; going on {rung}, which is slower; {remedy}"


def _record(
    files: Files, layers: int, options: ModelOptions, settings: Sequence[ContextSettings], n_ctx: int | None
) -> bytes:
    """All inputs of a choice, except the free memory of a GPU. The context length only matters on a GPU."""
    on_cpu = {"n_ctx": 0, "n_cells": 0, "n_slots": 0, "threads": 0, "threads_batch": 0} if not layers else {}
    parts = [
        FORMAT,
        identity_of(files),
        layers, asdict(options), [{**each.to_dict(), **on_cpu} for each in settings], n_ctx if layers else None,
        library.fingerprint(), platform.machine(), platform.processor(), platform.node(),
        [(gpu.name, gpu.description, gpu.memory_bytes) for gpu in library.devices()] if layers else [],
    ]  # fmt: skip
    return json.dumps(parts, default=str).encode("utf-8", "surrogateescape")


def _path(record: bytes) -> Path:
    return paths.cache_dir() / f"loading-{hashlib.sha256(record).hexdigest()[:32]}.json"


def _remembered(record: bytes, free: Sequence[int]) -> tuple[Rung, trial.Failure | None] | None:
    """The remembered choice. None if there is none, its format is another, or the free memory of a GPU has changed."""
    try:
        data: Any = json.loads(_path(record).read_bytes())
        rung, failure = Rung(**data["rung"]), trial.Failure(**data["failure"]) if data["failure"] else None
        changes = [(now - then) / max(then, 1) for now, then in zip(free, data["free"], strict=True)]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    less, more = min(changes, default=0.0) < -MEMORY_CHANGE, max(changes, default=0.0) > MEMORY_CHANGE
    lacked = failure is not None and failure.kind == "memory"
    return None if less or (lacked and more) else (rung, failure)


def _remember(record: bytes, rung: Rung, failure: trial.Failure | None, free: Sequence[int]) -> None:
    try:
        kept = {"rung": asdict(rung), "failure": asdict(failure) if failure else None, "free": list(free)}
        content = json.dumps(kept)
        paths.write_atomically(_path(record), content.encode())
    except OSError as error:
        log.warning("the settings that work with the model cannot be stored: %s", error)
