"""`index stats`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from rest_local.catalog.quantization import in_bytes
from rest_local.cli import completion
from rest_local.cli.index.common import index, indexes_of, print_json, vocabulary_option
from rest_local.cli.options import json_option
from rest_local.errors import printable

_WIDTH = 12
_UNITS = (("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1))


@index.command()
@click.argument("name", shell_complete=completion.datastores)
@vocabulary_option
@click.option("--changes", is_flag=True, help="Look at every recorded file, and count those that look changed.")
@json_option
def stats(name: str, vocabulary: str | None, changes: bool, as_json: bool) -> None:
    """Show what a datastore holds, in numbers: files, tokens, segments, bytes, duplicates, what is deleted.

    Tokens by folder, extension and file are those of the ten largest.
    """
    from rest_local.retrieval.keeping.statistics import statistics

    found = [statistics(directory, changes=changes) for directory in indexes_of(name, vocabulary)]
    if as_json:
        return print_json({"name": name, "indexes": found})
    return click.echo("\n\n".join("\n".join(map(printable, _lines(one))) for one in found))


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    vocabulary, dead, sizes = found["vocabulary"], found["dead"], dict(found["bytes"])
    everything = sizes.pop("all")
    kinds = ", ".join(f"{kind} {in_bytes(size)}" for kind, size in sizes.items())
    yield _line("path", found["path"])
    yield _line("vocabulary", f"{vocabulary['name']}, {vocabulary['size']:,} ids, {vocabulary['hash'][:12]}")
    yield _line("commit", f"{found['revision']}, {found['created']}{_ago(found['age_s'])}")
    for source in found["recipe"].get("paths", ()):
        yield _line("source", source)
    yield _line("files", f"{found['files']:,}, {found['duplicates']:,} of them duplicates")
    yield _line("documents", f"{found['documents']:,}, and {dead['documents']:,} deleted ones that wait for a merge")
    yield _line("tokens", f"{found['tokens']:,}, and {dead['tokens']:,} deleted ones")
    yield _line("bytes", f"{in_bytes(everything)}, {found['bytes_a_token']:.2f} a token: {kinds}")
    for tier in found["tiers"]:
        size = f"up to {tier['up_to']:,} tokens" if tier["up_to"] else "larger"
        yield _line("segments", f"{tier['segments']} {size}: {tier['tokens']:,} tokens")
    if "changed" in found:
        yield _line("since then", ", ".join(f"{count:,} {what}" for what, count in found["changed"].items()))
    for title, key in (("folders", "folders"), ("extensions", "extensions"), ("files", "largest")):
        yield from _table(title, found[key], found["tokens"])


def _line(title: str, value: object) -> str:
    return f"{title:<{_WIDTH}}{value}"


def _table(title: str, rows: Sequence[Mapping[str, Any]], tokens: int) -> Iterator[str]:
    yield f"largest {title}"
    for row in rows:
        yield f"{row['tokens']:>15,} {row['tokens'] / tokens:6.1%}  {row['name']}"


def _ago(seconds: float | None) -> str:
    if seconds is None:
        return ""
    name, size = next(((name, size) for name, size in _UNITS if seconds >= 2 * size), _UNITS[-1])
    return f", {seconds // size:.0f} {name} ago"
