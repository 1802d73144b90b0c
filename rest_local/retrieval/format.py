"""Read and write a datastore's manifest (docs/FORMAT.md has the byte tables, `documents` the document tables).

This module does no I/O: it converts bytes to checked values and back. Every number in a file is checked before it is
used to multiply, allocate or slice.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from rest_local.errors import DatastoreCorrupt, DatastoreVersion
from rest_local.retrieval.rows import MAX_VOCABULARY, PADDING, width_of
from rest_local.retrieval.sparse_index import sample_size

MAGIC = "rest-local datastore"
FORMAT = 2
MANIFEST = "manifest.json"
KINDS = ("tokens", "order", "documents")
OPTIONAL_KINDS = ("states", "sample")
MAX_SEGMENT = (1 << 31) - 1  # maximum number of tokens in a segment, because positions are int32

DOCUMENTS_HEAD = 24
STATES_HEAD = 24
STATE_BYTES = 60  # a file state without its name: size, mtime, name offset, document, sha256
_SEGMENT_NAME = re.compile(r"[0-9a-f]{16}\Z")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_CLOSED = "\n}\n"  # the end of canonical JSON
_FOREIGN = ((b"GGUF", "of a GGUF file"), (b"PK\x03\x04", "of a zip file"), (b"\x1f\x8b", "of a gzip file"))


@dataclass(frozen=True, slots=True)
class VocabularyId:
    """The identity of a datastore's vocabulary. `name` is for display."""

    hash: str  # sha256 in hex over pieces and special ids
    size: int  # number of ids
    name: str

    def __post_init__(self) -> None:
        width_of(self.size)

    def to_dict(self) -> dict[str, Any]:
        return {"hash": self.hash, "size": self.size, "name": self.name}


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file in the manifest. `size` is in bytes, `sha256` in hex."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """A segment in the manifest. `dead` and `gone` are bitmaps (bit i of byte i // 8, the least significant first),
    empty if nothing is deleted. Deleted text stays in the files until the segment is written again.
    """

    name: str
    tokens: int  # includes one separator for each document
    documents: int
    files: Mapping[str, FileEntry]  # kind -> file; all KINDS and some of OPTIONAL_KINDS
    states: int = 0
    dead: bytes = field(default=b"", repr=False)  # deleted documents
    gone: bytes = field(default=b"", repr=False)  # deleted file states

    @property
    def live(self) -> int:
        return self.documents - _bits(self.dead)

    @property
    def named_files(self) -> dict[str, FileEntry]:
        return {file_name(self.name, kind): file for kind, file in self.files.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready fields. Empty ones are left out."""
        fields: dict[str, Any] = {
            "name": self.name,
            "tokens": self.tokens,
            "documents": self.documents,
            "files": {kind: {"size": file.size, "sha256": file.sha256} for kind, file in self.files.items()},
        }
        if self.states:
            fields["states"] = self.states
        for key, bitmap in (("dead", self.dead), ("gone", self.gone)):
            if bitmap:
                fields[key] = base64.b64encode(bitmap).decode("ascii")
        return fields


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a commit."""

    vocabulary: VocabularyId
    segments: tuple[SegmentEntry, ...]
    recipe: Mapping[str, Any]  # how to build it again: paths, filters, model
    created: str  # UTC, ISO 8601
    revision: int  # one more than the highest of all indexes of the datastore before the commit

    @property
    def tokens(self) -> int:
        """Count the tokens, with one separator for each document."""
        return sum(segment.tokens for segment in self.segments)

    @property
    def documents(self) -> int:
        """Count the documents, with deleted ones."""
        return sum(segment.documents for segment in self.segments)

    @property
    def size(self) -> int:
        return sum(file.size for segment in self.segments for file in segment.files.values())

    @property
    def files(self) -> dict[str, FileEntry]:
        return {name: file for segment in self.segments for name, file in segment.named_files.items()}

    def to_bytes(self) -> bytes:
        """Make the content of `manifest.json`."""
        return sealed(
            {
                "magic": MAGIC,
                "format": FORMAT,
                "revision": self.revision,
                "created": self.created,
                "vocabulary": VocabularyId.to_dict(self.vocabulary),
                "segments": [segment.to_dict() for segment in self.segments],
                "recipe": dict(self.recipe),
            }
        )

    @staticmethod
    def parse(data: bytes, path: Path) -> Manifest:
        """Parse the manifest `data`, which was read from `path`. Unknown fields are ignored.

        Raises DatastoreCorrupt if it is not consistent, and DatastoreVersion if it is intact but of another format.
        """
        try:
            return _parse(data, path)
        except (KeyError, TypeError, ValueError) as error:
            raise DatastoreCorrupt(path, f"bad manifest: {error}") from error


def file_name(segment: str, kind: str) -> str:
    return f"{segment}.{kind}.bin"


def owns(name: str) -> bool:
    """Return True if only a build can have written a file of this name in the directory of a datastore."""
    parts = name.split(".")
    segment_file = (
        len(parts) == 3
        and _SEGMENT_NAME.match(parts[0])
        and parts[1] in (*KINDS, *OPTIONAL_KINDS)
        and parts[2] == "bin"
    )
    return bool(segment_file) or name.startswith(f"{MANIFEST}.new-")


def sealed(fields: Mapping[str, Any]) -> bytes:
    """Encode fields as canonical JSON whose last field is the sha256 of the others. Other bytes are damaged."""
    text = json.dumps(fields, indent=1, ensure_ascii=True, allow_nan=False) + "\n"
    digest = hashlib.sha256(text.encode("ascii")).hexdigest()
    return f'{text[: -len(_CLOSED)]},\n "sha256": "{digest}"{_CLOSED}'.encode("ascii")


def unsealed(data: bytes) -> dict[str, Any]:
    """Decode the fields of `sealed` bytes. Raises ValueError with the reason if they are anything else."""
    try:
        fields = json.loads(data.decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise ValueError("is not JSON") from error
    if not isinstance(fields, dict):
        raise ValueError("is not a JSON object")
    digest = fields.pop("sha256", None)
    try:
        intact = fields and isinstance(digest, str) and sealed(fields) == data
    except RecursionError as error:  # `json` allows fewer levels in writing than in reading
        raise ValueError("is nested too deeply") from error
    if not intact:
        raise ValueError("does not match its own checksum")
    return fields


def _fields_of(data: bytes, path: Path) -> dict[str, Any]:
    for magic, what in _FOREIGN:
        if data.startswith(magic):
            raise DatastoreVersion(path, what, str(FORMAT))
    try:
        fields = unsealed(data)
    except ValueError as error:
        raise DatastoreCorrupt(path, f"the manifest {error}") from error
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


@lru_cache(maxsize=8)  # Each step of a change and each reader reads the same commit again.
def _parse(data: bytes, path: Path) -> Manifest:
    fields = _fields_of(data, path)
    vocabulary = fields["vocabulary"]
    identity = VocabularyId(
        _text(vocabulary, "hash"), _number(vocabulary, "size", 1, MAX_VOCABULARY), _text(vocabulary, "name")
    )
    segments = tuple(parse_segment(segment, width_of(identity.size)) for segment in fields["segments"])
    if len({segment.name for segment in segments}) < len(segments):
        raise DatastoreCorrupt(path, "the manifest names a segment twice")
    if not isinstance(fields["recipe"], dict):
        raise ValueError("recipe is not an object")
    check_recipe(fields["recipe"])
    revision = _number(fields, "revision", 1, 1 << 62)
    return Manifest(identity, segments, fields["recipe"], _text(fields, "created"), revision)


def check_recipe(recipe: Mapping[str, Any]) -> None:
    """Raise ValueError if a field of a recipe that this program reads is not a text. Other fields are free."""
    for key in ("model", "kind", "description"):
        if not isinstance(value := recipe.get(key, ""), str):
            raise ValueError(f"{key} of the recipe is {str(value)[:40]!r}, not a text")


def parse_segment(fields: Mapping[str, Any], width: int) -> SegmentEntry:
    """Parse a segment's JSON. `width` is the bytes of a token. Raises KeyError, TypeError and ValueError if invalid."""
    tokens = _number(fields, "tokens", 1, MAX_SEGMENT - 1)
    documents = _number(fields, "documents", 1, tokens)
    states = _number(fields, "states", 1, MAX_SEGMENT - 1) if "states" in fields else 0
    kinds = (*KINDS, *(kind for kind in OPTIONAL_KINDS if kind in fields["files"]))
    files = {
        kind: FileEntry(
            _number(fields["files"][kind], "size", 0, 1 << 62), _text(fields["files"][kind], "sha256", _SHA256)
        )
        for kind in kinds
    }
    expected = {"tokens": (tokens + PADDING) * width, "order": tokens * 4, "sample": sample_size(tokens)}
    for kind, size in expected.items():
        if kind in files and files[kind].size != size:
            raise ValueError(f"{tokens} tokens give {size} bytes of {kind}, not {files[kind].size}")
    if files["documents"].size < DOCUMENTS_HEAD + 16 * (documents + 1):
        raise ValueError(f"{files['documents'].size} bytes cannot hold {documents} documents")
    if ("states" in files) != bool(states) or (states and files["states"].size < STATES_HEAD + STATE_BYTES * states):
        raise ValueError(f"{states} file states do not fit their file")
    dead, gone = _bitmap(fields, "dead", documents, documents - 1), _bitmap(fields, "gone", states, states)
    return SegmentEntry(_text(fields, "name", _SEGMENT_NAME), tokens, documents, files, states, dead, gone)


def _bitmap(fields: Mapping[str, Any], key: str, count: int, most: int) -> bytes:
    """Parse a bitmap of `count` bits with one to `most` set, or return b"" if the field is missing."""
    if key not in fields:
        return b""
    bitmap = base64.b64decode(_text(fields, key), validate=True)
    if len(bitmap) != (count + 7) // 8 or not 0 < _bits(bitmap) <= most or bitmap[-1] >> (count - 1) % 8 > 1:
        raise ValueError(f"{key} is no bitmap of {count} bits of which 1 to {most} are set")
    return bitmap


def _bits(bitmap: bytes) -> int:
    return int.from_bytes(bitmap, "little").bit_count()
