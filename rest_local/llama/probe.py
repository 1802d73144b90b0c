"""Loads a model in a child process before this one does: a hostile or broken GGUF can abort llama.cpp, or crash it.

`python -m rest_local.llama.probe TRIAL` (JSON: path, vocab_only, and the options that could end a process) loads
without reading the weights (mapped, CPU only, not repacked), makes a small context, which builds the compute graph, and
prints one line of JSON: `{"error": null}` or `{"error": "what llama.cpp said"}`. It costs about half a second, the
first time a (path, size, mtime, options, llama.cpp) is seen; success is remembered in the cache directory. A LoRA
adapter has a trial of its own, in which one token is evaluated, so that it is known which of the files is to blame.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import llama_cpp

from rest_local import paths
from rest_local.errors import AdapterInvalid, ModelInvalid, ModelNotFound
from rest_local.llama import child, library
from rest_local.llama.adapters import Adapters
from rest_local.llama.batch import Batch
from rest_local.llama.gguf_header import check_header
from rest_local.llama.options import Adapter, ModelOptions, Override, Placement
from rest_local.llama.parameters import LoadParameters

TIMEOUT_SECONDS = 60.0  # for a small file; one that makes llama.cpp spin takes longer
SECONDS_PER_BYTE = 2.4e-9  # more for a large one: 300 s in all for 100 GB, which a slow disk maps in less


Files = Sequence[tuple[Path, os.stat_result]]


def ensure_loadable(files: Files, vocab_only: bool, options: ModelOptions) -> None:
    """Returns when a child process loaded the model and each of its adapters, now or earlier.

    `files`: all of the model, the first one first. Raises ModelInvalid or AdapterInvalid with the cause."""
    path = files[0][0]
    loaded = ModelOptions(override_kv=options.override_kv, **_placed(options))
    changed = "leave out the overrides, or check them" if loaded != ModelOptions() else ""
    if cause := _cause(files, vocab_only, loaded):
        raise ModelInvalid(path, cause, changed)
    for adapter in () if vocab_only else options.lora:
        file = (adapter.path, _adapter_status(adapter.path))
        if cause := _cause([*files, file], vocab_only, replace(loaded, lora=(adapter,))):
            raise AdapterInvalid(adapter.path, cause)


def _placed(options: ModelOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("override_tensor", "cpu_moe", "n_cpu_moe")}


def _adapter_status(path: Path) -> os.stat_result:
    try:
        return check_header(path)
    except ModelNotFound:
        raise AdapterInvalid(path, "no such file") from None
    except ModelInvalid as error:
        raise AdapterInvalid(path, error.cause) from None


def _cause(files: Files, vocab_only: bool, options: ModelOptions) -> str | None:
    trial = _trial(files[0][0], vocab_only, options)
    if _remembered(files, trial):
        return None
    cause = _cause_in_child(trial, timeout_seconds(files))
    if not cause:
        _remember(files, trial)
    return cause


def timeout_seconds(files: Files) -> float:
    """How long loading the files may take in a child process that does not read the weights."""
    return TIMEOUT_SECONDS + SECONDS_PER_BYTE * sum(status.st_size for _, status in files)


def _trial(path: Path, vocab_only: bool, options: ModelOptions) -> str:
    """What the child is told; the options by their text, see `main`."""
    told = {
        "path": os.path.abspath(path),
        "vocab_only": vocab_only,
        "override_kv": [astuple(override) for override in options.override_kv],
        "override_tensor": [astuple(placement) for placement in options.override_tensor],
        "cpu_moe": options.cpu_moe,
        "n_cpu_moe": options.n_cpu_moe,
        "lora": [(os.path.abspath(adapter.path), adapter.scale) for adapter in options.lora],
    }
    return json.dumps(told)


def load_error(path: str, vocab_only: bool, options: ModelOptions | None = None) -> str | None:
    """Tries to load in this process: None, or what llama.cpp said. May abort; see `ensure_loadable`."""
    options = options or ModelOptions()
    parameters = LoadParameters.of(options, 0, vocab_only=vocab_only, on_cpu=True)
    with library.log_lines.collected_errors() as errors:
        model = llama_cpp.llama_model_load_from_file(os.fsencode(path), parameters.struct)
        if not model:
            return one_line(errors)
        if vocab_only:
            return None
        context_parameters = llama_cpp.llama_context_default_params()
        context_parameters.n_ctx = context_parameters.n_batch = context_parameters.n_ubatch = 64
        context = llama_cpp.llama_init_from_model(model, context_parameters)
        if not context:
            return one_line(errors)
    return _adapter_error(model, context, options) if options.lora else None


def _adapter_error(model: int, context: int, options: ModelOptions) -> str | None:
    """Applies the adapters and evaluates a token: some shapes that do not fit show, or abort, only then."""
    try:
        Adapters(model, options.lora).apply(context)
    except AdapterInvalid as error:
        return error.cause
    if not llama_cpp.llama_model_has_decoder(model):
        return None
    batch = Batch(1, 1)
    batch.fill([0], 0, 0, 1, 1)
    code = llama_cpp.llama_decode(context, batch.struct)
    return f"llama.cpp cannot compute with it (llama_decode returned {code})" if code else None


def one_line(errors: list[str]) -> str:
    """llama.cpp's errors as one cause. The first names it; what follows ("failed to load model") repeats."""
    first = next((line for line in errors if line), "")
    cause = first.split("error loading model: ")[-1].strip().rstrip(".")
    return f"llama.cpp cannot load it: {cause[:300]}" if cause else "llama.cpp cannot load it"


