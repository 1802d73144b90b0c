"""Splits a text into special tokens and the plain stretches between them, in one pass.

Contract: the result equals llama.cpp's own partition, whose cost is quadratic in the number of special tokens (it scans
its list of fragments from the front for each). Longer special tokens are matched before shorter ones, and the matches
of one token from left to right. Knows nothing about models: texts and attributes go in, stretches and ids come out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_SPACE = " \t\n\v\f\r"  # C's isspace


class SpecialToken(NamedTuple):
    """A special token. `lstrip`, `rstrip`: white space before or after it is dropped."""

    text: str
    id: int
    lstrip: bool = False
    rstrip: bool = False


class SpecialTokens:
    """A set of special tokens to search for. Construction takes about 10 ms for 1 000 tokens."""

    def __init__(self, tokens: Iterable[SpecialToken]) -> None:
        longest_first = sorted((t for t in tokens if t.text), key=lambda t: -len(t.text.encode()))
        self._tokens = {token.text: token for token in reversed(longest_first)}
        self._ordered = list(reversed(self._tokens.values()))
        self._pattern = _compiled([token.text for token in self._ordered]) if self._tokens else None
        self._may_overlap = _may_overlap(self._ordered)

    def split(self, text: str) -> Iterator[str | int]:
        """Stretches of plain text, none empty, and ids, in order. Linear in the text. Lazy if no two of the special
        tokens can overlap."""
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
        """Search the whole text for each token, the longest first. Of two overlapping matches the longer one wins."""
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
    """Whether two matches can overlap without one containing the other. Then the leftmost match is not always the right
    one. Runs of one character (line breaks, spaces) overlap too, but with the same result."""
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
    """A pattern that matches the longest of the texts at a place, in time that does not depend on their number."""
    trie: dict[str, dict] = {}  # type: ignore[type-arg]
    for text in texts:
        node = trie
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return _pattern_of(trie)


def _pattern_of(node: dict[str, dict]) -> str:  # type: ignore[type-arg]
    """The pattern of a node. Chains without branches are written in a loop, so only branches add to the call depth."""
    written = ""
    while len(node) == 1 and "" not in node:
        ((character, node),) = node.items()
        written += re.escape(character)
    branches = [re.escape(character) + _pattern_of(below) for character, below in node.items() if character]
    if not branches:
        return written
    return f"{written}(?:{'|'.join(branches)}){'?' if '' in node else ''}"
