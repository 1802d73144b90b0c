"""What every source is: a frozen record that goes into a manifest as JSON, and that yields texts."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeAlias, TypeVar

from rest_local.errors import OptionError
from rest_local.retrieval.documents import FileState, Text
from rest_local.retrieval.sources.corpus import Unchanged
from rest_local.retrieval.sources.secrecy import secret_content
from rest_local.retrieval.sources.skipped import Skipped

Parts: TypeAlias = "tuple[tuple[str, bool], ...]"
"""`documents.Text.parts`."""

Render: TypeAlias = "Callable[[Sequence[Mapping[str, Any]]], Sequence[Parts]]"
"""Renders the messages of a conversation with a model's chat template: for each turn of the assistant what the model
wrote, after the end of what it read. Raises RestLocalError for messages that the template refuses."""

AnySource = TypeVar("AnySource", bound="Source")


@dataclass(frozen=True, slots=True)
class Reading:
    """How sources are read. skipped: counts what they skip; unchanged, only, looked_at: as for `corpus.walk_files`,
    `only` for sources that walk; render: for transcripts of chats.
    """

    skipped: Skipped
    unchanged: Unchanged | None = None
    only: Collection[str] | None = None
    looked_at: Callable[[int], None] = lambda size: None
    render: Render | None = None

    def text(
        self, name: str, text: str, mark: int, *, allow_secrets: bool = False, parts: Parts = ()
    ) -> Iterator[Text]:
        """The text of a row of a file, or nothing if it is skipped. mark: the time of change of the file, or another
        number that is the same only while the text is the same; 0 if there is none.
        """
        data = text.encode("utf-8", "surrogatepass")
        reason = "empty" if not data else "binary" if "\0" in text else ""
        if not reason and mark and self.unchanged is not None and self.unchanged(name, len(data), mark):
            yield Text(name, None, FileState(name, len(data), mark, b""))
            return
        if not reason and not allow_secrets and secret_content(data):
            reason = "secret"
        if reason:
            self.skipped.add(reason, name)
        else:
            yield Text(name, text, FileState(name, len(data), mark, hashlib.sha256(data).digest()), parts)


@dataclass(frozen=True, slots=True)
class Source(ABC):
    """A source of texts. kind: its name in a recipe; repeatable: whether it can be read again."""

    kind: ClassVar[str] = ""
    repeatable: ClassVar[bool] = True

    @abstractmethod
    def texts(self, reading: Reading) -> Iterator[Text]:
        """The texts. Raises InputInvalid, OptionError before the first text if the source cannot be read."""

    @abstractmethod
    def measure(self) -> tuple[int, int]:
        """(files, bytes) to read, about: found without reading them. Raises as `texts`."""

    @abstractmethod
    def about(self) -> str:
        """What it is, in a few words, for a person."""

    def prepared(self) -> Source:
        """The source as it is recorded: paths absolute, and what a moving name means now. Raises as `texts`."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: the kind and all fields."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"kind": self.kind} | {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


def made(kind: type[AnySource], given: Mapping[str, Any]) -> AnySource:
    """A source of a kind from the fields of a recipe. Raises OptionError for one that is unknown, missing or of a wrong
    type.
    """
    known = {field.name: str(field.type) for field in fields(kind)}
    for name in given.keys() - known.keys() - {"kind"}:
        way = "correct it, or update rest-local if the recipe is newer"
        raise OptionError(f"source of kind {kind.kind!r}: unknown field {name!r}; {way}; known: {', '.join(known)}")
    values = {name: _checked(kind.kind, name, known[name], given[name]) for name in known.keys() & given.keys()}
    try:
        return kind(**values)
    except TypeError as error:
        raise OptionError(f"source of kind {kind.kind!r}: {str(error).partition(' ')[2]}") from error


def _checked(kind: str, name: str, type_name: str, value: Any) -> Any:
    if type_name.startswith("tuple"):
        right = isinstance(value, (list, tuple)) and all(type(item) is str for item in value)
        value = tuple(value) if right else value
    else:
        right = type(value).__name__ == type_name  # a bool is an int to isinstance
    if not right:
        wanted = "a list of strings" if type_name.startswith("tuple") else f"of type {type_name}"
        raise OptionError(f"source of kind {kind!r}: {name} is {str(value)[:40]!r}, not {wanted}")
    return value
