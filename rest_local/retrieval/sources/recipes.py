"""Turn the recipe of a manifest into the sources that it records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rest_local.errors import OptionError
from rest_local.retrieval.sources.records import Jsonl, Stdin, Transcripts
from rest_local.retrieval.sources.source import Source, made
from rest_local.retrieval.sources.walk import Walk

KINDS: dict[str, type[Source]] = {kind.kind: kind for kind in (Walk, Jsonl, Transcripts, Stdin)}


def source_of(fields: Any) -> Source:
    """Make the source that `Source.to_dict` turned into these fields.

    Raises:
        OptionError: a field or the kind is unknown; the message has the way out
    """
    kind = fields.get("kind") if isinstance(fields, Mapping) else None
    if not isinstance(kind, str) or kind not in KINDS:
        known = ", ".join(KINDS)
        way = "update rest-local if a newer version wrote it, else build the datastore again"
        raise OptionError(f"source of kind {str(kind)[:40]!r}: not known here; {way}; known: {known}")
    return made(KINDS[kind], fields)


def from_recipe(recipe: Mapping[str, Any]) -> list[Source]:
    """Make the sources of a manifest's recipe: none if its text has another origin, such as a history, named by `kind`.

    Raises:
        OptionError: this version does not know a source
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
