"""Loads a model in a child process first, because a hostile or broken GGUF file can abort or crash llama.cpp.

`python -m rest_local.llama.probe TASK` (JSON: path, vocab_only, and the options that could crash a process) loads the
model without reading the weights (mapped, CPU only, not repacked), makes a small context, which builds the compute
graph, and prints one line of JSON: `{"error": null}` or `{"error": "message of llama.cpp"}`.

It takes about half a second for each new (path, size, mtime, options, llama.cpp). Success is remembered in the cache
directory. Each LoRA adapter has a probe of its own, which also evaluates a token, so that errors name the right file.

`run` runs any module of this package in a child process, which may crash or hang, and reports how it ended. It knows
nothing about the task of the child: its input is JSON on the command line, its output lines of JSON. The parent
survives any behaviour of the child, and waits at most `timeout` and a few seconds.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from rest_local import paths
from rest_local.errors import AdapterInvalid, ModelInvalid, ModelNotFound
from rest_local.llama import library
from rest_local.llama.batch import Batch
from rest_local.llama.gguf_header import Files, check_header, identity_of
from rest_local.llama.loaded import llama_cpp
from rest_local.llama.options import Adapter, ModelOptions, Override, Placement
from rest_local.llama.parameters import Adapters, LoadParameters

KILLED = -9  # the exit status after SIGKILL, a name that Windows does not have
KILL_SECONDS = 5.0  # a process that waits in a driver does not end when it is killed


@dataclass(frozen=True)
class ChildResult:
    """How a child ended. `lines`: the JSON objects that it printed. `code`: its exit status, negative for a signal,
    None if it was killed after `timeout` seconds. `errors`: the end of its stderr.
    """

    code: int | None
    lines: Sequence[dict[str, Any]]
    errors: str

    @property
    def signal_name(self) -> str:
        """The signal that ended it, such as SIGSEGV; empty without one."""
        if self.code is None or self.code >= 0:
            return ""
        try:
            return signal.Signals(-self.code).name
        except ValueError:
            return f"signal {-self.code}"


def command(module: str, task: str) -> list[str]:
    """The command line of the child."""
    return [sys.executable, "-m", module, task]


def run(module: str, task: str, timeout: float) -> ChildResult:
    """Start the child and wait for it. `task`: its input. Raises OSError if it cannot be started."""
    root = Path(__file__).parents[2]  # `-m` searches the working directory first, so do not use the user's
    with subprocess.Popen(
        command(module, task),
        cwd=root,
        env={**os.environ, "GOMP_SPINCOUNT": "0"},  # waiting threads must not spin, as other programs may be running
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            output, errors = _killed(process)
            return ChildResult(None, _objects(output), _tail(errors))
        except BaseException:
            process.kill()
            raise
    return ChildResult(process.returncode, _objects(output), _tail(errors))


def _killed(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    process.kill()
    try:
        return process.communicate(timeout=KILL_SECONDS)
    except subprocess.TimeoutExpired as error:
        for pipe in (process.stdout, process.stderr):
            if pipe:
                pipe.close()
        process.returncode = KILLED  # otherwise the end of the `with` block waits for the process
        return error.stdout or b"", error.stderr or b""


def _objects(output: bytes) -> list[dict[str, Any]]:
    found = []
    for line in output.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def _tail(errors: bytes) -> str:
    return errors[-4000:].decode("utf-8", "replace")


TIMEOUT_SECONDS = 60.0  # for a small file; only one that makes llama.cpp loop takes longer
SECONDS_PER_BYTE = 2.4e-9  # in addition: 300 s in all for 100 GB, which even a slow disk maps faster


def ensure_loadable(files: Files, vocab_only: bool, options: ModelOptions) -> None:
    """Check that a child process can load the model and each of its adapters, now or in an earlier run.

    `files`: all files of the model, in order. Raises ModelInvalid or AdapterInvalid with the cause."""
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
    return cause_of(__name__, files, _task(files[0][0], vocab_only, options))


def cause_of(module: str, files: Files, task: str) -> str | None:
    """Why a child process cannot load the files, None where it can, now or in an earlier run.

    `module`: its `main` loads what `task`, JSON with the path among it, describes, and prints `{"error": ...}`."""
    if _remembered(files, task):
        return None
    cause = _cause_in_child(module, task, timeout_seconds(files))
    if not cause:
        _remember(files, task)
    return cause


def timeout_seconds(files: Files) -> float:
    """The time limit for a child process that loads the files without reading the weights."""
    return TIMEOUT_SECONDS + SECONDS_PER_BYTE * sum(status.st_size for _, status in files)


def _task(path: Path, vocab_only: bool, options: ModelOptions) -> str:
    """The input of the child as JSON; `main` reads it."""
    task = {
        "path": os.path.abspath(path),
        "vocab_only": vocab_only,
        "override_kv": [astuple(override) for override in options.override_kv],
        "override_tensor": [astuple(placement) for placement in options.override_tensor],
        "cpu_moe": options.cpu_moe,
        "n_cpu_moe": options.n_cpu_moe,
        "lora": [(os.path.abspath(adapter.path), adapter.scale) for adapter in options.lora],
    }
    return json.dumps(task)


def load_error(path: str, vocab_only: bool, options: ModelOptions | None = None) -> str | None:
    """Load the model in this process. Returns llama.cpp's error, or None. May abort; see `ensure_loadable`."""
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
    """Apply the adapters and evaluate a token, because some wrong shapes only fail, or abort, then."""
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
    """llama.cpp's errors as one cause. The first line names it; later ones ("failed to load model") repeat it."""
    first = next((line for line in errors if line), "")
    cause = first.split("error loading model: ")[-1].strip().rstrip(".")
    return f"llama.cpp cannot load it: {cause[:300]}" if cause else "llama.cpp cannot load it"


