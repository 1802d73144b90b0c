"""Computes with a model in a child process, in the settings that this process is going to use.

`python -m rest_local.llama.trial TASK` loads the model, makes a context for each of the settings, and decodes 1, 2, 8
and 32 tokens in it (on a GPU also a full batch, which needs the most memory). It prints a line of JSON at each stage,
so the last line names the stage at which a child crashed. `rest_local.llama.ladder` uses the result.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rest_local.errors import ModelError, RestLocalError
from rest_local.llama import library, probe
from rest_local.llama.context import Context, ContextSettings
from rest_local.llama.loaded import llama_cpp
from rest_local.llama.model import Model
from rest_local.llama.options import ModelOptions
from rest_local.llama.parameters import LoadParameters
from rest_local.llama.probe import one_line

SIZES = (1, 2, 8, 32)
CPU_CONTEXT = 512  # tokens
CONTEXT = "making a context"  # prefix of the names of these stages
MEMORY = ("out of memory", "allocate", "cudamalloc", "outofdevicememory", "insufficient memory", "memoryerror")


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
    return failure_of(probe.run(__name__, json.dumps(task, default=str), timeout), timeout)


def failure_of(ended: probe.ChildResult, timeout: float) -> Failure | None:
    """The failure that the end of a child and its lines show; None if it succeeded."""
    seen: dict[str, Any] = {}
    for line in ended.lines:
        seen.update(line)
    if ended.code == 0 and seen.get("done"):
        return None
    during = str(seen.get("at", "starting"))
    n_layer = int(seen.get("n_layer", 0))
    if ended.code is None:
        return Failure("hang", f"did not finish in {timeout:.0f} s", during, n_layer)
    refused = str(seen.get("refused", ""))
    messages = f"{refused} {ended.errors}".lower()
    memory = ended.signal_name == "SIGKILL" or any(words in messages for words in MEMORY)
    if refused:
        return Failure("memory" if memory else "refused", refused, during, n_layer)
    how = f"crashed ({ended.signal_name or f'exit code {ended.code}'})"
    passed = bool(seen.get("without_flash")) and not memory
    return Failure("memory" if memory else "crash", how, during, n_layer, passed)


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
    """The settings of the context as it will be made, see `attempt`. On the CPU the context is short, because its
    length causes no crash there."""
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


def report(**fields: object) -> None:
    """Print a line for the parent, flushed before the next stage begins."""
    print(json.dumps(fields), flush=True)


def _prepare() -> None:
    """Prevent core files of gigabytes, and let Linux kill this process, not the parent, when memory runs out."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", "ascii")


if __name__ == "__main__":
    main(sys.argv[1])
