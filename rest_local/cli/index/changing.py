"""`index add`, `index update` and `index merge`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rest_local.catalog.quantization import in_bytes
from rest_local.cli import building, completion
from rest_local.cli.index import common
from rest_local.cli.index.building import renderer
from rest_local.cli.index.common import index, indexes_of, model_option, path_of, print_json, vocabulary_option
from rest_local.cli.index.sourcing import chosen_sources, source_options
from rest_local.cli.messages import counted, warn
from rest_local.cli.options import json_option
from rest_local.errors import DatastoreError, printable

if TYPE_CHECKING:
    from rest_local.llama.vocabulary import Vocabulary
    from rest_local.retrieval.building.build import Progress
    from rest_local.retrieval.changing.updating import Updated
    from rest_local.retrieval.format import Manifest
    from rest_local.retrieval.sources.source import Render, Source

Change = Callable[["Vocabulary", "Progress", "Render | None"], "Updated"]


@index.command()
@click.argument("name", shell_complete=completion.datastores)
@source_options
@vocabulary_option
@model_option
@json_option
def add(name: str, vocabulary: str | None, model: str | None, as_json: bool, **given: Any) -> None:
    """Add the files below PATH... and other text to a datastore. Only these are read.

    Every later update reads them again too. What is added has the filters that are given here.
    """
    from rest_local.retrieval.changing.updating import add_sources

    sources, path = chosen_sources(**given).sources, path_of(name)

    def change(known: Vocabulary, progress: Progress, render: Render | None) -> Updated:
        return add_sources(path, sources, vocabulary=known, merging=True, render=render, progress=progress)

    _change_each(name, vocabulary, model, change, lambda manifest: sources, as_json)


@index.command()
@click.argument("name", shell_complete=completion.datastores)
@vocabulary_option
@model_option
@click.option(
    "--missing",
    is_flag=True,
    allow_from_autoenv=False,
    help="Delete the files of a recorded path that is gone or empty; otherwise that is refused.",
)
@json_option
def update(name: str, vocabulary: str | None, model: str | None, missing: bool, as_json: bool) -> None:
    """Bring a datastore up to date with the files it was built from.

    A file of the same size and time of change is not read, and one of the same content not tokenized. Each index is
    updated with the model it was built with, or the one for the vocabulary of --model.
    """
    from rest_local.retrieval.changing.updating import update
    from rest_local.retrieval.sources.registry import from_recipe

    path = path_of(name)

    def change(known: Vocabulary, progress: Progress, render: Render | None) -> Updated:
        return update(path, vocabulary=known, missing=missing, merging=True, render=render, progress=progress)

    _change_each(name, vocabulary, model, change, lambda manifest: from_recipe(manifest.recipe), as_json)


@dataclass(frozen=True)
class _Target:
    """An index, and the file of a model with its vocabulary; `stale` says why there is none."""

    manifest: Manifest
    model: Path | None
    stale: str = ""


def _change_each(
    name: str,
    vocabulary: str | None,
    model: str | None,
    change: Change,
    sources: Callable[[Manifest], Sequence[Source]],
    as_json: bool,
) -> None:
    """Change the chosen indexes of a datastore, and report each in a line."""
    rows: list[dict[str, Any]] = []
    stale: list[dict[str, str]] = []
    for target in _targets(name, vocabulary, model):
        about = target.manifest.vocabulary.name
        try:
            rows.append(_changed(target, change, sources(target.manifest), as_json))
        except _Stale as error:
            stale.append({"vocabulary": about, "cause": str(error)})
            warn(f"datastore {name}: the index for vocabulary {about} is stale: {error}")
        else:
            if not as_json:
                _report(name, rows[-1])
    if not rows:
        raise DatastoreError(f"datastore {name}: no index could be changed")
    if as_json:
        print_json({"name": name, "path": str(path_of(name)), "indexes": rows, "stale": stale})


class _Stale(Exception):
    """An index has no model, so that its text cannot be tokenized."""


def _targets(name: str, vocabulary: str | None, model: str | None) -> Iterator[_Target]:
    from rest_local.retrieval.home import read_manifest

    way = (
        f"give --model with a model of this vocabulary, or remove it with `rest-local index remove {name} --vocabulary"
    )
    for directory in indexes_of(name, vocabulary):
        manifest = read_manifest(directory)
        remedy = f"{way} {manifest.vocabulary.hash[:12]}`"
        if model is not None:
            yield _Target(manifest, common.model_path(model), "its vocabulary is not that of --model")
            continue
        recorded = str(manifest.recipe.get("model", ""))
        if os.path.isfile(recorded):
            yield _Target(manifest, common.model_path(recorded), f"{recorded} has another vocabulary now; {remedy}")
        else:
            gone = f"the model it was built with is gone ({recorded})" if recorded else "no model is recorded"
            yield _Target(manifest, None, f"{gone}; {remedy}")


def _changed(target: _Target, change: Change, sources: Sequence[Source], as_json: bool) -> dict[str, Any]:
    """Change one index. Raises _Stale if its model is gone or has another vocabulary."""
    if target.model is None:
        raise _Stale(target.stale)
    began = time.perf_counter()
    with common.open_vocabulary(target.model) as vocabulary:
        if vocabulary.hash != target.manifest.vocabulary.hash:
            raise _Stale(target.stale)
        render = renderer(target.model, sources)
        with building.progress(as_json, lambda: sum(source.measure()[1] for source in sources)) as progress:
            updated = change(vocabulary, progress, render)
    return _row(updated, time.perf_counter() - began)


def _row(updated: Updated, seconds: float) -> dict[str, Any]:
    """JSON-ready. tokens: of what was tokenized; total: of the index, without deleted documents' number."""
    segments = updated.manifest.segments
    return {
        "vocabulary": updated.manifest.vocabulary.name,
        "added": updated.added,
        "changed": updated.changed,
        "deleted": updated.deleted,
        "unchanged": updated.unchanged,
        "tokens": updated.tokens,
        "total": sum(segment.tokens for segment in segments),
        "documents": sum(segment.live for segment in segments),
        "segments": len(segments),
        "skipped": dict(updated.skipped.counts),
        "secrets": updated.skipped.secrets,
        "seconds": round(seconds, 3),
    }