def _cause_in_child(module: str, task: str, timeout: float) -> str | None:
    try:
        ended = run(module, task, timeout)
    except OSError as error:
        library.logger.warning("model %s: not probed in a child process: %s", json.loads(task)["path"], error)
        return None
    if ended.code is None:
        return f"llama.cpp did not finish loading it in {timeout:.0f} s"
    if ended.signal_name:
        return f"llama.cpp crashed on it ({ended.signal_name})"
    if not ended.lines or "error" not in ended.lines[-1]:
        return f"probing it in a child process failed with exit code {ended.code}"
    cause = ended.lines[-1]["error"]
    return str(cause) if cause else None


def _record(files: Files, task: str) -> bytes:
    return json.dumps([identity_of(files), task, library.fingerprint()]).encode("utf-8", "surrogateescape")


def _record_path(record: bytes) -> Path:
    return paths.cache_dir() / f"probe-{hashlib.sha256(record).hexdigest()[:32]}.json"


def _remembered(files: Files, task: str) -> bool:
    try:
        record = _record(files, task)
        return _record_path(record).read_bytes() == record
    except OSError:
        return False


def _remember(files: Files, task: str) -> None:
    try:
        record = _record(files, task)
        paths.write_atomically(_record_path(record), record)
    except OSError as error:
        library.logger.warning("model %s: probe not remembered: %s", files[0][0], error)


def main(text: str) -> None:
    """The child process. `text`: the result of `_task`."""
    task = json.loads(text)
    options = ModelOptions(
        override_kv=tuple(Override(*override) for override in task["override_kv"]),
        override_tensor=tuple(Placement(*placement) for placement in task["override_tensor"]),
        cpu_moe=task["cpu_moe"],
        n_cpu_moe=task["n_cpu_moe"],
        lora=tuple(Adapter(Path(path), scale) for path, scale in task["lora"]),
    )
    print(json.dumps({"error": load_error(task["path"], task["vocab_only"], options)}), flush=True)
    os._exit(0)  # without cleanup, because freeing a damaged model may crash


if __name__ == "__main__":
    main(sys.argv[1])
