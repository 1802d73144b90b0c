"""Turn the texts of a build into documents, which are tokenized texts, and store their names and file states.

Knows no model. Each text is tokenized in a thread, or on a cluster (`retrieval.building.cluster`).
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from rest_local.errors import DatastoreCorrupt
from rest_local.retrieval.format import DOCUMENTS_HEAD, STATES_HEAD, SegmentEntry, file_name
from rest_local.retrieval.rows import Int32Array, Int64Array


class FileState(NamedTuple):
    """The state of a file when it was read, by which an update finds out whether it changed. Rows of a file and git
    blobs have states too; then `mtime_ns` is the file's, or a number made of the blob's id.
    """

    name: str  # the document's name
    size: int
    mtime_ns: int  # 0 if it is uncertain, as the file was written just before; then only the content shows a change
    sha256: bytes  # 32 bytes, empty if the file was not read


class Text(NamedTuple):
    """A text of a source."""

    name: str
    text: str | None  # None if `state` says that the file is unchanged, so that it was not read
    state: FileState | None = None  # None for a text without a file


class Document(NamedTuple):
    """A tokenized text. `states` has all files with this content, so that it is stored once."""

    name: str
    tokens: Int32Array
    states: tuple[FileState, ...] = ()


class DocumentTokenizer(Protocol):
    """A vocabulary that tokenizes. Several threads call `tokenize` at once. It may also have `ship() -> Opener | None`,
    with which another machine opens the same vocabulary.
    """

    @property
    def hash(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def name(self) -> str: ...
    def tokenize(self, text: str, /, *, special: bool = ...) -> Int32Array: ...


Opener = Callable[[], AbstractContextManager[DocumentTokenizer]]  # can be pickled

Texts = Iterable[Text | tuple[str, str]]


def read_texts(texts: Texts) -> Iterator[Text]:
    """Yield the texts that have content."""
    for item in texts:
        text = item if isinstance(item, Text) else Text(*item)
        if text.text is not None:
            yield text


def tokenize_documents(texts: Texts, tokenizer: DocumentTokenizer) -> Iterator[Document]:
    """Yield the document of each text that was read, in order.

    Four documents for each thread are in memory, whatever the size of the corpus.

    Args:
        texts: texts or (name, text) pairs; one without content is skipped
        tokenizer: called through ctypes it does not hold the GIL, so that a thread for each core helps
    """
    waiting: deque[tuple[Text, Future[Int32Array]]] = deque()
    workers = os.cpu_count() or 1
    pool = ThreadPoolExecutor(workers, thread_name_prefix="tokenize")
    try:
        for text in read_texts(texts):
            waiting.append((text, pool.submit(tokens_of, text, tokenizer.tokenize)))
            if len(waiting) >= 4 * workers:
                done, future = waiting.popleft()
                yield document_of(done, future.result())
        while waiting:
            done, future = waiting.popleft()
            yield document_of(done, future.result())
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def counted(documents: Iterable[Document], progress: Callable[[str, int], None]) -> Iterator[Document]:
    """Yield the documents, and report the tokens of each as progress."""
    for document in documents:
        progress("tokenized", len(document.tokens))
        yield document


Item = TypeVar("Item")


def grouped(items: Iterable[Item], size_of: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """Yield the items in order, in groups of a size up to `most`. A larger item makes a group of its own."""
    group: list[Item] = []
    total = 0
    for item in items:
        size = size_of(item)
        if group and total + size > most:
            yield group
            group, total = [], 0
        group.append(item)
        total += size
    if group:
        yield group


def document_of(text: Text, tokens: Int32Array) -> Document:
    return Document(text.name, tokens, (text.state,) if text.state else ())


_SURROGATES = re.compile("[\ud800-\udfff]")


def tokens_of(text: Text, tokenize: Callable[..., Int32Array]) -> Int32Array:
    """Tokenize a text that was read: int32 [n]. Lone surrogates, which JSON or file names may contain, become U+FFFD,
    because UTF-8 cannot encode them.
    """
    return tokenize(encodable(text.text or ""))


def encodable(text: str) -> str:
    """Replace lone surrogates by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return _SURROGATES.sub("\ufffd", text)
    return text


DOCUMENTS_MAGIC = b"RLDOCS\x00\x01"
STATES_MAGIC = b"RLSTAT\x00\x01"
_DIGEST = 32
# Up to _FEW names of at least _LONG bytes are searched for; others are compared with every entry.
_FEW, _LONG = 16, 16


def pack_documents(names: Sequence[bytes], starts: Sequence[int]) -> bytes:
    """Make the content of `documents.bin`. `starts` is each document's start in the text, then the text's length."""
    ends = np.cumsum([0, *(len(name) for name in names)], dtype="<u8")
    head = DOCUMENTS_MAGIC + len(names).to_bytes(8, "little") + int(ends[-1]).to_bytes(8, "little")
    return b"".join((head, np.asarray(starts, "<u8").tobytes(), ends.tobytes(), *names))


