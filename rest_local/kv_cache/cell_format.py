"""The file format of KV cells.

A file is MAGIC and records: length (8 bytes, little-endian), SHA-256, content. The first record is JSON (`Head`): the
tokens, what the cells were computed with, and what records follow:

- `parts`: the state of PART tokens (`cell_states.part_of`), or of the rest of a text.
- `states`: the whole state, then checkpoints before it (`cell_states.states_of`), where memory cannot be cut back, and
  where the beginning of the text has left a sliding window. `marks` says how many tokens each has.

The digest of a record covers its number and the digest of the first, and that of the first the name of the file where
it is a digest of the text. So each record is checked as it is read, once, before llama.cpp sees it, and a file that was
cut, changed, renamed or moved is not used. A file is written under another name and renamed: it is whole or not there.

SHA-256 because processors have instructions for it: 0.9 GB/s here, BLAKE2b 0.3 GB/s.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import BinaryIO

from rest_local.llama import library
from rest_local.llama.context import ContextSettings
from rest_local.llama.model import Model
from rest_local.paths import replacing
from rest_local.stop import Closing

# Tokens of a part: 16 MB for a model of 8B, which are copied in some 5 ms and read in 20.
PART = 128
FORMAT = 3
MAGIC = b"RLCELLS2"
SUFFIX = ".cells"
# Bytes of a text that is one record, and is copied in memory.
LARGEST_STATE = 1 << 30
_LENGTH = 8
_DIGEST = hashlib.sha256().digest_size


class Unusable(Exception):
    """A file cannot be used, with what is wrong with it."""


@dataclass(frozen=True)
class Head:
    """The first record. `names`: of the texts up to each mark, where a file is found by them."""

    made_with: Mapping[str, str]
    tokens: Sequence[int]
    kind: str
    marks: Sequence[int]
    names: Sequence[str] = ()


def made_with(model: Model, settings: ContextSettings, exact: bool) -> dict[str, str]:
    """Return digests of all that decides the bits in the cells.

    Lengths, numbers of texts, threads and snapshots do not.
    """
    computing = replace(settings, n_ctx=8, n_batch=1, n_ubatch=0, n_slots=1, n_cells=0, n_branches=1, n_rs_seq=0)
    computing = replace(computing, threads=0, threads_batch=0)
    # The context's settings say what was chosen of these, and an exact request may have to give flash attention up.
    loading = replace(model.options, rollback=None, flash_attention="auto", cache_type_k=None, cache_type_v=None)
    parts = {
        "another model": [model.cache_key, model.adapters.identity, asdict(loading)],
        "other settings": [computing.to_dict(), model.n_gpu_layers, exact],
        "another build of llama.cpp": [FORMAT, library.fingerprint()],
    }
    return {what: hashlib.sha256(json.dumps(part, default=str).encode()).hexdigest() for what, part in parts.items()}


def size_of(head: Head, records: Sequence[bytes]) -> int:
    """Return the bytes of the file that `write` makes of this."""
    lengths = [len(_encoded(head)), *map(len, records)]
    return len(MAGIC) + sum(lengths) + len(lengths) * (_LENGTH + _DIGEST)


def write(path: Path, head: Head, records: Iterable[bytes], identity: str = "") -> int:
    """Write a file whole or not at all, and return its bytes.

    Raises OSError, and what `records` raises. A file that was there before then stays.
    """
    first = _encoded(head)
    root, size = _digest(identity.encode(), 0, first), len(MAGIC)
    with replacing(path) as file:
        file.write(MAGIC)
        for number, record in enumerate(itertools.chain((first,), records)):
            digest = _digest(root, number, record) if number else root
            file.write(len(record).to_bytes(_LENGTH, "little") + digest)
            file.write(record)
            size += _LENGTH + _DIGEST + len(record)
    return size


class Reader(Closing):
    """Reads a file of `write`, which was given the same `identity`. Raises OSError, Unusable."""

    def __init__(self, path: Path, identity: str = "") -> None:
        self.size = 0
        self._file: BinaryIO = path.open("rb")
        try:
            self._left = os.fstat(self._file.fileno()).st_size
            if self._exactly(len(MAGIC)) != MAGIC:
                raise Unusable("it is no file of cells")
            self._root = identity.encode()  # The digest of the first record takes its place once that is read.
            self.head = _decoded(self._record(0))
        except BaseException:
            self._file.close()
            raise

    def records(self) -> Iterator[bytes]:
        """Yield the records after the first, each once it was checked."""
        for number in range(1, 1 + len(self.head.marks)):
            yield self._record(number)

    def _record(self, number: int) -> bytes:
        head = self._exactly(_LENGTH + _DIGEST)
        record = self._exactly(int.from_bytes(head[:_LENGTH], "little"))
        digest = _digest(self._root, number, record)
        if digest != head[_LENGTH:]:
            raise Unusable("it is damaged")
        if not number:
            self._root = digest
        return record

    def _exactly(self, n: int) -> bytes:
        """Read `n` bytes. Whatever the file says, this takes no more memory than the file has bytes."""
        data = self._file.read(n) if n <= self._left else b""
        if len(data) < n:
            raise Unusable("it is damaged")
        self._left -= n
        self.size += n
        return data

    def close(self) -> None:
        self._file.close()


def _encoded(head: Head) -> bytes:
    return json.dumps(asdict(head)).encode()


def _decoded(record: bytes) -> Head:
    try:
        found = json.loads(record)
        return Head(
            dict(found["made_with"]), list(found["tokens"]), str(found["kind"]), list(found["marks"]),
            list(found["names"]),
        )  # fmt: skip
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Unusable("it is damaged") from error


def _digest(root: bytes, number: int, record: bytes) -> bytes:
    digest = hashlib.sha256(root + number.to_bytes(8, "little"))
    digest.update(record)
    return digest.digest()
