"""Text to token ids through llama.cpp, in bounded pieces that change no token.

Contract: special tokens are found in one pass (`special`), what is between them is tokenized in parts (`splitting`), so
the cost is linear, no part overflows a thread's stack, and between two parts a stop of the thread (`stop`) is heeded.
llama.cpp's own `llama_tokenize` of the whole text gives the same tokens, where it survives it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property

import llama_cpp
import numpy as np
from llama_cpp import llama_cpp as bindings
from numpy.typing import NDArray

from rest_local import stop
from rest_local.errors import ModelError, OptionError
from rest_local.llama.special import SpecialToken, SpecialTokens
from rest_local.llama.splitting import Places, fits

MAX_TEXT_BYTES = 1 << 26
"""Of what llama.cpp is given at once; it counts bytes in int32. Only WordPiece, Unigram and the like take more than a
part: these follow the whole text anyway, without recursion."""

MEMO_CHARACTERS = 64
"""Stretches that are no longer are tokenized once in a text: those between the markers of a conversation recur."""

_NOT_TEXT = bindings.LLAMA_TOKEN_ATTR_CONTROL | bindings.LLAMA_TOKEN_ATTR_UNKNOWN
_SPECIAL = _NOT_TEXT | bindings.LLAMA_TOKEN_ATTR_USER_DEFINED
_SPLIT_KINDS = (bindings.LLAMA_VOCAB_TYPE_SPM, bindings.LLAMA_VOCAB_TYPE_BPE)


class Lease:
    """A pointer that is not freed while it is used: `end` waits for those in `use`, and has later ones raise."""

    def __init__(self, pointer: int, closed: Callable[[], ModelError]) -> None:
        self._pointer: int | None = pointer
        self._closed = closed
        self._users = 0
        self._free = threading.Condition()

    @property
    def pointer(self) -> int:
        """Raises what `closed` gives, after `end`."""
        if self._pointer is None:
            raise self._closed()
        return self._pointer

    @contextmanager
    def use(self) -> Iterator[int]:
        """The pointer, valid in the block."""
        with self._free:
            pointer = self.pointer
            self._users += 1
        try:
            yield pointer
        finally:
            with self._free:
                self._users -= 1
                self._free.notify_all()

    def end(self) -> None:
        """Returns when the last block is left; none lasts longer than a part takes, milliseconds."""
        with self._free:
            self._pointer = None
            self._free.wait_for(lambda: not self._users)


class Tokenizer:
    """Of one vocabulary; any thread."""

    def __init__(self, lease: Lease, name: str) -> None:
        self._lease, self._name = lease, name

    def tokenize(self, text: str, special: bool, add_special: bool, most: int | None) -> NDArray[np.int32]:
        """As `Vocabulary.tokenize`, of text without lone surrogates."""
        before, after = self._added if add_special else ([], [])
        found: list[NDArray[np.int32]] = [np.array(before, np.int32)]
        count = len(before)
        for tokens in self._pieces(text, special):
            found.append(tokens)
            count += len(tokens)
            if most is not None and count > most:
                return np.concatenate(found)
            stop.check()
        return np.concatenate([*found, np.array(after, np.int32)])

    def _pieces(self, text: str, special: bool) -> Iterator[NDArray[np.int32]]:
        memo: dict[str, NDArray[np.int32]] = {}
        for stretch in (self._special if special else self._user_defined).split(text):
            if isinstance(stretch, int):
                yield np.array([stretch], np.int32)
            elif len(stretch) > MEMO_CHARACTERS:
                yield from self._stretch(stretch)
            else:
                if stretch not in memo:
                    memo[stretch] = self._call(stretch)
                yield memo[stretch]

    def _stretch(self, text: str) -> Iterator[NDArray[np.int32]]:
        """Plain text without special tokens."""
        if fits(text) or not self._splits:
            yield self._call(text)
            return
        first = True
        for part in self._places.parts(text):
            yield self._call(part) if first else self._continued(part)
            first = False

    def _continued(self, part: str) -> NDArray[np.int32]:
        """Without the space that SentencePiece puts in front: a line break takes it, and both are dropped."""
        begun = self._begun
        if not len(begun):
            return self._call(part)
        return self._call("\n" + part)[len(begun) :]

    @cached_property
    def _begun(self) -> NDArray[np.int32]:
        """What a line break in front of a part becomes; empty where no space is put in front of a text."""
        tokens = self._call("\n")
        return tokens if len(tokens) > 1 and self._kind == bindings.LLAMA_VOCAB_TYPE_SPM else tokens[:0]

    @cached_property
    def _splits(self) -> bool:
        if self._kind not in _SPLIT_KINDS:
            return False
        return not len(self._begun) or self._places.breaks_stand_alone

    @cached_property
    def _kind(self) -> int:
        with self._lease.use() as pointer:
            return int(bindings.llama_vocab_type(pointer))

    @cached_property
    def _added(self) -> tuple[list[int], list[int]]:
        """What `add_special` puts in front and at the end."""
        with self._lease.use() as pointer:
            tokens = [int(token) for token in self._whole(pointer, b"", add_special=True)]
            begins = bindings.llama_vocab_get_add_bos(pointer) or self._kind == bindings.LLAMA_VOCAB_TYPE_WPM
        return (tokens[:1], tokens[1:]) if begins else ([], tokens)

    @cached_property
    def _spelled(self) -> list[tuple[str, int]]:
        """Every token as the vocabulary spells it, with its attributes. 0.1 s for 150 k tokens."""
        text, attribute = bindings.llama_vocab_get_text, bindings.llama_vocab_get_attr
        with self._lease.use() as pointer:
            size = bindings.llama_vocab_n_tokens(pointer)
            return [(text(pointer, i).decode("utf-8", "replace"), attribute(pointer, i)) for i in range(size)]

    @cached_property
    def _special(self) -> SpecialTokens:
        return SpecialTokens(self._marked(_SPECIAL, 0))

    @cached_property
    def _user_defined(self) -> SpecialTokens:
        return SpecialTokens(self._marked(_SPECIAL, _NOT_TEXT))

    def _marked(self, wanted: int, unwanted: int) -> Iterable[SpecialToken]:
        left, right = bindings.LLAMA_TOKEN_ATTR_LSTRIP, bindings.LLAMA_TOKEN_ATTR_RSTRIP
        for number, (text, attributes) in enumerate(self._spelled):
            if attributes & wanted and not attributes & unwanted:
                yield SpecialToken(text, number, bool(attributes & left), bool(attributes & right))

    @cached_property
    def _places(self) -> Places:
        texts = [text for text, attributes in self._spelled if not attributes & _SPECIAL]
        return Places([*(text.replace("\N{LOWER ONE EIGHTH BLOCK}", " ") for text in texts), *map(_as_bytes, texts)])

    def _call(self, text: str) -> NDArray[np.int32]:
        with self._lease.use() as pointer:
            return self._whole(pointer, text.encode())

    def _whole(self, pointer: int, data: bytes, add_special: bool = False) -> NDArray[np.int32]:
        if len(data) > MAX_TEXT_BYTES:
            raise OptionError(f"text of {len(data)} bytes: at most {MAX_TEXT_BYTES} are tokenized at once; split it")
        tokens = np.empty(len(data) // 3 + 16, np.int32)
        for _ in range(2):
            address = tokens.ctypes.data_as(bindings.llama_token_p)
            count = llama_cpp.llama_tokenize(pointer, data, len(data), address, len(tokens), add_special, False)
            if count >= 0:
                result: NDArray[np.int32] = tokens[:count].copy()
                return result
            tokens = np.empty(-count, np.int32)
        raise ModelError(f"vocabulary {self._name}: llama.cpp cannot tokenize a text of {len(data)} bytes; split it")


def _as_bytes(text: str) -> str:
    """What a token stands for where the vocabulary spells bytes in GPT-2's alphabet; others are left as they are."""
    return text.translate(_BYTES).encode("latin-1", "replace").decode("utf-8", "replace")


def _alphabet() -> dict[int, int]:
    """GPT-2's: visible bytes stand for themselves, the others for the characters from U+0100 on."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {256 + place: byte for place, byte in enumerate(hidden)}


_BYTES = _alphabet()