class _Names:
    """The names of a table's entries over a buffer, one after another from `_names_at` on. `_ends` is a 0 and the end
    of each name, counted from there. Bytes that are not UTF-8 become lone surrogates, as in `os.fsdecode`.
    """

    path: Path
    _data: Any
    _names_at: int
    _ends: npt.NDArray[np.uint64]

    def name(self, index: int) -> str:
        first, last = self._names_at + int(self._ends[index]), self._names_at + int(self._ends[index + 1])
        if not self._names_at <= first <= last <= len(self._data):
            raise DatastoreCorrupt(self.path, f"name {index} of a table lies outside of it")
        return bytes(self._data[first:last]).decode("utf-8", "surrogateescape")

    def numbers_of(self, names: Collection[str]) -> list[int]:
        """Return the numbers of the entries with one of these names, ascending.

        O(bytes of all names): with 100 000 names of 80 bytes some milliseconds for a few `names`, 20 for many.
        """
        wanted = {encoded(name) for name in names}
        if len(wanted) <= _FEW and all(len(name) >= _LONG for name in wanted):
            found = ((name, *entry) for name in wanted for entry in self._entries_at(name))
            return sorted(number for name, number, size in found if size == len(name))
        stored = bytes(self._data[self._names_at :])
        spans = enumerate(pairwise(self._ends.tolist()))
        return [number for number, (first, last) in spans if stored[first:last] in wanted]

    def numbers_below(self, folder: str) -> list[int]:
        """Return the numbers of the files below a folder, ascending. O(bytes of all names), some milliseconds."""
        return sorted(number for number, _ in self._entries_at(encoded(os.path.join(folder, ""))))

    def _entries_at(self, start: bytes) -> Iterator[tuple[int, int]]:
        """Search the bytes, and yield (number, bytes of the name) of the entries whose name begins with `start`."""
        at = self._data.find(start, self._names_at)
        while at >= 0:
            first = np.uint64(at - self._names_at)
            number = int(np.searchsorted(self._ends, first, side="right")) - 1
            if 0 <= number < len(self._ends) - 1 and self._ends[number] == first:
                size = int(self._ends[number + 1]) - int(first)
                if size >= len(start):
                    yield number, size
            at = self._data.find(start, at + 1)


class DocumentTable(_Names):
    """A document table over a buffer (a map, or bytes). Only the requested entries are read, and an offset is checked
    on use. Raises DatastoreCorrupt if the header does not fit the buffer or the manifest.
    """

    def __init__(self, data: Any, path: Path, documents: int, tokens: int) -> None:
        self.path = path
        head = bytes(data[:DOCUMENTS_HEAD])
        count, names = int.from_bytes(head[8:16], "little"), int.from_bytes(head[16:24], "little")
        if head[:8] != DOCUMENTS_MAGIC or count != documents:
            raise DatastoreCorrupt(path, "the document table does not begin as the manifest says")
        if len(data) != DOCUMENTS_HEAD + 16 * (count + 1) + names:
            raise DatastoreCorrupt(path, f"the document table of {len(data)} bytes does not match its header")
        self._data = data
        self._names_at = DOCUMENTS_HEAD + 16 * (count + 1)
        self.starts: npt.NDArray[np.uint64] = np.frombuffer(data, "<u8", count + 1, DOCUMENTS_HEAD)
        self._ends = np.frombuffer(data, "<u8", count + 1, DOCUMENTS_HEAD + 8 * (count + 1))
        if int(self.starts[0]) != 0 or int(self.starts[-1]) != tokens:
            raise DatastoreCorrupt(path, "the document table does not span the text")

    def __len__(self) -> int:
        return len(self.starts) - 1

    def at(self, position: int) -> int:
        """Return the number of the document at a position of the text. O(log documents)."""
        index = int(np.searchsorted(self.starts, np.uint64(position), side="right")) - 1
        if not 0 <= index < len(self) or not int(self.starts[index]) <= position < int(self.starts[index + 1]):
            raise DatastoreCorrupt(self.path, f"the document table is out of order near token {position}")
        return index

    def start(self, index: int) -> int:
        return int(self.starts[index])

    def release(self) -> None:
        self.starts = self._ends = np.empty(0, np.uint64)
        self._data = b""


def encoded(name: str) -> bytes:
    """Return the stored form of a name: the bytes that `os.fsdecode` turned into it."""
    try:
        return name.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return name.encode("utf-8", "replace")


def pack_states(states: Sequence[tuple[int, FileState]]) -> bytes:
    """Make the content of `states.bin` from (document number in the segment, state of a file with its content)."""
    names = [encoded(state.name) for _, state in states]
    ends = np.cumsum([0, *map(len, names)], dtype="<u8")
    columns = (
        np.array([state.size for _, state in states], "<u8").tobytes(),
        np.array([state.mtime_ns for _, state in states], "<i8").tobytes(),
        ends.tobytes(),
        np.array([document for document, _ in states], "<u4").tobytes(),
        *(state.sha256 for _, state in states),
        *names,
    )
    return b"".join((STATES_MAGIC, len(states).to_bytes(8, "little"), int(ends[-1]).to_bytes(8, "little"), *columns))


