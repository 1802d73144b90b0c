"""All kinds of sources: from a recipe to sources, and what is done with a source of any kind."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from rest_local.errors import OptionError
from rest_local.retrieval.documents import Text
from rest_local.retrieval.sources.chat import Chat
from rest_local.retrieval.sources.corpus import MAX_FILE_SIZE, Unchanged
from rest_local.retrieval.sources.git_source import Git
from rest_local.retrieval.sources.jsonl import Jsonl
from rest_local.retrieval.sources.parquet import Parquet
from rest_local.retrieval.sources.python import Python
from rest_local.retrieval.sources.skipped import Skipped
from rest_local.retrieval.sources.source import Reading, Render, Source, made
from rest_local.retrieval.sources.stdin import Stdin
from rest_local.retrieval.sources.walk import Walk

KINDS: dict[str, type[Source]] = {kind.kind: kind for kind in (Walk, Git, Jsonl, Parquet, Chat, Stdin, Python)}


def source_of(fields: Any) -> Source:
    """The source that `Source.to_dict` made these fields of. Raises OptionError, which names the way out."""
    kind = fields.get("kind") if isinstance(fields, Mapping) else None
    if not isinstance(kind, str) or kind not in KINDS:
        known = ", ".join(KINDS)
        way = "update rest-local if a newer version wrote it, else correct it"
        raise OptionError(f"source of kind {str(kind)[:40]!r}: not known here; {way}; known: {known}")
    return made(KINDS[kind], fields)


def from_recipe(recipe: Mapping[str, Any]) -> list[Source]:
    """The sources of a manifest's recipe, none if the text is of another origin, such as a history, which `kind` names.
    A recipe with `paths` (format 1) is one walk. Raises OptionError for a source that this version does not know.
    """
    if "kind" in recipe:
        return []
    if "sources" in recipe:
        given = recipe["sources"]
        if not isinstance(given, (list, tuple)):
            raise OptionError("the recipe's sources are not a list; correct it, or build the datastore again")
        return [source_of(fields) for fields in given]
    paths = recipe.get("paths")
    if not paths:
        return []
    walk = Walk(
        tuple(paths),
        tuple(recipe.get("include", ())),
        tuple(recipe.get("exclude", ())),
        bool(recipe.get("allow_secrets", False)),
        int(recipe.get("max_file_size", MAX_FILE_SIZE)),
    )
    return [walk]


def read(
    source: Source,
    skipped: Skipped,
    unchanged: Unchanged | None = None,
    *,
    only: Collection[str] | None = None,
    looked_at: Callable[[int], None] = lambda size: None,
    render: Render | None = None,
) -> Iterator[Text]:
    """The texts of a source, see `Reading`. Raises InputInvalid, OptionError before the first text if the source cannot
    be read. Memory does not depend on the size of the source.
    """
    return source.texts(Reading(skipped, unchanged, only, looked_at, render))


def measure(source: Source) -> tuple[int, int]:
    """(files, bytes) that `read` reads, about. Raises as `read`."""
    return source.measure()


def is_repeatable(source: Source) -> bool:
    """Whether the source can be read again, for an update or for another vocabulary."""
    return source.repeatable


def can_repeat(recipe: Mapping[str, Any]) -> bool:
    """Whether an index can be built from a recipe: its sources are known here, and can all be read again."""
    try:
        sources = from_recipe(recipe)
    except OptionError:
        return False
    return bool(sources) and all(map(is_repeatable, sources))
