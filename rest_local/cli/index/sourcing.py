"""The options that say what text an index is built from, and `index recipes`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, astuple, fields
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from rest_local.cli import completion
from rest_local.cli.index.common import index, print_json
from rest_local.cli.options import json_option
from rest_local.errors import OptionError, printable

if TYPE_CHECKING:
    from rest_local.retrieval.sources.corpus import Filters
    from rest_local.retrieval.sources.source import Source

OF_SOURCES = ("sources", "paths", "include", "exclude", "allow_secrets", "max_file_size")
"""The fields of a recipe that `described_sources` describes."""

AnyCommand = TypeVar("AnyCommand", bound=Callable[..., Any])

_OPTIONS = (
    click.argument("paths", nargs=-1, metavar="[PATH]...", shell_complete=completion.paths),
    click.option(
        "--git",
        "repositories",
        multiple=True,
        metavar="REPO[@REV]",
        shell_complete=completion.paths,
        allow_from_autoenv=False,
        help="The tracked files of a revision, without a checkout; default: HEAD; repeatable.",
    ),
    click.option(
        "--history", is_flag=True, allow_from_autoenv=False, help="With --git: also what the newest commits wrote."
    ),
    click.option(
        "--commits",
        type=click.IntRange(min=1),
        default=1000,
        show_default=True,
        metavar="N",
        allow_from_autoenv=False,
        help="With --history: how many commits.",
    ),
    click.option(
        "--text",
        "texts",
        multiple=True,
        metavar="FILE:FIELD",
        shell_complete=completion.paths,
        allow_from_autoenv=False,
        help="A field of each row of a .jsonl, .jsonl.gz or .parquet file; a.b.0 leads inside; repeatable.",
    ),
    click.option(
        "--chat",
        "chats",
        multiple=True,
        metavar="FILE",
        shell_complete=completion.paths,
        allow_from_autoenv=False,
        help="What the assistant wrote in chats in OpenAI's message form; repeatable.",
    ),
    click.option("--python", is_flag=True, allow_from_autoenv=False, help="The standard library of Python."),
    click.option("--site-packages", is_flag=True, allow_from_autoenv=False, help="The installed Python packages."),
    click.option(
        "--recipe",
        "recipes",
        multiple=True,
        metavar="NAME|FILE",
        shell_complete=completion.paths,
        allow_from_autoenv=False,
        help="What a recipe names; `index recipes` lists them; repeatable.",
    ),
    click.option(
        "--include", multiple=True, metavar="GLOB", help="Take these files, not the usual extensions; repeatable."
    ),
    click.option("--exclude", multiple=True, metavar="GLOB", help="Leave out these files; repeatable."),
    click.option("--allow-secrets", is_flag=True, help="Take text that looks as if it held keys or passwords."),
    click.option(
        "--max-file-size",
        type=click.IntRange(min=1),
        default=1 << 20,
        show_default=True,
        metavar="BYTES",
        help="Skip larger files.",
    ),
)


def source_options(command: AnyCommand) -> AnyCommand:
    """Add the argument PATH and all options of sources to a command. Its parameters go to `chosen_sources`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


class Chosen(NamedTuple):
    """What a command line chose. recorded: what the manifest says of the only recipe; name: of it, else None."""

    sources: list[Source]
    recorded: dict[str, str]
    name: str | None


