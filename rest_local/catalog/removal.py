"""Deletes models from the cache of huggingface_hub, and says whose the others are.

Blobs that another snapshot or file uses stay: what is deleted is planned by `huggingface_hub`, which also knows the
shared parts of its cache. Nothing outside that cache is ever deleted.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from rest_local.catalog.stores import StoredModel, hub_cache
from rest_local.errors import ModelError, ModelNotOurs
from rest_local.llama.gguf import shards_of


@dataclass(frozen=True)
class Removal:
    """What would be deleted. bytes: of the disk that it frees; run: deletes it, raising ModelError where it cannot."""

    bytes: int
    run: Callable[[], None]


def removal_of(model: StoredModel) -> Removal:
    """Plan the deletion of a model. Raises ModelNotOurs for one that no download of a hub put there, and ModelError."""
    if model.store == "ollama":
        raise ModelNotOurs(model.name, "Ollama", f"`ollama rm {model.name.removeprefix('ollama/')}` deletes it")
    if model.store == "lmstudio":
        raise ModelNotOurs(model.name, "LM Studio", "delete it there, under My Models")
    if model.store == "demo":
        raise ModelNotOurs(model.name, "rest-local itself", "it goes when rest-local is uninstalled")
    if model.store != "hub":
        files = shlex.join(str(file) for file in _files(model))
        raise ModelNotOurs(model.name, "a folder of your own", f"`rm {files}` deletes it")
    return _from_hub_cache(model)


def _from_hub_cache(model: StoredModel) -> Removal:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    cache = hub_cache()
    try:
        info = scan_cache_dir(cache)
    except (CacheNotFound, OSError, ValueError) as error:
        raise ModelError(f"model {model.name}: {cache} cannot be read: {error}; set HF_HUB_CACHE") from error
    snapshot = next(parent for parent in model.path.parents if parent.parent.name == "snapshots")
    names = {os.path.relpath(file, snapshot) for file in _files(model)}
    repos = (repo for repo in info.repos if (repo.repo_type, repo.repo_id) == ("model", model.repo))
    revisions = [revision for repo in repos for revision in repo.revisions]
    all_files = [(revision, file) for revision in revisions for file in revision.files]
    chosen = [file for revision, file in all_files if os.path.relpath(file.file_path, revision.snapshot_path) in names]
    if not chosen:
        raise ModelError(f"model {model.name}: is not in {cache} any more; `rest-local models` lists what is")
    if len(chosen) == len(all_files):  # nothing else of the repository is there
        plan = info.delete_revisions(*(revision.commit_hash for revision in revisions))
    else:
        plan = info.delete_files(*chosen)

    def run() -> None:
        plan.execute()
        if model.path.exists():
            raise ModelError(f"model {model.name}: {model.path} cannot be deleted; check its permissions")

    return Removal(plan.expected_freed_size, run)


def _files(model: StoredModel) -> list[os.PathLike[str]]:
    """All files of a model; where parts are missing, the first alone."""
    with suppress(ModelError):
        return [*shards_of(model.path)]
    return [model.path]
