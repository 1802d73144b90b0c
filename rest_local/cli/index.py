"""`rest-local index`: build, look into and remove datastores."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rest_local.cli.inputs import model_path
from rest_local.cli.options import json_option
from rest_local.errors import OptionError, printable

if TYPE_CHECKING:
    from rest_local.llama.vocabulary import Vocabulary
    from rest_local.retrieval.datastore import Datastore

PLACES = 10
CONTINUATIONS = 5
_DEPTH = 8

model_option = click.option("-m", "--model", metavar="MODEL", help="Model whose vocabulary is used.")


@click.group()
def index() -> None:
    """Build, search and remove datastores of your own code and text."""


@index.command()
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option("-o", "--output", "name", default="default", show_default=True, metavar="NAME", help="Name or path.")
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
@json_option
def build(
    paths: tuple[str, ...],
    name: str,
    model: str | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    allow_secrets: bool,
    max_file_size: int,
    as_json: bool,
) -> None:
    """Index the text files below PATH... for one model's vocabulary.

    Hidden, git-ignored, binary, oversized and minified files are skipped, and files that look like secrets.
    """
    import time

    from rest_local.retrieval.indexing import build_datastore

    began, path = time.perf_counter(), model_path(model)
    with _vocabulary(path) as vocabulary, _progress(as_json) as progress:
        built = build_datastore(
            name,
            paths,
            vocabulary=vocabulary,
            include=include,
            exclude=exclude,
            allow_secrets=allow_secrets,
            max_file_size=max_file_size,
            recipe={"model": str(path.absolute())},
            progress=progress,
        )
    seconds = time.perf_counter() - began
    if as_json:
        return _print_json({**built.to_dict(), "seconds": round(seconds, 3)})
    click.echo(
        f"{built.path}: {built.tokens:,} tokens of {built.documents:,} files, {_bytes(built.bytes)}, "
        f"in {seconds:.1f} s; skipped: {built.skipped.summary()}"
    )
    for secret in built.skipped.secrets:
        click.echo(f"looks like it holds a secret, left out (--allow-secrets takes it): {secret}")
    return None


@index.command()
@click.argument("name")
@json_option
def info(name: str, as_json: bool) -> None:
    """Show what a datastore holds and how it was built."""
    with _open(name) as store:
        found = store.info()
    if as_json:
        return _print_json(found)
    vocabulary = found["vocabulary"]
    click.echo(f"path        {printable(found['path'])}")
    click.echo(f"created     {printable(found['created'])}")
    click.echo(f"tokens      {found['tokens']:,} in {found['documents']:,} documents, {found['segments']} segments")
    click.echo(f"size        {_bytes(found['bytes'])}, {found['bytes'] / found['tokens']:.2f} bytes a token")
    click.echo(printable(f"vocabulary  {vocabulary['name']}, {vocabulary['size']:,} ids, {vocabulary['hash'][:12]}"))
    for key, value in found["recipe"].items():
        click.echo(printable(f"{key:<11} {', '.join(map(str, value)) if isinstance(value, list) else value}"))
    return None


@index.command(name="list")
@json_option
def list_(as_json: bool) -> None:
    """List the datastores that have a name."""
    from rest_local.errors import DatastoreError
    from rest_local.retrieval.datastore import Datastore
    from rest_local.retrieval.home import datastore_path, datastores_home, list_datastores

    rows: list[dict[str, Any]] = []
    for name in list_datastores():
        try:
            with Datastore.open(datastore_path(name), mmap=True) as store:  # reads sizes and some bytes, not all
                rows.append({"name": name, **store.info()})
        except DatastoreError as error:
            rows.append({"name": name, "error": str(error)})
    if as_json:
        return _print_json({"home": str(datastores_home()), "datastores": rows})
    for row in rows:
        about = (
            row.get("error") or f"{row['tokens']:>14,} tokens  {_bytes(row['bytes']):>9}  {row['vocabulary']['name']}"
        )
        click.echo(printable(f"{row['name']:<20} {about}"))
    if not rows:
        click.echo(f"no datastores in {datastores_home()}; make one with `rest-local index build PATH`")
    return None


@index.command()
@click.argument("name")
@click.argument("text")
@model_option
@json_option
def search(name: str, text: str, model: str | None, as_json: bool) -> None:
    """Show where the end of TEXT occurs, how much of it agrees, and how it goes on there."""
    with _open(name) as store:
        built_with = store.manifest.recipe.get("model", "")
        path = model_path(model or (built_with if os.path.isfile(built_with) else None))
        with _vocabulary(path) as vocabulary:
            _check_vocabulary(store, vocabulary)
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
@click.argument("name")
@json_option
def remove(name: str, as_json: bool) -> None:
    """Delete a datastore."""
    from rest_local.retrieval.home import datastore_path
    from rest_local.retrieval.home import remove as remove_datastore

    path = datastore_path(name)
    remove_datastore(path)
    if as_json:
        return _print_json({"removed": str(path)})
    click.echo(f"removed {path}")
    return None


@index.command()
@click.argument("name")
@json_option
def check(name: str, as_json: bool) -> None:
    """Compare every file of a datastore with its checksum."""
    with _open(name) as store:
        size = store.check()
    if as_json:
        return _print_json({"path": str(store.path), "ok": True, "bytes": size})
    click.echo(f"{store.path}: {_bytes(size)} checked, no damage")
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


def _open(name: str) -> Datastore:
    from rest_local.retrieval.datastore import Datastore
    from rest_local.retrieval.home import datastore_path

    return Datastore.open(datastore_path(name))


@contextmanager
def _vocabulary(path: Path) -> Iterator[Vocabulary]:
    from rest_local.llama.model import Model

    with Model.open(path, vocab_only=True) as model:
        yield model.vocabulary


def _check_vocabulary(store: Datastore, vocabulary: Vocabulary) -> None:
    if store.manifest.vocabulary.hash != vocabulary.hash:
        built = store.manifest.vocabulary.name
        raise OptionError(f"datastore {store.path} has the vocabulary of {built}, not {vocabulary.name}; give -m")


@contextmanager
def _progress(quiet: bool) -> Iterator[Any]:
    """A callable(what, tokens) that moves a bar on stderr: tokens so far and tokens/s, as tokenizing goes."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TextColumn("{task.completed:,.0f} tokens"),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("tokenizing", total=None, rate="")

        def advance(what: str, tokens: int) -> None:
            if what == "tokenized":
                speed = bar.tasks[task].speed
                bar.update(task, advance=tokens, rate=f"{speed:,.0f} tokens/s" if speed else "")
            else:
                bar.update(task, description=f"{what} {tokens:,}, tokenizing")

        yield advance


def _print_json(fields: Any) -> None:
    click.echo(json.dumps(fields))


def _bytes(size: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
