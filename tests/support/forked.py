"""The child processes that try a model, forked from one that has imported everything: a tenth of a fresh one's cost.

A child is as separate as a fresh one: it crashes, hangs and allocates alone. What one found out about files that load
holds for all files with the same content: an engine remembers it in its cache folder, which many tests begin anew.
"""

import hashlib
import importlib
import json
import multiprocessing
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

from rest_local import sandbox
from rest_local.llama import cores, library

MODULES = (
    "rest_local.drafting.models.head_kinds", "rest_local.drafting.models.opening", "rest_local.llama.load_fallback",
    "rest_local.llama.loading", "rest_local.llama.projector",
)  # fmt: skip
PATHS = re.compile(r'"/(?:[^"\\]|\\.)*"')  # JSON texts that may name a file
SIZES = re.compile(r'"(n_ctx|n_cells|n_slots|threads|threads_batch)": \w+')  # do not matter on a CPU
PART = re.compile(r"-\d{5}-of-\d{5}")
LOADERS = ("rest_local.llama.loading", "rest_local.llama.load_fallback")
DIGESTS = re.compile(r"\b[0-9a-f]{64}\b")
OVERRIDES = re.compile(r'"(override_kv|override_tensor|lora)": \[[^]]|"n_cpu_moe": [1-9]|"cpu_moe": true')
LOADED = sandbox.ChildResult(0, [{"done": True, "error": None}], "", 0.0)
_ours: set[str] = set()
Run = Callable[[str, str, float], sandbox.ChildResult]


def can_fork() -> bool:
    """Return False with a GPU, whose driver does not outlive a fork, and on macOS, whose frameworks do not."""
    return sys.platform.startswith("linux") and not library.supports_gpu()


def forked(whole: Run) -> Run:
    """Return `sandbox.run` with forked children. `whole` runs commands that a test puts in place of the child's."""
    known: dict[str, sandbox.ChildResult] = {}
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([__name__, *MODULES])
    python = sys.executable

    def run(module: str, task: str, timeout: float) -> sandbox.ChildResult:
        command = sandbox.command(module, task)
        if command != [python, "-m", module, task]:
            with mock.patch.object(sandbox, "command", return_value=command):
                return whole(module, task, timeout)
        key = module + SIZES.sub("", PATHS.sub(_digest, task))
        if key in known:
            return known[key]
        if module in LOADERS and _is_ours(key):
            return LOADED
        result = _run(server.Process, module, task, timeout)
        if result.code == 0 and (result.seen.get("done") or result.seen.get("error", "") is None):
            known[key] = result
        return result

    return run


def _run(process_of: Callable[..., BaseProcess], module: str, task: str, timeout: float) -> sandbox.ChildResult:
    with tempfile.TemporaryDirectory() as folder:
        process = process_of(target=_child, args=(module, task, folder, dict(os.environ)))
        process.start()
        process.join(timeout)
        ended = process.exitcode
        process.kill()
        process.join()
        process.close()
        output, errors = ((Path(folder) / name).read_bytes() for name in ("1", "2"))
    return sandbox.ChildResult.of(ended, output, errors, timeout)


def trust(path: Path) -> None:
    """Let a known model load without a child that finds that out for each of its settings."""
    _ours.add(hashlib.sha256(path.read_bytes()).hexdigest())


def _is_ours(key: str) -> bool:
    """Return True if a task is about such a model alone, as it is in its file."""
    found = DIGESTS.findall(key)
    return len(found) == 1 and found[0] in _ours and not OVERRIDES.search(key)


def _digest(path: re.Match[str]) -> str:
    """Return the digest of a file that a task names, or a new key if it is large or one of several parts."""
    file = Path(json.loads(path[0]))
    if PART.search(file.name) or not file.is_file() or file.stat().st_size > 1 << 25:
        return f"{path[0]} {os.urandom(8).hex()}"
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _child(module: str, task: str, folder: str, environment: Mapping[str, str]) -> None:
    for descriptor in (1, 2):
        file = os.open(Path(folder) / str(descriptor), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    mock.patch.object(cores, "cores", return_value=1).start()
    again = partial(_run, multiprocessing.get_context("fork").Process)
    mock.patch.object(sandbox, "run", again).start()  # a trial that opens a model tries that one in turn
    code = 0
    try:
        importlib.import_module(module).main(task)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
