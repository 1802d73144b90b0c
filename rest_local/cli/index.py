"""`rest-local index`: build, look into and remove datastores."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rest_local.catalog.quantization import in_bytes
from rest_local.cli import building, completion
from rest_local.cli.inputs import model_path
from rest_local.cli.options import json_option
from rest_local.cli.sections import SummaryGroup
from rest_local.errors import DatastoreError, DatastoreNotFound, OptionError, printable

if TYPE_CHECKING:
    from rest_local.llama.vocabulary import Vocabulary
    from rest_local.retrieval.datastore import Datastore
    from rest_local.retrieval.format import Manifest
    from rest_local.retrieval.indexing import Built

PLACES = 10
CONTINUATIONS = 5
_DEPTH = 8

model_option = click.option(
    "-m", "--model", metavar="MODEL", shell_complete=completion.models, help="Model whose vocabulary is used."
)
replace_option = click.option(
    "--replace",
    is_flag=True,
    allow_from_autoenv=False,
    help="Replace what the datastore has for this vocabulary, without a question.",
)
vocabulary_option = click.option(
    "--vocabulary",
    metavar="ID",
    allow_from_autoenv=False,
    help="One vocabulary: its name or the beginning of its id, as `index list` shows it.",
)


@click.group(cls=SummaryGroup)
def index() -> None:
    """Build, search and remove datastores of your own code and text.

    A datastore holds token ids, so it has one index for each vocabulary: models with the same tokenizer share one.
    """


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
    replace: bool,
    as_json: bool,
) -> None:
    """Index the text files below PATH... for one model's vocabulary.

    Hidden, git-ignored, binary, oversized and minified files are skipped, and files that look like secrets. What the
    datastore has for other vocabularies stays.
    """
    from rest_local.retrieval.indexing import recipe_of

    recipe = recipe_of(paths, include, exclude, allow_secrets=allow_secrets, max_file_size=max_file_size)
    _build(name, model_path(model), recipe, replace, as_json)


@index.command()
@click.argument("name", shell_complete=completion.datastores)
@model_option
@replace_option
@json_option
def rebuild(name: str, model: str | None, replace: bool, as_json: bool) -> None:
    """Index the files that a datastore was built from again, for one model's vocabulary.

    So a datastore gets an index for another model, or the present text.
    """
    from rest_local.retrieval.home import datastore_path
    from rest_local.retrieval.indexing import recorded_recipe

    _build(name, model_path(model), recorded_recipe(datastore_path(name)), replace, as_json)


def _build(name: str, model: Path, recipe: Mapping[str, Any], replace: bool, as_json: bool) -> None:
    from rest_local.retrieval.corpus import measure
    from rest_local.retrieval.indexing import build_datastore

    made = {"model": str(model.absolute())}
    with _vocabulary(model) as vocabulary:
        replace = replace or _may_replace(name, vocabulary)
        began = time.perf_counter()
        with building.progress(as_json, lambda: measure(**recipe)[1]) as progress:
            built = build_datastore(
                name, **recipe, vocabulary=vocabulary, recipe=made, progress=progress, replace=replace
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
        return _print_json({**built.to_dict(), "seconds": round(seconds, 3)})
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


@index.command()
@click.argument("name", shell_complete=completion.datastores)
@vocabulary_option
@json_option
def info(name: str, vocabulary: str | None, as_json: bool) -> None:
    """Show what a datastore holds and how it was built."""
    found = [_info(directory) for directory in _indexes(name, vocabulary)]
    if as_json:
        return _print_json({"name": name, "indexes": found})
    click.echo("\n\n".join(map(_described, found)))
    return None


def _info(directory: Path) -> dict[str, Any]:
    from rest_local.retrieval.datastore import Datastore

    with Datastore.open(directory, mmap=True) as store:  # reads sizes and some bytes, not all
        return store.info()


def _described(found: Mapping[str, Any]) -> str:
    vocabulary = found["vocabulary"]
    lines = [
        f"path        {found['path']}",
        f"created     {found['created']}",
        f"tokens      {found['tokens']:,} in {found['documents']:,} documents, {found['segments']} segments",
        f"size        {in_bytes(found['bytes'])}, {found['bytes'] / found['tokens']:.2f} bytes a token",
        f"vocabulary  {vocabulary['name']}, {vocabulary['size']:,} ids, {vocabulary['hash'][:12]}",
    ]
    for key, value in found["recipe"].items():
        lines.append(f"{key:<11} {', '.join(map(str, value)) if isinstance(value, list) else value}")
    return "\n".join(map(printable, lines))


@index.command(name="list")
@json_option
def list_(as_json: bool) -> None:
    """List the datastores that have a name, with a line for each vocabulary."""
    from rest_local.paths import datastores_home
    from rest_local.retrieval.home import datastore_path, indexes, list_datastores

    rows: list[dict[str, Any]] = []
    for name in list_datastores():
        for directory in indexes(datastore_path(name)):
            try:
                rows.append({"name": name, **_info(directory)})
            except DatastoreError as error:
                rows.append({"name": name, "error": str(error)})
    if as_json:
        return _print_json({"home": str(datastores_home()), "datastores": rows})
    width = max((len(row["name"]) for row in rows), default=0)
    for row in rows:
        click.echo(printable(f"{row['name']:<{width}}  {row.get('error') or _line(row)}"))
    if not rows:
        click.echo(f"no datastores in {datastores_home()}; make one with `rest-local index build PATH`")
    return None


def _line(row: Mapping[str, Any]) -> str:
    vocabulary = row["vocabulary"]
    held = f"{row['tokens']:>13,} tokens {in_bytes(row['bytes']):>9}"
    return f"{held}  {vocabulary['hash'][:8]} {vocabulary['name']}"


@index.command()
@click.argument("name", shell_complete=completion.datastores)
@click.argument("text")
@model_option
@json_option
def search(name: str, text: str, model: str | None, as_json: bool) -> None:
    """Show where the end of TEXT occurs, how much of it agrees, and how it goes on there."""
    path = model_path(model or _recorded_model(name))
    with _vocabulary(path) as vocabulary, _open(name, vocabulary) as store:
        found = _search(store, vocabulary, text)
    if as_json:
        return _print_json(found)
    click.echo(f"longest match: {found['match']} of {found['tokens']} tokens, {found['matched']!r}")
    if found["left_off"]:
        click.echo(f"left off at the end: {found['left_off']!r}; there it goes on in other tokens")
    click.echo(f"in {found['places']:,} places" + (":" if found["files"] else ""))
    for file in found["files"]:
        click.echo(f"  {file['name']}:{file['line']}")
    for row in found["continuations"]:
        click.echo(f"  {row['weight']:6.1%}  {row['text']!r}")
    return None


@index.command()
@click.argument("name", shell_complete=completion.datastores)
@vocabulary_option
@click.option("-y", "--yes", is_flag=True, allow_from_autoenv=False, help="Delete without a question.")
@json_option
def remove(name: str, vocabulary: str | None, yes: bool, as_json: bool) -> None:
    """Delete a datastore, or what it has for one vocabulary."""
    from rest_local.retrieval import home

    path = home.datastore_path(name)
    chosen = _indexes(name, vocabulary) if vocabulary is not None or home.indexes(path) else []
    if not chosen and not home.holds_files(path):
        raise DatastoreNotFound(path)
    if not yes:
        _confirm_removal(name, chosen, vocabulary is not None)
    if vocabulary is None:
        home.remove(path)
    else:
        home.remove_index(path, chosen[0])
    removed = path if vocabulary is None else chosen[0]
    if as_json:
        return _print_json({"removed": str(removed)})
    click.echo(f"removed {removed}")
    return None


def _confirm_removal(name: str, chosen: list[Path], is_one: bool) -> None:
    """Ask before the removal. Raises OptionError without a terminal."""
    if not building.can_ask():
        raise OptionError(f"datastore {name}: give --yes to delete it without a question")
    held = []
    for directory in chosen:
        try:
            row = _info(directory)
            held.append(f"{row['vocabulary']['name']}: {row['tokens']:,} tokens, {in_bytes(row['bytes'])}")
        except DatastoreError:
            held.append("damaged")
    what = f"what datastore {name} has for one vocabulary" if is_one else f"datastore {name}"
    building.ask_or_leave(f"Delete {what} ({'; '.join(held) or 'nothing complete'})?")


@index.command()
@click.argument("name", shell_complete=completion.datastores)
@vocabulary_option
@json_option
def check(name: str, vocabulary: str | None, as_json: bool) -> None:
    """Compare every file of a datastore with its checksum."""
    from rest_local.retrieval.datastore import Datastore

    size = 0
    for directory in _indexes(name, vocabulary):
        with Datastore.open(directory) as store:
            size += store.check()
    path = _path(name)
    if as_json:
        return _print_json({"path": str(path), "ok": True, "bytes": size})
    click.echo(f"{path}: {in_bytes(size)} checked, no damage")
    return None


def _search(store: Datastore, vocabulary: Vocabulary, text: str) -> dict[str, Any]:
    """Everything `search` prints, JSON-ready. Lines count from 1; weights are shares of the rows, longer first."""
    from collections import defaultdict

    def decode(tokens: Any) -> str:
        return b"".join(vocabulary.piece(int(token)) for token in tokens if token >= 0).decode("utf-8", "replace")

    tokens = vocabulary.tokenize(text)
    context = tokens[: len(tokens) - store.to_leave_off(tokens)]
    match, places, positions = store.find(context, PLACES)
    files = []
    for position in positions.tolist():
        name, line, offset = store.place(position, decode)
        files.append({"name": printable(name), "line": line, "token": offset})
    rows = store.rows(context, depth=_DEPTH)
    # A row counts as its match is long: each token less of agreement makes it a quarter.
    weights: defaultdict[str, float] = defaultdict(float)
    for continuation, length in zip(rows.continuations, rows.match.tolist(), strict=True):
        weights[decode(continuation)] += 4.0 ** (length - match)
    total = sum(weights.values()) or 1
    return {
        "tokens": len(tokens),
        "match": match,
        "matched": decode(context[len(context) - match :]),
        "left_off": decode(tokens[len(context) :]),
        "places": places,
        "files": files,
        "continuations": [
            {"text": text, "weight": round(weights[text] / total, 4)}
            for text in sorted(weights, key=lambda text: -weights[text])[:CONTINUATIONS]
        ],
    }


def _path(name: str) -> Path:
    from rest_local.retrieval.home import datastore_path

    return datastore_path(name)


def _indexes(name: str, vocabulary: str | None) -> list[Path]:
    """The directories of a datastore's indexes, or of the one for the vocabulary with that name or beginning of id.

    Raises DatastoreNotFound, and OptionError if no vocabulary is meant, or several are.
    """
    from rest_local.retrieval.format import Manifest
    from rest_local.retrieval.home import manifests

    found = manifests(_path(name))
    if not found:
        raise DatastoreNotFound(_path(name))
    if vocabulary is None:
        return list(found)
    held = {directory: found.vocabulary for directory, found in found.items() if isinstance(found, Manifest)}
    meant = [where for where, held_ in held.items() if held_.name == vocabulary or held_.hash.startswith(vocabulary)]
    if len(meant) != 1:
        known = ", ".join(f"{one.name} {one.hash[:12]}" for one in held.values())
        fits = "several fit" if meant else "it has none of that name or id"
        raise OptionError(f"vocabulary {vocabulary!r} of datastore {name}: {fits}; give one of: {known}")
    return meant


def _recorded_model(name: str) -> str | None:
    """A model that the datastore was built with and that is still there."""
    from rest_local.retrieval.format import Manifest
    from rest_local.retrieval.home import manifests

    found = [manifest for manifest in manifests(_path(name)).values() if isinstance(manifest, Manifest)]
    models = [manifest.recipe.get("model", "") for manifest in found]
    return next((model for model in models if os.path.isfile(model)), None)


def _open(name: str, vocabulary: Vocabulary) -> Datastore:
    from rest_local.retrieval.datastore import Datastore

    return Datastore.open(_path(name), vocabulary_hash=vocabulary.hash, vocabulary_name=vocabulary.name)


@contextmanager
def _vocabulary(path: Path) -> Iterator[Vocabulary]:
    from rest_local.llama.model import Model

    with Model.open(path, vocab_only=True) as model:
        yield model.vocabulary


def _print_json(fields: Any) -> None:
    click.echo(json.dumps(fields))
