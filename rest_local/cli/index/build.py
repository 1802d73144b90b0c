"""`index build`, `rebuild` and `recipes`, and the options that say which text an index is built from."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from rest_local.catalog.quantization import in_bytes
from rest_local.cli import completion, terminal
from rest_local.cli.index import group
from rest_local.cli.index.group import index, model_option, replace_option
from rest_local.cli.options import memory_option, ray_option
from rest_local.cli.sections import option, with_options
from rest_local.cli.terminal import columns, counted, json_option, print_json, without_messages_of_ray
from rest_local.errors import OptionError, printable

if TYPE_CHECKING:
    from rest_local.llama.vocabulary import Vocabulary
    from rest_local.retrieval.building.indexing import Built
    from rest_local.retrieval.format import Manifest
    from rest_local.retrieval.sources.source import Source

_source = partial(option, configurable=False)
_sources = partial(_source, multiple=True, shell_complete=completion.paths)
_OPTIONS = (
    click.argument("paths", nargs=-1, metavar="[PATH]...", shell_complete=completion.paths),
    _sources(
        "--git REPO[@REV]",
        "The tracked files of a revision, without a checkout; default: HEAD; repeatable.",
        to="repositories",
    ),
    _source("--history", "With --git: also what the newest commits wrote."),
    _source("--commits N", "With --history: how many commits.", default=1000),
    _sources(
        "--text FILE:FIELD",
        "A field of each row of a .jsonl, .jsonl.gz or .parquet file; a.b.0 leads inside; repeatable.",
        to="texts",
    ),
    _sources(
        "--chat FILE", "What the assistant wrote in chats in OpenAI's message form; repeatable.", to="chats", type=str
    ),
    _source("--python", "The standard library of Python."),
    _source("--site-packages", "The installed Python packages."),
    _sources("--recipe NAME|FILE", "What a recipe names; `index recipes` lists them; repeatable.", to="recipes"),
    option("--include GLOB", "Take these files, not the usual extensions; repeatable.", multiple=True),
    option("--exclude GLOB", "Leave out these files; repeatable.", multiple=True),
    option("--allow-secrets", "Take text that looks as if it held keys or passwords."),
    option("--max-file-size BYTES", "Skip larger files.", type=click.IntRange(min=1), default=1 << 20),
)


def source_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the argument PATH and all options of sources to a command. Their parameters go to `chosen_sources`."""
    return with_options(_OPTIONS, command)


class Chosen(NamedTuple):
    """The choices of a command line. If there is only one recipe, `recorded` is its record and `name` its name."""

    sources: list[Source]
    recorded: dict[str, str]
    name: str | None


def chosen_sources(
    paths: Sequence[str],
    repositories: Sequence[str],
    history: bool,
    commits: int,
    texts: Sequence[str],
    chats: Sequence[str],
    python: bool,
    site_packages: bool,
    recipes: Sequence[str],
    include: Sequence[str],
    exclude: Sequence[str],
    allow_secrets: bool,
    max_file_size: int,
) -> Chosen:
    """Prepare the sources of `source_options`. Raises UsageError if there are none, OptionError, InputInvalid."""
    from rest_local.retrieval.sources import Git, Python, Transcripts
    from rest_local.retrieval.sources.recipes import read_recipe
    from rest_local.retrieval.sources.walk import Filters

    filters: dict[str, Any] = {"include": tuple(include), "exclude": tuple(exclude)}
    filters |= {"allow_secrets": allow_secrets, "max_file_size": max_file_size}
    Filters(**filters)  # A wrong filter is an error even if no source uses it.
    sources = _path_sources(paths, allow_secrets, filters)
    for repository, revision in map(split_revision, repositories):
        sources.append(Git(repository, revision, "", history, commits, **filters))
    for text in texts:
        if (source := row_source(text, allow_secrets)) is None:
            raise OptionError(f"--text {text}: give FILE:FIELD, with a file that ends in .jsonl, .jsonl.gz or .parquet")
        sources.append(source)
    sources += [Transcripts(chat, allow_secrets) for chat in chats]
    sources += [Python(False)] if python else []
    sources += [Python(True)] if site_packages else []
    read = [read_recipe(recipe) for recipe in recipes]
    sources += [source for recipe in read for source in recipe.present()]
    if not sources:
        raise click.UsageError("give a PATH, --git, --text, --chat, --python, --site-packages or --recipe")
    if history and not repositories:
        raise click.UsageError("--history needs --git")
    recorded, name = (read[0].recorded(), read[0].name) if len(read) == 1 else ({}, None)
    return Chosen([source.prepared() for source in sources], recorded, name)


