"""Read recipes of datastores: TOML files that name sources, their licence and the size of the result.

description = "what it is"
licence = "under which terms the text may be used"
size = "how many tokens, about"

[[sources]]
kind = "walk"
paths = ["~/notes"]

Paths are relative to the working directory; `~` is the home directory and `{data}` the data directory of rest-local. Of
several paths those that do not exist are left out.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rest_local.errors import InputInvalid, OptionError, printable
from rest_local.paths import data_home
from rest_local.retrieval.sources.git import Git
from rest_local.retrieval.sources.records import Jsonl, Parquet, Stdin, Transcripts
from rest_local.retrieval.sources.source import Source, made
from rest_local.retrieval.sources.walk import Python, Walk, absolute

_ENDING = ".toml"
_TEXTS = ("description", "licence", "size")
_PLACES = ("path", "paths", "repository")
_MOST = 1 << 20  # maximum bytes to read of a recipe


class Recipe(NamedTuple):
    """A recipe. Its file without the ending gives the `name`, which also names the datastore by default."""

    name: str
    description: str
    licence: str
    size: str
    sources: tuple[Source, ...]

    def recorded(self) -> dict[str, str]:
        """Return the manifest's fields about the recipe in addition to its sources."""
        return {"recipe": self.name, "description": self.description, "licence": self.licence}

    def present(self) -> list[Source]:
        """Return the sources with those of their paths that exist. Raises InputInvalid if a source has none."""
        return [_present(self.name, source) for source in self.sources]

    def to_dict(self) -> dict[str, Any]:
        return {**self._asdict(), "sources": [source.to_dict() for source in self.sources]}


def list_recipes() -> list[Recipe]:
    """List the recipes that come with rest-local, by name."""
    return [_parsed(path) for path in sorted(_home().glob(f"*{_ENDING}"))]


def read_recipe(name: str) -> Recipe:
    """Read the recipe of this name, or in this file: a name with a path separator or the ending `.toml` is a path.
    Raises OptionError for an unknown name, and InputInvalid for a file that is no recipe.
    """
    if os.sep in name or name.endswith(_ENDING):
        return _parsed(Path(name).expanduser())
    path = _home() / f"{name}{_ENDING}"
    if not path.is_file():
        known = ", ".join(sorted(path.stem for path in _home().glob(f"*{_ENDING}")))
        raise OptionError(f"recipe {name!r}: not known; give the path of a TOML file, or one of: {known}")
    return _parsed(path)


def _home() -> Path:
    """Return the folder of the recipes: package data if installed, `datastore` in a checkout."""
    package = Path(__file__).resolve().parents[2]
    installed = package / "data" / "recipes"
    return installed if installed.is_dir() else package.parent / "datastore"


def _parsed(path: Path) -> Recipe:
    import tomlkit  # takes 20 ms

    try:
        with path.open("rb") as file:
            fields = tomlkit.parse(file.read(_MOST).decode()).unwrap()
        return _recipe(path.name.removesuffix(_ENDING), fields)
    except OSError as error:
        raise InputInvalid("recipe", printable(str(path)), (error.strerror or "cannot be read").lower()) from error
    except (OptionError, ValueError, RecursionError) as error:
        raise InputInvalid("recipe", printable(str(path)), printable(str(error))) from error


def _recipe(name: str, fields: Mapping[str, Any]) -> Recipe:
    sources, texts = fields.get("sources"), {key: fields.get(key, "") for key in _TEXTS}
    if unknown := sorted(fields.keys() - {*_TEXTS, "sources"}):
        raise OptionError(f"unknown field {unknown[0]!r}; known: {', '.join(_TEXTS)}, sources")
    if not all(isinstance(text, str) for text in texts.values()):
        raise OptionError(f"{', '.join(_TEXTS)} must be texts")
    if not isinstance(sources, list) or not sources:
        raise OptionError("give at least one table [[sources]]")
    return Recipe(name, **texts, sources=tuple(source_of(_expanded(source)) for source in sources))


def _expanded(fields: Any) -> Any:
    """Replace `{data}` and `~` in the paths of a source's fields."""
    if not isinstance(fields, dict):
        return fields

    def expand(value: Any) -> Any:
        if isinstance(value, list):
            return [expand(item) for item in value]
        return os.path.expanduser(value.replace("{data}", str(data_home()))) if isinstance(value, str) else value

    return {key: expand(value) if key in _PLACES else value for key, value in fields.items()}


def _present(recipe: str, source: Source) -> Source:
    if not isinstance(source, Walk):
        return source
    paths = tuple(path for path in source.paths if os.path.exists(path))
    if not paths:
        where = ", ".join(map(absolute, source.paths))
        raise InputInvalid("recipe", recipe, f"this machine has none of: {printable(where)}")
    return replace(source, paths=paths)


KINDS: dict[str, type[Source]] = {kind.kind: kind for kind in (Walk, Git, Jsonl, Parquet, Transcripts, Stdin, Python)}


def source_of(fields: Any) -> Source:
    """Make the source that `Source.to_dict` turned into these fields. Raises OptionError with the way out."""
    kind = fields.get("kind") if isinstance(fields, Mapping) else None
    if not isinstance(kind, str) or kind not in KINDS:
        known = ", ".join(KINDS)
        way = "update rest-local if a newer version wrote it, else correct it"
        raise OptionError(f"source of kind {str(kind)[:40]!r}: not known here; {way}; known: {known}")
    return made(KINDS[kind], fields)


def from_recipe(recipe: Mapping[str, Any]) -> list[Source]:
    """Make the sources of a manifest's recipe. There are none if the text is of another origin, such as a history,
    which `kind` names. Raises OptionError for a source that this version does not know.
    """
    sources = [] if "kind" in recipe else recipe.get("sources", [])
    if not isinstance(sources, (list, tuple)):
        raise OptionError("the recipe's sources are not a list; correct it, or build the datastore again")
    return [source_of(fields) for fields in sources]


def can_repeat(recipe: Mapping[str, Any]) -> bool:
    """Return True if the recipe's sources are all known here and can be read again."""
    try:
        sources = from_recipe(recipe)
    except OptionError:
        return False
    return bool(sources) and all(source.repeatable for source in sources)
