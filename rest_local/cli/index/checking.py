"""`index check`."""

from __future__ import annotations

import click

from rest_local.catalog.quantization import in_bytes
from rest_local.cli import completion
from rest_local.cli.index.common import index, indexes_of, path_of, print_json, vocabulary_option
from rest_local.cli.options import json_option


@index.command()
@click.argument("name", shell_complete=completion.datastores)
@vocabulary_option
@json_option
def check(name: str, vocabulary: str | None, as_json: bool) -> None:
    """Compare every file of a datastore with its checksum."""
    from rest_local.retrieval.datastore import Datastore

    size = 0
    for directory in indexes_of(name, vocabulary):
        with Datastore.open(directory) as store:
            size += store.check()
    path = path_of(name)
    if as_json:
        return print_json({"path": str(path), "ok": True, "bytes": size})
    click.echo(f"{path}: {in_bytes(size)} checked, no damage")
    return None