def _cause_in_child(trial: str, timeout: float) -> str | None:
    try:
        ended = child.run(__name__, trial, timeout)
    except OSError as error:
        library.logger.warning("model %s: not probed in a child process: %s", json.loads(trial)["path"], error)
        return None
    if ended.code is None:
        return f"llama.cpp did not finish loading it in {timeout:.0f} s"
    if ended.signal_name:
        return f"llama.cpp crashed on it ({ended.signal_name})"
    if not ended.lines or "error" not in ended.lines[-1]:
        return f"probing it in a child process failed with exit code {ended.code}"
    cause = ended.lines[-1]["error"]
    return str(cause) if cause else None


def _record(files: Files, trial: str) -> bytes:
    stats = [(os.path.realpath(path), status.st_size, status.st_mtime_ns) for path, status in files]
    return json.dumps([stats, trial, library.fingerprint()]).encode("utf-8", "surrogateescape")


def _record_path(record: bytes) -> Path:
    return paths.cache_dir() / f"probe-{hashlib.sha256(record).hexdigest()[:32]}.json"


def _remembered(files: Files, trial: str) -> bool:
    try:
        record = _record(files, trial)
        return _record_path(record).read_bytes() == record
    except OSError:
        return False


def _remember(files: Files, trial: str) -> None:
    try:
        record = _record(files, trial)
        paths.write_atomically(_record_path(record), record)
    except OSError as error:
        library.logger.warning("model %s: probe not remembered: %s", files[0][0], error)


def main(trial: str) -> None:
    """The child; the trial as `_trial` wrote it."""
    told = json.loads(trial)
    options = ModelOptions(
        override_kv=tuple(Override(*override) for override in told["override_kv"]),
        override_tensor=tuple(Placement(*placement) for placement in told["override_tensor"]),
        cpu_moe=told["cpu_moe"],
        n_cpu_moe=told["n_cpu_moe"],
        lora=tuple(Adapter(Path(path), scale) for path, scale in told["lora"]),
    )
    print(json.dumps({"error": load_error(told["path"], told["vocab_only"], options)}), flush=True)
    os._exit(0)  # nothing to clean up, and tearing down a damaged model may crash


if __name__ == "__main__":
    main(sys.argv[1])
