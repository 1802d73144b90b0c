"""`index remove`."""

from __future__ import annotations

from pathlib import Path

import click

from rest_local.catalog.quantization import in_bytes
from rest_local.cli import building, completion
from rest_local.cli.index.common import index, indexes_of, info_of, print_json, vocabulary_option
from rest_local.cli.options import json_option
from rest_local.errors import DatastoreError, DatastoreNotFound, OptionError


@index.command()
@click.argument("name", shell_complete=completion.datastores)
@vocabulary_option
@click.option("-y", "--yes", is_flag=True, allow_from_autoenv=False, help="Delete without a question.")
@json_option
def remove(name: str, vocabulary: str | None, yes: bool, as_json: bool) -> None:
    """Delete a datastore, or what it has for one vocabulary."""
    from rest_local.retrieval import home

    path = home.datastore_path(name)
    chosen = indexes_of(name, vocabulary) if vocabulary is not None or home.indexes(path) else []
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
        return print_json({"removed": str(removed)})
    click.echo(f"removed {removed}")
    return None


def _confirm_removal(name: str, chosen: list[Path], is_one: bool) -> None:
    """Ask before the removal. Raises OptionError without a terminal."""
    if not building.can_ask():
        raise OptionError(f"datastore {name}: give --yes to delete it without a question")
    held = []
    for directory in chosen:
        try:
            row = info_of(directory)
            held.append(f"{row['vocabulary']['name']}: {row['tokens']:,} tokens, {in_bytes(row['bytes'])}")
        except DatastoreError:
            held.append("damaged")
    what = f"what datastore {name} has for one vocabulary" if is_one else f"datastore {name}"
    building.ask_or_leave(f"Delete {what} ({'; '.join(held) or 'nothing complete'})?")
