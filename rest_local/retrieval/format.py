"""The on-disk form of a datastore: its manifest and its document tables (docs/FORMAT.md has the byte tables).

This module does no I/O: it converts bytes to checked values and back. Every number in a file is checked before it is
used to multiply, allocate or slice.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rest_local.errors import DatastoreCorrupt, DatastoreVersion
from rest_local.retrieval.rows import MAX_VOCABULARY, PADDING, width_of

MAGIC = "rest-local datastore"
FORMAT = 1
MANIFEST = "manifest.json"
KINDS = ("tokens", "order", "documents")
MAX_SEGMENT = (1 << 31) - 1
"""Maximum number of tokens in a segment, because positions are int32."""

DOCUMENTS_MAGIC = b"RLDOCS\x00\x01"
_DOCUMENTS_HEAD = 24
_SEGMENT_NAME = re.compile(r"[0-9a-f]{16}\Z")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_RECIPE: dict[str, type] = {
    "paths": list,
    "include": list,
    "exclude": list,
    "allow_secrets": bool,
    "max_file_size": int,
    "model": str,
    "kind": str,
    "description": str,
}
_FOREIGN = ((b"GGUF", "of a GGUF file"), (b"PK\x03\x04", "of a zip file"), (b"\x1f\x8b", "of a gzip file"))


@dataclass(frozen=True, slots=True)
class VocabularyId:
    """The vocabulary of a datastore's token ids. hash: sha256 hex of all pieces and special ids; size: number of ids;
    name: for display.
    """

    hash: str
    size: int
    name: str

    def __post_init__(self) -> None:
        width_of(self.size)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file in the manifest."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """A segment in the manifest. tokens: its length, including one separator for each document; files: by kind."""

    name: str
    tokens: int
    documents: int
    files: Mapping[str, FileEntry]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a commit. recipe: how to build it again (paths, filters, model); created: UTC, ISO 8601."""

    vocabulary: VocabularyId
    segments: tuple[SegmentEntry, ...]
    recipe: Mapping[str, Any]
    created: str

    def to_bytes(self) -> bytes:
        """The content of `manifest.json`."""
        return sealed(
            {
                "magic": MAGIC,
                "format": FORMAT,
                "created": self.created,
                "vocabulary": {name: getattr(self.vocabulary, name) for name in ("hash", "size", "name")},
                "segments": [asdict(segment) for segment in self.segments],
                "recipe": dict(self.recipe),
            }
        )

    @staticmethod
    def parse(data: bytes, path: Path) -> Manifest:
        """Parse the manifest `data`, which was read from `path`. Unknown fields are ignored.

        Raises DatastoreCorrupt if it is not consistent, and DatastoreVersion if it is intact but of another format.
        """
        try:
            return _parse(_unsealed(data, path), path)
        except (KeyError, TypeError, ValueError) as error:
            raise DatastoreCorrupt(path, f"bad manifest: {error}") from error


def file_name(segment: str, kind: str) -> str:
    """The name of a segment's file in the directory of a datastore."""
    return f"{segment}.{kind}.bin"


def owns(name: str) -> bool:
    """Whether only a build can have written a file of this name in the directory of a datastore."""
    parts = name.split(".")
    segment_file = len(parts) == 3 and _SEGMENT_NAME.match(parts[0]) and parts[1] in KINDS and parts[2] == "bin"
    return bool(segment_file) or name.startswith(f"{MANIFEST}.new-")


def sealed(fields: Mapping[str, Any]) -> bytes:
    """Fields as canonical JSON, with the sha256 of the others as the last field. Any other byte sequence is damaged."""
    digest = hashlib.sha256(_canonical(fields)).hexdigest()
    return _canonical({**fields, "sha256": digest})


def _canonical(fields: Mapping[str, Any]) -> bytes:
    return (json.dumps(fields, indent=1, ensure_ascii=True, allow_nan=False) + "\n").encode("ascii")


def _unsealed(data: bytes, path: Path) -> dict[str, Any]:
    for magic, what in _FOREIGN:
        if data.startswith(magic):
            raise DatastoreVersion(path, what, str(FORMAT))
    try:
        fields = json.loads(data.decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise DatastoreCorrupt(path, "the manifest is not JSON") from error
    if not isinstance(fields, dict):
        raise DatastoreCorrupt(path, "the manifest is not a JSON object")
    digest = fields.pop("sha256", None)
    try:
        intact = isinstance(digest, str) and sealed(fields) == data
    except RecursionError as error:  # `json` allows fewer levels in writing than in reading
        raise DatastoreCorrupt(path, "the manifest is nested too deeply") from error
    if not intact:
        raise DatastoreCorrupt(path, "the manifest does not match its own checksum")
    if fields.get("magic") != MAGIC:
        raise DatastoreVersion(path, f"of something else ({str(fields.get('magic'))[:40]!r})", str(FORMAT))
    if fields.get("format") != FORMAT or isinstance(fields["format"], bool):
        raise DatastoreVersion(path, str(fields.get("format"))[:40], str(FORMAT))
    return fields


def _number(fields: Mapping[str, Any], key: str, least: int, most: int) -> int:
    value = fields[key]
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{key} is {str(value)[:40]!r}, expected {least} to {most}")
    return value


def _text(fields: Mapping[str, Any], key: str, pattern: re.Pattern[str] | None = None) -> str:
    value = fields[key]
    if not isinstance(value, str) or (pattern and not pattern.match(value)):
        raise ValueError(f"{key} is {str(value)[:40]!r}")
    return value


def _parse(fields: Mapping[str, Any], path: Path) -> Manifest:
    vocabulary = fields["vocabulary"]
    identity = VocabularyId(
        _text(vocabulary, "hash"), _number(vocabulary, "size", 1, MAX_VOCABULARY), _text(vocabulary, "name")
    )
    segments = tuple(_parse_segment(segment, width_of(identity.size)) for segment in fields["segments"])
    if len({segment.name for segment in segments}) < len(segments):
        raise DatastoreCorrupt(path, "the manifest names a segment twice")
    if not isinstance(fields["recipe"], dict):
        raise ValueError("recipe is not an object")
    check_recipe(fields["recipe"])
    return Manifest(identity, segments, fields["recipe"], _text(fields, "created"))


def check_recipe(recipe: Mapping[str, Any]) -> None:
    """Raise ValueError if a field of a recipe that this program reads has a wrong type. Other fields are free."""
    for key, kind in _RECIPE.items():
        value = recipe.get(key, kind())
        if kind is list:
            right = isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value)
        else:
            right = type(value) is kind  # a bool is an int to isinstance
        if not right:
            wanted = "a list of strings" if kind is list else f"of type {kind.__name__}"
            raise ValueError(f"{key} of the recipe is {str(value)[:40]!r}, not {wanted}")


