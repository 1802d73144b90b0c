"""`index build` and `index rebuild`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from rest_local.catalog.quantization import in_bytes
from rest_local.cli import building, completion, messages
from rest_local.cli.index import common
from rest_local.cli.index.common import index, model_option, print_json, replace_option
from rest_local.cli.options import json_option
from rest_local.cli.sizes import jobs_option, memory_option, ray_option
from rest_local.cli.streams import without_messages_of_ray
from rest_local.errors import printable

if TYPE_CHECKING:
    from rest_local.llama.vocabulary import Vocabulary
    from rest_local.retrieval.cluster import Cluster
    from rest_local.retrieval.format import Manifest
    from rest_local.retrieval.indexing import Built


class Means(NamedTuple):
    """What a build may use. memory: bytes, None: a quarter of the machine's; jobs: processes, None: one a core; ray:
    the address of a cluster, None: this machine.
    """

    memory: int | None
    jobs: int | None
    ray: str | None

    @property
    def cluster(self) -> Cluster | None:
        if self.ray is None:
            return None
        from rest_local.retrieval.cluster import Cluster

        return Cluster(self.ray, warn=messages.warn)


@index.command()
@click.argument("paths", nargs=-1, required=True, metavar="PATH...", shell_complete=completion.paths)
@click.option(
    "-o",
    "--output",
    "name",
    default="default",
    show_default=True,
    metavar="NAME",
    shell_complete=completion.datastores,
    help="Name or path.",
)
@model_option
@click.option(
    "--include", multiple=True, metavar="GLOB", help="Take these files, not the usual extensions; repeatable."
)
@click.option("--exclude", multiple=True, metavar="GLOB", help="Leave out these files; repeatable.")
@click.option("--allow-secrets", is_flag=True, help="Take files that look as if they held keys or passwords.")
@click.option(
    "--max-file-size",
    type=click.IntRange(min=1),
    default=1 << 20,
    show_default=True,
    metavar="BYTES",
    help="Skip larger files.",
)
@memory_option
@jobs_option
@ray_option
@replace_option
@json_option
def build(
    paths: tuple[str, ...],
    name: str,
    model: str | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    allow_secrets: bool,
    max_file_size: int,
    memory: int | None,
    jobs: int | None,
    ray: str | None,
    replace: bool,
    as_json: bool,
) -> None:
    """Index the text files below PATH... for one model's vocabulary.

    Hidden, git-ignored, binary, oversized and minified files are skipped, and files that look like secrets. What the
    datastore has for other vocabularies stays.
    """
    from rest_local.retrieval.indexing import recipe_of

    recipe = recipe_of(paths, include, exclude, allow_secrets=allow_secrets, max_file_size=max_file_size)
    _build(name, common.model_path(model), recipe, Means(memory, jobs, ray), replace, as_json)


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
    """Index the files that a datastore was built from again, for one model's vocabulary.

    So a datastore gets an index for another model, or the present text.
    """
    from rest_local.retrieval.home import datastore_path
    from rest_local.retrieval.indexing import recorded_recipe

    recipe = recorded_recipe(datastore_path(name))
    _build(name, common.model_path(model), recipe, Means(memory, jobs, ray), replace, as_json)


def _build(name: str, model: Path, recipe: Mapping[str, Any], means: Means, replace: bool, as_json: bool) -> None:
    from rest_local.retrieval.corpus import measure
    from rest_local.retrieval.indexing import build_datastore

    made = {"model": str(model.absolute())}
    with common.open_vocabulary(model) as vocabulary:
        replace = replace or _may_replace(name, vocabulary)
        began = time.perf_counter()
        cluster = means.cluster
        with (
            without_messages_of_ray() if cluster else nullcontext(),
            building.progress(as_json, lambda: measure(**recipe)[1]) as progress,
        ):
            built = build_datastore(
                name,
                **recipe,
                vocabulary=vocabulary,
                recipe=made,
                progress=progress,
                replace=replace,
                memory=means.memory,
                jobs=means.jobs,
                cluster=cluster,
            )
    _report(built, time.perf_counter() - began, as_json)


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
    paths = ", ".join(manifest.recipe.get("paths", ()))
    return f"{tokens:,} tokens{f' of {paths}' if paths else ''}, built {manifest.created[:10]}"


def _report(built: Built, seconds: float, as_json: bool) -> None:
    if as_json:
        return print_json({**built.to_dict(), "seconds": round(seconds, 3)})
    click.echo(
        f"{built.path}: {built.tokens:,} tokens of {built.documents:,} files, {in_bytes(built.bytes)}, "
        f"in {seconds:.1f} s; skipped: {built.skipped.summary()}"
    )
    for secret in built.skipped.secrets:
        click.echo(f"looks like it holds a secret, left out (--allow-secrets takes it): {secret}")
    for other in _others(built):
        click.echo(printable(f"for vocabulary {other.vocabulary.name} it still holds {_about(other)}"))
    return None


def _others(built: Built) -> list[Manifest]:
    """The datastore's indexes for other vocabularies that were built from other files or in another way."""
    from rest_local.retrieval.format import Manifest
    from rest_local.retrieval.home import manifests
    from rest_local.retrieval.indexing import WALK

    def walked(manifest: Manifest) -> list[Any]:
        return [manifest.recipe.get(key) for key in WALK]

    found = [manifest for manifest in manifests(built.path).values() if isinstance(manifest, Manifest)]
    return [manifest for manifest in found if walked(manifest) != walked(built.manifest)]
