"""Reads the keys of a GGUF header: numbers, texts, and how long arrays are. No weights, no vocabulary.

Layout (`ggml/include/gguf.h`), little-endian: magic, version, number of tensors, number of keys; then each key as name,
type and value. The texts of a vocabulary come before keys that are wanted, and each says its own length: walking over
150 000 of them takes 45 ms. So the next key is searched for by its name, in 4 ms, and only where none is found they are
walked over.
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass, field
from pathlib import Path

from rest_local.errors import ModelInvalid, printable
from rest_local.llama.gguf_header import MOST_KEYS, MOST_TEXTS, check_header
from rest_local.llama.options import ModelOptions

Value = bool | int | float | str | list[bool | int | float]

LONGEST_LIST = 1024  # numbers of an array that is kept, such as one a layer; of a longer one only the count is
LONGEST_TEXT = 256  # characters that are kept

_HEADER = 24
_TEXT, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_MANY = 1000  # texts that are searched through, not walked over
_FARTHEST = 32 << 20  # bytes: the texts of the largest vocabularies take a third of it
_NEXT = (b"tokenizer.", b"general.")  # what the keys after a vocabulary begin with
# Whole names, so that no text of a vocabulary is one of them.
_NEXT_KEY = re.compile(rb"tokenizer\.(ggml\.[a-z_]+|chat_template)|general\.(file_type|quantization_version)")


# Architectures that llama.cpp evaluates without a KV cache (`llama_model::create_memory`) and that pool vectors.
ENCODERS = frozenset({
    "bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3", "eurobert",
    "gemma-embedding",
})  # fmt: skip


@dataclass
class Metadata:
    """`values`: by key; `counts`: lengths of arrays by key; `n_tensors`: of this file."""

    values: dict[str, Value] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    n_tensors: int = 0

    def text(self, key: str) -> str:
        """A text without control characters, at most LONGEST_TEXT long; empty where there is none."""
        value = self.values.get(key)
        return printable(value) if isinstance(value, str) else ""

    @property
    def is_encoder(self) -> bool:
        """Whether the model reads text in both directions: it has no KV cache and generates nothing."""
        architecture = self.text("general.architecture")
        return architecture in ENCODERS or self.values.get(f"{architecture}.attention.causal") is False

    def number(self, key: str, default: int = 0) -> int:
        """A whole number; of a list the greatest."""
        value = self.values.get(key)
        if isinstance(value, list):
            value = max(value, default=default)
        return default if value is None or isinstance(value, str) else int(value)


def read_metadata(path: Path) -> Metadata:
    """The keys of one file. Raises ModelNotFound, ModelInvalid."""
    check_header(path)
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).read()
    except (struct.error, IndexError, KeyError, ValueError, OverflowError) as error:
        raise ModelInvalid(path, "is damaged or truncated in its header") from error
    except OSError as error:
        raise ModelInvalid(path, f"cannot be read: {error.strerror or error}") from error


def trained_context(path: Path, options: ModelOptions) -> int:
    """Tokens of context that a model was trained for, by its file and `options.override_kv`, without loading it; 0
    where neither says. Raises ModelNotFound, ModelInvalid.
    """
    metadata = read_metadata(path)
    key = f"{metadata.text('general.architecture')}.context_length"
    overridden = [override.value for override in options.override_kv if override.key == key]
    return int(overridden[-1]) if overridden else metadata.number(key)


class _Reader:
    """Walks over the keys of a mapped file. Whatever lies outside of it raises struct.error or ValueError."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, _HEADER
        self._searched = False  # keys may have been left out, so their number says no longer where the last one ends

    def read(self) -> Metadata:
        _, _, n_tensors, n_keys = struct.unpack_from("<4sIqq", self._data)
        if n_keys > MOST_KEYS:
            raise ValueError(f"{n_keys} keys")
        found = Metadata(n_tensors=n_tensors)
        for _ in range(n_keys):
            try:
                self._key(found)
            except (struct.error, IndexError, KeyError, ValueError, OverflowError):
                if self._searched:
                    break
                raise
        return found

    def _key(self, found: Metadata) -> None:
        key = self._text()
        kind = self._number(_U32)
        if kind == _TEXT:
            found.values[key] = self._text()[:LONGEST_TEXT]
        elif kind == _ARRAY:
            self._array(key, found)
        else:
            found.values[key] = self._numbers(_NUMBERS[kind], 1)[0]

    def _array(self, key: str, found: Metadata) -> None:
        kind, count = self._number(_U32), self._number(_U64)
        found.counts[key] = count
        if kind == _TEXT:
            if count < _MANY or not self._search():
                self._skip_texts(count)
        elif count <= LONGEST_LIST:
            found.values[key] = list(self._numbers(_NUMBERS[kind], count))
        else:
            self._advance(count * struct.calcsize(_NUMBERS[kind]))

    def _search(self) -> bool:
        """Go to the next key of a known name; False where there is none near."""
        begin, end = self._at, self._at + _FARTHEST
        while (at := self._data.find(_NEXT[0], begin, end)) >= 0:
            earlier = self._data.find(_NEXT[1], begin, at)
            at = at if earlier < 0 else earlier
            (length,) = _U64.unpack_from(self._data, at - 8)
            if length < LONGEST_TEXT and _NEXT_KEY.fullmatch(self._data[at : at + length]):
                self._at, self._searched = at - 8, True
                return True
            begin = at + 1
        return False

    def _skip_texts(self, count: int) -> None:
        """Walk over texts, 0.15 us each."""
        if count > MOST_TEXTS:
            raise ValueError(f"{count} texts")
        data, at, length_at = self._data, self._at, _U64.unpack_from
        for _ in range(count):
            at += 8 + length_at(data, at)[0]
        self._at = at

    def _number(self, form: struct.Struct) -> int:
        (value,) = form.unpack_from(self._data, self._advance(form.size))
        return int(value)

    def _numbers(self, code: str, count: int) -> tuple[bool | int | float, ...]:
        form = struct.Struct(f"<{count}{code}")
        return form.unpack_from(self._data, self._advance(form.size))

    def _text(self) -> str:
        length = self._number(_U64)
        begin = self._advance(length)
        return self._data[begin : begin + min(length, 1 << 16)].decode("utf-8", "replace")

    def _advance(self, size: int) -> int:
        """Where the next `size` bytes begin. Raises ValueError where the file is shorter."""
        begin, self._at = self._at, self._at + size
        if self._at > len(self._data):
            raise ValueError("after the end of the file")
        return begin