def _parse_segment(fields: Mapping[str, Any], width: int) -> SegmentEntry:
    tokens = _number(fields, "tokens", 1, MAX_SEGMENT - 1)
    documents = _number(fields, "documents", 1, tokens)
    files = {
        kind: FileEntry(
            _number(fields["files"][kind], "size", 0, 1 << 62), _text(fields["files"][kind], "sha256", _SHA256)
        )
        for kind in KINDS
    }
    expected = {"tokens": (tokens + PADDING) * width, "order": tokens * 4}
    for kind, size in expected.items():
        if files[kind].size != size:
            raise ValueError(f"{tokens} tokens give {size} bytes of {kind}, not {files[kind].size}")
    if files["documents"].size < _DOCUMENTS_HEAD + 16 * (documents + 1):
        raise ValueError(f"{files['documents'].size} bytes cannot hold {documents} documents")
    return SegmentEntry(_text(fields, "name", _SEGMENT_NAME), tokens, documents, files)


def pack_documents(names: Sequence[bytes], starts: Sequence[int]) -> bytes:
    """The content of `documents.bin`. starts: of each document in the forward text, then the text's length."""
    ends = np.cumsum([0, *(len(name) for name in names)], dtype="<u8")
    head = DOCUMENTS_MAGIC + len(names).to_bytes(8, "little") + int(ends[-1]).to_bytes(8, "little")
    return b"".join((head, np.asarray(starts, "<u8").tobytes(), ends.tobytes(), *names))


class DocumentTable:
    """A document table over a buffer (a map, or bytes). Only the requested entries are read.

    Raises DatastoreCorrupt if the header does not fit the buffer or the manifest. An offset is checked on use.
    """

    def __init__(self, data: Any, path: Path, documents: int, tokens: int) -> None:
        self.path = path
        head = bytes(data[:_DOCUMENTS_HEAD])
        count, names = int.from_bytes(head[8:16], "little"), int.from_bytes(head[16:24], "little")
        if head[:8] != DOCUMENTS_MAGIC or count != documents:
            raise DatastoreCorrupt(path, "the document table does not begin as the manifest says")
        if len(data) != _DOCUMENTS_HEAD + 16 * (count + 1) + names:
            raise DatastoreCorrupt(path, f"the document table of {len(data)} bytes does not match its header")
        self._data = data
        self._names_at = _DOCUMENTS_HEAD + 16 * (count + 1)
        self.starts: npt.NDArray[np.uint64] = np.frombuffer(data, "<u8", count + 1, _DOCUMENTS_HEAD)
        self._ends: npt.NDArray[np.uint64] = np.frombuffer(data, "<u8", count + 1, _DOCUMENTS_HEAD + 8 * (count + 1))
        if int(self.starts[0]) != 0 or int(self.starts[-1]) != tokens:
            raise DatastoreCorrupt(path, "the document table does not span the text")

    def __len__(self) -> int:
        return len(self.starts) - 1

    def at(self, position: int) -> int:
        """The number of the document at a position of the text. O(log documents)."""
        index = int(np.searchsorted(self.starts, np.uint64(position), side="right")) - 1
        if not 0 <= index < len(self) or not int(self.starts[index]) <= position < int(self.starts[index + 1]):
            raise DatastoreCorrupt(self.path, f"the document table is out of order near token {position}")
        return index

    def start(self, index: int) -> int:
        """The start of a document in the text."""
        return int(self.starts[index])

    def name(self, index: int) -> str:
        """The name of a document. Bytes that are not UTF-8 become lone surrogates, as in `os.fsdecode`."""
        first, last = self._names_at + int(self._ends[index]), self._names_at + int(self._ends[index + 1])
        if not self._names_at <= first <= last <= len(self._data):
            raise DatastoreCorrupt(self.path, f"the name of document {index} lies outside the table")
        return bytes(self._data[first:last]).decode("utf-8", "surrogateescape")

    def release(self) -> None:
        """Release the buffer."""
        self.starts = self._ends = np.empty(0, np.uint64)
        self._data = b""
