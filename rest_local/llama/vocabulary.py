"""Turn text into a model's token ids and back, find special tokens, and hash the vocabulary for datastores.

Knows nothing about weights or the KV cache. Valid until its model is closed. Thread-safe.

`Detokenizer` streams tokens as text: it returns a character when its last byte has arrived. The results of all `feed`
calls and of `finish` concatenate to exactly `b"".join(pieces).decode("utf-8", "replace")`.
"""

from __future__ import annotations

import codecs
import ctypes
import hashlib
import json
import re
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rest_local.errors import ModelError
from rest_local.grammar.compiler import Tokens
from rest_local.llama.loaded import bindings, llama_cpp
from rest_local.llama.tokenizer import Lease, Tokenizer
from rest_local.paths import cache_dir, write_atomically

_hashes: dict[object, str] = {}  # Vocabulary's cache key -> hash, in this process


class Identity(NamedTuple):
    """The vocabulary as a datastore records it: the fields of retrieval's VocabularyId."""

    hash: str
    size: int
    name: str


class SpecialIds(NamedTuple):
    """The special tokens of a vocabulary, None where it has no such token. `add_bos` and the like: whether a text gets
    one.
    """

    bos: int | None
    eos: int | None
    eot: int | None
    sep: int | None
    fim_prefix: int | None
    fim_suffix: int | None
    fim_middle: int | None
    fim_rep: int | None
    fim_sep: int | None
    add_bos: bool
    add_eos: bool
    add_sep: bool

    @classmethod
    def read(cls, pointer: int) -> SpecialIds:
        """Ask llama.cpp for those of a llama_vocab_p."""

        def token(function: Callable[[int], int]) -> int | None:
            found = function(pointer)
            return None if found == bindings.LLAMA_TOKEN_NULL else found

        return cls(
            bos=token(bindings.llama_vocab_bos),
            eos=token(bindings.llama_vocab_eos),
            eot=token(bindings.llama_vocab_eot),
            sep=token(bindings.llama_vocab_sep),
            fim_prefix=token(bindings.llama_vocab_fim_pre),
            fim_suffix=token(bindings.llama_vocab_fim_suf),
            fim_middle=token(bindings.llama_vocab_fim_mid),
            fim_rep=token(bindings.llama_vocab_fim_rep),
            fim_sep=token(bindings.llama_vocab_fim_sep),
            add_bos=bool(bindings.llama_vocab_get_add_bos(pointer)),
            add_eos=bool(bindings.llama_vocab_get_add_eos(pointer)),
            add_sep=bool(bindings.llama_vocab_get_add_sep(pointer)),
        )


# Opens the same vocabulary on a machine without the model's file. Can be pickled.
Opener = Callable[[], AbstractContextManager["Vocabulary"]]


