"""`index export` and `index import`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rest_local.catalog.quantization import in_bytes
from rest_local.cli import completion
from rest_local.cli.index.common import index, indexes_of, path_of, print_json, vocabulary_option
from rest_local.cli.options import json_option
from rest_local.errors import InputInvalid, OptionError, printable

if TYPE_CHECKING:
    from rest_local.retrieval.keeping.moving import Moved


@index.command()
@click.argument("name", shell_complete=completion.datastores)
@click.argument("target", required=False, metavar="[FILE|-]", shell_complete=completion.paths)
@click.option(
    "-o",
    "--output",
    "file",
    metavar="FILE|-",
    shell_complete=completion.paths,
    help="As the argument FILE, or - for the standard output.  [default: NAME.tar]",
)
@vocabulary_option
@click.option("--without-recipe", is_flag=True, allow_from_autoenv=False, help="Leave out the paths that it came from.")
@click.option("--replace", is_flag=True, allow_from_autoenv=False, help="Replace an existing file.")
@json_option
def export(
    name: str,
    target: str | None,
    file: str | None,
    vocabulary: str | None,
    without_recipe: bool,
    replace: bool,
    as_json: bool,
) -> None:
    """Write a datastore into one file with a checksum, for another machine.

    The file holds what the datastore holds: the text as token ids, and the names of documents, also without its recipe.
    It is a tar archive, not compressed. To send it: `rest-local index export NAME - | ssh HOST rest-local index import
    -`.
    """
    from rest_local.retrieval.keeping.moving import export, export_file

    if target is not None and file is not None:
        raise click.UsageError("FILE and --output are the same; give one of them")
    file = target or file
    path, directories = path_of(name), indexes_of(name, vocabulary)
    if file == "-":
        if sys.stdout.isatty():
            raise OptionError("the standard output is a terminal; give a file, or pipe it to a program")
        output = sys.stdout.buffer
        moved = export(path, directories, output, recipe=not without_recipe)
        output.flush()
    else:
        output_file = Path(file or f"{path.name}.tar").expanduser()
        moved = export_file(path, directories, output_file, recipe=not without_recipe, overwrite=replace)
    told = "the standard output" if file == "-" else str(output_file)
    if as_json:
        return click.echo(json.dumps({**moved.to_dict(), "file": told}), err=file == "-")
    return click.echo(f"{path}: {moved.tokens:,} tokens, {in_bytes(moved.bytes)}, in {told}", err=file == "-")


@index.command(name="import")
@click.argument("file", metavar="FILE|-", shell_complete=completion.paths)
@click.option("-o", "--output", "name", metavar="NAME", help="Name or path.  [default: the name that it had]")
@click.option(
    "--replace", is_flag=True, allow_from_autoenv=False, help="Replace what the datastore has for these vocabularies."
)
@json_option
def import_(file: str, name: str | None, replace: bool, as_json: bool) -> None:
    """Make a datastore from a file of `index export`, - for the standard input.

    Everything is checked before anything is visible. With --replace, indexes for other vocabularies stay.
    """
    from rest_local.retrieval.keeping.moving import import_datastore

    if file == "-":
        moved = import_datastore(sys.stdin.buffer, name, replace=replace)
    else:
        try:
            source = Path(file).expanduser().open("rb")
        except OSError as error:
            raise InputInvalid("export", file, f"{error.strerror or error}; give a file of `index export`") from error
        with source:
            moved = import_datastore(source, name, replace=replace, label=file)
    if as_json:
        return print_json(moved.to_dict())
    return _tell(moved)


def _tell(moved: Moved) -> None:
    held = ", ".join(manifest.vocabulary.name for manifest in moved.manifests)
    click.echo(printable(f"{moved.path}: {moved.tokens:,} tokens for {held}, {in_bytes(moved.bytes)} read"))
    if moved.also:
        click.echo(printable(f"for vocabulary {', '.join(moved.also)} it still holds what it held"))
    if moved.paths():
        paths = ", ".join(moved.paths())
        click.echo(printable(f"`rest-local index update` and `rebuild` will read these paths on this machine: {paths}"))