def _report(name: str, row: dict[str, Any]) -> None:
    done = ", ".join(f"{row[what]:,} {what}" for what in ("added", "changed", "deleted") if row[what])
    done = f"{done} ({row['tokens']:,} tokens)" if done else "nothing changed"
    held = f"{row['total']:,} tokens of {counted(row['documents'], 'document')}"
    click.echo(printable(f"{name} ({row['vocabulary']}): {done}; {held}, in {row['seconds']:.1f} s"))
    for secret in row["secrets"]:
        click.echo(f"looks like it holds a secret, left out: {secret}")


@index.command()
@click.argument("name", shell_complete=completion.datastores)
@vocabulary_option
@json_option
def merge(name: str, vocabulary: str | None, as_json: bool) -> None:
    """Write a datastore's segments again as few, without deleted text. An update merges by itself what is due."""
    from rest_local.retrieval.changing.merging import merge
    from rest_local.retrieval.home import read_manifest

    rows = []
    for directory in indexes_of(name, vocabulary):
        before, began = read_manifest(directory), time.perf_counter()
        known = before.vocabulary.hash
        with building.progress(as_json, lambda: 0) as progress:
            after = merge(path_of(name), vocabulary_hash=known, everything=True, progress=progress) or before
        seconds = round(time.perf_counter() - began, 3)
        rows.append({"vocabulary": before.vocabulary.name, **_sizes(before, after), "seconds": seconds})
        if not as_json:
            click.echo(printable(f"{name} ({before.vocabulary.name}): {_merged(rows[-1])}"))
    if as_json:
        print_json({"name": name, "path": str(path_of(name)), "indexes": rows})


def _sizes(before: Manifest, after: Manifest) -> dict[str, list[int]]:
    both = (before.segments, after.segments)
    sizes = [sum(file.size for segment in segments for file in segment.files.values()) for segments in both]
    return {"segments": [len(segments) for segments in both], "bytes": sizes}


def _merged(row: dict[str, Any]) -> str:
    (old, new), (large, small) = row["segments"], row["bytes"]
    if (old, large) == (new, small):
        return f"nothing to merge; {counted(new, 'segment')}, {in_bytes(small)}"
    return f"{old} segments are {new} now, {in_bytes(large)} are {in_bytes(small)}, in {row['seconds']:.1f} s"