class Vocabulary:
    """The vocabulary of one loaded model.

    `pointer` is a llama_vocab_p, `name` is for messages. `cache_key` identifies the file; vocabularies with the same
    key are hashed once per process. `ship` makes an opener for other machines. `lease` keeps the pointer valid while it
    is used.
    """

    def __init__(
        self, pointer: int, name: str, cache_key: object = None, ship: Callable[[], Opener] | None = None
    ) -> None:
        self.lease = Lease(pointer, lambda: ModelError(f"vocabulary {name}: its model is closed; open it again"))
        self._tokenizer = Tokenizer(self.lease, name)
        self.name = name
        self._ship = ship
        self._cache_key = cache_key
        self._is_end: dict[int, bool] = {}  # a cache of `is_end`
        self._pieces: dict[int, bytes] = {}  # a cache; some 15 MB for all tokens of a vocabulary of 150 000
        self._grammar_tokens: Tokens | None = None
        self._grammar_lock = threading.Lock()
        self.size: int = bindings.llama_vocab_n_tokens(pointer)
        self.type: int = bindings.llama_vocab_type(pointer)
        self.ids = SpecialIds.read(pointer)

    @property
    def pointer(self) -> int:
        """Return the llama_vocab_p. Raises ModelError after the model was closed."""
        return self.lease.pointer

    def tokenize(
        self,
        text: str | bytes,
        *,
        special: bool = False,
        add_special: bool = False,
        most: int | None = None,
    ) -> NDArray[np.int32]:
        """Return the token ids of a text, int32 [n].

        Invalid UTF-8 and lone surrogates are replaced first, so llama.cpp gets valid UTF-8 only. Time and memory are
        linear in the text, including special tokens, and no text overflows the stack of a thread
        (`rest_local.llama.tokenizer`).

        Args:
            text: any text, bytes as UTF-8
            special: text that spells a special token becomes that token (for templates; never for untrusted text)
            add_special: add BOS and EOS if the model is configured so
            most: stop reading the text after more tokens than this, so a longer result may be incomplete

        Raises:
            ServiceClosed: the thread was stopped (`rest_local.stop`)
            ModelError: the model is closed meanwhile
        """
        data = text.encode("utf-8", "replace") if isinstance(text, str) else text
        return self._tokenizer.tokenize(data.decode("utf-8", "replace"), special, add_special, most)

    def ship(self) -> Opener | None:
        """Return an opener for another machine, with some MB of the file, or None if the vocabulary has no file. Raises
        ModelNotFound, ModelInvalid if the file changed.
        """
        return self._ship() if self._ship else None

    def piece(self, token: int, special: bool = True) -> bytes:
        """Return all bytes of one token (llama-cpp-python cuts them at 32). About 1 us for the first call, then 0.1 us.

        A piece can be part of a character. `special=False` renders control tokens as nothing. Raises ValueError for an
        id outside [0, size), because llama.cpp would abort the process.
        """
        if special and (known := self._pieces.get(token)) is not None:
            return known
        if not 0 <= token < self.size:
            raise ValueError(f"token {token} is outside the vocabulary {self.name} of {self.size} tokens")
        # A new buffer for each call, because ctypes releases the GIL and threads would overwrite each other's pieces.
        buffer = ctypes.create_string_buffer(64)
        with self.lease.use() as pointer:
            length = llama_cpp.llama_token_to_piece(pointer, token, buffer, 64, 0, special)
            if length < 0:
                buffer = ctypes.create_string_buffer(-length)
                length = llama_cpp.llama_token_to_piece(pointer, token, buffer, -length, 0, special)
        piece = buffer.raw[: max(length, 0)]
        if special:
            self._pieces[int(token)] = piece
        return piece

    def is_end(self, token: int) -> bool:
        """Return True if a generation ends at this token (EOS, EOT, end of message ...)."""
        known = self._is_end.get(token)  # a call of llama.cpp takes ten times as long
        if known is None:
            if not 0 <= token < self.size:
                return False
            known = self._is_end[int(token)] = bool(llama_cpp.llama_vocab_is_eog(self.pointer, token))
        return known

    @cached_property
    def ends(self) -> NDArray[np.int32]:
        """Return all tokens at which a generation ends. About 0.05 s for 150 k tokens, once per model."""
        is_end, pointer = llama_cpp.llama_vocab_is_eog, self.pointer
        return np.array([token for token in range(self.size) if is_end(pointer, token)], np.int32)

    def is_control(self, token: int) -> bool:
        """Return True if the token is a control token, not text."""
        return 0 <= token < self.size and bool(llama_cpp.llama_vocab_is_control(self.pointer, token))

    def special_token(self, text: str) -> int | None:
        """Return the control token with this spelling, or None."""
        tokens = self.tokenize(text, special=True)
        token = int(tokens[-1]) if len(tokens) else -1  # the last, because some vocabularies add a space in front
        return token if self.is_control(token) and self.piece(token) == text.encode() else None

    def grammar_tokens(self) -> Tokens:
        """Return the vocabulary for grammars. The first call takes most of a second at 128 000 tokens."""
        with self._grammar_lock:
            if self._grammar_tokens is None:
                hidden = bindings.LLAMA_TOKEN_ATTR_CONTROL | bindings.LLAMA_TOKEN_ATTR_UNKNOWN
                hidden |= bindings.LLAMA_TOKEN_ATTR_UNUSED
                attribute, pointer = bindings.llama_vocab_get_attr, self.pointer
                special = [token for token in range(self.size) if attribute(pointer, token) & hidden]
                self._grammar_tokens = Tokens(
                    pieces_of(self), special, self.ends.tolist(), lambda text: self.tokenize(text).tolist()
                )
            return self._grammar_tokens

    @cached_property
    def hash(self) -> str:
        """Return the sha256, hex, of the kind of tokenizer, the special ids and every piece in order. It is the same
        for all models with one tokenizer, whatever size the vocabulary is padded to. A third of a second for 150 k
        tokens, once per file: the cache directory keeps it.

        Pieces are hashed in the vocabulary's spelling, with a flag for single bytes; with the kind of tokenizer these
        determine the bytes. Scores and other attributes are left out, because they do not change the meaning of an id,
        and converters (even llama.cpp itself, depending on the model's name) set them differently for one tokenizer.
        """
        if self._cache_key is None:
            return _digest_of(self)
        if self._cache_key not in _hashes:
            _hashes[self._cache_key] = _kept_digest_of(self, self._cache_key)
        return _hashes[self._cache_key]

    @property
    def identity(self) -> Identity:
        """Return hash, size and name, which a datastore records."""
        return Identity(self.hash, self.size, self.name)


