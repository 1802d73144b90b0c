"""`index forget`."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click

from rest_local.cli import building, completion
from rest_local.cli.history import keeps_answers_or_prompts
from rest_local.cli.index.common import index, indexes_of, path_of, print_json
from rest_local.cli.options import json_option
from rest_local.errors import OptionError, printable

_SHOWN = 10


@index.command()
@click.argument("name", shell_complete=completion.datastores)
@click.argument("files", nargs=-1, required=True, metavar="FILE|GLOB...", shell_complete=completion.paths)
@click.option(
    "--once",
    is_flag=True,
    allow_from_autoenv=False,
    help="Do not record it: the next update takes a file that is still there.",
)
@click.option("-y", "--yes", is_flag=True, allow_from_autoenv=False, help="Do not ask, also where nothing is left.")
@json_option
def forget(name: str, files: tuple[str, ...], once: bool, yes: bool, as_json: bool) -> None:
    """Delete files from a datastore: when it ends, no file of the datastore holds their text.

    FILE is a path, or the name of a document; GLOB is as in .gitignore, compared with the path below each recorded
    path. It is recorded that they are left out from now on, also by later updates, unless --once is given. All indexes
    of the datastore forget them, and what killed commands left there is deleted. A terminal asks first.

    Not in a datastore, and so not forgotten: earlier answers, chats and prompts, which may quote a file (`rest-local
    history forget`), exports, and the answers of batches.
    """
    from rest_local.retrieval import home
    from rest_local.retrieval.changing.forgetting import forget_where

    path = path_of(name)
    if not home.indexes(path) and home.holds_files(path):
        home.remove(path)
        return _say(name, _Done([], removed=True), once, as_json)
    home.clear(path, everything=True)  # also where there is no such datastore: an import of it may have been killed
    held = {directory: _names(directory) for directory in indexes_of(name, None)}
    every = set().union(*held.values())
    recipes = {directory: home.read_manifest(directory) for directory in held}
    meant = {directory: _meant(one.recipe, files, every) for directory, one in recipes.items()}
    emptied = [directory for directory, names in held.items() if names <= meant[directory].names]
    if emptied:
        _confirm(name, yes)
    elif not yes and building.can_ask() and (found := sorted(set().union(*(one.names for one in meant.values())))):
        after = "" if once else f" Later updates leave {'it' if len(found) == 1 else 'them'} out as well."
        building.ask_or_leave(f"Delete {_listed(found)} from datastore {name}?{after}")
    if len(emptied) == len(held):
        home.remove(path)
        return _say(name, _Done(sorted(every), removed=True), once, as_json)
    forgotten: set[str] = set()
    copies: set[str] = set()
    for directory, one in meant.items():
        done = forget_where(
            path,
            one.names.__contains__,
            recipe=(lambda recipe, _: recipe) if once else one.recipe,
            whole=True,
            vocabulary_hash=recipes[directory].vocabulary.hash,
        )
        forgotten |= set(done.names)
        copies |= set(done.copies)
    if not forgotten:
        raise OptionError(f"datastore {name}: it holds no file that {' '.join(files)!r} names")
    back = [one for one in forgotten if (os.path.exists(one) if once else not _can_exclude(meant.values(), one))]
    return _say(name, _Done(sorted(forgotten), sorted(copies), sorted(back)), once, as_json)


@dataclass(frozen=True)
class _Done:
    """What was removed. copies: files that stay and have the content of one of `forgotten`; returning: files that the
    next update brings back.
    """

    forgotten: list[str]
    copies: list[str] = field(default_factory=list)
    returning: list[str] = field(default_factory=list)
    removed: bool = False


@dataclass(frozen=True)
class _Meant:
    """names: those that are to be forgotten; globs: given by these."""

    names: frozenset[str]
    files: tuple[str, ...]
    globs: tuple[str, ...]
    recorded: Mapping[str, Any]

    def recipe(self, recipe: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
        from rest_local.retrieval.changing.excluding import excluding

        return excluding(recipe, self.files, self.globs)


def _can_exclude(meant: Iterable[_Meant], name: str) -> bool:
    from rest_local.retrieval.changing.excluding import excludable

    return all(excludable(one.recorded, name) for one in meant)


def _meant(recipe: Mapping[str, Any], given: Sequence[str], held: Collection[str]) -> _Meant:
    """What the arguments mean: a path or name that is held, or files below a folder; else a glob."""
    from pathspec import GitIgnoreSpec

    from rest_local.retrieval.changing.excluding import relative_names

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
    return _Meant(frozenset(files | matched), tuple(sorted(files)), tuple(globs), recipe)


def _names(directory: Path) -> set[str]:
    from rest_local.retrieval.changing.forgetting import names_in
    from rest_local.retrieval.datastore import Datastore

    with Datastore.open(directory) as store:
        return names_in(store)


def _confirm(name: str, yes: bool) -> None:
    if yes:
        return
    what = f"datastore {name}: nothing would be left of it, or of what it has for a vocabulary"
    if not building.can_ask():
        raise OptionError(f"{what}; give --yes to delete it without a question")
    building.ask_or_leave(f"{what}. Delete it?")


def _say(name: str, done: _Done, once: bool, as_json: bool) -> None:
    if as_json:
        return print_json({"path": str(path_of(name)), **asdict(done)})
    if not done.forgotten:
        return click.echo(printable(f"{name}: deleted what a build left that did not end; there was nothing else"))
    click.echo(printable(f"{name}: forgot {_listed(done.forgotten)}"))
    if done.removed:
        click.echo("nothing was left; deleted")
    if done.copies:
        click.echo(printable(f"other files have the same content and stay: {_listed(done.copies)}"))
    if done.returning:
        click.echo(printable(f"the next update brings back {_listed(done.returning)}"))
    elif not once and not done.removed:
        click.echo("recorded: no update brings this back; `index info` shows what is left out")
    if keeps_answers_or_prompts():
        click.echo("earlier answers and prompts may quote it; `rest-local history forget --all --prompts` deletes them")
    return None


def _listed(names: Sequence[str]) -> str:
    shown = names[:_SHOWN]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more:,} more" if more else "")
