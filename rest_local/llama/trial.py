"""Computes with a model in a child process, in the settings that are about to be used, before this process does.

`python -m rest_local.llama.trial TRIAL` loads the model as told, makes a context for each of the settings, decodes 1,
2, 8 and 32 tokens in it (on a GPU also a full batch, which needs the most memory), and prints a line of JSON at each
stage. So the last line says where a child that died was. `rest_local.llama.ladder` decides what follows from that.
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

import llama_cpp
import numpy as np

from rest_local.errors import ModelError, RestLocalError
from rest_local.llama import child, library
from rest_local.llama.context import Context, ContextSettings
from rest_local.llama.model import Model
from rest_local.llama.options import ModelOptions
from rest_local.llama.parameters import LoadParameters
from rest_local.llama.probe import one_line

SIZES = (1, 2, 8, 32)
CPU_CONTEXT = 512  # tokens
CONTEXT = "making a context"  # begins the name of that stage
MEMORY = ("out of memory", "allocate", "cudamalloc", "outofdevicememory", "insufficient memory", "memoryerror")


@dataclass(frozen=True)
class Failure:
    """Why a trial failed. `kind`: `crash`, `hang`, `memory`, or `refused` (llama.cpp returned an error).

    `during`: what it was doing. `n_layer`: of the model, 0 where that is unknown. `without_flash`: everything passed
    without flash attention before.
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
    """Runs the child. None where every setting that llama.cpp accepts works. Raises OSError where it cannot be started.

    `n_ctx`: tokens of context; 0 = what the model was trained for; None = that or what `settings` say, whichever is
    less. `settings`: recurrent models alone use their `n_rs_seq`."""
    told = {
        "path": os.path.abspath(path),
        "n_gpu_layers": n_gpu_layers,
        "n_ctx": n_ctx,
        "options": asdict(options),
        "settings": [each.to_dict() for each in sorted(settings, key=lambda each: each.flash_attention)],
    }
    return judged(child.run(__name__, json.dumps(told, default=str), timeout), timeout)


def judged(ended: child.Ended, timeout: float) -> Failure | None:
    """What a child's end and its lines mean."""
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
    said = f"{refused} {ended.errors}".lower()
    memory = ended.signal_name == "SIGKILL" or any(words in said for words in MEMORY)
    if refused:
        return Failure("memory" if memory else "refused", refused, during, n_layer)
    how = f"crashed ({ended.signal_name or f'exit code {ended.code}'})"
    passed = bool(seen.get("without_flash")) and not memory
    return Failure("memory" if memory else "crash", how, during, n_layer, passed)


def main(trial: str) -> None:
    """The child; the trial as `attempt` wrote it."""
    _prepare()
    told = json.loads(trial)
    settings = [ContextSettings.from_dict(each) for each in told["settings"]]
    try:
        options = ModelOptions.from_dict(told["options"])
        compute(Path(told["path"]), told["n_gpu_layers"], options, settings, told["n_ctx"])
        say(done=True)
    except RestLocalError as error:
        say(refused=str(error))
    os._exit(0)  # nothing to clean up, and a broken driver may crash on the way out


def compute(
    path: Path, n_gpu_layers: int, options: ModelOptions, settings: Sequence[ContextSettings], n_ctx: int | None
) -> None:
    """All stages, each announced on stdout. Raises ModelError, OptionError; may crash, abort or hang."""
    if n_gpu_layers:  # cheap, and what the number of layers is taken from where the device fails
        at_first = LoadParameters.of(options, 0, vocab_only=False, on_cpu=True)
        with _loaded(path, at_first, 0, options) as model:
            say(n_layer=model.n_layer)
    say(at="loading it")
    parameters = LoadParameters.of(replace(options, mlock=False), n_gpu_layers, vocab_only=False)
    model = _loaded(path, parameters, n_gpu_layers, options)
    refused: ModelError | None = None
    accepted = 0
    for each in settings:
        if each.flash_attention and accepted and refused is None:
            say(without_flash=True)
        flash = f"flash attention {'on' if each.flash_attention else 'off'}, cache {each.cache_type_k}"
        say(at=f"{CONTEXT} ({flash})")
        try:
            context = Context(model, _for_model(model, each, n_ctx, on_cpu=not n_gpu_layers))
        except ModelError as error:  # such settings are left out, as where they are measured
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
        say(at=f"decoding {n} token{'s' if n > 1 else ''} ({flash})")
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


def _for_model(model: Model, settings: ContextSettings, n_ctx: int | None, on_cpu: bool) -> ContextSettings:
    """As the context will be made, see `attempt`. On the CPU a short one: its length crashes nothing there."""
    trained = model.n_ctx_train or settings.n_ctx
    size = max(8, n_ctx or (trained if n_ctx == 0 else min(settings.n_ctx, trained)))
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


def say(**what: object) -> None:
    """A line for the parent, out before the next stage begins."""
    print(json.dumps(what), flush=True)


def _prepare() -> None:
    """No core file of gigabytes; and where memory runs out, Linux ends this process and not the parent."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", "ascii")


if __name__ == "__main__":
    main(sys.argv[1])
