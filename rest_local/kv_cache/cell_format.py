"""The file format of KV cells: the file of a part of a text, or of a text whose memory cannot be cut back.

A file is MAGIC and records: SHA-256, length (8 bytes, little-endian), content. The first record is JSON (`Head`), the
others are states of llama.cpp: one of a part (`cell_states.part_of`); or the whole state and checkpoints before it
(`cell_states.states_of`).

The digest of a record covers its number and the digest of the first, and that of the first the name of the file, which
is a digest of the text. So each record is checked before llama.cpp sees it, and a file that was cut, changed, renamed
or moved is not used. A file is written under another name and renamed: it is whole or not there.

SHA-256 because processors have instructions for it: 0.9 GB/s here, BLAKE2b 0.3 GB/s.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rest_local.llama import library
from rest_local.llama.context import ContextSettings
from rest_local.llama.model import Model
from rest_local.paths import replacing

# Tokens of a part: 16 MB for a model of 8B, which are copied in some 5 ms and read in 20.
PART = 128
FORMAT = 4
MAGIC = b"RLCELLS3"
SUFFIX = ".cells"
# Bytes of a text that is one record, and is copied in memory.
LARGEST_STATE = 1 << 30
_LENGTH = 8
_DIGEST = hashlib.sha256().digest_size


class Unusable(Exception):
    """A file cannot be used, with what is wrong with it."""


@dataclass(frozen=True)
class Head:
    """The first record of a file: the tokens of a part, how many tokens each of its states has (`marks`), and the names
    of the texts up to those places, by which a file is found.
    """

    tokens: Sequence[int]
    marks: Sequence[int]
    names: Sequence[str] = ()


def fingerprint_of(model: Model, settings: ContextSettings, exact: bool) -> str:
    """Return a digest of everything that decides the bits in the cells.

    Lengths, numbers of texts, threads and snapshots do not.
    """
    computing = replace(settings, n_ctx=8, n_batch=1, n_ubatch=0, n_slots=1, n_cells=0, n_branches=1, n_rs_seq=0)
    computing = replace(computing, threads=0, threads_batch=0)
    # The settings of the context have the values that were chosen for these.
    loading = replace(model.options, rollback=None, flash_attention="auto", cache_type_k=None, cache_type_v=None)
    parts = [
        [model.cache_key, model.adapters.identity, asdict(loading)],
        [computing.to_dict(), model.n_gpu_layers, exact],
        [FORMAT, library.fingerprint()],
    ]
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


def size_of(head: Head, records: Sequence[bytes]) -> int:
    """Return the bytes of the file that `write` makes of these records."""
    lengths = [len(_encoded(head)), *map(len, records)]
    return len(MAGIC) + sum(lengths) + len(lengths) * (_LENGTH + _DIGEST)


def write(path: Path, name: str, head: Head, records: Sequence[bytes]) -> None:
    """Write the file of this name whole or not at all. Raises OSError, and then an earlier file stays as it was."""
    root = name.encode()
    with replacing(path) as file:
        file.write(MAGIC)
        for number, record in enumerate([_encoded(head), *records]):
            digest = _digest(root, number, record)
            file.write(digest + len(record).to_bytes(_LENGTH, "little"))
            file.write(record)
            root = root if number else digest


def read(path: Path, name: str, only_head: bool = False) -> tuple[Head, list[bytes]]:
    """Read the head of a file of `write`, and the other records. Raises OSError, Unusable.

    Whatever the file says, this takes no more memory than the file has bytes.
    """
    root, records, wanted, head = name.encode(), list[bytes](), 1, Head((), ())
    with path.open("rb") as file:
        left = os.fstat(file.fileno()).st_size
        if file.read(len(MAGIC)) != MAGIC:
            raise Unusable("it is no file of cells")
        while len(records) < wanted:
            digest, length = file.read(_DIGEST), int.from_bytes(file.read(_LENGTH), "little")
            record = file.read(length) if length <= left else b""
            if digest != _digest(root, len(records), record):
                raise Unusable("it is damaged")
            if not records:
                root, head = digest, _decoded(record)
                wanted = 1 if only_head else 1 + len(head.marks)
            records.append(record)
    return head, records[1:]


def _encoded(head: Head) -> bytes:
    return json.dumps(asdict(head)).encode()


def _decoded(record: bytes) -> Head:
    try:
        found = json.loads(record)
        return Head(list(found["tokens"]), list(found["marks"]), list(found["names"]))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Unusable("it is damaged") from error


def _digest(root: bytes, number: int, record: bytes) -> bytes:
    digest = hashlib.sha256(root + number.to_bytes(8, "little"))
    digest.update(record)
    return digest.digest()
