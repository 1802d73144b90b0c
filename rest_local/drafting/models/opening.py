"""Opens what drafts for a model, by what the file is.

Contract: a path that the user gave goes in, an open drafter comes out, or an error of one line with cause and remedy.
What becomes of a refusal is the caller's decision (`rest_local.decoding.core` goes on without a drafter). What can be
refused without loading weights is refused first, because a file that does not fit may not fit the memory either.
"""

from __future__ import annotations

import os
from pathlib import Path

from rest_local.drafting.models.draft_model import DraftModel
from rest_local.errors import ModelInvalid, OptionError
from rest_local.llama.gguf_header import Files, check_headers, n_tensors
from rest_local.llama.model import Model

_MB = 1e6


def open_drafter(
    path: str | os.PathLike[str],
    model: Model,
    n_ctx: int,
    n_slots: int,
    threads: int,
    n_gpu_layers: int | None,
) -> DraftModel:
    """What drafts for `model`: the file at `path`, a smaller model of the same vocabulary.

    `n_ctx`: tokens of one text; `n_slots`: texts at a time. Costs the load time and a few passes. Raises ModelNotFound
    where there is no such file, and for a file that cannot draft for this model ModelError or OptionError.
    """
    file = Path(path).expanduser()
    files = check_headers(file)
    if not n_tensors(files):
        raise ModelInvalid(file, "holds a vocabulary and no weights", "give the file with the weights")
    size, most = _bytes(files), _bytes(check_headers(model.path))
    if size > most:  # a forward pass reads all weights, so its drafts would cost more than they save
        raise OptionError(
            f"model {file}: is larger ({size / _MB:.1f} MB) than the model that it would draft for "
            f"({most / _MB:.1f} MB); choose a smaller model of the same family"
        )
    return DraftModel.open(file, model.vocabulary, n_ctx, n_slots, threads=threads, n_gpu_layers=n_gpu_layers)


def _bytes(files: Files) -> int:
    return sum(status.st_size for _, status in files)
