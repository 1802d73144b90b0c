"""Read the headers of GGUF files without llama.cpp.

- `check_headers` gives a clear cause for common mistakes: magic, version, counts against the file size, and missing
  files of a model in several files, `NAME-00001-of-00003.gguf`. llama.cpp checks everything after the header.
- `read_gguf` reads keys, and the names of tensors; `vocabulary_file` makes a file of the keys alone.

Layout (`ggml/include/gguf.h`), little-endian: magic "GGUF", uint32 version, int64 tensors, int64 keys; each key as
name, type and value; each tensor as name, dimensions, type and offset. A header may be hostile: its numbers are
bounded, and reading beyond the file raises ModelInvalid.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

from rest_local.errors import ModelInvalid, ModelNotFound, printable
from rest_local.llama.options import ModelOptions

# Real files have a hundredth of this. A hostile header in a sparse file could name billions.
MOST_KEYS, MOST_TENSORS, MOST_TEXTS = 1 << 16, 1 << 20, 1 << 24
LONGEST_NAME = 1 << 16  # bytes of the name of a key or tensor; GGUF allows 65 535, llama.cpp 63 for a tensor
LONGEST_LIST = 1024  # a longer array than one number a layer is only counted
LONGEST_TEXT = 256  # maximum characters to keep of a text

_HEADER = struct.Struct("<4sIqq")
_VERSIONS = (2, 3)
_MIN_KEY_BYTES = 8 + 4 + 1  # length of the name, type, a one-byte value
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8  # length of the name, dimensions, type, offset
_FOREIGN = {
    b"PK\x03\x04": "a zip archive (a PyTorch checkpoint?)",
    b"lmgg": "a GGML file from before GGUF",
    b"fmgg": "a GGML file from before GGUF",
    b"tjgg": "a GGML file from before GGUF",
    b"FUGG": "a GGUF file for big-endian machines",
    b"vers": "a git-lfs pointer, not the file itself",
    b"<!DO": "a web page",
    b"<htm": "a web page",
}

# Architectures that llama.cpp evaluates without a KV cache (`llama_model::create_memory`) and that pool vectors.
ENCODERS = frozenset({
    "bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3", "eurobert",
    "gemma-embedding",
})  # fmt: skip

Files = Sequence[tuple[Path, os.stat_result]]  # all files of a model, each with its stat, the first one first

Value = bool | int | float | str | list[bool | int | float]
_Found = TypeVar("_Found")


def check_headers(path: Path) -> Files:
    """Return the files of the model that `path` begins. Reads 24 bytes of each. Raises ModelNotFound, ModelInvalid."""
    return [(file, check_header(file)) for file in shards_of(path)]


def identity_of(files: Files) -> tuple[tuple[str, int, int], ...]:
    """Return real path, size in bytes and modification time in ns of each file, as a key for cached results."""
    return tuple((os.path.realpath(path), status.st_size, status.st_mtime_ns) for path, status in files)


def check_header(path: Path) -> os.stat_result:
    """Check one file and return its stat. Reads 24 bytes. Raises ModelNotFound, or ModelInvalid with the cause."""
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise ModelInvalid(path, "is a directory", "give a GGUF file, or a name that `rest-local models` lists")
        if not stat.S_ISREG(status.st_mode):
            raise ModelInvalid(path, "is not a regular file", "give a GGUF file")
        with path.open("rb") as file:
            start = file.read(_HEADER.size)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ModelNotFound(path) from error
    except (OSError, ValueError) as error:
        raise ModelInvalid(path, f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
    cause = _cause(start, status.st_size)
    if cause:
        raise ModelInvalid(path, cause)
    return status


def _cause(start: bytes, size: int) -> str | None:
    if size == 0:
        return "is empty"
    if start[:4] in _FOREIGN:
        return f"is {_FOREIGN[start[:4]]}, not a GGUF file"
    if not start.startswith(b"GGUF"[: len(start)]):
        return "is not a GGUF file"
    if len(start) < _HEADER.size:
        return f"is truncated: {size} bytes"
    _, version, n_tensors, n_keys = _HEADER.unpack(start)
    if version not in _VERSIONS:
        return f"has GGUF version {version}, readable are {' and '.join(map(str, _VERSIONS))}"
    if n_tensors < 0 or n_keys < 0 or n_keys * _MIN_KEY_BYTES + n_tensors * _MIN_TENSOR_BYTES > size:
        return f"is damaged or truncated: it declares {n_keys} keys and {n_tensors} tensors in {size} bytes"
    return None


class SplitName(NamedTuple):
    """The parsed name of a part: the name without its number, the number from 1 on, and the number of parts."""

    name: str
    number: int
    total: int


def part_of(file_name: str) -> SplitName | None:
    """Parse a name like `NAME-00001-of-00003.gguf`. Return None if it is not that of a part."""
    match = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", file_name, re.DOTALL)
    return None if match is None else SplitName(match[1], int(match[2]), int(match[3]))


def shards_of(path: Path) -> list[Path]:
    """Return all files of a model, `path` first, or only `path` if its name is not that of a part. Raises ModelInvalid
    if `path` is not the first of several files, or another file is missing.
    """
    part = part_of(path.name)
    if part is None or not path.is_file():
        return [path]
    number, count = part.number, part.total
    names = [f"{part.name}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]
    if not 1 <= number <= count:
        return [path]
    if number > 1:
        raise ModelInvalid(path, f"is part {number} of {count} of a model", f"give the first, {names[0]}")
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        more = f" and {len(missing) - 3} more are" if len(missing) > 3 else " are" if len(missing) > 1 else " is"
        cause = f"is in {count} files, of which {', '.join(missing[:3])}{more} not there"
        raise ModelInvalid(path, cause, "put all files in one directory")
    return [path.parent / name for name in names]


@dataclass
class Gguf:
    """The content of one header. The arrays of texts are not in `values`, only in `counts`."""

    values: dict[str, Value] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)  # key -> length of its array
    n_tensors: int = 0
    tensors: frozenset[str] = frozenset()  # the tensors' names, if asked for

    def text(self, key: str) -> str:
        """Return a text without control characters, at most LONGEST_TEXT long, or an empty one."""
        value = self.values.get(key)
        return printable(value) if isinstance(value, str) else ""

    def number(self, key: str, default: int = 0) -> int:
        """Return a whole number, the greatest of a list."""
        value = self.values.get(key)
        if isinstance(value, list):
            value = max(value, default=default)
        return default if value is None or isinstance(value, str) else int(value)

    @property
    def architecture(self) -> str:
        """Return `general.architecture`, such as "llama"."""
        return self.text("general.architecture")

    @property
    def is_encoder(self) -> bool:
        """Return True if the model reads text in both directions: it has no KV cache and generates nothing."""
        return self.architecture in ENCODERS or self.values.get(f"{self.architecture}.attention.causal") is False

    @property
    def projectors(self) -> list[str]:
        """Return the kinds of projectors that the file declares, for example in `clip.vision.projector_type`."""
        return [self.text(key) for key in self.values if key.endswith("projector_type") and self.text(key)]

    @property
    def has_mtp(self) -> bool:
        """Return True if the file has the weights of MTP layers. Needs `tensors`."""
        layers = self.number(f"{self.architecture}.nextn_predict_layers")
        return layers > 0 and any(".nextn." in name for name in self.tensors)

    @property
    def is_mtp_alone(self) -> bool:
        """Return True if the file has MTP layers without their model. Needs `tensors`."""
        return self.has_mtp and not any(name.startswith("blk.0.") for name in self.tensors)


def read_gguf(path: Path, *, tensors: bool = False) -> Gguf:
    """Read the header of one file, with the names of the tensors if asked for.

    Takes 4 ms with a vocabulary of 150 000 tokens, and 50 ms with the names of the tensors. Raises ModelNotFound, and
    ModelInvalid for a damaged or truncated header.
    """

    def read(reader: _Reader) -> Gguf:
        found = Gguf(n_tensors=reader.n_tensors)
        for key in reader.walk(search=not tensors):
            if key.n_items is not None:
                found.counts[key.name] = key.n_items
            if (value := reader.value(key)) is not None:
                found.values[key.name] = value
        if tensors:
            found.tensors = frozenset(reader.tensors())
        return found

    return _with_reader(path, read)


def trained_context(path: Path, options: ModelOptions) -> int:
    """Return the tokens of context that a model was trained for, by its file and `options.override_kv`, without loading
    it, or 0 if neither says. Raises ModelNotFound, ModelInvalid.
    """
    found = read_gguf(path)
    key = f"{found.architecture}.context_length"
    overridden = [override.value for override in options.override_kv if override.key == key]
    return int(overridden[-1]) if overridden else found.number(key)


def vocabulary_file(path: str | os.PathLike[str]) -> bytes:
    """Make a GGUF file with the keys of the model's first file, some MB, so that a machine that lacks the model can
    tokenize as it does. O(keys): 50 ms for 150 000 tokens. Raises ModelNotFound, ModelInvalid.
    """

    def read(reader: _Reader) -> bytes:
        keys = []
        for key in reader.walk():
            if key.end > _HEADER.size + _MOST_BYTES:
                raise ValueError("larger than any vocabulary")
            if not key.name.startswith("split."):  # these name further files of the model
                keys.append(reader.data[key.begin : key.end])
        return b"".join([_HEADER.pack(b"GGUF", reader.version, 0, len(keys)), *keys])

    return _with_reader(Path(path), read)


def _with_reader(path: Path, read: Callable[[_Reader], _Found]) -> _Found:
    check_header(path)
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return read(_Reader(data))
    except (struct.error, IndexError, KeyError, ValueError, OverflowError) as error:
        raise ModelInvalid(path, "is damaged or truncated in its header") from error
    except OSError as error:
        raise ModelInvalid(path, f"cannot be read: {error.strerror or error}") from error


_TEXT, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_U32, _U64, _U32_U64 = struct.Struct("<I"), struct.Struct("<Q"), struct.Struct("<IQ")
_MOST_BYTES = 1 << 28  # maximum bytes of a vocabulary's keys: ten times the largest
_MANY = 1000  # more texts are searched through, not walked over
_FARTHEST = 32 << 20  # bytes to search: the texts of the largest vocabularies take a third of it
# The keys after a vocabulary begin so. Whole names are compared too, as a text of the vocabulary may begin alike.
_NEXT = (b"tokenizer.", b"general.")
_NEXT_KEY = re.compile(rb"tokenizer\.(ggml\.[a-z_]+|chat_template)|general\.(file_type|quantization_version)")


class _Key(NamedTuple):
    """A key from `begin` to `end` in the file. Its value, or its `n_items`, have the type `kind` and begin at `at`."""

    name: str
    kind: int
    n_items: int | None
    begin: int
    at: int
    end: int


class _Reader:
    """A reader of the header of a mapped file. Reading beyond it raises struct.error or ValueError."""

    def __init__(self, data: mmap.mmap) -> None:
        _, self.version, self.n_tensors, self._n_keys = _HEADER.unpack_from(data)
        self.data, self._at = data, _HEADER.size
        if self._n_keys > MOST_KEYS or self.n_tensors > MOST_TENSORS:
            raise ValueError(f"{self._n_keys} keys and {self.n_tensors} tensors")

    def walk(self, search: bool = False) -> Iterator[_Key]:
        """Yield the keys in order.

        With `search` the texts of a vocabulary are skipped: each says its own length, and walking over 150 000 of them
        takes 45 ms. So the next key is searched for by its name, in 4 ms, and they are walked over only if none is
        found. Keys may then be left out, and their number no longer tells where the last one ends.
        """
        searched = False
        for _ in range(self._n_keys):
            begin = self._at
            try:
                name = self._name()
                (kind,), count = _U32.unpack_from(self.data, self._advance(4)), None
                if kind == _ARRAY:
                    kind, count = _U32_U64.unpack_from(self.data, self._advance(12))
                at = self._at
                if kind != _TEXT:
                    self._advance(struct.calcsize(_NUMBERS[kind]) * (1 if count is None else count))
                elif search and count is not None and count >= _MANY and (following := self._search()):
                    self._at, searched = following, True
                else:
                    self._skip_texts(1 if count is None else count)
            except (struct.error, IndexError, KeyError, ValueError, OverflowError):
                if searched:
                    return
                raise
            yield _Key(name, kind, count, begin, at, self._at)

    def value(self, key: _Key) -> Value | None:
        """Return the value of a key, or None for an array of texts or of more than LONGEST_LIST numbers."""
        if key.kind == _TEXT:
            return None if key.n_items is not None else self._text(key.at + 8, key.end, 4 * LONGEST_TEXT)[:LONGEST_TEXT]
        if key.n_items is None:
            number: Value = struct.unpack_from(f"<{_NUMBERS[key.kind]}", self.data, key.at)[0]
            return number
        if key.n_items > LONGEST_LIST:
            return None
        return list(struct.unpack_from(f"<{key.n_items}{_NUMBERS[key.kind]}", self.data, key.at))

    def tensors(self) -> Iterator[str]:
        """Yield the names of the tensors, after all keys."""
        for _ in range(self.n_tensors):
            name = self._name()
            (n_dimensions,) = _U32.unpack_from(self.data, self._advance(4))
            self._advance(8 * n_dimensions + 4 + 8)
            yield name

    def _name(self) -> str:
        (length,) = _U64.unpack_from(self.data, self._advance(8))
        if length > LONGEST_NAME:
            raise ValueError(f"a name of {length} bytes")
        begin = self._advance(length)
        return self._text(begin, self._at, LONGEST_NAME)

    def _text(self, begin: int, end: int, most: int) -> str:
        return self.data[begin : min(end, begin + most)].decode("utf-8", "replace")

    def _skip_texts(self, count: int) -> None:
        """Walk over texts, 0.15 us each."""
        if count > MOST_TEXTS:
            raise ValueError(f"{count} texts")
        data, at, length_at = self.data, self._at, _U64.unpack_from
        for _ in range(count):
            at += 8 + length_at(data, at)[0]
        self._advance(at - self._at)

    def _search(self) -> int:
        """Return where the next key of a known name begins, or 0 if there is none near."""
        begin, end = self._at, self._at + _FARTHEST
        while (at := self.data.find(_NEXT[0], begin, end)) >= 0:
            earlier = self.data.find(_NEXT[1], begin, at)
            at = at if earlier < 0 else earlier
            (length,) = _U64.unpack_from(self.data, at - 8)
            if length < LONGEST_TEXT and _NEXT_KEY.fullmatch(self.data[at : at + length]):
                return at - 8
            begin = at + 1
        return 0

    def _advance(self, size: int) -> int:
        """Return where the next `size` bytes begin. Raises ValueError if the file is shorter."""
        begin, self._at = self._at, self._at + size
        if self._at > len(self.data):
            raise ValueError("after the end of the file")
        return begin
