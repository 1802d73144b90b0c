"""Loads a model in a child process before this one does: a hostile or broken GGUF can abort llama.cpp, or crash it.

`python -m rest_local.llama.probe PATH full|vocabulary` loads without reading the weights (mapped, CPU only, not
repacked), makes a small context, which builds the compute graph, and prints one line of JSON: `{"error": null}` or
`{"error": "what llama.cpp said"}`. It costs about half a second, the first time a (path, size, mtime, llama.cpp) is
seen; success is remembered in the cache directory.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import llama_cpp

from rest_local import paths
from rest_local.errors import ModelInvalid
from rest_local.llama import library

TIMEOUT_SECONDS = 300.0  # mapping 100 GB from a slow disk is done in less; a file that makes llama.cpp spin is not


def ensure_loadable(path: Path, status: os.stat_result, vocab_only: bool) -> None:
    """Returns when a child process loaded the model, now or earlier. Raises ModelInvalid with the cause."""
    if _remembered(path, status, vocab_only):
        return
    cause = _cause_in_child(path, vocab_only)
    if cause:
        raise ModelInvalid(path, cause)
    _remember(path, status, vocab_only)


def load_error(path: str, vocab_only: bool) -> str | None:
    """Tries to load in this process: None, or what llama.cpp said. May abort; see `ensure_loadable`."""
    parameters = llama_cpp.llama_model_default_params()
    parameters.vocab_only = vocab_only
    parameters.n_gpu_layers = 0
    parameters.use_extra_bufts = False  # repacking would read all weights
    parameters.load_mode = llama_cpp.LLAMA_LOAD_MODE_MMAP
    with library.log_lines.collected_errors() as errors:
        model = llama_cpp.llama_model_load_from_file(os.fsencode(path), parameters)
        if not model:
            return one_line(errors)
        if vocab_only:
            return None
        context_parameters = llama_cpp.llama_context_default_params()
        context_parameters.n_ctx = context_parameters.n_batch = context_parameters.n_ubatch = 64
        context = llama_cpp.llama_init_from_model(model, context_parameters)
        return None if context else one_line(errors)


def one_line(errors: list[str]) -> str:
    """llama.cpp's errors as one cause. The first names it; what follows ("failed to load model") repeats."""
    first = next((line for line in errors if line), "")
    cause = first.split("error loading model: ")[-1].strip().rstrip(".")
    return f"llama.cpp cannot load it: {cause[:300]}" if cause else "llama.cpp cannot load it"


def _cause_in_child(path: Path, vocab_only: bool) -> str | None:
    kind = "vocabulary" if vocab_only else "full"
    command = [sys.executable, "-m", "rest_local.llama.probe", str(path.absolute()), kind]
    root = Path(__file__).parents[2]  # -m looks in the working directory first: let that be ours, not the user's
    try:
        child = subprocess.run(
            command, cwd=root, capture_output=True, timeout=TIMEOUT_SECONDS, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return f"llama.cpp did not finish loading it in {TIMEOUT_SECONDS:.0f} s"
    except OSError as error:
        library.logger.warning("model %s: not probed in a child process: %s", path, error)
        return None
    if child.returncode < 0:
        return f"llama.cpp crashed on it ({_signal_name(-child.returncode)})"
    try:
        cause = json.loads(child.stdout.splitlines()[-1])["error"]
    except (ValueError, IndexError, KeyError, TypeError):
        return f"probing it in a child process failed with exit code {child.returncode}"
    return str(cause) if cause else None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _record(path: Path, status: os.stat_result, vocab_only: bool) -> bytes:
    key = [os.path.realpath(path), status.st_size, status.st_mtime_ns, vocab_only, library.fingerprint()]
    return json.dumps(key).encode("utf-8", "surrogateescape")


def _record_path(record: bytes) -> Path:
    return paths.cache_dir() / f"probe-{hashlib.sha256(record).hexdigest()[:32]}.json"


def _remembered(path: Path, status: os.stat_result, vocab_only: bool) -> bool:
    try:
        record = _record(path, status, vocab_only)
        return _record_path(record).read_bytes() == record
    except OSError:
        return False


def _remember(path: Path, status: os.stat_result, vocab_only: bool) -> None:
    try:
        record = _record(path, status, vocab_only)
        paths.write_atomically(_record_path(record), record)
    except OSError as error:
        library.logger.warning("model %s: probe not remembered: %s", path, error)


def main(arguments: list[str]) -> None:
    """The child: `PATH full|vocabulary`."""
    path, kind = arguments
    print(json.dumps({"error": load_error(path, kind == "vocabulary")}), flush=True)
    os._exit(0)  # nothing to clean up, and tearing down a damaged model may crash


if __name__ == "__main__":
    main(sys.argv[1:])
