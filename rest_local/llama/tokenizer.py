"""Turn text into token ids through llama.cpp, in bounded pieces that change no token.

Contract: special tokens are found in one pass (`SpecialTokens`), the text between them is tokenized in parts
(`SafeCuts`). So the cost is linear, no part overflows the stack of a thread, and the thread can be stopped between two
parts (`stop`). `llama_tokenize` of the whole text gives the same tokens, unless it crashes.

`SpecialTokens` splits a text into special tokens and the plain stretches between them. The result equals llama.cpp's
own partition, whose cost is quadratic in the number of special tokens (it scans its list of fragments from the front
for each). Longer special tokens are matched before shorter ones, and the matches of one token from left to right.
"""

from __future__ import annotations

import re
import string
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rest_local import stop
from rest_local.errors import ModelError, OptionError
from rest_local.llama.loaded import bindings, llama_cpp

_SPACE = " \t\n\v\f\r"  # C's isspace


class SpecialToken(NamedTuple):
    """A special token. White space before it is dropped with `lstrip`, after it with `rstrip`."""

    text: str
    id: int
    lstrip: bool = False
    rstrip: bool = False


class SpecialTokens:
    """The special tokens to search for. Construction takes about 10 ms for 1 000 tokens."""

    def __init__(self, tokens: Iterable[SpecialToken]) -> None:
        longest_first = sorted((t for t in tokens if t.text), key=lambda t: -len(t.text.encode()))
        self._tokens = {token.text: token for token in reversed(longest_first)}
        self._ordered = list(reversed(self._tokens.values()))
        self._pattern = _compiled([token.text for token in self._ordered]) if self._tokens else None
        self._may_overlap = _may_overlap(self._ordered)

    def split(self, text: str) -> Iterator[str | int]:
        """Yield stretches of plain text, none empty, and ids, in order; linear in the text. Lazy if none overlap."""
        if self._pattern is None:
            found: Iterable[tuple[int, int, SpecialToken]] = ()
        elif self._may_overlap:
            found = self._longest_first(text)
        else:
            found = ((m.start(), m.end(), self._tokens[m.group()]) for m in self._pattern.finditer(text))
        at = 0
        for start, end, token in found:
            before = text[at:start].rstrip(_SPACE) if token.lstrip else text[at:start]
            if before:
                yield before
            yield token.id
            at = end
            while token.rstrip and at < len(text) and text[at] in _SPACE:
                at += 1
        if at < len(text):
            yield text[at:]

    def _longest_first(self, text: str) -> list[tuple[int, int, SpecialToken]]:
        """Search the whole text for each token, the longest first. The longer of two overlapping matches wins."""
        found: list[tuple[int, int, SpecialToken]] = []
        stretches = [(0, len(text))]
        for token in self._ordered:
            left: list[tuple[int, int]] = []
            for start, end in stretches:
                while (at := text.find(token.text, start, end)) >= 0:
                    found.append((at, at + len(token.text), token))
                    before = len(text[start:at].rstrip(_SPACE)) if token.lstrip else at - start
                    if before:
                        left.append((start, start + before))
                    start = at + len(token.text)
                    while token.rstrip and start < end and text[start] in _SPACE:
                        start += 1
                if start < end:
                    left.append((start, end))
            stretches = left
        return sorted(found)


def _may_overlap(tokens: list[SpecialToken]) -> bool:
    """Return True if two matches can overlap without one containing the other. Then the leftmost match is not always
    the right one. Runs of one character (line breaks, spaces) overlap too, but with the same result.
    """
    strips = any(token.lstrip or token.rstrip for token in tokens)
    if strips and any(token.text[0] in _SPACE or token.text[-1] in _SPACE for token in tokens):
        return True
    texts = [token.text for token in tokens if len(set(token.text)) > 1]
    runs = {token.text[0] for token in tokens if len(token.text) > 1 and len(set(token.text)) == 1}
    if any(text[0] in runs or text[-1] in runs for text in texts):
        return True
    beginnings = {text[:size] for text in texts for size in range(1, len(text))}
    return any(text[at:] in beginnings for text in texts for at in range(1, len(text)))


def _compiled(longest_first: list[str]) -> re.Pattern[str]:
    try:
        return re.compile(_trie_pattern(longest_first))
    except RecursionError:  # a hostile vocabulary: hundreds of tokens, each one character longer than the last
        return re.compile("|".join(map(re.escape, longest_first)))


def _trie_pattern(texts: list[str]) -> str:
    """Return a pattern for the longest of the texts at a place, in time that does not depend on their number."""
    trie: dict[str, dict] = {}  # type: ignore[type-arg]
    for text in texts:
        node = trie
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return _pattern_of(trie)


def _pattern_of(node: dict[str, dict]) -> str:  # type: ignore[type-arg]
    """Return a node's pattern. A loop writes chains without branches, so only branches add to the call depth."""
    written = ""
    while len(node) == 1 and "" not in node:
        ((character, node),) = node.items()
        written += re.escape(character)
    branches = [re.escape(character) + _pattern_of(below) for character, below in node.items() if character]
    if not branches:
        return written
    return f"{written}(?:{'|'.join(branches)}){'?' if '' in node else ''}"