def _path_sources(paths: Sequence[str], secret: bool, filters: Mapping[str, Any]) -> list[Source]:
    """Return the sources of the arguments PATH: one walk of files and folders, then rows, then the standard input."""
    from rest_local.retrieval.sources import Stdin, Walk

    rows = {path: source for path in paths if (source := row_source(path, secret)) and not os.path.exists(path)}
    walked = tuple(path for path in paths if path != "-" and path not in rows)
    walk: list[Source] = [Walk(walked, **filters)] if walked else []
    return [*walk, *rows.values(), *([Stdin(secret)] if "-" in paths else [])]


def described_sources(recipe: Mapping[str, Any], in_full: bool = False) -> list[str]:
    """Describe the sources of a recorded recipe for a person, `in_full` with all that differs from the defaults."""
    from rest_local.retrieval.sources import from_recipe

    try:
        sources = from_recipe(recipe)
    except OptionError:  # A newer version recorded it.
        return [json.dumps(recipe["sources"])]
    return [_in_full(source) if in_full else source.about() for source in sources]


def _in_full(source: Source) -> str:
    known = [(field.name, field.default, getattr(source, field.name)) for field in fields(source)]
    different = [(name, value) for name, default, value in known if default is not MISSING and value != default]
    shown = [f"{name} {' '.join(value) if isinstance(value, tuple) else value}" for name, value in different]
    return f"{source.about()} ({'; '.join(shown)})" if shown else source.about()


def split_revision(given: str) -> tuple[str, str]:
    """Split REPO[@REV] into repository and revision. A folder whose name has an @ is a repository."""
    repository, at, revision = given.rpartition("@")
    return (repository, revision) if at and repository and not os.path.isdir(given) else (given, "HEAD")


def row_source(given: str, allow_secrets: bool = False) -> Source | None:
    """Return the source of FILE:FIELD, or None if the file does not end like a file of rows."""
    from rest_local.retrieval.sources import Jsonl, Parquet
    from rest_local.retrieval.sources.records import ENDINGS

    path, _, field = given.rpartition(":")
    if not field or not path.lower().endswith((*ENDINGS, ".parquet")):
        return None
    kind = Parquet if path.lower().endswith(".parquet") else Jsonl
    return kind(path, field, allow_secrets)


@index.command()
@json_option
def recipes(as_json: bool) -> None:
    """List the recipes for `index build --recipe`: text that most machines have. Nothing is downloaded."""
    from rest_local.retrieval.sources.recipes import list_recipes

    found = list_recipes()
    if as_json:
        return print_json({"recipes": [recipe.to_dict() for recipe in found]})
    rows = [(recipe.name, f"{recipe.description}; {recipe.size}") for recipe in found]
    return click.echo("\n".join(columns(rows)))


@index.command()
@source_options
@option(
    "-o --output NAME",
    "Name or path; default: the name of the recipe, else `default`.",
    to="name",
    shell_complete=completion.datastores,
)
@model_option
@memory_option
@ray_option
@replace_option
@json_option
def build(name: str | None, model: str | None, replace: bool, as_json: bool, **given: Any) -> None:
    """Index the text files below PATH... and other text for one model's vocabulary.

    Hidden, git-ignored, binary, oversized and minified files are skipped, and so is text that looks like secrets.
    Indexes for other vocabularies stay. PATH may also be FILE:FIELD, as in --text, or - for the standard input.
    """
    how = {what: given.pop(what) for what in ("memory", "ray")}
    chosen = chosen_sources(**given)
    path = group.model_path(model)
    _build(name or chosen.name or "default", path, chosen.sources, chosen.recorded, replace, as_json, **how)


