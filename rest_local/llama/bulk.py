"""Tokenizes many texts with few calls of llama.cpp: each distinct word of all texts is tokenized once.

A text is cut into words at places where llama.cpp's tokens never continue, so the tokens of a text are those of its
words, one after another. The tokens of a word are kept, and most words of a text have occurred before. Words that have
not are tokenized by llama.cpp, thousands in one call. So every id is one that llama.cpp gave, and only the places of
the cuts are ours. There are two kinds of them:

- BPE vocabularies whose pre-tokenizer is known here (`_PATTERNS`): llama.cpp splits the text by a regular expression
  and tokenizes each piece on its own. The words are these pieces. In ASCII the expression means the same in Python.
  Lines with other characters are tokenized by llama.cpp as they are; a line break before a line that begins with
  visible ASCII, blanks aside, always ends a piece.
- SentencePiece vocabularies, which have no pre-tokenizer: tokens are made by joining neighbours, and a join of two
  neighbours is possible only if a token contains the two bytes next to each other. Words end where no token does.

For every other vocabulary, and if a sample text gives other tokens than llama.cpp, there is no `BulkTokenizer`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, product

import numpy as np
from numpy.typing import NDArray

from rest_local import stop
from rest_local.llama.loaded import bindings

Tokens = NDArray[np.int32]

MOST_WORDS = 1 << 19  # words that are kept, about 120 bytes each. At more of them all are forgotten
LONGEST_WORD = 128  # bytes of the longest word that is kept. Longer ones hardly occur again
CALL_BYTES = 6_000  # in one call: see `tokenizer.PART_CHARACTERS`
LONG_RUN = 700
"""A text with a word of this length is left to `Tokenizer`, which keeps llama.cpp from recursing as deep as it."""

_SPACE = rb" \t\n\r\f\v"


def _pattern(digits: bytes) -> re.Pattern[bytes]:
    """The pieces of the pre-tokenizers of Llama 3 (digits by threes) and Qwen 2 (one by one), for ASCII.

    The same as `'s|'t|..|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}|..`: at most one of the alternatives before the last can
    match at a place, except for a contraction, which comes first among those that begin with a mark.
    """
    return re.compile(
        rb"[A-Za-z]+| [A-Za-z]+|[0-9]%(digits)b|[%(space)b]*[\r\n]+|[%(space)b]+(?![^%(space)b])"
        rb"|'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])|[^\r\nA-Za-z0-9][A-Za-z]+"
        rb"| ?[^%(space)bA-Za-z0-9]+[\r\n]*|[%(space)b]+" % {b"digits": digits, b"space": _SPACE}
    )


_PATTERNS = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"), _pattern(b"{1,3}")),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _pattern(b"")),
}
# A line, with those after it that do not begin with visible ASCII.
_BLOCK = re.compile(rb"[^\n]*(?:\n(?![ \t]*[!-~])[^\n]*)*\n?")

SAMPLE = """#!/usr/bin/env python3
# -*- coding: utf-8 -*-

