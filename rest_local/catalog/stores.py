"""Where models lie on this machine, and the names that `-m` takes for them. Reads directories, opens no model file.

| store      | where                                                            | names                   |
|------------|------------------------------------------------------------------|-------------------------|
| `folder`   | `$REST_LOCAL_MODELS`, else `models` in the data directory        | the file's, less `.gguf` |
| `hub`      | the cache of huggingface_hub: `$HF_HUB_CACHE`, `$HF_HOME/hub`    | `user/repo:QUANT`       |
| `lmstudio` | `~/.lmstudio/models`, `~/.cache/lm-studio/models`                | `user/repo:QUANT`       |
| `ollama`   | `$OLLAMA_MODELS`, `~/.ollama/models`, those of its service       | `llama3.2:3b`           |
| `demo`     | comes with rest-local                                            | `demo`                  |

A name that two models would have belongs to the first; the second gets its store in front (`ollama/llama3.2:3b`), and
where that is taken too, its path. Nothing here is written. A directory that cannot be read holds nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rest_local.catalog.quantization import is_model_file, label_of, stem_of
from rest_local.errors import ModelNotFound
from rest_local.llama.gguf import part_of
from rest_local.paths import data_home, demo_model

DEMO = "demo"
FOLDERS = "REST_LOCAL_MODELS"
DEEPEST = 5  # folders below a store: user, repository, quantization, and some of one's own

_OLLAMA_MODEL = "application/vnd.ollama.image.model"
_OLLAMA_HOST, _OLLAMA_USER = "registry.ollama.ai", "library"  # are left out of its names


@dataclass(frozen=True, kw_only=True)
class StoredModel:
    """A model on the disk.

    name   what `-m` takes
    path   its file; of several files the first
    store  which of the places it is in
    label  its quantization as the file's name says it, else that name
    repo   `user/repo` where the store has it from a hub
    """

    name: str
    path: Path
    store: str
    label: str = ""
    repo: str = ""


def stored_models() -> list[StoredModel]:
    """All models on the disk, the user's own folders first, each under another name. A few ms for hundreds of files."""
    found: dict[str, StoredModel] = {}
    for model in _all():
        for name in (model.name, f"{model.store}/{model.name}", str(model.path)):
            if name.casefold() not in found:
                found[name.casefold()] = replace(model, name=name)
                break
    return list(found.values())


def names() -> list[str]:
    """The names of all models on the disk, as `-m` takes them; for completion."""
    return [model.name for model in stored_models()]


def _all() -> Iterator[StoredModel]:
    for folder in own_folders():
        for path in _model_files(folder):
            yield StoredModel(name=stem_of(path.name), path=path, store="folder", label=label_of(path.name))
    yield from _hub()
    yield from _lmstudio()
    yield from _ollama()
    with suppress(ModelNotFound):
        yield StoredModel(name=DEMO, path=demo_model(), store="demo")


def own_folders() -> list[Path]:
    """The user's folders of models, which need not exist."""
    given = os.environ.get(FOLDERS, "")
    if not given:
        return [data_home() / "models"]
    return [Path(folder).expanduser() for folder in given.split(os.pathsep) if folder]