# Maximum size of a text for one call of llama.cpp, which counts bytes in int32. Only WordPiece, Unigram and similar
# vocabularies get more than a part at once: they process the whole text anyway, without recursion.
MAX_TEXT_BYTES = 1 << 26

# Stretches up to this length are tokenized once in a text, because those between the markers of a chat recur.
MEMO_CHARACTERS = 64

# Maximum length of a part. Each call compiles the pre-tokenizer's patterns again, in 0.05 to 2 ms.
PART_CHARACTERS = 8_000

# Maximum length of a part with a long run that one match could cover. Fits every pre-tokenizer in 512 KB of stack.
SHORT_PART_CHARACTERS = 1_400

_NOT_TEXT = bindings.LLAMA_TOKEN_ATTR_CONTROL | bindings.LLAMA_TOKEN_ATTR_UNKNOWN
_SPECIAL = _NOT_TEXT | bindings.LLAMA_TOKEN_ATTR_USER_DEFINED
_SPLIT_KINDS = (bindings.LLAMA_VOCAB_TYPE_SPM, bindings.LLAMA_VOCAB_TYPE_BPE)

_MARKS = string.punctuation.replace("'", "") + string.digits
_WIDE_MARKS = "\u3001\u3002\uff0c\uff01\uff1f\uff1b\uff1a"  # Chinese and Japanese text has these, and no spaces
_LETTER = r"[^\W\d_]"
# A run that one match can cover: a word or a number, white space, words with single spaces between them (EXAONE).
_LONG_RUN = re.compile(r"\S{700}|\s{700}|[^\n0-9!-/:-@\[-`{-~]{1400}")


class Lease:
    """A pointer that is not freed during its use: `end` waits for all blocks of `use`, and later ones raise."""

    def __init__(self, pointer: int, closed: Callable[[], ModelError]) -> None:
        self._pointer: int | None = pointer
        self._closed = closed
        self._users = 0
        self._free = threading.Condition()

    @property
    def pointer(self) -> int:
        """Return the pointer. After `end`, raises the error that `closed` returns."""
        if self._pointer is None:
            raise self._closed()
        return self._pointer

    @contextmanager
    def use(self) -> Iterator[int]:
        """Yield the pointer, which is valid in the block."""
        with self._free:
            pointer = self.pointer
            self._users += 1
        try:
            yield pointer
        finally:
            with self._free:
                self._users -= 1
                if self._pointer is None:
                    self._free.notify_all()

    def end(self) -> None:
        """Wait until the last block has ended. A block lasts as long as one part takes: milliseconds."""
        with self._free:
            self._pointer = None
            self._free.wait_for(lambda: not self._users)


class Tokenizer:
    """The tokenizer of one vocabulary, for any thread."""

    def __init__(self, lease: Lease, name: str) -> None:
        self._lease, self._name = lease, name

    def tokenize(self, text: str, special: bool, add_special: bool, most: int | None) -> NDArray[np.int32]:
        """Tokenize text without lone surrogates, as `Vocabulary.tokenize`."""
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
                yield from self._plain(stretch)
            else:
                if stretch not in memo:
                    memo[stretch] = self._call(stretch)
                yield memo[stretch]

    def _plain(self, text: str) -> Iterator[NDArray[np.int32]]:
        """Yield the tokens of a long stretch without special tokens, part by part."""
        if len(text) <= PART_CHARACTERS:
            yield self._part(text, False)
        elif not self._can_split:
            yield self._call(text)
        else:
            for number, part in enumerate(self._cuts.parts(text)):
                yield self._part(part, number > 0)

    def _part(self, text: str, continued: bool) -> NDArray[np.int32]:
        """Tokenize at most `PART_CHARACTERS`. Other text comes before a `continued` part."""
        if continued:
            return self._continued(text)
        if fits(text) or not self._can_split:
            return self._call(text)
        parts = enumerate(self._cuts.parts(text))
        return np.concatenate([self._part(part, number > 0) for number, part in parts])

    def _continued(self, part: str) -> NDArray[np.int32]:
        """Tokenize a part without the space that SentencePiece adds in front of a text. A line break before the part
        gets that space, and the tokens of both are dropped.
        """
        prefix = self._prefix
        if not len(prefix):
            return self._call(part)
        return self._call("\n" + part)[len(prefix) :]

    @cached_property
    def _prefix(self) -> NDArray[np.int32]:
        """Return the tokens of a line break before a part, or none if the vocabulary adds no space before a text."""
        tokens = self._call("\n")
        return tokens if len(tokens) > 1 and self._kind == bindings.LLAMA_VOCAB_TYPE_SPM else tokens[:0]

    @cached_property
    def _can_split(self) -> bool:
        if self._kind not in _SPLIT_KINDS:
            return False
        return not len(self._prefix) or self._cuts.breaks_stand_alone

    @cached_property
    def _kind(self) -> int:
        with self._lease.use() as pointer:
            return int(bindings.llama_vocab_type(pointer))

    @cached_property
    def _added(self) -> tuple[list[int], list[int]]:
        """Return the tokens that `add_special` adds before and after a text."""
        with self._lease.use() as pointer:
            tokens = [int(token) for token in self._whole(pointer, b"", add_special=True)]
            begins = bindings.llama_vocab_get_add_bos(pointer) or self._kind == bindings.LLAMA_VOCAB_TYPE_WPM
        return (tokens[:1], tokens[1:]) if begins else ([], tokens)

    @cached_property
    def _spelled(self) -> list[tuple[str, int]]:
        """Return the spelling and the attributes of every token. Takes 0.1 s for 150 k tokens."""
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
    def _cuts(self) -> SafeCuts:
        texts = [text for text, attributes in self._spelled if not attributes & _SPECIAL]
        return SafeCuts([*(text.replace("\N{LOWER ONE EIGHTH BLOCK}", " ") for text in texts), *map(_as_bytes, texts)])

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