@index.command()
@click.argument("name", shell_complete=completion.datastores)
@model_option
@memory_option
@ray_option
@replace_option
@json_option
def rebuild(name: str, model: str | None, replace: bool, as_json: bool, **how: Any) -> None:
    """Index the sources of a datastore again, for one model's vocabulary.

    Use it for another model, or to read the present text.
    """
    from rest_local.retrieval.building.indexing import recorded_sources
    from rest_local.retrieval.home import datastore_path, newest_manifest

    path = datastore_path(name)
    sources, recipe = recorded_sources(path), newest_manifest(path).recipe
    fields = {key: str(recipe[key]) for key in ("recipe", "description", "licence") if key in recipe}
    _build(name, group.model_path(model), sources, fields, replace, as_json, **how)


def _build(
    name: str,
    model: Path,
    sources: list[Source],
    fields: Mapping[str, str],
    replace: bool,
    as_json: bool,
    *,
    memory: int | None,
    ray: str | None,
) -> None:
    from rest_local.retrieval.building.cluster import Cluster
    from rest_local.retrieval.building.indexing import build_from_sources

    recipe = {**fields, "model": str(model.absolute())}
    with group.open_vocabulary(model) as vocabulary:
        replace = replace or _may_replace(name, vocabulary)
        began = time.perf_counter()
        cluster = None if ray is None else Cluster(ray)
        with without_messages_of_ray() if cluster else nullcontext(), terminal.build_bar(as_json) as progress:
            built = build_from_sources(
                name,
                sources,
                vocabulary=vocabulary,
                recipe=recipe,
                progress=progress,
                replace=replace,
                memory=memory,
                cluster=cluster,
            )
    _report(built, time.perf_counter() - began, as_json)


def _may_replace(name: str, vocabulary: Vocabulary) -> bool:
    """Ask at a terminal whether to replace an index for this vocabulary. Without a terminal the build refuses."""
    from rest_local.retrieval.format import Manifest
    from rest_local.retrieval.home import datastore_path, find, manifests

    path = datastore_path(name)
    found = manifests(path).get(find(path, vocabulary.hash))
    of_another = isinstance(found, Manifest) and found.vocabulary.hash != vocabulary.hash
    if found is None or of_another or not terminal.can_ask():
        return False
    held = _about(found) if isinstance(found, Manifest) else f"damaged: {found}"
    terminal.confirm(f"Datastore {name} exists ({held}). Replace it?")
    return True


def _about(manifest: Manifest) -> str:
    tokens = sum(segment.tokens for segment in manifest.segments)
    what = ", ".join(described_sources(manifest.recipe))
    return f"{tokens:,} tokens{f' of {what}' if what else ''}, built {manifest.created[:10]}"


def _report(built: Built, seconds: float, as_json: bool) -> None:
    if as_json:
        fields = {**built.to_dict(), "seconds": round(seconds, 3)}
        return print_json(fields)
    click.echo(
        f"{built.path}: {built.tokens:,} tokens of {counted(built.documents, 'file')}, {in_bytes(built.bytes)}, "
        f"in {seconds:.1f} s; skipped: {built.skipped.summary()}"
    )
    for secret in built.skipped.secrets:
        click.echo(f"left out, as it looks like a secret (--allow-secrets takes it): {secret}")
    for other in _others(built):
        click.echo(printable(f"for vocabulary {other.vocabulary.name} it still holds {_about(other)}"))
    return None


def _others(built: Built) -> list[Manifest]:
    """Return the datastore's indexes for other vocabularies that were built from other files or in another way."""
    from rest_local.retrieval.format import Manifest
    from rest_local.retrieval.home import manifests

    def walked(manifest: Manifest) -> list[str]:
        return described_sources(manifest.recipe, in_full=True)

    found = [manifest for manifest in manifests(built.path).values() if isinstance(manifest, Manifest)]
    return [manifest for manifest in found if walked(manifest) != walked(built.manifest)]