def hub_cache() -> Path:
    """The directory of huggingface_hub's cache, by the rules of that library, which is not imported for it."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    given = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.expandvars(given)).expanduser()


def _hub() -> Iterator[StoredModel]:
    for folder in _folders(hub_cache()):
        if folder.name.startswith("models--"):
            repo = folder.name.removeprefix("models--").replace("--", "/")
            files = {
                path.relative_to(shot).as_posix(): path for shot in _snapshots(folder) for path in _model_files(shot)
            }
            yield from _of_repository(repo, files, "hub")


def _snapshots(folder: Path) -> list[Path]:
    """The snapshots of a repository, that of its main branch last, so that its files win."""
    main = ""
    with suppress(OSError, UnicodeDecodeError):
        main = (folder / "refs" / "main").read_text("utf-8").strip()
    return sorted(_folders(folder / "snapshots"), key=lambda shot: (shot.name == main, shot.name))


def _lmstudio() -> Iterator[StoredModel]:
    for store in ("~/.lmstudio/models", "~/.cache/lm-studio/models"):
        for user in _folders(Path(store).expanduser()):
            for folder in _folders(user):
                files = {path.relative_to(folder).as_posix(): path for path in _model_files(folder)}
                yield from _of_repository(f"{user.name}/{folder.name}", files, "lmstudio")


def _of_repository(repo: str, files: dict[str, Path], store: str) -> Iterator[StoredModel]:
    """The models among the files of a repository. Of two with one quantization, the second has its file's name."""
    taken = set()
    for name, path in sorted(files.items()):
        label = label_of(name)
        shown = stem_of(name) if label in taken else label
        taken.add(label)
        yield StoredModel(name=f"{repo}:{shown}", path=path, store=store, label=label, repo=repo)


def _ollama() -> Iterator[StoredModel]:
    """The models of Ollama: a manifest for each name, and its layers as blobs."""
    given = os.environ.get("OLLAMA_MODELS")
    homes = [given] if given else ["~/.ollama/models", "/usr/share/ollama/.ollama/models"]
    for home in (Path(home).expanduser() for home in homes):
        for manifest in _files(home / "manifests", deepest=3):
            parts = manifest.relative_to(home / "manifests").parts
            digest = _model_digest(manifest)
            path = home / "blobs" / digest.replace(":", "-")
            if digest and len(parts) > 1 and path.is_file():
                yield StoredModel(name=_ollama_name(parts), path=path, store="ollama", label=parts[-1])


def _ollama_name(parts: tuple[str, ...]) -> str:
    """`llama3.2:3b` for `registry.ollama.ai/library/llama3.2/3b`, as Ollama lists it."""
    shown = [part for part, left_out in zip(parts[:-1], (_OLLAMA_HOST, _OLLAMA_USER), strict=False) if part != left_out]
    return "/".join([*shown, *parts[2:-1]]) + f":{parts[-1]}"


def _model_digest(manifest: Path) -> str:
    """The digest of the layer that holds the model; empty for what is no manifest of a model."""
    try:
        layers: Any = json.loads(manifest.read_bytes())["layers"]
        digests = [layer["digest"] for layer in layers if layer["mediaType"] == _OLLAMA_MODEL]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""
    named = digests[0] if digests and isinstance(digests[0], str) else ""
    return "" if "/" in named or os.sep in named or "\0" in named else named


def models_in(folder: Path) -> list[StoredModel]:
    """The models in a folder and those below it, each under the name of its file; of equal names the first."""
    found: dict[str, StoredModel] = {}
    for path in _model_files(folder):
        name = stem_of(path.name)
        found.setdefault(
            name.casefold(), StoredModel(name=name, path=path, store=str(folder), label=label_of(path.name))
        )
    return list(found.values())


def _model_files(folder: Path) -> Iterator[Path]:
    """The files below a folder that can be models by their names; of a model in several files the first."""
    for path in _files(folder, DEEPEST):
        part = part_of(path.name)
        if is_model_file(path.name) and (part is None or part.number == 1):
            yield path


def _files(folder: Path, deepest: int) -> Iterator[Path]:
    """Files below a folder in the order of their names, links followed, hidden ones left out."""
    for entry in _entries(folder):
        if _is(entry.is_file):
            yield Path(entry.path)
        elif deepest and _is(entry.is_dir):
            yield from _files(Path(entry.path), deepest - 1)


def _folders(folder: Path) -> list[Path]:
    return [Path(entry.path) for entry in _entries(folder) if _is(entry.is_dir)]


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)
    except OSError:
        return []


def _is(question: Any) -> bool:
    """The answer of a directory entry about itself; no where it cannot be looked at."""
    try:
        return bool(question())
    except OSError:
        return False
