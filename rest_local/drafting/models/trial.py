"""Tries a head in a child process, because one that does not fit its target can abort or crash llama.cpp.

The child loads the target and the head and evaluates a few tokens with each. It takes the load time of both, once for
each pair of files: success is remembered in the cache directory.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np

from rest_local.drafting.models.drafter import Evaluated, Query
from rest_local.errors import ModelError, ModelInvalid, RestLocalError
from rest_local.llama.context import Context, ContextSettings
from rest_local.llama.gguf import check_headers
from rest_local.llama.load_fallback import timeout_seconds
from rest_local.llama.loading import cause_of
from rest_local.llama.model import Model
from rest_local.llama.options import ModelOptions
from rest_local.sandbox import report


def ensure_usable(head: Path, target: Path, options: ModelOptions, n_gpu_layers: int, kind: str) -> None:
    """Check that a child process can draft with the head, now or in an earlier run.

    `head`: the target's own file for MTP layers inside it. `options`, `n_gpu_layers`: of the target. `kind`: a key of
    `head_kinds.HEADS`. Raises ModelInvalid.
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
    """The child process. `text`: the task of `ensure_usable`."""
    from rest_local.drafting.models.head_kinds import open_head

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
                head.spoil(len(tokens))  # the second decode has to write them anew
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
        report(error=cause.split(f"{task['head']}: ", 1)[-1])  # the caller names the file
    os._exit(0)  # without cleanup, because a broken driver may crash there


if __name__ == "__main__":
    main(sys.argv[1])
