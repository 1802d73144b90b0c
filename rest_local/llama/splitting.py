"""Where a text can be cut so that its parts, tokenized on their own, give the tokens of the whole.

Why: llama.cpp hands the text to `std::regex`, which recurses for each character of a match. With libstdc++ that is 310
bytes of stack each: a run of 1 700 characters ends a process whose threads have 512 KB of stack, 100 000 one with 8 MB.

A cut is safe where both hold:

- No token of the vocabulary holds the two characters at the cut next to each other. Tokens are made by merging
  neighbours, so no token of the whole text can span the cut.
- No pre-tokenizer of llama.cpp splits the text on either side differently because it ends or begins there. That holds
  before a space and a letter, before a digit and before a mark of punctuation, each after a letter (no pattern of its
  looks back; those that look ahead do so from white space or digits), and after a single line break that follows
  something visible and precedes a letter. Not before an apostrophe (`'s` belongs to the word for some).

Where a part has no such place (a run of one letter or of blank lines), it is cut at its end, and the tokens there can
differ from those of the whole.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Iterator

PART = 8_000
"""Characters of a part. Each call compiles the pre-tokenizer's patterns anew, 0.05 to 2 ms."""

SHORT_PART = 1_400
"""Of a part that holds a stretch which one match could take whole: within 512 KB of stack for every pre-tokenizer."""

_MARKS = string.punctuation.replace("'", "") + string.digits
_WIDE_MARKS = "\u3001\u3002\uff0c\uff01\uff1f\uff1b\uff1a"  # of Chinese and Japanese text, which has no spaces
_LETTER = r"[^\W\d_]"
# What one match can take: a word or a number, white space, words with single spaces between them (EXAONE's).
_LONG = re.compile(r"\S{700}|\s{700}|[^\n0-9!-/:-@\[-`{-~]{1400}")


def fits(text: str) -> bool:
    """Whether it need not be cut."""
    return len(text) <= SHORT_PART or (len(text) <= PART and not _LONG.search(text))


class Places:
    """The safe places of one vocabulary.

    `texts`: what the tokens stand for, in each reading that a spelling allows; U+FFFD is a part of a character.
    `breaks_stand_alone`: no token holds a line break and something else. 0.3 to 0.7 s for 130 to 150 k tokens.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        joined = "\0".join(texts)
        self._cut = re.compile("(?s:.*)(?:" + "|".join(_places(joined)) + ")")
        self.breaks_stand_alone = re.search(r"[^\0]\n|\n[^\0]", joined) is None

    def parts(self, text: str) -> Iterator[str]:
        """`text` in parts of at most `PART` characters, none empty."""
        at = 0
        while at < len(text):
            size = SHORT_PART if _LONG.search(text, at, at + PART) else PART
            end = len(text)
            if end - at > size:
                safe = self._cut.match(text, at + 1, at + size + 1)  # it looks one character ahead
                end = safe.end() if safe else at + size
            yield text[at:end]
            at = end


def _places(joined: str) -> Iterator[str]:
    """Patterns that match between two characters: each kind of place without the pairs that a token holds."""
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
            yield f"(?<={_but(_LETTER, taken)})(?={mark})"
    after = set(re.findall(r"\n([^\0])", joined))
    wide = "" if "\ufffd" not in after else r"(?![^\x00-\x7f])"
    yield rf"(?<=\S\n){wide}(?={_but(_LETTER, after)})"


def _but(kind: str, characters: set[str]) -> str:
    """A class of characters, written `[^...]`, without some."""
    return kind[:-1] + re.escape("".join(sorted(characters))) + "]"
