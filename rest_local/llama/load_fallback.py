"""Finds settings in which llama.cpp works with a model, so that it does not crash this process.

Contract: the settings that the user wants go in. If a child process can compute with them, they come out unchanged. If
the child crashes, hangs, or runs out of memory, safer settings are tried in turn: no snapshots of a recurrent state
(where memory is short), weights not repacked, flash attention off, fewer layers on the GPU, the CPU alone.

The child loads the model, makes a context for each of the settings, and decodes 1, 2, 8 and 32 tokens in it (on a GPU
also a full batch, which needs the most memory). It reports each stage, so the last line names the one at which it
crashed. docs/ARCHITECTURE.md, Faults, says what is remembered, and what overrides the user.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rest_local import paths, sandbox
from rest_local.errors import ModelError, ModelInvalid, RestLocalError
from rest_local.llama import library
from rest_local.llama.context import Context, ContextSettings
from rest_local.llama.gguf import Files, check_headers, identity_of
from rest_local.llama.loaded import llama_cpp
from rest_local.llama.loading import LoadParameters, ensure_loadable, one_line
from rest_local.llama.model import Model
from rest_local.llama.options import FLOAT_CACHE_TYPES, ModelOptions
from rest_local.sandbox import ChildResult, report

log = logging.getLogger("rest_local.loading")
progress = logging.getLogger("rest_local.tuning.progress")

FORMAT = 1
TIMEOUT_SECONDS = 120.0  # for a small file
SECONDS_PER_BYTE = 4e-8  # in addition: 280 s for 4 GB, which are read at 25 MB/s in 160 s
ALL_LAYERS = -1
MEMORY_CHANGE = 0.1  # the choice is tried again after such a relative change in the free memory of a GPU
SIZES = (1, 2, 8, 32)
CPU_CONTEXT = 512  # tokens
CONTEXT = "making a context"  # prefix of the names of these stages
MEMORY = ("out of memory", "allocate", "cudamalloc", "outofdevicememory", "insufficient memory", "memoryerror")

Wanted = Callable[[ModelOptions], Sequence[ContextSettings]]


@dataclass(frozen=True)
class Fallback:
    """The features that are given up. `n_gpu_layers`: None for as many as the user wants."""

    repack: bool = True
    flash: bool = True
    n_gpu_layers: int | None = None
    snapshots: bool = True  # of a recurrent state

    def applied(self, options: ModelOptions, n_gpu_layers: int) -> tuple[ModelOptions, int]:
        """The options, and the layers on the GPU."""
        if not self.repack:
            options = replace(options, repack=False)
        if not self.flash:
            cache_type_v = options.cache_type_v if options.cache_type_v in FLOAT_CACHE_TYPES else None
            options = replace(options, flash_attention="off", cache_type_v=cache_type_v)
        if not self.snapshots:
            options = replace(options, rollback=0)
        if self.n_gpu_layers == 0:  # do not use a GPU that fails at all, not even for long prompts
            options = replace(options, devices=("none",), kv_offload=False, tensor_split=(), override_tensor=())
        return options, n_gpu_layers if self.n_gpu_layers is None else self.n_gpu_layers

    def __str__(self) -> str:
        given_up = ["weights not repacked"] if not self.repack else []
        given_up += ["flash attention off"] if not self.flash else []
        given_up += ["no snapshots of the recurrent state"] if not self.snapshots else []
        if self.n_gpu_layers is not None:
            given_up.append(f"{self.n_gpu_layers} layers on the GPU" if self.n_gpu_layers else "on the CPU alone")
        return ", ".join(given_up)


@dataclass(frozen=True)
class LoadChoice:
    """How to load the model. `warning`: empty if the wanted settings work."""

    options: ModelOptions
    n_gpu_layers: int
    warning: str = ""


@dataclass(frozen=True)
class Failure:
    """Why a trial failed. `kind`: `crash`, `hang`, `memory`, or `refused` (llama.cpp returned an error).

    `during`: the stage. `n_layer`: number of layers of the model, 0 if unknown. `without_flash`: all settings without
    flash attention worked.
    """

    kind: str
    cause: str
    during: str
    n_layer: int = 0
    without_flash: bool = False

    @classmethod
    def of(cls, ended: ChildResult) -> Failure | None:
        """What the end of a child and its lines show; None if it succeeded."""
        seen = ended.seen
        if ended.code == 0 and seen.get("done"):
            return None
        during, n_layer = str(seen.get("at", "starting")), int(seen.get("n_layer", 0))
        if ended.code is None:
            return cls("hang", ended.end, during, n_layer)
        refused = str(seen.get("refused", ""))
        messages = f"{refused} {ended.errors}".lower()
        memory = ended.signal_name == "SIGKILL" or any(words in messages for words in MEMORY)
        if refused:
            return cls("memory" if memory else "refused", refused, during, n_layer)
        passed = bool(seen.get("without_flash")) and not memory
        return cls("memory" if memory else "crash", ended.end, during, n_layer, passed)


def choose(
    path: str | os.PathLike[str],
    n_gpu_layers: int | None,
    options: ModelOptions,
    wanted: Wanted,
    n_ctx: int | None = None,
) -> LoadChoice:
    """Find settings that work. The first time they are tried in child processes, which takes the load time and about 16
    plain steps for each of the settings.

    `wanted`: gives the settings of all contexts that may be made with given options. `n_ctx`: as for `attempt`.
    Raises ModelNotFound, OptionError, and ModelInvalid for a model that `Model.open` refuses or that crashes in all
    settings."""
    file = Path(path).expanduser()
    files = check_headers(file)
    requested = ALL_LAYERS if n_gpu_layers is None else n_gpu_layers
    layers = requested if library.supports_gpu() and options.devices != ("none",) else 0
    LoadParameters.of(options, layers, vocab_only=False)  # raises OptionError for a device that does not exist
    ensure_loadable(files, False, options)
    record = _record(files, layers, options, wanted(options), n_ctx)
    free = [device.free_bytes for device in library.devices() if device.name in library.gpus()] if layers else []
    fallback, failure = _remembered(record, free) or _first_that_works(files, layers, options, wanted, n_ctx)
    if failure is None or failure.kind != "refused":
        _remember(record, fallback, failure, free)
    warning = _warning(file, fallback, failure) if fallback != Fallback() and failure else ""
    return LoadChoice(*fallback.applied(options, layers), warning)


def _first_that_works(
    files: Files, layers: int, options: ModelOptions, wanted: Wanted, n_ctx: int | None
) -> tuple[Fallback, Failure | None]:
    """The first settings that work, and the failure of the wanted settings. Raises ModelInvalid."""
    path = files[0][0]
    progress.info("%s is new here and is tried in a child process first", path.name)
    first = _tried(files, Fallback(), layers, options, wanted, n_ctx)
    if first is None or (first.kind == "refused" and (not layers or first.during.startswith(CONTEXT))):
        return Fallback(), first  # llama.cpp refuses it without a crash, and will do so again with the right message
    if first.without_flash:
        return Fallback(flash=False), first
    last = first
    for fallback in safer(first, layers, options):
        log.info("model %s: %s while %s; trying %s", path, last.cause, last.during, fallback)
        failed = _tried(files, fallback, layers, options, wanted, n_ctx)
        if failed is None:
            return fallback, first
        last = failed
    if last.kind == "refused" and layers:
        return Fallback(n_gpu_layers=0), first
    raise ModelInvalid(
        path,
        f"llama.cpp {first.cause} while {first.during}, and in all safer settings as well ({last.cause})",
        "get the file again, or build llama-cpp-python with another compiler or version",
    )


def safer(failure: Failure, layers: int, options: ModelOptions) -> Iterator[Fallback]:
    """The settings to try in turn after the wanted ones failed: at most nine, after a hang at most two."""
    repacks, flashes = options.repack, options.flash_attention != "off"
    plainer = [Fallback(repack=False)] if repacks else []
    plainer += [Fallback(flash=False)] if flashes else []
    plainer += [Fallback(repack=False, flash=False)] if repacks and flashes else []
    on_cpu = [replace(fallback, n_gpu_layers=0) for fallback in (Fallback(), *plainer)]
    if failure.kind == "hang":
        yield from [on_cpu[0], on_cpu[-1]] if layers and len(on_cpu) > 1 else on_cpu[-1:] if layers else plainer[-1:]
        return
    kept = not (failure.kind == "memory" and options.rollback)
    if not kept:
        yield Fallback(snapshots=False)
    if failure.kind == "crash" or not layers:
        yield from plainer
    if layers:
        most = failure.n_layer + 1 if layers < 0 else min(layers, failure.n_layer + 1 or layers)
        yield from (Fallback(n_gpu_layers=most // part, snapshots=kept) for part in (2, 4) if most // part > 0)
        yield from on_cpu


def timeout_seconds(files: Files) -> float:
    """The time limit for loading the files and computing with them."""
    return TIMEOUT_SECONDS + SECONDS_PER_BYTE * sum(status.st_size for _, status in files)


def works(model: Model, settings: ContextSettings) -> bool:
    """Whether a child process can compute with an open model in these settings. Raises OSError without a child."""
    files = check_headers(model.path)
    failed = attempt(model.path, model.n_gpu_layers, model.options, [settings], settings.n_ctx, timeout_seconds(files))
    if failed is not None:
        log.warning("model %s: llama.cpp %s while %s; settings are not used", model.path, failed.cause, failed.during)
    return failed is None


def _tried(
    files: Files, fallback: Fallback, layers: int, options: ModelOptions, wanted: Wanted, n_ctx: int | None
) -> Failure | None:
    tried, n_gpu_layers = fallback.applied(options, layers)
    try:
        return attempt(files[0][0], n_gpu_layers, tried, wanted(tried), n_ctx, timeout_seconds(files))
    except OSError as error:
        log.warning("model %s: not tried in a child process: %s", files[0][0], error)
        return None


def _warning(path: Path, fallback: Fallback, failure: Failure) -> str:
    """Cause and remedy in one line."""
    if failure.kind == "memory":
        remedy = "to choose yourself, free memory, or lower `n_gpu_layers` or `n_ctx`"
    elif fallback.n_gpu_layers is not None:
        remedy = "update the GPU's driver or llama-cpp-python"
    else:
        remedy = "build llama-cpp-python with another compiler (gcc 13 or newer, clang 16 or newer) or version"
    cause = f"llama.cpp {failure.cause} while {failure.during}"
    return f"model {path}: {cause}; going on {fallback}, which is slower; {remedy}"


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


def _remembered(record: bytes, free: Sequence[int]) -> tuple[Fallback, Failure | None] | None:
    """The remembered choice. None if there is none, its format is another, or the free memory of a GPU has changed."""
    try:
        data: Any = json.loads(_path(record).read_bytes())
        fallback, failure = Fallback(**data["fallback"]), Failure(**data["failure"]) if data["failure"] else None
        changes = [(now - then) / max(then, 1) for now, then in zip(free, data["free"], strict=True)]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    less, more = min(changes, default=0.0) < -MEMORY_CHANGE, max(changes, default=0.0) > MEMORY_CHANGE
    lacked = failure is not None and failure.kind == "memory"
    return None if less or (lacked and more) else (fallback, failure)


def _remember(record: bytes, fallback: Fallback, failure: Failure | None, free: Sequence[int]) -> None:
    try:
        kept = {"fallback": asdict(fallback), "failure": asdict(failure) if failure else None, "free": list(free)}
        content = json.dumps(kept)
        paths.write_atomically(_path(record), content.encode())
    except OSError as error:
        log.warning("the settings that work with the model cannot be stored: %s", error)


def attempt(
    path: Path,
    n_gpu_layers: int,
    options: ModelOptions,
    settings: Sequence[ContextSettings],
    n_ctx: int | None,
    timeout: float,
) -> Failure | None:
    """Run the child. Returns None if all settings that llama.cpp accepts work. Raises OSError if it cannot be started.

    `n_ctx`: tokens of context, also beyond what the model was trained for; None = the number in `settings`, but at most
    what it was trained for. `settings`: only recurrent models use their `n_rs_seq`."""
    task = {
        "path": os.path.abspath(path),
        "n_gpu_layers": n_gpu_layers,
        "n_ctx": n_ctx,
        "options": asdict(options),
        "settings": [each.to_dict() for each in sorted(settings, key=lambda each: each.flash_attention)],
    }
    return Failure.of(sandbox.run(__name__, json.dumps(task, default=str), timeout))


def main(text: str) -> None:
    """The child process. `text`: the task from `attempt`, as JSON."""
    _prepare()
    task = json.loads(text)
    settings = [ContextSettings.from_dict(each) for each in task["settings"]]
    try:
        options = ModelOptions.from_dict(task["options"])
        compute(Path(task["path"]), task["n_gpu_layers"], options, settings, task["n_ctx"])
        report(done=True)
    except RestLocalError as error:
        report(refused=str(error))
    os._exit(0)  # without cleanup, because a broken driver may crash there


def compute(
    path: Path, n_gpu_layers: int, options: ModelOptions, settings: Sequence[ContextSettings], n_ctx: int | None
) -> None:
    """Run all stages and report each on stdout. Raises ModelError, OptionError; may crash, abort or hang."""
    if n_gpu_layers:  # a cheap load on the CPU gives the number of layers, in case the device fails
        on_cpu = LoadParameters.of(options, 0, vocab_only=False, on_cpu=True)
        with _loaded(path, on_cpu, 0, options) as model:
            report(n_layer=model.n_layer)
    report(at="loading it")
    parameters = LoadParameters.of(replace(options, mlock=False), n_gpu_layers, vocab_only=False)
    model = _loaded(path, parameters, n_gpu_layers, options)
    refused: ModelError | None = None
    accepted = 0
    for each in settings:
        if each.flash_attention and accepted and refused is None:
            report(without_flash=True)
        flash = f"flash attention {'on' if each.flash_attention else 'off'}, cache {each.cache_type_k}"
        report(at=f"{CONTEXT} ({flash})")
        try:
            context = Context(model, _for_model(model, each, n_ctx, on_cpu=not n_gpu_layers))
        except ModelError as error:  # measuring leaves such settings out, too
            refused = error
            continue
        accepted += 1
        _decode(context, model, flash, full=bool(n_gpu_layers))
        context.close()
    if refused is not None and not accepted:
        raise refused


def _decode(context: Context, model: Model, flash: str, full: bool) -> None:
    if model.has_encoder or not llama_cpp.llama_model_has_decoder(model.pointer):
        return
    sizes = [n for n in SIZES if n <= min(context.max_outputs, context.n_batch, context.n_ctx)]
    n_past = 0
    for n in [*sizes, *([min(context.n_batch, context.n_ctx)] if full else [])]:
        report(at=f"decoding {n} token{'s' if n > 1 else ''} ({flash})")
        if n_past + n > context.n_ctx:
            context.clear()
            n_past = 0
        tokens = np.arange(1, n + 1, dtype=np.int32) % model.n_vocab
        output = np.arange(n) >= n - min(n, SIZES[-1])
        context.batch.fill(tokens, np.arange(n_past, n_past + n), 0, context.n_branches, output)
        if code := context.decode():
            memory = " (out of memory)" if code == -2 else ""
            raise ModelError(f"model {model.path}: llama_decode returned {code}{memory}")
        context.logits(1)  # to wait for the device
        n_past += n


def _for_model(model: Model, settings: ContextSettings, n_ctx: int | None, on_cpu: bool) -> ContextSettings:
    """The settings of the context to be made, see `attempt`; on the CPU a short one: no length crashes there."""
    trained = model.n_ctx_train or settings.n_ctx
    size = max(8, n_ctx or min(settings.n_ctx, trained))
    n_cells = size * settings.n_slots if settings.n_cells == settings.n_ctx * settings.n_slots else settings.n_cells
    settings = replace(settings, n_ctx=size, n_cells=max(size, n_cells))
    if on_cpu:
        size = min(size, CPU_CONTEXT)
        settings = replace(settings, n_ctx=size, n_cells=size, n_slots=1)
    if model.is_recurrent or model.is_hybrid:
        return replace(settings, n_branches=1)
    return replace(settings, n_rs_seq=0)


def _loaded(path: Path, parameters: LoadParameters, n_gpu_layers: int, options: ModelOptions) -> Model:
    with library.log_lines.collected_errors() as errors:
        pointer = llama_cpp.llama_model_load_from_file(os.fsencode(path), parameters.struct)
    if not pointer:
        raise ModelError(next((line for line in errors if "alloc" in line.lower()), "") or one_line(errors))
    return Model(pointer, path, vocab_only=False, n_gpu_layers=n_gpu_layers, options=options, cache_key="trial")


def _prepare() -> None:
    """Prevent core files of gigabytes, and let Linux kill this process, not the parent, when memory runs out."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", "ascii")


if __name__ == "__main__":
    main(sys.argv[1])
