"""The files of a segment: their content, made of documents, and writing them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rest_local.retrieval.documents import FileState
from rest_local.retrieval.files import Files
from rest_local.retrieval.format import FileEntry
from rest_local.retrieval.rows import MAX_DEPTH, MAX_MATCH, Int32Array, big_endian, order_of, width_of
from rest_local.retrieval.sample import SAMPLED, make_sample
from rest_local.retrieval.tables import encoded, pack_documents, pack_states

_WRITE = 1 << 24

Progress = Callable[[str, int], None]
"""Called with ("tokenized" | "sorted" | "written", tokens since the last call), and by a walk with ("read", bytes)."""


class GrowingSegment:
    """The documents of a segment that is being made, in their stored form: `width_of(vocab_size)` bytes a token."""

    def __init__(self, vocab_size: int) -> None:
        self.tokens = 0  # with one separator for each document
        self._size, self._width = vocab_size, width_of(vocab_size)
        self._separator = vocab_size.to_bytes(self._width, "big")
        self._texts: list[bytes] = []  # of each document: the separator, then the tokens, last first
        self._names: list[bytes] = []
        self._starts: list[int] = []
        self._states: list[tuple[int, FileState]] = []

    def __len__(self) -> int:
        return len(self._names)

    def add(self, name: str, tokens: Int32Array, states: Iterable[FileState] = ()) -> int:
        """Add a document with at least one token, of ids below `vocab_size`; returns its number."""
        number = len(self)
        self._names.append(encoded(name))
        self._starts.append(self.tokens)
        self._texts.append(self._separator + big_endian(tokens[::-1], self._width))
        self._states += ((number, state) for state in states)
        self.tokens += len(tokens) + 1
        return number

    def add_state(self, number: int, state: FileState) -> None:
        """Another file with the content of a document."""
        self._states.append((number, state))

    def content(self) -> SegmentContent:
        """The content of the segment's files; the documents are used up.

        O(tokens log tokens). Sorting takes 7 bytes of memory for each byte of a token, and 4 for each token.
        """
        pieces = [self._separator * MAX_DEPTH, *reversed(self._texts), self._separator * MAX_MATCH]
        self._texts.clear()
        tokens = b"".join(pieces)
        pieces.clear()
        order = order_of(tokens, self._width)
        files: dict[str, bytes | memoryview] = {
            "tokens": tokens,
            "order": order.astype("<u4", copy=False).data.cast("B"),
            "documents": pack_documents(self._names, [*self._starts, self.tokens]),
        }
        states = sorted(self._states, key=lambda state: state[0])
        if states:
            files["states"] = pack_states(states)
        if len(order) >= SAMPLED:
            files["sample"] = make_sample(tokens, order, self._width)
        return SegmentContent(self.tokens, len(self), len(states), files)


@dataclass(frozen=True)
class SegmentContent:
    """tokens, documents, states: their numbers; files: content by kind."""

    tokens: int
    documents: int
    states: int
    files: Mapping[str, bytes | memoryview]


def write_file(files: Files, path: Path, content: bytes | memoryview) -> FileEntry:
    """Write a new file and sync it. An OSError names the path."""
    view, digest = memoryview(content), hashlib.sha256()
    descriptor = files.create(path)
    try:
        for start in range(0, len(view), _WRITE):
            part = view[start : start + _WRITE]
            digest.update(part)
            files.write(descriptor, part)
        files.sync(descriptor)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        os.close(descriptor)
    return FileEntry(len(view), digest.hexdigest())


def checked(name: str, tokens: Int32Array, vocab_size: int) -> Int32Array:
    """The ids of a document. Raises ValueError if one is not in the vocabulary."""
    if len(tokens) and (int(np.min(tokens)) < 0 or int(np.max(tokens)) >= vocab_size):
        raise ValueError(f"document {name}: token ids must be from 0 to {vocab_size - 1}")
    return tokens
