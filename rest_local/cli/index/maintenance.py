"""`index check`, `export` and `import`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rest_local.catalog.quantization import in_bytes
from rest_local.cli import completion, terminal
from rest_local.cli.index.group import index, indexes_of, path_of, vocabulary_option
from rest_local.cli.sections import option
from rest_local.cli.terminal import json_option, print_json
from rest_local.errors import DatastoreNotFound, InputInvalid, OptionError, printable

if TYPE_CHECKING:
    from rest_local.retrieval.maintenance.checking import Fault, Looked, Plan
    from rest_local.retrieval.maintenance.moving import Moved

_NAMED = 10  # lost documents that are listed


@index.command()
@click.argument("name", shell_complete=completion.datastores)
@vocabulary_option
@option("--thorough", "Sort the text again and compare the whole order; takes the memory of a build.")
@option("--repair", "Repair what can be repaired.", configurable=False)
@option("-y --yes", "Drop what cannot be repaired, without a question.", configurable=False)
@json_option
def check(name: str, vocabulary: str | None, thorough: bool, repair: bool, yes: bool, as_json: bool) -> None:
    """Look at every file of a datastore and list each fault. The exit code is 1 if there is one.

    Compares sizes and checksums, and looks at what the files hold. Also lists what killed processes left.

    --repair keeps the segments that are intact. It writes again what can be derived, drops segments whose text is
    damaged, takes a complete copy for a damaged manifest, and deletes what killed processes left. `index update` or
    `rebuild` then reads the files of dropped segments again.
    """
    from rest_local.retrieval.maintenance.checking import look

    looked = look(path_of(name), _directories(name, vocabulary), thorough=thorough)
    faults = [fault for one in looked for fault in one.faults]
    if not as_json:
        _tell(name, looked, faults, repair)
    plans = _repaired(name, looked, yes) if repair and faults else []
    if as_json:
        found = {"path": str(path_of(name)), "ok": not faults, "bytes": sum(one.bytes for one in looked)}
        listed = [fault.to_dict() for fault in faults]
        print_json({**found, "faults": listed, "repaired": [planned.to_dict() for planned in plans]})
    else:
        for planned in plans:
            _tell_repaired(name, planned)
    if faults and (not repair or any(planned.hopeless for planned in plans)):
        raise click.exceptions.Exit(1)


def _directories(name: str, vocabulary: str | None) -> Any:
    """The indexes that are meant; None for everything. Raises DatastoreNotFound."""
    from rest_local.retrieval.home import holds_files, read_manifest

    if vocabulary is not None:
        return indexes_of(name, vocabulary)
    path = path_of(name)
    if path.is_file():
        read_manifest(path)
    if not holds_files(path):
        raise DatastoreNotFound(path)
    return None


def _tell(name: str, looked: Sequence[Looked], faults: Sequence[Fault], repair: bool) -> None:
    size = in_bytes(sum(one.bytes for one in looked))
    if not faults:
        return click.echo(f"{path_of(name)}: {size} checked, no damage")
    for fault in faults:
        room = f", {in_bytes(fault.bytes)}" if fault.bytes else ""
        click.echo(printable(f"{fault.directory / fault.name}: {fault.what}{room}"))
    click.echo(f"{path_of(name)}: {size} intact, {len(faults)} faults")
    if not repair:
        click.echo(f"`rest-local index check {name} --repair` repairs what can be repaired")
    return None


def _repaired(name: str, looked: Sequence[Looked], yes: bool) -> list[Plan]:
    """Repair, after a question if documents are lost. Raises OptionError without a terminal."""
    from rest_local.retrieval.maintenance.checking import plan, repair

    plans = [plan(one) for one in looked if one.faults]
    lossy = [planned for planned in plans if planned.lost or planned.copy]
    if lossy and not yes:
        what = "; ".join(_lost(planned) for planned in lossy)
        without = f"datastore {name}: give --yes to repair it without a question ({what})"
        terminal.confirm(f"Repair datastore {name} ({what})?", without)
    for planned in plans:
        repair(planned)
    return plans


def _lost(planned: Plan) -> str:
    if planned.copy:
        return "the damaged manifest is replaced by its copy"
    names = planned.lost_names
    if names is None:
        return f"{planned.lost_tokens:,} tokens are lost, of documents whose names are damaged as well"
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{planned.lost_tokens:,} tokens are lost, of {', '.join(names[:_NAMED])}{more}"


def _tell_repaired(name: str, planned: Plan) -> None:
    from rest_local.retrieval.sources.recipes import can_repeat

    directory, manifest = planned.looked.directory, planned.looked.manifest
    if planned.hopeless:
        return click.echo(printable(f"{directory}: not repaired, {planned.hopeless}; build it again"))
    if planned.again:
        click.echo(f"{directory}: {len(planned.again)} segments were written again from their intact text")
    if planned.lost or planned.copy:
        click.echo(printable(f"{directory}: {_lost(planned)}"))
    if planned.lost and manifest and can_repeat(manifest.recipe):
        click.echo(f"`rest-local index update {name}` reads those files again, `rest-local index rebuild {name}` all")
    if planned.left:
        freed = in_bytes(sum(fault.bytes for fault in planned.left))
        click.echo(f"{directory}: deleted what killed processes left, {freed}")
    return None


@index.command()
@click.argument("name", shell_complete=completion.datastores)
@click.argument("target", required=False, metavar="[FILE|-]", shell_complete=completion.paths)
@option(
    "-o --output FILE|-",
    "As the argument FILE, or - for the standard output.  [default: NAME.tar]",
    to="file",
    shell_complete=completion.paths,
)
@vocabulary_option
@option("--without-recipe", "Leave out the paths that it came from.", configurable=False)
@option("--replace", "Replace an existing file.", configurable=False)
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
    from rest_local.retrieval.maintenance.moving import export, export_file

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
@option("-o --output NAME", "Name or path.  [default: the name that it had]", to="name")
@option("--replace", "Replace what the datastore has for these vocabularies.", configurable=False)
@json_option
def import_(file: str, name: str | None, replace: bool, as_json: bool) -> None:
    """Make a datastore from a file of `index export`, - for the standard input.

    Everything is checked before anything is visible. With --replace, indexes for other vocabularies stay.
    """
    from rest_local.retrieval.maintenance.moving import import_datastore

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
    return _tell_moved(moved)


def _tell_moved(moved: Moved) -> None:
    held = ", ".join(manifest.vocabulary.name for manifest in moved.manifests)
    click.echo(printable(f"{moved.path}: {moved.tokens:,} tokens for {held}, {in_bytes(moved.bytes)} read"))
    if moved.also:
        click.echo(printable(f"for vocabulary {', '.join(moved.also)} it still holds what it held"))
    if moved.paths():
        paths = ", ".join(moved.paths())
        click.echo(printable(f"`rest-local index update` and `rebuild` will read these paths on this machine: {paths}"))
