"""Open what drafts for a model, by what the file is, and try a head first.

A path that the user gave goes in, an open drafter comes out, or an error of one line with cause and remedy.
What becomes of a refusal is the caller's decision (`decoding.opening` goes on without a drafter). What can be
refused without loading weights is refused first, because a file that does not fit may not fit the memory either.

A head that does not fit its target can abort or crash llama.cpp, so a child process tries it: it loads the target and
the head and evaluates a few tokens with each. It takes the load time of both, once for each pair of files: success is
remembered in the cache directory.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np

from rest_local.drafting.models.draft_model import DraftModel
from rest_local.drafting.models.drafter import Drafter, Evaluated, Query
from rest_local.drafting.models.head_kinds import kind_of, open_head
from rest_local.errors import ModelError, ModelInvalid, OptionError, RestLocalError
from rest_local.llama.context import Context, ContextSettings
from rest_local.llama.gguf import Files, check_headers, read_gguf
from rest_local.llama.load_fallback import timeout_seconds
from rest_local.llama.loading import cause_of
from rest_local.llama.model import Model
from rest_local.llama.options import ModelOptions
from rest_local.sandbox import report


class Opener:
    """Opens what drafts for a context of the target: a head reads that context, a draft model serves all of them."""

    def __init__(
        self, make: Callable[[Context], Drafter | None] = lambda context: None, shared: Drafter | None = None
    ) -> None:
        """Make drafters with `make`, or give away one that is open already, `shared`."""
        self._make, self._shared = make, shared

    def __call__(self, context: Context) -> Drafter | None:
        """Open what drafts for a context. A draft model was opened before; a head takes its memory now.

        Raises ModelError, OptionError.
        """
        return self._shared or self._make(context)

    def close(self) -> None:
        """Close what no context has taken over."""
        if self._shared:
            self._shared.close()


NO_DRAFTER = Opener()


def opener_of(
    path: str | os.PathLike[str], model: Model, n_ctx: int, n_slots: int, threads: int, n_gpu_layers: int | None
) -> Opener:
    """Make what opens the drafter in the file at `path`, by what the file is.

    A draft model is opened now, which costs the load time and a few passes; a head is tried in a child process, the
    first time. Raises as `open_drafter`.
    """
    file = Path(path).expanduser()
    kind = kind_of(file)
    if kind == "model":
        return Opener(shared=open_drafter(file, model, n_ctx, n_slots, threads, n_gpu_layers))
    ensure_usable(file, model.path, model.options, model.n_gpu_layers, kind)
    return Opener(lambda context: open_head(kind, file, context, model, context.n_slots, n_gpu_layers))


def mtp_inside(model: Model) -> Opener:
    """Make what opens the MTP layers in the file of `model`, which was loaded with them."""
    return Opener(lambda context: open_head("mtp", None, context, model, context.n_slots, model.n_gpu_layers))


def has_usable_mtp(path: Path, options: ModelOptions, n_gpu_layers: int) -> tuple[bool, str]:
    """Tell whether a model's own file has MTP layers that can be used, and a warning if they cannot.

    A child process tries them, the first time. Raises ModelNotFound, ModelInvalid for a damaged file.
    """
    if not read_gguf(path, tensors=True).has_mtp:
        return False, ""
    try:
        ensure_usable(path, path, options, n_gpu_layers, "mtp")
        return True, ""
    except ModelInvalid as error:
        return False, f"going on without the model's MTP layers: {error}"


def open_drafter(
    path: str | os.PathLike[str],
    model: Model,
    n_ctx: int,
    n_slots: int,
    threads: int,
    n_gpu_layers: int | None,
) -> DraftModel:
    """Open the file at `path`, a smaller model of the same vocabulary, to draft for `model`.

    A text has `n_ctx` tokens, and there are `n_slots` at a time. It costs the load time and a few passes. Raises
    ModelNotFound where there is no such file, and for a file that cannot draft for this model ModelError or
    OptionError.
    """
    file = Path(path).expanduser()
    files = check_headers(file)
    if not any(read_gguf(path).n_tensors for path, _ in files):
        raise ModelInvalid(file, "holds a vocabulary and no weights", "give the file with the weights")
    size, most = _bytes(files), _bytes(check_headers(model.path))
    if size > most:  # A forward pass reads all weights, so its drafts would cost more than they save.
        raise OptionError(
            f"model {file}: is larger ({size / 1e6:.1f} MB) than the model that it would draft for "
            f"({most / 1e6:.1f} MB); choose a smaller model of the same family"
        )
    return DraftModel.open(file, model.vocabulary, n_ctx, n_slots, threads=threads, n_gpu_layers=n_gpu_layers)


def _bytes(files: Files) -> int:
    return sum(status.st_size for _, status in files)


def ensure_usable(head: Path, target: Path, options: ModelOptions, n_gpu_layers: int, kind: str) -> None:
    """Check that a child process can draft with the head, now or in an earlier run. Raises ModelInvalid.

    `head` is the target's own file for MTP layers inside it. `options` and `n_gpu_layers` are those of the target,
    `kind` is a key of `head_kinds.HEADS`.
    """
    task = {
        "target": os.path.abspath(target),
        "head": os.path.abspath(head),
        "kind": kind,
        "n_gpu_layers": n_gpu_layers,
        "options": asdict(options),
    }
    files = [*check_headers(target), *check_headers(head)]
    if cause := cause_of(__name__, files, task, timeout_seconds(files)):
        raise ModelInvalid(head, cause, "get a head that was made for this model")


def main(text: str) -> None:
    """Run the child process. `text` is the task of `ensure_usable`."""
    task = json.loads(text)
    try:
        report(at="loading the model")
        options = ModelOptions.from_dict(task["options"])
        inside = task["head"] == task["target"]
        target = Model.open(task["target"], n_gpu_layers=task["n_gpu_layers"], options=options, mtp=inside)
        context = Context(target, ContextSettings(n_ctx=64, n_batch=64, n_branches=1, n_rs_seq=0))
        report(at="loading the head")
        head = open_head(task["kind"], None if inside else Path(task["head"]), context, target, 1, task["n_gpu_layers"])
        report(at="evaluating the model")
        tokens = [token % target.n_vocab for token in range(1, 6)]
        for again in (False, True):
            context.clear()
            context.batch.fill(tokens, list(range(5)), 0, 1, [0, 0, 0, 0, 1])
            if code := context.decode():
                raise ModelError(f"the model cannot be evaluated with it (llama_decode: {code})")
            given = head.features(len(tokens))
            if np.isnan(given).any():
                raise ModelError("the model gives no hidden states: llama.cpp has none for its architecture")
            if not again:
                head.spoil(len(tokens))  # The second decode has to write them anew.
        report(at="drafting")
        text_of_head = head.text()
        text_of_head.restart([*tokens, 1], 0)
        head.observe([Evaluated(text_of_head, 0, tokens, range(5))])
        (likely,) = head.answer([Query(text_of_head, ())])
        (after,) = head.answer([Query(text_of_head, (likely[0][0],))]) if likely else ((),)
        if not likely or not after or head.failed:
            report(error="does not draft with this model")
        else:
            report(error=None)
    except RestLocalError as error:
        cause = getattr(error, "cause", None) or str(error)
        report(error=cause.split(f"{task['head']}: ", 1)[-1])  # The caller names the file.
    os._exit(0)  # There is no cleanup, because a broken driver may crash there.


if __name__ == "__main__":
    main(sys.argv[1])