def fits(text: str) -> bool:
    """Return True if a text can be tokenized without splitting it."""
    return len(text) <= SHORT_PART_CHARACTERS or (len(text) <= PART_CHARACTERS and not _LONG_RUN.search(text))


class SafeCuts:
    """The places at which a text can be cut so that its parts, tokenized separately, give the tokens of the whole.

    Long text must be cut because llama.cpp passes it to `std::regex`, which recurses for each character of a match.
    With libstdc++ each character takes 310 bytes of stack: a run of 1 700 characters ends a process whose threads have
    512 KB of stack, and 100 000 characters end one with 8 MB.

    A cut is safe if both hold:

    - No token of the vocabulary contains the two characters around the cut next to each other. Tokens are made by
      merging neighbours, so no token of the whole text can span the cut.
    - No pre-tokenizer of llama.cpp splits either side differently because the text ends or begins there. That holds
      after a letter: before a space and a letter, before a digit, and before a punctuation mark (no pattern looks back,
      and those that look ahead start from white space or digits). It also holds after a single line break between a
      visible character and a letter. It does not hold before an apostrophe, because for some pre-tokenizers `'s`
      belongs to the word.

    A part without such a place (a run of one letter or of blank lines) is cut at its end. The tokens there can differ
    from those of the whole text.

    `texts` are the texts of the tokens, in each reading that the spelling allows; U+FFFD stands for a part of a
    character. If `breaks_stand_alone`, no token contains a line break and another character. Construction takes 0.3 to
    0.7 s for 130 to 150 k tokens.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        joined = "\0".join(texts)
        self._cut = re.compile("(?s:.*)(?:" + "|".join(_cut_patterns(joined)) + ")")
        self.breaks_stand_alone = re.search(r"[^\0]\n|\n[^\0]", joined) is None

    def parts(self, text: str) -> Iterator[str]:
        """Yield `text` in parts of at most `PART_CHARACTERS` characters, none empty."""
        at = 0
        while at < len(text):
            size = SHORT_PART_CHARACTERS if _LONG_RUN.search(text, at, at + PART_CHARACTERS) else PART_CHARACTERS
            end = len(text)
            if end - at > size:
                safe = self._cut.match(text, at + 1, at + size + 1)  # one character more, for the lookahead
                end = safe.end() if safe else at + size
            yield text[at:end]
            at = end


def _cut_patterns(joined: str) -> Iterator[str]:
    """Yield patterns that match between two characters: one for each kind of place, without pairs inside a token."""
    seen: dict[str, set[str]] = {}
    for before, mark in re.findall(f"(.)(?=([{re.escape(_MARKS + _WIDE_MARKS)} ]))", joined):
        seen.setdefault(mark, set()).add(before)
    letters = {mark: "".join(c for c in string.ascii_letters if c not in seen.get(mark, ())) for mark in _MARKS + " "}
    for allowed in sorted(set(letters.values()) - {""}):
        marks = [mark for mark in _MARKS if letters[mark] == allowed]
        if marks:
            yield f"(?<=[{allowed}])(?=[{re.escape(''.join(marks))}])"
    if letters[" "]:
        yield f"(?<=[{letters[' ']}])(?= [A-Za-z])"
    for mark in _WIDE_MARKS:
        taken = seen.get(mark, set())
        if "\ufffd" not in taken:
            yield f"(?<={_without(_LETTER, taken)})(?={mark})"
    after = set(re.findall(r"\n([^\0])", joined))
    wide = "" if "\ufffd" not in after else r"(?![^\x00-\x7f])"
    yield rf"(?<=\S\n){wide}(?={_without(_LETTER, after)})"


def _without(kind: str, characters: set[str]) -> str:
    """Return a class of characters, written `[^...]`, without some of them."""
    return kind[:-1] + re.escape("".join(sorted(characters))) + "]"


def _as_bytes(text: str) -> str:
    """Return a token's text if the vocabulary spells bytes in GPT-2's alphabet. Other spellings do not change."""
    return text.translate(_BYTES).encode("latin-1", "replace").decode("utf-8", "replace")


# GPT-2's alphabet: a visible byte is its own character, the others are the characters from U+0100 on.
_BYTES = dict(enumerate([*range(33), *range(127, 161), 173], 256))