def pieces_of(vocabulary: Vocabulary) -> list[bytes]:
    """Return `Vocabulary.piece` of each token, in a third of the time of as many calls."""
    found: list[bytes] = []
    buffer = ctypes.create_string_buffer(64)
    with vocabulary.lease.use() as pointer:
        for token in range(vocabulary.size):
            length = llama_cpp.llama_token_to_piece(pointer, token, buffer, 64, 0, True)
            found.append(buffer.raw[: max(length, 0)])
    return [piece or vocabulary.piece(token) for token, piece in enumerate(found)]


def _kept_digest_of(vocabulary: Vocabulary, key: object) -> str:
    """Return the digest that the cache directory has for this key, or compute it and keep it there."""
    name = hashlib.sha256(json.dumps(key, default=str).encode()).hexdigest()[:32]
    with suppress(OSError, UnicodeDecodeError):
        kept = (cache_dir() / f"vocabulary-{name}").read_text("ascii")
        if re.fullmatch("[0-9a-f]{64}", kept):
            return kept
    digest = _digest_of(vocabulary)
    with suppress(OSError):  # It only costs time later.
        write_atomically(cache_dir() / f"vocabulary-{name}", digest.encode())
    return digest


def _digest_of(vocabulary: Vocabulary) -> str:
    pointer, text, attribute = vocabulary.pointer, bindings.llama_vocab_get_text, bindings.llama_vocab_get_attr
    attributes = np.fromiter((attribute(pointer, i) for i in range(vocabulary.size)), np.int32, vocabulary.size)
    used = np.flatnonzero(~(attributes & bindings.LLAMA_TOKEN_ATTR_UNUSED).astype(bool))
    size = int(used[-1]) + 1 if len(used) else 0  # unused ids at the end only pad the matrix
    pieces = [text(pointer, i) for i in range(size)]
    is_byte = (attributes[:size] & bindings.LLAMA_TOKEN_ATTR_BYTE).astype(bool)
    lengths = np.fromiter(map(len, pieces), "<u4", size)
    ids = vocabulary.ids
    fim = (ids.fim_prefix, ids.fim_suffix, ids.fim_middle, ids.fim_rep, ids.fim_sep)
    special = (ids.bos, ids.eos, ids.eot, *fim)
    digest = hashlib.sha256(f"rest-local vocabulary 1 {vocabulary.type} {size} {special}".encode())
    for part in (lengths.tobytes(), np.packbits(is_byte).tobytes(), b"".join(pieces)):
        digest.update(part)
    return digest.hexdigest()


class Detokenizer:
    """An incremental decoder of tokens as UTF-8, which holds back three bytes at most. `piece` gives token bytes."""

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        self._piece = piece
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """Return the text that the token completes; empty inside a character. U+FFFD only stands for invalid bytes."""
        return self._decoder.decode(self._piece(token))

    def finish(self) -> str:
        """Return the last text: U+FFFD for an incomplete character, else nothing. The next `feed` begins a new text."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