def chosen_sources(
    paths: Sequence[str],
    repositories: Sequence[str],
    history: bool,
    commits: int,
    texts: Sequence[str],
    chats: Sequence[str],
    python: bool,
    site_packages: bool,
    recipes: Sequence[str],
    include: Sequence[str],
    exclude: Sequence[str],
    allow_secrets: bool,
    max_file_size: int,
) -> Chosen:
    """The sources of the parameters that `source_options` added, prepared. Raises UsageError if there are none,
    OptionError, InputInvalid.
    """
    from rest_local.retrieval.sources import Chat, Git, Python
    from rest_local.retrieval.sources.corpus import Filters
    from rest_local.retrieval.sources.recipes import read_recipe

    filters = Filters(tuple(include), tuple(exclude), allow_secrets, max_file_size)
    sources = _path_sources(paths, filters)
    for repository, revision in map(split_revision, repositories):
        sources.append(Git(repository, revision, "", history, commits, *astuple(filters)))
    for text in texts:
        sources.append(row_source(text, allow_secrets) or _refuse(text))
    sources += [Chat(chat, allow_secrets) for chat in chats]
    sources += [Python(False)] if python else []
    sources += [Python(True)] if site_packages else []
    read = [read_recipe(recipe) for recipe in recipes]
    sources += [source for recipe in read for source in recipe.present()]
    if not sources:
        raise click.UsageError("give a PATH, --git, --text, --chat, --python, --site-packages or --recipe")
    if history and not repositories:
        raise click.UsageError("--history needs --git")
    recorded, name = (read[0].recorded(), read[0].name) if len(read) == 1 else ({}, None)
    return Chosen([source.prepared() for source in sources], recorded, name)


def _path_sources(paths: Sequence[str], filters: Filters) -> list[Source]:
    """The sources of the arguments PATH: one walk of files and folders, then rows, then the standard input."""
    from rest_local.retrieval.sources import Stdin, Walk

    secret = filters.allow_secrets
    rows = {path: source for path in paths if (source := row_source(path, secret)) and not os.path.exists(path)}
    walked = tuple(path for path in paths if path != "-" and path not in rows)
    walk: list[Source] = [Walk(walked, *astuple(filters))] if walked else []
    return [*walk, *rows.values(), *([Stdin(secret)] if "-" in paths else [])]


def described_sources(recipe: Mapping[str, Any], in_full: bool = False) -> list[str]:
    """What a recorded recipe names, for a person; in full: with all that differs from the defaults."""
    from rest_local.retrieval.sources import from_recipe

    try:
        sources = from_recipe(recipe)
    except OptionError:  # of a newer version
        return [json.dumps(recipe["sources"])]
    return [_in_full(source) if in_full else source.about() for source in sources]


def _in_full(source: Source) -> str:
    known = [(field.name, field.default, getattr(source, field.name)) for field in fields(source)]
    different = [(name, value) for name, default, value in known if default is not MISSING and value != default]
    shown = [f"{name} {' '.join(value) if isinstance(value, tuple) else value}" for name, value in different]
    return f"{source.about()} ({'; '.join(shown)})" if shown else source.about()


def split_revision(given: str) -> tuple[str, str]:
    """The repository and the revision of REPO[@REV]; a folder whose name has an @ is a repository."""
    repository, at, revision = given.rpartition("@")
    return (repository, revision) if at and repository and not os.path.isdir(given) else (given, "HEAD")


def row_source(given: str, allow_secrets: bool = False) -> Source | None:
    """The source of FILE:FIELD, None if the file has no ending of a file of rows."""
    from rest_local.retrieval.sources import Jsonl, Parquet
    from rest_local.retrieval.sources.jsonl import ENDINGS

    path, _, field = given.rpartition(":")
    if not field or not path.lower().endswith((*ENDINGS, ".parquet")):
        return None
    kind = Parquet if path.lower().endswith(".parquet") else Jsonl
    return kind(path, field, allow_secrets)


def _refuse(given: str) -> Source:
    raise OptionError(f"--text {given}: give FILE:FIELD, with a file that ends in .jsonl, .jsonl.gz or .parquet")


@index.command()
@json_option
def recipes(as_json: bool) -> None:
    """List the recipes for `index build --recipe`: text that most machines have. Nothing is downloaded."""
    from rest_local.retrieval.sources.recipes import list_recipes

    found = list_recipes()
    if as_json:
        return print_json({"recipes": [recipe.to_dict() for recipe in found]})
    width = max((len(recipe.name) for recipe in found), default=0)
    for recipe in found:
        click.echo(printable(f"{recipe.name:<{width}}  {recipe.description}; {recipe.size}"))
    return None
