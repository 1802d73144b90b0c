"""The projector for images that lies with a model's file: `mmproj*.gguf` next to it, or in its folder of a hub's cache.

A name says whose a projector is only in part. So of several models in one folder, each takes the projector that has its
name; one without a name (`mmproj-model-f16.gguf`) is taken where all models in the folder are one model in several
quantizations. Whether it fits is seen when it is loaded. Reads directories and opens no file.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from rest_local.catalog.quantization import is_model_file, label_of, stem_of

_PREFERRED = ("F16", "BF16", "Q8_0", "F32")  # a projector is small: quantized further it gains little and sees worse
_APART = re.compile(r"[^a-z0-9]+")


def is_projector_file(name: str) -> bool:
    """Whether a file of this name is a projector by the habit of those who publish them."""
    return name.lower().endswith(".gguf") and "mmproj" in name.lower()


def projector_of(model: Path) -> Path | None:
    """The projector of a model's file; None where there is none, or it is not clear which."""
    return next((found for folder in _folders(model) if (found := _in_folder(folder, model.name))), None)


def _folders(model: Path) -> list[Path]:
    """The folder of the file; in the cache of a hub also the root of each snapshot of the repository."""
    above = [folder for folder in model.parents if folder.parent.name == "snapshots"]
    if not above:
        return [model.parent]
    with suppress(OSError):
        above += sorted(folder for folder in above[0].parent.iterdir() if folder != above[0])
    return list(dict.fromkeys([model.parent, *above]))


def _in_folder(folder: Path, model: str) -> Path | None:
    try:
        names = sorted(entry.name for entry in os.scandir(folder))
    except OSError:
        return None
    named = [name for name in names if is_projector_file(name) and name != model]
    own = _plain(model)
    found = [name for name in named if _of(name) and (_of(name) in own or own in _of(name))]
    if not found and {_plain(name) for name in names if is_model_file(name)} <= {own}:
        found = [name for name in named if not _of(name)]
    if not found:
        return None
    labels = {label_of(name): name for name in found}
    best = next((label for label in _PREFERRED if label in labels), None)
    return folder / (labels[best] if best else found[0])


def _plain(name: str) -> str:
    """The name of a model without its quantization, in small letters and digits."""
    stem, label = stem_of(name), label_of(name)
    if label != stem:
        stem = re.sub(re.escape(label), "", stem, flags=re.IGNORECASE)
    return _APART.sub("", stem.lower())


def _of(name: str) -> str:
    """The model that a projector is named after; empty for `mmproj-model-f16.gguf` and `mmproj-F16.gguf`."""
    return _plain(name).replace("mmproj", "").removesuffix("model")
