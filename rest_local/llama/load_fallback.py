"""Try a model in a child process before this process loads it, because llama.cpp may crash, hang or find no memory.

Contract: the settings that the user wants go in. If a child process can compute with them, they come out unchanged.
If the child fails there are at most three retries: half and a quarter of the layers if the memory of a GPU is short,
the CPU alone if a GPU fails, weights that are not repacked if a CPU does (gcc 11 and 12 compile AMX code that crashes).
If they fail too, an error names the cause and the way out.

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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rest_local import paths, sandbox
from rest_local.errors import ModelError, ModelInvalid, OptionError, RestLocalError
from rest_local.llama import library
from rest_local.llama.context import Context, ContextSettings
from rest_local.llama.gguf import Files, check_headers, identity_of, read_gguf
from rest_local.llama.loaded import llama_cpp
from rest_local.llama.loading import LoadParameters, ensure_loadable, one_line
from rest_local.llama.model import Model
from rest_local.llama.options import ModelOptions
from rest_local.sandbox import ChildResult, report

log = logging.getLogger("rest_local.loading")
progress = logging.getLogger("rest_local.tuning.progress")

FORMAT = 2
TIMEOUT_SECONDS = 120.0  # enough for a small file
SECONDS_PER_BYTE = 4e-8  # added for large files: 280 s in all for 4 GB, which are read at 25 MB/s in 160 s
ALL_LAYERS = -1
MEMORY_CHANGE = 0.1  # the choice is tried again after such a relative change in the free memory of a GPU
SIZES = (1, 2, 8, 32)
CPU_CONTEXT = 512  # tokens
MEMORY = ("out of memory", "allocate", "cudamalloc", "outofdevicememory", "insufficient memory", "memoryerror")

Wanted = Callable[[ModelOptions], Sequence[ContextSettings]]


@dataclass(frozen=True)
class LoadChoice:
    """The way to load the model. `warning` is empty if the wanted settings work."""

    options: ModelOptions
    n_gpu_layers: int
    warning: str = ""


@dataclass(frozen=True)
class Failure:
    """The cause of a failed trial, and its stage. `kind` is `crash`, `hang`, `memory`, or `refused` by llama.cpp."""

    kind: str
    cause: str
    during: str

    @classmethod
    def of(cls, ended: ChildResult) -> Failure | None:
        """Return the failure that the end of a child and its lines show, or None if it succeeded."""
        seen = ended.seen
        if ended.code == 0 and seen.get("done"):
            return None
        during, refused = str(seen.get("at", "starting")), str(seen.get("refused", ""))
        if ended.code is None:
            return cls("hang", ended.end, during)
        messages = f"{refused} {ended.errors}".lower()
        memory = ended.signal_name == "SIGKILL" or any(words in messages for words in MEMORY)
        return cls("memory" if memory else "refused" if refused else "crash", refused or ended.end, during)

    def __str__(self) -> str:
        return f"llama.cpp {self.cause} while {self.during}"


def choose(path: str | os.PathLike[str], n_gpu_layers: int | None, options: ModelOptions, wanted: Wanted) -> LoadChoice:
    """Find settings that work. The first time they are tried in child processes, which takes the load time and about 16
    plain steps for each of the settings.

    `wanted` gives the settings of all contexts that may be made with given options. Raises ModelNotFound, OptionError,
    and ModelInvalid for a model that `Model.open` refuses or that no trial survives.
    """
    file = Path(path).expanduser()
    files = check_headers(file)
    requested = ALL_LAYERS if n_gpu_layers is None else n_gpu_layers
    layers = requested if library.supports_gpu() and options.devices != ("none",) else 0
    LoadParameters.of(options, layers, vocab_only=False)  # OptionError for a device that does not exist
    ensure_loadable(files, False, options)
    record = _record(files, layers, options, wanted(options))
    free = [device.free_bytes for device in library.devices() if device.name in library.gpus()] if layers else []
    if known := _remembered(record, free):
        return known
    asked = LoadChoice(options, layers)
    progress.info("%s is new here and is tried in a child process first", file.name)
    failure = _tried(files, asked, wanted)
    if failure is None:
        _remember(record, asked, free)
        return asked
    for given_up, safe in safer(failure, file, asked):
        log.info("model %s: %s; trying it %s", file, failure, given_up)
        if _tried(files, safe, wanted) is None:
            warning = f"model {file}: {failure}; going on {given_up}, which is slower; {_way_out(failure, safe)}"
            choice = replace(safe, warning=warning)
            if failure.kind != "refused":
                _remember(record, choice, free)
            return choice
    if failure.kind == "refused":
        return asked  # It does not crash, and `Model.open` gives llama.cpp's own message.
    raise ModelInvalid(file, str(failure), _way_out(failure, asked))


def safer(failure: Failure, path: Path, wanted: LoadChoice) -> list[tuple[str, LoadChoice]]:
    """Return the retries, and what each gives up."""
    options, layers = wanted.options, wanted.n_gpu_layers
    if not layers:
        plain = LoadChoice(replace(options, repack=False), 0)
        return [("with weights that are not repacked", plain)] if failure.kind == "crash" and options.repack else []
    header = read_gguf(path)
    n_layer = header.number(f"{header.architecture}.block_count") + 1
    most = min(layers, n_layer) if layers > 0 else n_layer
    parts = [most // part for part in (2, 4) if most // part] if failure.kind == "memory" else []
    cpu = replace(options, devices=("none",), kv_offload=False, tensor_split=(), override_tensor=())
    return [
        *((f"with {part} of {n_layer} layers on the GPU", LoadChoice(options, part)) for part in parts),
        ("on the CPU alone", LoadChoice(cpu, 0)),
    ]


def _way_out(failure: Failure, choice: LoadChoice) -> str:
    if failure.kind == "memory":
        return "free memory, lower `n_gpu_layers` or `n_ctx`, or choose a smaller model"
    if choice.options.devices == ("none",):
        return "turn `flash_attention` off, or update the GPU's driver or llama-cpp-python"
    return (
        "turn `flash_attention` off, get the file again, or build llama-cpp-python with another compiler (gcc 13 or "
        "newer, clang 16 or newer) or version"
    )


def timeout_seconds(files: Files) -> float:
    """Return the time limit for loading the files and computing with them."""
    return TIMEOUT_SECONDS + SECONDS_PER_BYTE * sum(status.st_size for _, status in files)


def _tried(files: Files, choice: LoadChoice, wanted: Wanted) -> Failure | None:
    path, options = files[0][0], choice.options
    try:
        return attempt(path, choice.n_gpu_layers, options, wanted(options), timeout_seconds(files))
    except OSError as error:
        log.warning("model %s: not tried in a child process: %s", path, error)
        return None


def _record(files: Files, layers: int, options: ModelOptions, settings: Sequence[ContextSettings]) -> bytes:
    """Return all inputs of a choice, except the free memory of a GPU. The context length only matters on a GPU."""
    on_cpu = {"n_ctx": 0, "n_cells": 0, "n_slots": 0, "threads": 0, "threads_batch": 0} if not layers else {}
    parts = [
        FORMAT,
        identity_of(files),
        layers, asdict(options), [{**each.to_dict(), **on_cpu} for each in settings],
        library.fingerprint(), platform.machine(), platform.processor(), platform.node(),
        [(gpu.name, gpu.description, gpu.memory_bytes) for gpu in library.devices()] if layers else [],
    ]  # fmt: skip
    return json.dumps(parts, default=str).encode("utf-8", "surrogateescape")


def _path(record: bytes) -> Path:
    return paths.cache_dir() / f"loading-{hashlib.sha256(record).hexdigest()[:32]}.json"


def _remembered(record: bytes, free: Sequence[int]) -> LoadChoice | None:
    """Return the remembered choice, unless its format is another, or the free memory of a GPU has changed."""
    try:
        data: Any = json.loads(_path(record).read_bytes())
        options = ModelOptions.from_dict(data["options"])
        choice = LoadChoice(options, int(data["n_gpu_layers"]), str(data["warning"]))
        changes = [(now - then) / max(then, 1) for now, then in zip(free, data["free"], strict=True)]
    except (OSError, ValueError, TypeError, KeyError, OptionError):
        return None
    less, more = min(changes, default=0.0) < -MEMORY_CHANGE, max(changes, default=0.0) > MEMORY_CHANGE
    return None if less or (choice.warning and more) else choice


def _remember(record: bytes, choice: LoadChoice, free: Sequence[int]) -> None:
    try:
        content = json.dumps({**asdict(choice), "free": list(free)}, default=str)
        paths.write_atomically(_path(record), content.encode())
    except OSError as error:
        log.warning("the settings that work with the model cannot be stored: %s", error)


def attempt(
    path: Path,
    n_gpu_layers: int,
    options: ModelOptions,
    settings: Sequence[ContextSettings],
    timeout: float,
) -> Failure | None:
    """Run the child. Return None if all settings that llama.cpp accepts work. Raises OSError if it cannot be started.

    Only recurrent models use the `n_rs_seq` of `settings`.
    """
    task = {
        "path": os.path.abspath(path),
        "n_gpu_layers": n_gpu_layers,
        "options": asdict(options),
        "settings": [each.to_dict() for each in settings],
    }
    return Failure.of(sandbox.run(__name__, json.dumps(task, default=str), timeout))


def main(text: str) -> None:
    """Run the child process. `text` is the task from `attempt`, as JSON."""
    _prepare()
    task = json.loads(text)
    settings = [ContextSettings.from_dict(each) for each in task["settings"]]
    try:
        options = ModelOptions.from_dict(task["options"])
        compute(Path(task["path"]), task["n_gpu_layers"], options, settings)
        report(done=True)
    except RestLocalError as error:
        report(refused=str(error))
    os._exit(0)  # A broken driver may crash in the cleanup.


def compute(path: Path, n_gpu_layers: int, options: ModelOptions, settings: Sequence[ContextSettings]) -> None:
    """Run all stages and report each on stdout. Raises ModelError, OptionError; may crash, abort or hang."""
    report(at="loading it")
    parameters = LoadParameters.of(replace(options, mlock=False), n_gpu_layers, vocab_only=False)
    model = _loaded(path, parameters, n_gpu_layers, options)
    refused: ModelError | None = None
    accepted = 0
    for each in settings:
        flash = f"flash attention {'on' if each.flash_attention else 'off'}, cache {each.cache_type_k}"
        report(at=f"making a context ({flash})")
        try:
            context = Context(model, _for_model(model, each, on_cpu=not n_gpu_layers))
        except ModelError as error:  # Measuring leaves such settings out, too.
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
        context.logits(1)  # waits for the device
        n_past += n


def _for_model(model: Model, settings: ContextSettings, on_cpu: bool) -> ContextSettings:
    """Return the settings of the context to make (`attempt`), a short one on the CPU: no length crashes there."""
    if on_cpu:
        size = min(settings.n_ctx, CPU_CONTEXT)
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
