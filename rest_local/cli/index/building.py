"""`index build` and `index rebuild`."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from rest_local.catalog.quantization import in_bytes
from rest_local.cli import building, completion, messages
from rest_local.cli.index import common
from rest_local.cli.index.common import index, model_option, print_json, replace_option
from rest_local.cli.index.pruning import described, prune_index, prune_option, target_of
from rest_local.cli.index.sourcing import chosen_sources, described_sources, source_options
from rest_local.cli.messages import counted
from rest_local.cli.options import json_option
from rest_local.cli.sizes import jobs_option, memory_option, ray_option
from rest_local.cli.streams import without_messages_of_ray
from rest_local.errors import printable

if TYPE_CHECKING:
    from rest_local.llama.vocabulary import Vocabulary
    from rest_local.retrieval.building.cluster import Cluster
    from rest_local.retrieval.building.indexing import Built
    from rest_local.retrieval.changing.pruning import Pruned
    from rest_local.retrieval.format import Manifest
    from rest_local.retrieval.sources.source import Render, Source


class Means(NamedTuple):
    """What a build may use. memory: bytes, None: a quarter of the machine's; jobs: processes; ray: the address of a
    cluster, None: this machine.
    """

    memory: int | None
    jobs: int
    ray: str | None

    @property
    def cluster(self) -> Cluster | None:
        if self.ray is None:
            return None
        from rest_local.retrieval.building.cluster import Cluster

        return Cluster(self.ray, warn=messages.warn)


@index.command()
@source_options
@click.option(
    "-o",
    "--output",
    "name",
    metavar="NAME",
    shell_complete=completion.datastores,
    help="Name or path; default: the name of the recipe, else `default`.",
)
@model_option
@memory_option
@jobs_option
@ray_option
@prune_option
@replace_option
@json_option
def build(
    name: str | None,
    model: str | None,
    memory: int | None,
    jobs: int | None,
    ray: str | None,
    prune: str | None,
    replace: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Index the text files below PATH... and other text for one model's vocabulary.

    Hidden, git-ignored, binary, oversized and minified files are skipped, and text that looks like secrets. What the
    datastore has for other vocabularies stays. PATH may be FILE:FIELD, as for --text, and - for the standard input.
    """
    if prune is not None:
        target_of(prune)  # a wrong one should not be found after minutes
    chosen = chosen_sources(**given)
    path = common.model_path(model)
    means = Means(memory, jobs or os.cpu_count() or 1, ray)
    _build(name or chosen.name or "default", path, chosen.sources, chosen.recorded, means, replace, as_json, prune)


@index.command()
@click.argument("name", shell_complete=completion.datastores)
@model_option
@memory_option
@jobs_option
@ray_option
@replace_option
@json_option
def rebuild(
    name: str,
    model: str | None,
    memory: int | None,
    jobs: int | None,
    ray: str | None,
    replace: bool,
    as_json: bool,
) -> None:
    """Index what a datastore was built from again, for one model's vocabulary.

    So a datastore gets an index for another model, or the present text.
    """
    from rest_local.retrieval.building.indexing import recorded_sources
    from rest_local.retrieval.home import datastore_path, newest_manifest

    path = datastore_path(name)
    sources, recipe = recorded_sources(path), newest_manifest(path).recipe
    fields = {key: str(recipe[key]) for key in ("recipe", "description", "licence") if key in recipe}
    means = Means(memory, jobs or os.cpu_count() or 1, ray)
    _build(name, common.model_path(model), sources, fields, means, replace, as_json)


def _build(
    name: str,
    model: Path,
    sources: list[Source],
    fields: Mapping[str, str],
    means: Means,
    replace: bool,
    as_json: bool,
    prune: str | None = None,
) -> None:
    from rest_local.retrieval.building.indexing import build_from_sources

    recipe = {**fields, "model": str(model.absolute())}
    with common.open_vocabulary(model) as vocabulary:
        replace, render = replace or _may_replace(name, vocabulary), renderer(model, sources)
        began = time.perf_counter()
        cluster = means.cluster
        with (
            without_messages_of_ray() if cluster else nullcontext(),
            building.progress(as_json, lambda: sum(source.measure()[1] for source in sources)) as progress,
        ):
            built = build_from_sources(
                name,
                sources,
                vocabulary=vocabulary,
                recipe=recipe,
                progress=progress,
                replace=replace,
                render=render,
                memory=means.memory,
                jobs=means.jobs,
                cluster=cluster,
            )
        pruned = None if prune is None else prune_index(name, vocabulary.hash, prune)
    _report(built, time.perf_counter() - began, as_json, pruned)


def renderer(path: Path, sources: Sequence[Source]) -> Render | None:
    """What renders the transcripts of chats among the sources, None if there are none."""
    from rest_local.retrieval.sources.chat import Chat

    if not any(isinstance(source, Chat) for source in sources):
        return None
    from rest_local.decoding.transcripts import turn_renderer
    from rest_local.llama.model import Model

    with Model.open(path, vocab_only=True) as model:
        return turn_renderer(model, sources)


def _may_replace(name: str, vocabulary: Vocabulary) -> bool:
    """Ask whether to replace the index for this vocabulary, if there is one and a terminal. Without a
    terminal the build refuses.
    """
    from rest_local.retrieval.format import Manifest
    from rest_local.retrieval.home import datastore_path, find, manifests

    path = datastore_path(name)
    found = manifests(path).get(find(path, vocabulary.hash))
    if (
        found is None
        or not building.can_ask()
        or (isinstance(found, Manifest) and found.vocabulary.hash != vocabulary.hash)
    ):
        return False
    held = _about(found) if isinstance(found, Manifest) else f"damaged: {found}"
    building.ask_or_leave(f"Datastore {name} exists ({held}). Replace it?")
    return True


def _about(manifest: Manifest) -> str:
    tokens = sum(segment.tokens for segment in manifest.segments)
    what = ", ".join(described_sources(manifest.recipe))
    return f"{tokens:,} tokens{f' of {what}' if what else ''}, built {manifest.created[:10]}"


def _report(built: Built, seconds: float, as_json: bool, pruned: Pruned | None) -> None:
    if as_json:
        fields = {**built.to_dict(), "seconds": round(seconds, 3)}
        return print_json(fields if pruned is None else {**fields, "pruned": pruned.to_dict()})
    click.echo(
        f"{built.path}: {built.tokens:,} tokens of {counted(built.documents, 'file')}, {in_bytes(built.bytes)}, "
        f"in {seconds:.1f} s; skipped: {built.skipped.summary()}"
    )
    if pruned is not None:
        click.echo(described(pruned))
    for secret in built.skipped.secrets:
        click.echo(f"looks like it holds a secret, left out (--allow-secrets takes it): {secret}")
    for other in _others(built):
        click.echo(printable(f"for vocabulary {other.vocabulary.name} it still holds {_about(other)}"))
    return None


def _others(built: Built) -> list[Manifest]:
    """The datastore's indexes for other vocabularies that were built from other files or in another way."""
    from rest_local.retrieval.format import Manifest
    from rest_local.retrieval.home import manifests

    def walked(manifest: Manifest) -> list[str]:
        return described_sources(manifest.recipe, in_full=True)

    found = [manifest for manifest in manifests(built.path).values() if isinstance(manifest, Manifest)]
    return [manifest for manifest in found if walked(manifest) != walked(built.manifest)]
