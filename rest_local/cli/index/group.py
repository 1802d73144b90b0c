"""The parts that the commands of `rest-local index` share: the group, options, and the lookup of indexes by name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rest_local.cli.inputs import model_path as model_path
from rest_local.cli.sections import SummaryGroup, option
from rest_local.errors import DatastoreError, DatastoreNotFound, OptionError

if TYPE_CHECKING:
    from rest_local.llama.vocabulary import Vocabulary
    from rest_local.retrieval.format import Manifest

model_option = option("-m --model MODEL", "Model whose vocabulary is used.")
yes_option = option("-y --yes", "Delete without a question.", configurable=False)
replace_option = option(
    "--replace", "Replace what the datastore has for this vocabulary, without a question.", configurable=False
)
vocabulary_option = option(
    "--vocabulary ID",
    "Use only this vocabulary: its name or the beginning of its id, as `index list` shows it.",
    configurable=False,
)


@click.group(
    cls=SummaryGroup,
    first=("build", "update", "search", "list", "forget", "remove"),
    also={"ls": "list", "rm": "remove", "delete": "remove", "create": "build"},
)
def index() -> None:
    """Build, search and remove datastores of your own code and text.

    A datastore holds token ids, so it has one index for each vocabulary. Models with the same tokenizer share one.
    """


def info_of(directory: Path) -> dict[str, Any]:
    from rest_local.retrieval.datastore import Datastore

    with Datastore.open(directory, mmap=True) as store:
        return store.info()


def path_of(name: str) -> Path:
    from rest_local.retrieval.home import datastore_path

    return datastore_path(name)


def indexes_of(name: str, vocabulary: str | None) -> list[Path]:
    """Return the directories of a datastore's indexes, or of the one whose vocabulary has that name or beginning of an
    id.

    Raises DatastoreNotFound, and OptionError if no vocabulary or several are meant.
    """
    from rest_local.retrieval.format import Manifest
    from rest_local.retrieval.home import manifests

    found = manifests(path_of(name))
    if not found:
        raise DatastoreNotFound(path_of(name))
    if vocabulary is None:
        return list(found)
    held = {directory: found.vocabulary for directory, found in found.items() if isinstance(found, Manifest)}
    meant = [where for where, held_ in held.items() if held_.name == vocabulary or held_.hash.startswith(vocabulary)]
    if len(meant) != 1:
        known = ", ".join(f"{one.name} {one.hash[:12]}" for one in held.values())
        fits = "several fit" if meant else "it has none of that name or id"
        raise OptionError(f"vocabulary {vocabulary!r} of datastore {name}: {fits}; give one of: {known}")
    return meant


def recorded_model(name: str) -> str | None:
    """Return a model that the datastore was built with and that is still there."""
    from rest_local.retrieval.format import Manifest
    from rest_local.retrieval.home import manifests

    found = [manifest for manifest in manifests(path_of(name)).values() if isinstance(manifest, Manifest)]
    models = [manifest.recipe.get("model", "") for manifest in found]
    return next((model for model in models if os.path.isfile(model)), None)


@contextmanager
def open_vocabulary(path: Path) -> Iterator[Vocabulary]:
    from rest_local.llama.model import Model

    with Model.open(path, vocab_only=True) as model:
        yield model.vocabulary


class Stale(DatastoreError):
    """No model with the vocabulary of an index is on the disk, so no text can be tokenized for it."""


@contextmanager
def vocabulary_of(manifest: Manifest, model: str | None = None) -> Iterator[Vocabulary]:
    """Yield the vocabulary of `model`, or of the index's own model. Raises Stale if it does not fit."""
    recorded = str(manifest.recipe.get("model", ""))
    if model is None and not os.path.isfile(recorded):
        raise Stale(f"the model it was built with is gone ({recorded or 'none is recorded'})")
    with open_vocabulary(model_path(model or recorded)) as vocabulary:
        if vocabulary.hash != manifest.vocabulary.hash:
            raise Stale("its vocabulary is not that of --model" if model else f"{recorded} has another vocabulary now")
        yield vocabulary
