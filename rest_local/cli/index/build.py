"""`index build` and `rebuild`, and the sources that an index is built from."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rest_local.catalog.quantization import in_bytes
from rest_local.cli import completion, terminal
from rest_local.cli.index import group
from rest_local.cli.index.group import index, model_option, replace_option
from rest_local.cli.options import memory_option, ray_option
from rest_local.cli.sections import option
from rest_local.cli.terminal import counted, json_option, print_json, without_messages_of_ray
from rest_local.errors import OptionError

if TYPE_CHECKING:
    from rest_local.llama.vocabulary import Vocabulary
    from rest_local.retrieval.building.indexing import Built
    from rest_local.retrieval.format import Manifest
    from rest_local.retrieval.sources.source import Source


def sources_of(
    paths: Sequence[str],
    chats: Sequence[str],
    *,
    include: Sequence[str],
    exclude: Sequence[str],
    allow_secrets: bool,
    max_file_size: int,
) -> list[Source]:
    """Return the sources that a command line names: one walk of files and folders, then rows, chats and the standard
    input. Raises UsageError if there are none, OptionError, InputInvalid.
    """
    from rest_local.retrieval.sources import Stdin, Transcripts, Walk
    from rest_local.retrieval.sources.walk import Filters

    filters: dict[str, Any] = {"include": tuple(include), "exclude": tuple(exclude)}
    filters |= {"allow_secrets": allow_secrets, "max_file_size": max_file_size}
    Filters(**filters)  # A wrong filter is an error even if no source uses it.
    rows = {path: source for path in paths if (source := row_source(path, allow_secrets)) and not os.path.exists(path)}
    walked = tuple(path for path in paths if path != "-" and path not in rows)
    sources: list[Source] = [Walk(walked, **filters)] if walked else []
    sources += [*rows.values(), *(Transcripts(chat, allow_secrets) for chat in chats)]
    sources += [Stdin(allow_secrets)] if "-" in paths else []
    if not sources:
        raise click.UsageError("give a PATH or --chat")
    return [source.prepared() for source in sources]


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


def row_source(given: str, allow_secrets: bool = False) -> Source | None:
    """Return the source of FILE:FIELD, or None if the file does not end like a file of rows."""
    from rest_local.retrieval.sources import Jsonl
    from rest_local.retrieval.sources.records import ENDINGS

    path, _, field = given.rpartition(":")
    return Jsonl(path, field, allow_secrets) if field and path.lower().endswith(ENDINGS) else None


@index.command()
@click.argument("paths", nargs=-1, metavar="[PATH]...", shell_complete=completion.paths)
@option(
    "--chat FILE",
    "What the assistant wrote in chats in OpenAI's message form; repeatable.",
    to="chats",
    type=str,
    multiple=True,
    configurable=False,
    shell_complete=completion.paths,
)
@option("--include GLOB", "Take these files, not the usual extensions; repeatable.", multiple=True)
@option("--exclude GLOB", "Leave out these files; repeatable.", multiple=True)
@option("--allow-secrets", "Take text that looks as if it held keys or passwords.")
@option("--max-file-size BYTES", "Skip larger files.", type=click.IntRange(min=1), default=1 << 20)
@option(
    "-o --output NAME",
    "Name or path of the datastore.",
    to="name",
    default="default",
    shell_complete=completion.datastores,
)
@model_option
@memory_option
@ray_option
@replace_option
@json_option
def build(
    paths: tuple[str, ...],
    chats: tuple[str, ...],
    name: str,
    model: str | None,
    memory: int | None,
    ray: str | None,
    replace: bool,
    as_json: bool,
    **filters: Any,
) -> None:
    """Index the text files below PATH... and other text for one model's vocabulary.

    Hidden, git-ignored, binary, oversized and minified files are skipped, and so is text that looks like secrets.
    Indexes for other vocabularies stay. PATH may also be FILE:FIELD for a field of each row of a .jsonl or .jsonl.gz
    file (a.b.0 leads inside), or - for the standard input.
    """
    sources = sources_of(paths, chats, **filters)
    _build(name, group.model_path(model), sources, replace, as_json, memory=memory, ray=ray)


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
    from rest_local.retrieval.home import datastore_path

    _build(name, group.model_path(model), recorded_sources(datastore_path(name)), replace, as_json, **how)


def _build(
    name: str,
    model: Path,
    sources: list[Source],
    replace: bool,
    as_json: bool,
    *,
    memory: int | None,
    ray: str | None,
) -> None:
    from rest_local.retrieval.building.cluster import Cluster
    from rest_local.retrieval.building.indexing import build_from_sources

    with group.open_vocabulary(model) as vocabulary:
        replace = replace or _may_replace(name, vocabulary)
        began = time.perf_counter()
        cluster = None if ray is None else Cluster(ray)
        with without_messages_of_ray() if cluster else nullcontext(), terminal.build_bar(as_json) as progress:
            built = build_from_sources(
                name,
                sources,
                vocabulary=vocabulary,
                recipe={"model": str(model.absolute())},
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
    return None