def main(argv=None):\t\t# it's what they'd've done; I'LL, WE'RE, he'S 'sx 't' ''re
    \"\"\"Return 0.  Two spaces.   Three\u2026\"\"\"
    for i in range(1, 1000000):\x20\x20
        print(f"{i:>08.3f}%", 0x1F, 12, 123, 1234, 12345.678e-9, a[i]['key'], end="\\n\\n")


        x = {**y, "caf\u00e9": None} \r\n\r\n\tif x != y or not(z): return\r\n  \f \v
    #include <stdio.h> // http://example.com/?q=a+b&c=d#e  ....  ---- ==== !!! ((())) camelCase HTTPServer A1b2
    \u4f60\u597d, \u043c\u0438\u0440 \U0001f600 na\u00efve\u00a0x\u2028y
   <|endoftext|> <s> </s> <unk> [INST] <0x0A> @@ ~~ `` ^^ || \\\\ $$ {}{}

   \n \n\n  end of text    """


Word = bytes | tuple[int]  # a piece of text in UTF-8, or the id of a special token


_MIXED = ("ab", "Cd", " ", "  ", "\t", "\n", "\r\n", "7", "1234", "(", "):", "'s", "'", "\u00e9", "\u3002", "_")


def samples() -> list[str]:
    """Texts that a wrong cut would tokenize differently: code, and every three kinds of text next to each other."""
    return [SAMPLE, SAMPLE.swapcase().replace("\n", "\r\n"), "".join(map("".join, product(_MIXED, repeat=3)))]


Call = Callable[[str], Tokens]  # llama.cpp: the token ids of a text that is neither long nor has special tokens, int32


class BulkTokenizer:
    """The tokenizer of one vocabulary for many texts. Not thread safe; threads would not make it faster.

    words: cuts a stretch of text into words (None: it has to stay whole; a word that is not ASCII may be any text), and
    gives each its tokens from llama.cpp, int32; split: a text to stretches of plain text and ids of special tokens;
    whole: the tokens of a text that must not be cut here.
    """

    def __init__(
        self, words: PiecesOfPattern | SeparatePairs, split: Callable[[str], Iterable[str | int]], whole: Call
    ) -> None:
        self._words, self._split, self._whole = words, split, whole
        self._known: dict[Word, bytes] = {}

    def __call__(self, texts: Sequence[str]) -> list[Tokens]:
        """The token ids of each text, int32, without BOS and EOS: those of `Vocabulary.tokenize`.

        Meant for about a megabyte at a time: while it works it needs some 15 bytes for each byte of text. Raises
        ServiceClosed if the thread was stopped (`rest_local.stop`), ModelError if the model is closed.
        """
        stop.check()
        if len(self._known) > MOST_WORDS:
            self._known.clear()
        cut = [self._cut(text) for text in texts]
        missing = set[Word]().union(*filter(None, cut)).difference(self._known)
        self._known.update(self._words.lookup(word for word in missing if isinstance(word, bytes)))
        self._known.update((word, _bytes(word)) for word in missing if isinstance(word, tuple))
        get = self._known.__getitem__
        pairs = zip(texts, cut, strict=True)
        found = [
            self._whole(text) if words is None else np.frombuffer(b"".join(map(get, words)), np.int32)
            for text, words in pairs
        ]
        for word in missing:
            if len(word) > LONGEST_WORD:
                del self._known[word]
        return found

    def _cut(self, text: str) -> list[Word] | None:
        words: list[Word] = []
        for stretch in self._split(text):
            if isinstance(stretch, int):
                words.append((stretch,))
                continue
            found = self._words.cut(stretch.encode("utf-8", "replace"))
            if found is None:
                return None
            words += found
        return words


def bulk_tokenizer(
    kind: int,
    pre: str,
    spelled: Sequence[tuple[str, int]],
    split: Callable[[str], Iterable[str | int]],
    call: Call,
    whole: Call,
) -> BulkTokenizer | None:
    """The bulk tokenizer of a vocabulary, None if its words are not known.

    kind: llama_vocab_type; pre: `tokenizer.ggml.pre`; spelled: text and attributes of every token; split: see
    `SpecialTokens.split`; call: one call of llama.cpp; whole: `Tokenizer.tokenize`. Takes 0.1 s.
    """
    words: PiecesOfPattern | SeparatePairs | None = None
    if kind == bindings.LLAMA_VOCAB_TYPE_BPE and pre in _PATTERNS:
        words = PiecesOfPattern(_PATTERNS[pre], call, whole)
    elif kind == bindings.LLAMA_VOCAB_TYPE_SPM:
        words = SeparatePairs.of([text for text, _ in spelled], call)
    if words is None:
        return None
    bulk = BulkTokenizer(words, split, whole)
    given = samples()
    same = all(np.array_equal(ids, whole(text)) for ids, text in zip(bulk(given), given, strict=True))
    return bulk if same else None


class PiecesOfPattern:
    """The words of a BPE vocabulary: the pieces that its pre-tokenizer makes."""

    def __init__(self, pattern: re.Pattern[bytes], call: Call, whole: Call) -> None:
        self._pieces, self._call, self._whole = pattern.findall, call, whole

    def cut(self, data: bytes) -> list[bytes] | None:
        if data.isascii():
            words: list[bytes] = self._pieces(data)
        else:
            words = []
            for plain, blocks in groupby(_BLOCK.findall(data), bytes.isascii):
                block = b"".join(blocks)
                words += self._pieces(block) if plain else [block] if block else []
        if words and max(map(len, words)) >= LONG_RUN and any(len(w) >= LONG_RUN and w.isascii() for w in words):
            return None
        return words

    def lookup(self, words: Iterable[bytes]) -> Iterator[tuple[bytes, bytes]]:
        """In one call: words with a separator after each, which is a token of its own there, and in none of them."""
        kinds: dict[bytes, list[bytes]] = {b"": [], b"a": [], b" a": [], b"0": []}
        for word in words:
            kinds[_separator(word)].append(word)
        for separator, alike in kinds.items():
            for batch in _batches(alike, len(separator)) if separator else ():
                yield from self._together(batch, separator)
            if not separator:
                yield from ((word, self._whole(word.decode()).tobytes()) for word in alike)

    def _together(self, words: list[bytes], separator: bytes) -> Iterator[tuple[bytes, bytes]]:
        text = b"".join(word + separator for word in words)
        # The pattern is llama.cpp's, so that it shows whether the words stay whole next to their separators.
        if self._pieces(text) == [piece for word in words for piece in (word, separator)]:
            tokens = self._call(text.decode())
            ends = np.flatnonzero(tokens == tokens[-1])
            if len(ends) == len(words):
                yield from zip(words, _slices(tokens, [0, *(ends[:-1] + 1)], ends), strict=True)
                return
        yield from ((word, self._call(word.decode()).tobytes()) for word in words)


def _separator(word: bytes) -> bytes:
    """What ends a word as another word, so that both stay what they are; empty for a word that is no piece."""
    if not word.isascii():
        return b""
    if word.isdigit():
        return b"a"
    return b" a" if word.isspace() and word[-1:] not in b"\r\n" else b"0"


class SeparatePairs:
    """The words of a SentencePiece vocabulary: between two bytes that no token has next to each other, a word ends.

    joined: bool [65536], whether a pair of bytes may be within a token.
    """

    def __init__(self, joined: NDArray[np.bool_], call: Call) -> None:
        self._apart, self._call = ~joined, call
        first = call("\n")
        self._break = int(first[-1])
        self._prefix = b" " if len(first) > 1 else b""  # the space that is added in front of a text

    @staticmethod
    def of(texts: Sequence[str], call: Call) -> SeparatePairs | None:
        """For a vocabulary with these tokens. None if a line break can be within a token: then it separates nothing."""
        spelled = [text.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode() for text in texts]
        if any(b"\n" in text and text != b"\n" for text in spelled):
            return None
        data = np.frombuffer(b"\n".join(spelled), np.uint8).astype(np.uint16)
        joined = np.zeros((256, 256), np.bool_)
        joined[data[:-1], data[1:]] = True
        joined[0x80:] = joined[:, 0x80:] = True  # bytes of one character, or one that is cut nowhere
        joined[10] = joined[:, 10] = False
        return SeparatePairs(joined.reshape(-1), call)

    def cut(self, data: bytes) -> list[bytes] | None:
        data = self._prefix + data
        values = np.frombuffer(data, np.uint8)
        pairs = (values[:-1].astype(np.uint16) << 8) | values[1:]
        ends = (np.flatnonzero(self._apart[pairs]) + 1).tolist()
        return [data[start:end] for start, end in zip([0, *ends], [*ends, len(data)], strict=True)]

    def lookup(self, words: Iterable[bytes]) -> Iterator[tuple[bytes, bytes]]:
        """In one call: words with a line break before each, which is a token of its own."""
        for batch in _batches(words, 1):
            if b"\n" in batch:
                yield b"\n", _bytes((self._break,))
                batch.remove(b"\n")
            tokens = self._call("\n" + b"\n".join(batch).decode())
            breaks = np.flatnonzero(tokens == self._break)
            yield from zip(batch, _slices(tokens, breaks + 1, [*breaks[1:], len(tokens)]), strict=True)


def _batches(words: Iterable[bytes], more: int) -> Iterator[list[bytes]]:
    """Words for one call each: of CALL_BYTES together, with `more` bytes for each, or a single longer one."""
    batch: list[bytes] = []
    size = 0
    for word in words:
        if batch and size + len(word) + more > CALL_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(word)
        size += len(word) + more
    if batch:
        yield batch


def _slices(tokens: Tokens, starts: Iterable[int], ends: Iterable[int]) -> Iterator[bytes]:
    data = tokens.tobytes()
    return (data[4 * start : 4 * end] for start, end in zip(starts, ends, strict=True))


def _bytes(ids: tuple[int]) -> bytes:
    return np.array(ids, np.int32).tobytes()
