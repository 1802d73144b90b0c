"""`index update`, `forget` and `remove`."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from rest_local.catalog.quantization import in_bytes
from rest_local.cli import completion, terminal
from rest_local.cli.history import keeps_answers_or_prompts
from rest_local.cli.index import group
from rest_local.cli.index.group import index, indexes_of, info_of, model_option, path_of, vocabulary_option, yes_option
from rest_local.cli.sections import option
from rest_local.cli.terminal import counted, json_option, print_json, warn
from rest_local.errors import DatastoreError, DatastoreNotFound, OptionError, printable


@index.command()
@click.argument("name", shell_complete=completion.datastores)
@vocabulary_option
@model_option
@option(
    "--missing",
    "Delete the files of a recorded path that is gone or empty; otherwise that is refused.",
    configurable=False,
)
@json_option
def update(name: str, vocabulary: str | None, model: str | None, missing: bool, as_json: bool) -> None:
    """Bring a datastore up to date with the files it was built from.

    A file whose size and time did not change is not read, and a file whose content did not change is not tokenized.
    Each index is updated with the model it was built with, or the one for the vocabulary of --model.
    """
    from rest_local.retrieval.home import read_manifest
    from rest_local.retrieval.update.updating import update

    rows: list[dict[str, Any]] = []
    stale: list[dict[str, str]] = []
    for directory in indexes_of(name, vocabulary):
        manifest, began = read_manifest(directory), time.perf_counter()
        about = manifest.vocabulary.name
        try:
            with group.vocabulary_of(manifest, model) as known, terminal.build_bar(as_json) as progress:
                updated = update(path_of(name), vocabulary=known, missing=missing, merging=True, progress=progress)
        except group.Stale as error:
            remove = f"`rest-local index remove {name} --vocabulary {manifest.vocabulary.hash[:12]}`"
            way_on = "" if model else f"; give --model with a model of this vocabulary, or remove it with {remove}"
            stale.append({"vocabulary": about, "cause": f"{error}{way_on}"})
            warn(f"datastore {name}: the index for vocabulary {about} is stale: {error}{way_on}")
            continue
        rows.append({**updated.to_dict(), "seconds": round(time.perf_counter() - began, 3)})
        if not as_json:
            _report(name, rows[-1])
    if not rows:
        raise DatastoreError(f"datastore {name}: no index could be changed")
    if as_json:
        print_json({"name": name, "path": str(path_of(name)), "indexes": rows, "stale": stale})


def _report(name: str, row: dict[str, Any]) -> None:
    done = ", ".join(f"{row[what]:,} {what}" for what in ("added", "changed", "deleted") if row[what])
    done = f"{done} ({row['tokens']:,} tokens)" if done else "nothing changed"
    held = f"{row['total']:,} tokens of {counted(row['documents'], 'document')}"
    click.echo(printable(f"{name} ({row['vocabulary']}): {done}; {held}, in {row['seconds']:.1f} s"))
    for secret in row["secrets"]:
        click.echo(f"left out, as it looks like a secret: {secret}")


_SHOWN = 10


@index.command()
@click.argument("name", shell_complete=completion.datastores)
@click.argument("files", nargs=-1, required=True, metavar="FILE|GLOB...", shell_complete=completion.paths)
@option("-y --yes", "Do not ask, even if nothing would be left.", configurable=False)
@json_option
def forget(name: str, files: tuple[str, ...], yes: bool, as_json: bool) -> None:
    """Delete files from a datastore. Afterwards no file of the datastore holds their text.

    FILE is a path, or the name of a document. GLOB is as in .gitignore, compared with the path below each recorded
    path. Later updates leave these files out too. All indexes of the datastore forget them, and the leftovers of killed
    commands there are deleted. A terminal asks first.

    Some text is not in a datastore, and so not forgotten: earlier answers, chats and prompts, which may quote a file
    (`rest-local history forget`), copies of the datastore, and the answers of batches.
    """
    from rest_local.retrieval import home, staging
    from rest_local.retrieval.datastore import Datastore
    from rest_local.retrieval.update.forgetting import excludable, excluding, forget_where, names_in

    def names_of(directory: Path) -> set[str]:
        with Datastore.open(directory) as store:
            return names_in(store)

    path = path_of(name)
    if not home.indexes(path) and home.holds_files(path):
        staging.remove(path)
        return _say(name, [], as_json, removed=True)
    staging.clear(path, everything=True)  # Its first build may have been killed.
    held = {directory: names_of(directory) for directory in indexes_of(name, None)}
    every = set().union(*held.values())
    recipes = {directory: home.read_manifest(directory) for directory in held}
    meant = {directory: _meant(one.recipe, files, every) for directory, one in recipes.items()}
    emptied = [directory for directory, names in held.items() if names <= meant[directory][0]]
    if emptied and not yes:
        what = f"datastore {name}: nothing would be left of it, or of what it has for a vocabulary"
        terminal.confirm(f"{what}. Delete it?", f"{what}; give --yes to delete it without a question")
    elif not yes and terminal.can_ask() and (found := sorted(set().union(*(names for names, *_ in meant.values())))):
        them = "it" if len(found) == 1 else "them"
        terminal.confirm(f"Delete {_listed(found)} from datastore {name}? Later updates leave {them} out as well.")
    if len(emptied) == len(held):
        staging.remove(path)
        return _say(name, sorted(every), as_json, removed=True)
    forgotten: set[str] = set()
    copies: set[str] = set()
    for directory, (names, exact, globs) in meant.items():

        def left_out(recipe: Mapping[str, Any], _: object, exact: list[str] = exact, globs: list[str] = globs) -> Any:
            return excluding(recipe, exact, globs)

        known = recipes[directory].vocabulary.hash
        done = forget_where(path, names.__contains__, recipe=left_out, whole=True, vocabulary_hash=known)
        forgotten |= set(done.names)
        copies |= set(done.copies)
    if not forgotten:
        raise OptionError(f"datastore {name}: it holds no file that {' '.join(files)!r} names")

    def returns(file: str) -> bool:
        return not all(excludable(one.recipe, file) for one in recipes.values())

    return _say(name, sorted(forgotten), as_json, sorted(copies), sorted(filter(returns, forgotten)))


def _meant(
    recipe: Mapping[str, Any], given: Sequence[str], held: Collection[str]
) -> tuple[set[str], list[str], list[str]]:
    """Return the names that are meant, those that were given exactly or lie below a given folder, and the globs."""
    from pathspec import GitIgnoreSpec

    from rest_local.retrieval.update.forgetting import relative_names

    files: set[str] = set()
    globs: list[str] = []
    for argument in given:
        parent, base = os.path.split(os.path.abspath(argument))
        spellings = {argument, os.path.join(parent, base), os.path.join(os.path.realpath(parent), base)}
        below = tuple(os.path.join(one, "") for one in spellings if os.path.isabs(one))
        found = {one for one in held if one in spellings or one.startswith(below)}
        files |= found
        if not found:
            globs.append(argument)
    try:
        spec = GitIgnoreSpec.from_lines(globs)
    except ValueError as error:
        raise OptionError(f"glob {' '.join(globs)!r}: {error}") from error
    matched = {one for one in held if globs and any(map(spec.match_file, relative_names(recipe, one)))}
    return files | matched, sorted(files), globs


def _say(
    name: str,
    forgotten: list[str],
    as_json: bool,
    copies: Sequence[str] = (),
    returning: Sequence[str] = (),
    removed: bool = False,
) -> None:
    """Say what was removed, which copies of the same content stay, and which files the next update brings back."""
    if as_json:
        done = {"forgotten": forgotten, "copies": copies, "returning": returning, "removed": removed}
        return print_json({"path": str(path_of(name)), **done})
    if not forgotten:
        return click.echo(printable(f"{name}: deleted the leftovers of an unfinished build; there was nothing else"))
    click.echo(printable(f"{name}: forgot {_listed(forgotten)}"))
    if removed:
        click.echo("nothing was left, so the datastore was deleted")
    if copies:
        click.echo(printable(f"other files have the same content and stay: {_listed(copies)}"))
    if returning:
        click.echo(printable(f"the next update brings back {_listed(returning)}"))
    elif not removed:
        click.echo("recorded: no update brings this back; `index info` shows what is left out")
    if keeps_answers_or_prompts():
        click.echo("earlier answers and prompts may quote it; `rest-local history forget --all --prompts` deletes them")
    return None


def _listed(names: Sequence[str]) -> str:
    shown = names[:_SHOWN]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more:,} more" if more else "")


@index.command()
@click.argument("name", shell_complete=completion.datastores)
@vocabulary_option
@yes_option
@json_option
def remove(name: str, vocabulary: str | None, yes: bool, as_json: bool) -> None:
    """Delete a datastore, or what it has for one vocabulary."""
    from rest_local.retrieval import home, staging

    path = home.datastore_path(name)
    chosen = indexes_of(name, vocabulary) if vocabulary is not None or home.indexes(path) else []
    if not chosen and not home.holds_files(path):
        raise DatastoreNotFound(path)
    if not yes:
        held = "; ".join(map(_held, chosen)) or "nothing complete"
        what = f"what datastore {name} has for one vocabulary" if vocabulary is not None else f"datastore {name}"
        without = f"datastore {name}: give --yes to delete it without a question"
        terminal.confirm(f"Delete {what} ({held})?", without)
    removed = path if vocabulary is None else chosen[0]
    if vocabulary is None:
        staging.remove(path)
    else:
        staging.remove_index(path, removed)
    if as_json:
        return print_json({"removed": str(removed)})
    click.echo(f"removed {removed}")
    return None


def _held(directory: Path) -> str:
    try:
        row = info_of(directory)
    except DatastoreError:
        return "damaged"
    return f"{row['vocabulary']['name']}: {row['tokens']:,} tokens, {in_bytes(row['bytes'])}"
