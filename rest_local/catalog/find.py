"""From what `-m` says to a model file: a path, a name that the stores of this machine know, or `user/repo:QUANT`.

1. A file that exists is that file. So is what can only be a path: what ends in `.gguf`, or begins with `.`, `~` or `/`.
2. A name of `stores.stored_models`, letters of any case; a repository without a quantization, and an Ollama model
   without a tag, mean the one that would be taken by default.
3. A name of a hub that is not on the disk raises ModelNotHere, which says how to get it.

Reads directories only: a few milliseconds for hundreds of files. Never reaches the network.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rest_local.catalog.quantization import is_meant, preferred
from rest_local.catalog.stores import StoredModel, stored_models
from rest_local.errors import ModelNotFound, ModelNotHere
from rest_local.paths import demo_model

_HUB_NAME = re.compile(
    r"(?:hf:/{1,2}|https?:/{1,2}[\w.:-]+/|hf\.co/|huggingface\.co/)?"
    r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(?::(?P<label>[^:\s]+))?/?"
)
_CLOSE = 3  # names that an error suggests


class HubName(NamedTuple):
    """`user/repo:QUANT`. label: a quantization or the name of a file; None where none was given."""

    repo: str
    label: str | None

    def __str__(self) -> str:
        return self.repo + (f":{self.label}" if self.label else "")


def hub_name(text: str) -> HubName | None:
    """`user/repo` or `user/repo:QUANT`, also with the address of the hub in front; None for any other text."""
    found = _HUB_NAME.fullmatch(text)
    return HubName(found["repo"], found["label"]) if found else None


def model_file(model: str | os.PathLike[str] | None) -> Path:
    """The file that `-m` means, of several the first; the demo model for None. A path need not exist.

    Raises ModelNotHere for a name of a hub that is not on the disk, ModelNotFound for any other name that is unknown.
    """
    if model is None:
        return demo_model()
    path = Path(model).expanduser()
    if _is_path(os.fspath(model), path):
        return path
    try:
        return find_model(os.fspath(model)).path
    except ModelNotFound:
        if path.exists():  # a directory, or a device: the error says what it is once it is opened
            return path
        raise


def _is_path(text: str, path: Path) -> bool:
    if path.is_file() or path.is_absolute() or text.startswith("."):
        return True
    named = hub_name(text)
    return text.lower().endswith(".gguf") and not (named and named.label)  # user/repo:file.gguf is a name


def find_model(name: str, models: Sequence[StoredModel] | None = None) -> StoredModel:
    """The model on the disk that `name` means. `models`: to look among, by default all. Raises as `model_file`."""
    models = stored_models() if models is None else models
    found = matching(name, models)
    if found:
        return _taken_by_default(found)
    wanted = hub_name(name)
    if wanted:
        raise ModelNotHere(str(wanted), _labels_of(wanted.repo, models))
    known = [model.name for model in models]
    close = difflib.get_close_matches(name, known, _CLOSE) or [
        each for each in known if name.casefold() in each.casefold()
    ]
    did_you_mean = f"did you mean {' or '.join(close[:_CLOSE])}? " if close else ""
    raise ModelNotFound(name, "no such file, and no model of that name", f"{did_you_mean}`rest-local models` lists all")


def matching(name: str, models: Sequence[StoredModel]) -> list[StoredModel]:
    """The models that `name` can mean: the one that is called so, else those of that repository or Ollama model."""
    exact = [model for model in models if model.name.casefold() == name.casefold()]
    if exact:
        return exact
    wanted = hub_name(name)
    of_repo = [model for model in models if wanted and model.repo.casefold() == wanted.repo.casefold()]
    if wanted and wanted.label is not None:
        return [model for model in of_repo if is_meant(wanted.label, model.path.name)][:1]
    tagged = f"{name}:latest".casefold()
    return of_repo or [model for model in models if model.store == "ollama" and model.name.casefold() == tagged]


def _taken_by_default(models: Sequence[StoredModel]) -> StoredModel:
    label = preferred(model.label for model in models)
    return next((model for model in models if model.label == label), models[0])


def _labels_of(repo: str, models: Sequence[StoredModel]) -> tuple[str, ...]:
    return tuple(model.name for model in models if model.repo.casefold() == repo.casefold())
