"""`index info`, `list`, `search` and `check`."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from rest_local.catalog.quantization import in_bytes
from rest_local.cli import completion
from rest_local.cli.index import group
from rest_local.cli.index.build import described_sources
from rest_local.cli.index.group import (
    index,
    indexes_of,
    info_of,
    model_option,
    path_of,
    recorded_model,
    vocabulary_option,
)
from rest_local.cli.terminal import columns, counted, json_option, print_json
from rest_local.errors import DatastoreError, DatastoreNotFound, printable

if TYPE_CHECKING:
    from rest_local.llama.vocabulary import Vocabulary
    from rest_local.retrieval.datastore import Datastore

PLACES = 10
CONTINUATIONS = 5
_DEPTH = 8


@index.command()
@click.argument("name", shell_complete=completion.datastores)
@vocabulary_option
@json_option
def info(name: str, vocabulary: str | None, as_json: bool) -> None:
    """Show what a datastore holds and how it was built."""
    found = [info_of(directory) for directory in indexes_of(name, vocabulary)]
    if as_json:
        return print_json({"name": name, "indexes": found})
    click.echo("\n\n".join(map(_described, found)))
    return None


def _described(found: Mapping[str, Any]) -> str:
    vocabulary, recipe = found["vocabulary"], found["recipe"]
    held = f"{found['tokens']:,} in {counted(found['documents'], 'document')}, {counted(found['segments'], 'segment')}"
    facts = [
        ("path", found["path"]),
        ("created", found["created"]),
        ("tokens", held),
        ("size", f"{in_bytes(found['bytes'])}, {found['bytes'] / found['tokens']:.2f} bytes a token"),
        ("vocabulary", f"{vocabulary['name']}, {vocabulary['size']:,} ids, {vocabulary['hash'][:12]}"),
    ]
    sources = described_sources(recipe, in_full=True)
    facts += [("source", source) for source in sources]
    for key, value in recipe.items():
        if not sources or key != "sources":
            facts.append((key, ", ".join(map(str, value)) if isinstance(value, list) else str(value)))
    return "\n".join(columns(facts))


@index.command(name="list")
@json_option
def list_(as_json: bool) -> None:
    """List the datastores that have a name, with a line for each vocabulary.

    Leftovers of killed processes are deleted. A build that did not end is listed.
    """
    from rest_local.paths import datastores_home
    from rest_local.retrieval.files import Files
    from rest_local.retrieval.home import datastore_path, indexes, list_datastores
    from rest_local.retrieval.staging import clear, clear_folder

    rows: list[dict[str, Any]] = []
    with contextlib.suppress(DatastoreError):
        clear_folder(datastores_home(), Files())
    for name in list_datastores():
        with contextlib.suppress(DatastoreError):  # A leftover that cannot be deleted is listed.
            clear(datastore_path(name))
        for directory in indexes(datastore_path(name)):
            try:
                rows.append({"name": name, **info_of(directory)})
            except DatastoreError as error:
                rows.append({"name": name, "error": str(error)})
    for name in list_datastores(unfinished=True):
        rows.append({"name": name, "error": f"its build has not ended; `rest-local index remove {name}` deletes it"})
    if as_json:
        return print_json({"home": str(datastores_home()), "datastores": rows})
    if not rows:
        return click.echo(f"no datastores in {datastores_home()}; make one with `rest-local index build PATH`")
    lines: list[tuple[str, ...]] = [("NAME", "TOKENS", "SIZE", "VOCABULARY")]
    for row in rows:
        if "error" in row:
            lines.append((row["name"], row["error"]))
        else:
            about = f"{row['vocabulary']['hash'][:8]} {row['vocabulary']['name']}"
            lines.append((row["name"], f"{row['tokens']:,}", in_bytes(row["bytes"]), about))
    return click.echo("\n".join(columns(lines, right=(1, 2))))


@index.command()
@click.argument("name", shell_complete=completion.datastores)
@click.argument("text")
@model_option
@json_option
def search(name: str, text: str, model: str | None, as_json: bool) -> None:
    """Show where the end of TEXT occurs, how much of it agrees, and how it goes on there."""
    from rest_local.retrieval.datastore import Datastore

    path = group.model_path(model or recorded_model(name))
    with (
        group.open_vocabulary(path) as vocabulary,
        Datastore.open(path_of(name), vocabulary_hash=vocabulary.hash, vocabulary_name=vocabulary.name) as store,
    ):
        found = _search(store, vocabulary, text)
    if as_json:
        return print_json(found)
    click.echo(f"longest match: {found['match']} of {found['tokens']} tokens, {found['matched']!r}")
    if found["left_off"]:
        click.echo(f"left off: {found['left_off']!r} at the end, whose tokens change with what follows")
    click.echo(f"in {counted(found['places'], 'place')}" + (":" if found["files"] else ""))
    for file in found["files"]:
        click.echo(f"  {file['name']}:{file['line']}")
    for row in found["continuations"]:
        click.echo(f"  {row['weight']:6.1%}  {row['text']!r}")
    return None


def _search(store: Datastore, vocabulary: Vocabulary, text: str) -> dict[str, Any]:
    """Return everything that `search` prints, JSON-ready. Lines count from 1, and weights are shares of the rows."""
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
    # Each token less of agreement divides the weight of a row by four.
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


@index.command()
@click.argument("name", shell_complete=completion.datastores)
@vocabulary_option
@json_option
def check(name: str, vocabulary: str | None, as_json: bool) -> None:
    """Check every file of a datastore and list each fault. The exit code is 1 if there is one.

    Sizes, checksums and the contents of the files are checked. Leftovers of killed processes are deleted. `index
    rebuild` replaces a damaged datastore.
    """
    from rest_local.retrieval.checking import look
    from rest_local.retrieval.home import holds_files, read_manifest
    from rest_local.retrieval.staging import clear

    path = path_of(name)
    if vocabulary is None and path.is_file():
        read_manifest(path)
    if vocabulary is None and not holds_files(path):
        raise DatastoreNotFound(path)
    with contextlib.suppress(DatastoreError):  # It can be read even if it cannot be changed.
        clear(path)
    looked = look(path, None if vocabulary is None else indexes_of(name, vocabulary))
    faults, size = [fault for one in looked for fault in one.faults], sum(one.bytes for one in looked)
    if as_json:
        print_json({"path": str(path), "ok": not faults, "bytes": size, "faults": [one.to_dict() for one in faults]})
    elif not faults:
        click.echo(f"{path}: {in_bytes(size)} checked, no damage")
    else:
        for fault in faults:
            click.echo(printable(f"{fault.directory / fault.name}: {fault.what}"))
        way_out = f"`rest-local index rebuild {name}` replaces it"
        click.echo(f"{path}: {in_bytes(size)} intact, {len(faults)} faults; {way_out}")
    if faults:
        raise click.exceptions.Exit(1)
