"""What passes through a build: texts with the state of their file, and documents, which are tokenized texts."""

from __future__ import annotations

from typing import NamedTuple

from rest_local.retrieval.rows import Int32Array


class FileState(NamedTuple):
    """The state of a file when it was read, by which an update finds out whether it changed.

    name: the name of the document; size: bytes; mtime_ns: 0 if it is not certain, because the file was written within
    the clock's resolution of its reading (then only the content says whether it changed); sha256: 32 bytes, of the
    bytes that were read, empty if they were not read. A row of a file and a blob of git have states too; `mtime_ns` is
    the file's, or a number made of the blob's id.
    """

    name: str
    size: int
    mtime_ns: int
    sha256: bytes


class Text(NamedTuple):
    """A text of a source. text: None if `state` says that the file is unchanged, so that it was not read; state: None
    for a text that is no file.

    parts: of a text that a chat template wrote, () for any other. Concatenated they are the text. Each is a text and
    whether spellings of special tokens in it are special tokens; it is tokenized on its own.
    """

    name: str
    text: str | None
    state: FileState | None = None
    parts: tuple[tuple[str, bool], ...] = ()


class Document(NamedTuple):
    """A tokenized text. states: of all files with this content, so that it is stored once; empty without files."""

    name: str
    tokens: Int32Array
    states: tuple[FileState, ...] = ()
