"""Records in a recipe that files are left out from now on, so that no update brings them back."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rest_local.retrieval.building.indexing import recipe_of
from rest_local.retrieval.changing.rereading import WALKED
from rest_local.retrieval.sources.git_source import Git
from rest_local.retrieval.sources.registry import from_recipe
from rest_local.retrieval.sources.source import Source
from rest_local.retrieval.sources.walk import Walk

_SPECIAL = re.compile(r"([\\*?\[\]!# ])")


def excluding(recipe: Mapping[str, Any], names: Collection[str], globs: Sequence[str] = ()) -> dict[str, Any]:
    """The recipe without files of these names, and without those that match the globs (as in .gitignore, below each
    path). Raises OptionError for a source that this version does not know.
    """
    sources = [new for source in from_recipe(recipe) for new in _excluding(source, names, globs)]
    if sources == from_recipe(recipe):
        return dict(recipe)
    return {**{key: value for key, value in recipe.items() if key not in WALKED}, **recipe_of(sources)}


def excludable(recipe: Mapping[str, Any], name: str) -> bool:
    """Whether a recipe can leave out a file of this name: rows of a file cannot be left out one by one."""
    return excluding(recipe, [name]) != dict(recipe)


def relative_names(recipe: Mapping[str, Any], name: str) -> list[str]:
    """A name below each of the recorded paths and repositories that it lies in; globs are compared with these."""
    return [relative for source in from_recipe(recipe) for _, relative in _places(source, name)]


def _excluding(source: Source, names: Collection[str], globs: Sequence[str]) -> Iterator[Source]:
    if not isinstance(source, (Walk, Git)):
        yield source
        return
    patterns: dict[str, set[str]] = {}
    for name in sorted(names):
        for root, relative in _places(source, name):
            patterns.setdefault(root, set()).add("/" + _SPECIAL.sub(r"\\\1", relative))
    source = replace(source, exclude=_more(source.exclude, globs))
    if isinstance(source, Walk) and len(source.paths) > 1 and patterns:
        # A pattern counts below every path of a walk, and the same relative name may exist below another one.
        rest = tuple(path for path in source.paths if path not in patterns)
        if rest:
            yield replace(source, paths=rest)
        for root, some in patterns.items():
            yield replace(source, paths=(root,), exclude=_more(source.exclude, sorted(some)))
        return
    every = sorted({pattern for some in patterns.values() for pattern in some})
    yield replace(source, exclude=_more(source.exclude, every))


def _more(exclude: Sequence[str], patterns: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys([*exclude, *patterns]))


def _places(source: Source, name: str) -> Iterator[tuple[str, str]]:
    """(recorded path, name below it) of a file in a source; more than one if the paths overlap."""
    if isinstance(source, Git):
        if name.startswith(f"{source.repository}@") and ":" in name[len(source.repository) :]:
            yield source.repository, name[len(source.repository) :].partition(":")[2]
    elif isinstance(source, Walk):
        for path in source.paths:
            root = os.path.realpath(path)
            if name == root:
                yield path, os.path.basename(root)
            elif name.startswith(os.path.join(root, "")):
                yield path, name[len(os.path.join(root, "")) :].replace(os.sep, "/")
