"""`index prune`, and the option `--prune` of a build."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from rest_local.catalog.quantization import in_bytes
from rest_local.cli import completion
from rest_local.cli.index.common import index, indexes_of, path_of, print_json, vocabulary_option
from rest_local.cli.options import json_option

if TYPE_CHECKING:
    from rest_local.retrieval.changing.pruning import Pruned, Target

prune_option = click.option(
    "--prune",
    metavar="seen:N|SIZE",
    allow_from_autoenv=False,
    help="Then keep what matters most, as `index prune` does: seen:2, 200MB.",
)


@index.command()
@click.argument("name", shell_complete=completion.datastores)
@click.argument("target", metavar="seen:N|SIZE")
@vocabulary_option
@click.option("--dry-run", is_flag=True, allow_from_autoenv=False, help="Only say what would be left.")
@json_option
def prune(name: str, target: str, vocabulary: str | None, dry_run: bool, as_json: bool) -> None:
    """Make a datastore smaller: keep the files with the most common contexts.

    seen:2 keeps files until every context that occurs twice is in one of them; 200MB keeps that much for each
    vocabulary. A context is 4 tokens and what follows them. `index update` and `index rebuild` bring the other files
    back.
    """
    from rest_local.retrieval.home import read_manifest

    meant = target_of(target)
    rows = []
    for directory in indexes_of(name, vocabulary):
        identity = read_manifest(directory).vocabulary
        pruned = prune_index(name, identity.hash, str(meant), dry=dry_run)
        rows.append({"vocabulary": identity.name, **pruned.to_dict()})
        if not as_json:
            click.echo(described(pruned, "would be left" if dry_run else "left"))
    if as_json:
        print_json({"path": str(path_of(name)), "target": str(meant), "dry_run": dry_run, "indexes": rows})


def target_of(text: str) -> Target:
    """Raises OptionError unless it is a target."""
    from rest_local.retrieval.changing.pruning import Target

    return Target.parse(text)


def prune_index(name: str, vocabulary_hash: str | None, target: str, *, dry: bool = False) -> Pruned:
    from rest_local.retrieval.changing.pruning import prune as prune_documents

    return prune_documents(path_of(name), target_of(target), vocabulary_hash=vocabulary_hash, dry=dry)


def described(pruned: Pruned, left: str = "left") -> str:
    """One line."""
    (documents, kept), (tokens, kept_tokens), (size, kept_size) = pruned.documents, pruned.tokens, pruned.bytes
    return (
        f"{left}: {kept:,} of {documents:,} files, {kept_tokens:,} of {tokens:,} tokens, "
        f"{in_bytes(kept_size)} of {in_bytes(size)}"
    )