class StateTable(_Names):
    """The file states of a segment over a buffer. `documents` has the document number of each: int64 [states]. Raises
    DatastoreCorrupt if a header or a value does not fit the buffer or the manifest. O(states).
    """

    def __init__(self, data: bytes, path: Path, states: int, documents: int) -> None:
        self.path, head = path, data[:STATES_HEAD]
        names = int.from_bytes(head[16:24], "little")
        fixed = STATES_HEAD + 16 * states + 8 * (states + 1) + 4 * states + _DIGEST * states
        if head[:8] != STATES_MAGIC or int.from_bytes(head[8:16], "little") != states or len(data) != fixed + names:
            raise DatastoreCorrupt(path, "the table of file states does not match its header or the manifest")
        self._data, self._names_at, self._digests_at = data, fixed, fixed - _DIGEST * states
        self._sizes = np.frombuffer(data, "<u8", states, STATES_HEAD)
        self._mtimes = np.frombuffer(data, "<i8", states, STATES_HEAD + 8 * states)
        self._ends = np.frombuffer(data, "<u8", states + 1, STATES_HEAD + 16 * states)
        at = STATES_HEAD + 16 * states + 8 * (states + 1)
        self.documents: Int64Array = np.frombuffer(data, "<u4", states, at).astype(np.int64)
        orderly = self._ends[0] == 0 and self._ends[-1] == names and bool((np.diff(self._ends) <= names).all())
        if not orderly or int(self.documents.max()) >= documents:
            raise DatastoreCorrupt(path, "the table of file states points outside itself")

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> FileState:
        if not 0 <= index < len(self):
            raise IndexError(index)
        at = self._digests_at + _DIGEST * index
        return FileState(
            self.name(index), int(self._sizes[index]), int(self._mtimes[index]), self._data[at : at + _DIGEST]
        )


def documents_of(directory: Path, entry: SegmentEntry) -> DocumentTable:
    """Read the document table of a segment from its file. Raises DatastoreCorrupt and OSError."""
    path = directory / file_name(entry.name, "documents")
    return DocumentTable(path.read_bytes(), path, entry.documents, entry.tokens)


def states_of(directory: Path, entry: SegmentEntry) -> StateTable | None:
    """Read the file states of a segment, or return None if it has none. Raises DatastoreCorrupt and OSError."""
    path = directory / file_name(entry.name, "states")
    return StateTable(path.read_bytes(), path, entry.states, entry.documents) if entry.states else None


def states_by_document(table: StateTable | None, gone: bytes) -> dict[int, list[FileState]]:
    """Group the states that are not deleted by the number of their document."""
    found: dict[int, list[FileState]] = {}
    if table is not None:
        for number in np.flatnonzero(alive(gone, len(table))).tolist():
            found.setdefault(int(table.documents[number]), []).append(table[number])
    return found


def bitmap_of(numbers: Iterable[int], count: int) -> bytes:
    """Return a bitmap of `count` bits with these set, or b"" if there are none."""
    bits = np.zeros(count, np.uint8)
    bits[list(numbers)] = 1
    return np.packbits(bits, bitorder="little").tobytes() if bits.any() else b""


def numbers_in(bitmap: bytes) -> Int64Array:
    """Return the numbers of the set bits, ascending: int64."""
    return np.flatnonzero(np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little"))


def alive(deleted: bytes, count: int) -> npt.NDArray[np.bool_]:
    """Return a mask of the entries that are not in the bitmap `deleted`: bool [count]."""
    found = np.ones(count, np.bool_)
    found[numbers_in(deleted)] = False
    return found


def other_names(table: DocumentTable, states: StateTable, gone: bytes) -> dict[int, str]:
    """Return names by number for documents whose stored name is that of a deleted state while files with other names
    still have the content. O(states).
    """
    live = alive(gone, len(states))
    deleted = np.flatnonzero(~live).tolist()
    lost = {(int(states.documents[number]), states.name(number)) for number in deleted}
    names: dict[int, str] = {}
    for number in np.flatnonzero(np.isin(states.documents, states.documents[~live]) & live).tolist():
        document = int(states.documents[number])
        if (document, table.name(document)) in lost:
            names.setdefault(document, states.name(number))
    return names


def intervals(table: DocumentTable, dead: bytes) -> Int64Array | None:
    """Return the deleted documents as sorted half-open intervals of the text, int64 [documents, 2], or None."""
    if not dead:
        return None
    numbers = numbers_in(dead)
    return np.stack([table.starts[numbers], table.starts[numbers + 1]], axis=1).astype(np.int64)
