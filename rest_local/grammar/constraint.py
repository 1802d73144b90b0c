"""Restrict the next token by a grammar, the minimum length and bans, for the sampler and to prune drafts.

Contract: `allows`, `allowed`, `longest` and `forced` only look; `advance` changes the state. Nothing here sees logits.

Text that a grammar allows only one way (keys, punctuation, the rest of an enum, a forced call) is drafted. `Forced`
gives the text that is likely to follow, `ForcedText` its possible tokens, each with its kind. It is verified like any
other draft, so a wrong guess costs time and never changes a token.

Most grammars leave white space open between the tokens of JSON. There `Spacing` repeats the white space of this answer
at the last place of the same kind. Models split text as the vocabulary does, but not always: a model that does not
expect a key can begin it with a shorter token. So two tokens are proposed at each place, that of the vocabulary and the
first character alone. The last token of a draft can merge with text that is not known yet, so it is a kind of its own.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rest_local.errors import GenerationError
from rest_local.grammar.compiler import Tokens, readable
from rest_local.grammar.grammar import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher


class VocabularyLike(Protocol):
    """Lets a grammar constrain any vocabulary, the one of `rest_local.llama.vocabulary` or a fake."""

    @property
    def size(self) -> int: ...
    @property
    def ends(self) -> NDArray[np.int32]: ...
    def is_end(self, token: int) -> bool: ...
    def grammar_tokens(self) -> Tokens: ...


class Constraint:
    """The state of one generation, from its first token on. Not thread-safe.

    End tokens are forbidden until `min_tokens` tokens are generated, or always with `ignore_end`, but allowed in any
    case if the grammar allows nothing else. `banned` tokens are never allowed, because their logit bias is minus
    infinity.

    Measured with 152 000 tokens and a schema of 30 properties, one core of a Zen 4: a mask 18 us in the median and 165
    us at most, its ids another 23 us, one step 2 us, 16 tokens of a draft 38 us.
    """

    def __init__(
        self,
        vocabulary: VocabularyLike,
        grammar: Grammar | None = None,
        *,
        min_tokens: int = 0,
        ignore_end: bool = False,
        banned: Collection[int] = (),
    ) -> None:
        """Compile the grammar. Raises OptionError if that is impossible for this vocabulary."""
        self.vocabulary = vocabulary
        self.ignore_end, self.min_tokens = ignore_end, min_tokens
        self._banned = frozenset(banned)
        self._accepted = 0
        self._matcher: LLMatcher | None = None
        self._forced: Forced | None = None
        if grammar is not None:
            tokens = vocabulary.grammar_tokens()
            self._matcher = tokens.matcher(grammar.compiled_text)
            self._forced = Forced(tokens.matcher(grammar.compiled_text, ahead=True), tokens)

    @property
    def forbids_ends(self) -> bool:
        return self._forbids_ends_after(0)

    def _forbids_ends_after(self, n: int) -> bool:
        return self.ignore_end or self._accepted + n < self.min_tokens

    @property
    def never_forbids(self) -> bool:
        """Return True if every token is allowed at every place."""
        return self._matcher is None and not self._banned and not self.ignore_end and not self.min_tokens

    @property
    def is_free(self) -> bool:
        """Return True if nothing is forbidden from here on."""
        return self._matcher is None and not self._banned and not self.forbids_ends

    def allows(self, token: int) -> bool:
        """Return True if the token may come next, False for an id outside the vocabulary."""
        return self.longest([token]) == 1

    def longest(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens, from the first on, may follow in a row."""
        allowed = next((n for n, token in enumerate(tokens) if not self._may(token, n)), len(tokens))
        if self._matcher is None or not allowed:
            return allowed
        if self._matcher.is_stopped():  # llguidance expects no end token after a complete text
            return int(self.vocabulary.is_end(tokens[0]))
        return int(self._matcher.validate_tokens(list(tokens[:allowed])))

    def _may(self, token: int, n: int) -> bool:
        """Return True if the token is allowed n tokens from here, apart from the grammar."""
        if not 0 <= token < self.vocabulary.size or token in self._banned:
            return False
        return not (self._forbids_ends_after(n) and self.vocabulary.is_end(token))

    def allowed(self) -> NDArray[np.int32] | None:
        """Return the token ids that may come next, ascending, int32, or None for all. The sampler applies logit biases.
        Raises GenerationError if the grammar allows no token or needs too much work.
        """
        if self._matcher is None and not self.forbids_ends:
            return None
        if self._matcher is None:
            allowed = np.ones(self.vocabulary.size, bool)
        else:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            self._check()
            allowed = np.unpackbits(bits, count=self.vocabulary.size, bitorder="little").view(bool)
        if self.forbids_ends:
            ends = allowed[self.vocabulary.ends]
            allowed[self.vocabulary.ends] = False
            if not allowed.any():  # only an end can follow a complete text
                allowed[self.vocabulary.ends] = ends
        ids = np.flatnonzero(allowed).astype(np.int32)
        if not len(ids):
            raise GenerationError("the grammar allows no token of this vocabulary here; change the grammar")
        return ids

    def advance(self, token: int) -> None:
        """Add a token to the text. Raises ValueError for a token that the grammar forbids, without a change, and
        GenerationError if the grammar needs too much work.
        """
        matcher = self._matcher
        complete = matcher is None or (matcher.is_stopped() and self.vocabulary.is_end(token))
        if matcher is not None and not complete and matcher.try_consume_tokens([token]) != 1:
            self._check()
            raise ValueError(f"token {token} is not allowed by the grammar here")
        self._accepted += 1
        if self._forced is not None:
            self._forced.extend(token)

    def forced(self, most: int, path: Sequence[int] = ()) -> ForcedText | None:
        """Return text for about `most` tokens that the grammar is likely to allow in no other way, after the tokens of
        `path`. Takes 0.15 ms if there is some, else 0.02 ms (152 000 tokens, one core of a Zen 4).
        """
        return None if self._forced is None else self._forced.draft(most, path)

    def _check(self) -> None:
        if self._matcher is not None and self._matcher.is_error():
            cause = readable(self._matcher.get_error())
            raise GenerationError(f"the grammar cannot be followed further: {cause}; simplify it")

    def follow(self, token: int) -> bool:
        """Add a token if it is allowed. Otherwise return False and change nothing."""
        if not self.allows(token):
            return False
        self.advance(token)
        return True


N_KINDS = 5
# Kinds of a token: the grammar allows no other text; it holds white space as the answer wrote it before; it holds white
# space as JSON is usually written; it is the last one; it is shorter than the vocabulary's own token.
CERTAIN, REPEATED, ASSUMED, LAST, CHARACTER = range(N_KINDS)

MOST_BYTES = 256  # maximum bytes of one draft
MOST_CHOICES = 18  # a value begins with one of 17 characters of `_JSON`, or an array ends; more mean free text
TAIL_TOKENS = 4  # the last tokens of the answer are tokenized together with the draft
USUAL_MS, EXCESS_MS = 1.0, 25.0  # a draft takes 0.2 ms; an answer may spend EXCESS_MS beyond USUAL_MS a draft
_SPECIAL = re.compile(rb"\xff\[(\d+)\]")  # llguidance's name for a special token among forced bytes
_MARK = b"\xff"  # replaces a special token in the text of a draft
_WHITE = b" \t\r\n"
_JSON = b'"-0123456789tfn{}[],:'
_NOT_JSON = bytes(byte for byte in range(0x21, 0x7F) if byte not in _JSON)
_clock = time.thread_time


class ForcedToken(NamedTuple):
    """A token that may come next and ends at `end`. It is `apart` after text that the vocabulary splits otherwise."""

    token: int
    kind: int
    apart: bool
    end: int


class ForcedText:
    """Bytes that are likely to follow, and the tokens they can be made of. `kinds` has a kind for each byte, `specials`
    the special tokens by the place of their mark in the text. If `complete`, nothing but an end can follow.
    """

    def __init__(
        self,
        tokens: Tokens,
        tail: Sequence[int],
        text: bytes,
        kinds: bytes,
        specials: Mapping[int, int],
        complete: bool,
    ) -> None:
        self.text, self._kinds, self._specials, self._complete = text, kinds, specials, complete
        self._tokens = tokens
        self._own: dict[int, int] = {}  # place -> the vocabulary's token
        self._apart: dict[int, int] = {}  # likewise, for an answer that split its text otherwise
        self._split(0, tail, self._own)

    def __len__(self) -> int:
        return len(self.text)

    def at(self, place: int) -> list[ForcedToken]:
        """Return the tokens that may come at a place of the text, none at its end."""
        if place in self._specials:
            return [ForcedToken(self._specials[place], CERTAIN, False, place + 1)]
        apart = place not in self._own
        if apart and place not in self._apart and place < len(self.text):
            self._split(place, (), self._apart)
        token = (self._apart if apart else self._own).get(place)
        if token is None:
            return []
        end = place + len(self._tokens.pieces[token])
        kind = LAST if end == len(self.text) and not self._complete else max(self._kinds[place:end])
        found = [ForcedToken(token, kind, apart, end)]
        character = self._tokens.of_byte[self.text[place]] if self.text[place] < 0x80 else -1
        if character not in (token, -1):
            found.append(ForcedToken(character, CHARACTER, apart, place + 1))
        return found

    def _split(self, place: int, before: Sequence[int], into: dict[int, int]) -> None:
        """Add the vocabulary's tokens from a place on, to the next special token."""
        if place in self._specials:
            place, before = place + 1, [self._specials[place]]
        end = min((special for special in self._specials if special >= place), default=len(self.text))
        for offset, token in self._tokens.split(before, self.text[place:end]).items():
            into[place + offset] = token
        if end < len(self.text) and into is self._own:
            self._split(end, (), into)


class Forced:
    """The text that follows in one answer, which is followed from its first token on. Not thread-safe. Measured with
    152 000 tokens and seven JSON schemas: a draft takes 0.10 to 0.17 ms in the median if there is text, else 0.01 to
    0.02 ms.
    """

    def __init__(self, matcher: LLMatcher, tokens: Tokens) -> None:
        """Take over a `matcher` at the beginning of the text that was compiled to look ahead."""
        self._matcher: LLMatcher | None = matcher
        self._tokens = tokens
        self._pending: list[int] = []
        self._tail: list[int] = []
        self._spacing = Spacing()
        self._excess_ms = 0.0

    def extend(self, token: int) -> None:
        """Note a confirmed token. The next `draft` looks at it."""
        self._pending.append(token)

    def draft(self, most: int, path: Sequence[int] = ()) -> ForcedText | None:
        """Return text for about `most` tokens after the drafted tokens of `path`, or None if nothing is likely."""
        if self._matcher is None:
            return None
        begun = _clock()
        found = None
        if self._follow(self._matcher):
            found = self._explore(self._matcher, min(MOST_BYTES, 8 * most), path)
        self._excess_ms += max(0.0, 1e3 * (_clock() - begun) - USUAL_MS)
        if self._excess_ms > EXCESS_MS:  # This grammar is too expensive for the rest of the answer.
            self._matcher = None
        return found

    def _follow(self, matcher: LLMatcher) -> bool:
        """Consume the pending tokens. Return False if the text has ended, or asks for too much work."""
        pending, self._pending = self._pending, []
        if pending and matcher.try_consume_tokens(pending) != len(pending):
            self._matcher = None
            return False
        for token in pending:
            self._spacing.feed(self._tokens.pieces[token])
        self._tail = [*self._tail, *pending][-TAIL_TOKENS:]
        return True

    def _explore(self, matcher: LLMatcher, most: int, path: Sequence[int]) -> ForcedText | None:
        """Return text after `path`, and roll the matcher back. If that is impossible, nothing more is drafted."""
        pieces = self._tokens.pieces
        if any(not 0 <= token < len(pieces) or not pieces[token] for token in path):  # an end, or an invalid id
            return None
        text, kinds, specials = b"", b"", dict[int, int]()
        spacing, complete = self._spacing.clone(), False
        consumed = matcher.try_consume_tokens(list(path)) if path else 0
        spacing.feed(b"".join(pieces[token] for token in path))
        most = most if consumed == len(path) else 0  # the grammar forbids the path
        while len(text) < most and not complete and (part := self._next(matcher, spacing, most - len(text))):
            run, kind, special = part
            ids = [self._tokens.of_byte[byte] for byte in run] if special is None else [special]
            taken = matcher.try_consume_tokens(ids) if min(ids) >= 0 else 0
            consumed += taken
            if taken != len(ids):
                break
            if special is None:
                spacing.feed(run)
            else:
                specials[len(text)] = special
            text, kinds, complete = text + run, kinds + bytes([kind]) * len(run), matcher.is_stopped()
        if matcher.is_error() or (consumed and not matcher.rollback(consumed)):
            self._matcher = None
            return None
        tail = [*self._tail, *path][-TAIL_TOKENS:]
        return ForcedText(self._tokens, tail, text, kinds, specials, complete) if text else None

    def _next(self, matcher: LLMatcher, spacing: Spacing, most: int) -> tuple[bytes, int, int | None] | None:
        """Return a forced run of bytes with its kind, a special token, or likely white space with the byte after it."""
        run = matcher.compute_ff_bytes()
        if special := _SPECIAL.search(run):
            if special.start() == 0:
                return _MARK, CERTAIN, int(special[1])
            run = run[: special.start()]
        if run:
            return run[:most], CERTAIN, None
        if matcher.is_stopped() or matcher.is_accepting():
            return None
        if not self._allows(matcher, ord(" ")) or not (spacing.white or self._allows(matcher, ord("\n"))):
            return None
        choices = [byte for byte in _JSON if self._allows(matcher, byte)]
        if len(choices) > MOST_CHOICES:
            return None
        if len(choices) < 2:
            choices += [byte for byte in _NOT_JSON if self._allows(matcher, byte)]
        following = choices[0] if len(choices) == 1 else None
        white, kind = spacing.expected(following)
        run = white + (b"" if following is None else bytes([following]))
        return (run, kind, None) if run else None

    def _allows(self, matcher: LLMatcher, byte: int) -> bool:
        """Return True if this byte may follow. Takes 0.4 us; a mask takes up to 0.3 ms if a string may begin."""
        token = self._tokens.of_byte[byte]
        return token >= 0 and matcher.validate_tokens([token]) == 1


class Spacing:
    """The white space of an answer between the tokens of JSON, by the token before it, the depth and the bracket.
    `white` is the white space since the last other byte outside strings. Text that is not JSON teaches it nothing
    useful, and its expectations are then wrong at the price of a rejected draft.
    """

    def __init__(self) -> None:
        self.white = b""
        self._open = b""  # open brackets
        self._last = 0  # the last byte outside strings that is not white space
        self._in_string = self._escaped = False
        self._habits: dict[tuple[int, int, bytes], bytes] = {}
        self._indentation = b"  "  # one level
        self._on_lines = False  # the newest member began on a line of its own

    def clone(self) -> Spacing:
        twin = copy.copy(self)
        twin._habits = dict(self._habits)
        return twin

    def feed(self, text: bytes) -> None:
        """Add more of the answer. Takes 0.2 us a byte."""
        for byte in text:
            if self._in_string:
                ends = (byte == ord('"') and not self._escaped) or byte == ord("\n")  # JSON strings have no line ends
                self._escaped = byte == ord("\\") and not self._escaped
                self._in_string = not ends
            elif byte in _WHITE:
                self.white += bytes([byte])
            else:
                self._learn(byte)
                if byte in b"{[":
                    self._open += bytes([byte])
                elif byte in b"}]":
                    self._open = self._open[:-1]
                self._in_string, self._escaped = byte == ord('"') and bool(self._open), False
                self.white, self._last = b"", byte

    def expected(self, following: int | None) -> tuple[bytes, int]:
        """Return the white space still to come before the byte `following` (None: any value), and its kind."""
        place = self._place(following)
        if place is None:
            white, kind = b"", REPEATED
        elif place in self._habits:
            white, kind = self._habits[place], REPEATED
        else:
            white, kind = self._usual(place), ASSUMED
        if not white.startswith(self.white):  # After an unexpected line end comes indentation.
            line = self._line(place)
            white, kind = line if line.startswith(self.white) else self.white, ASSUMED
        return white[len(self.white) :], kind

    def _place(self, following: int | None) -> tuple[int, int, bytes] | None:
        """Return what decides about white space: a bracket, a comma or a colon, before it or after it."""
        if following is not None and following in b"}]":
            return None if self._last in b"{[" else (ord("}"), len(self._open), self._open[-1:])
        if following is not None and following in b":,":
            return following, -1, b""
        if self._last == ord(":"):
            return ord(":"), 0, b""
        if self._last and self._last in b"{[,":
            return ord(",") if self._last == ord(",") else ord("{"), len(self._open), self._open[-1:]
        return None

    def _usual(self, place: tuple[int, int, bytes]) -> bytes:
        """Return the usual white space at a kind of place that was not seen yet."""
        before, depth, bracket = place
        if depth < 0:
            return b""
        if before == ord(":"):
            return b" "
        if before == ord("}"):
            return self._line(place) if self._habits.get((ord("{"), depth, bracket), b"")[:1] == b"\n" else b""
        if before == ord("{"):
            return self._line(place) if self._on_lines else b""
        first = self._habits.get((ord("{"), depth, bracket), b"")
        others = [
            white
            for (kind, level, _), white in self._habits.items()
            if kind == ord(",") and level >= 0 and white[:1] != b"\n"
        ]
        return first if first[:1] == b"\n" else others[-1] if others else b" "

    def _line(self, place: tuple[int, int, bytes] | None) -> bytes:
        """Return a line end and the indentation of a place."""
        levels = 0 if place is None else place[1] - (place[0] == ord("}"))
        return b"\n" + self._indentation * levels

    def _learn(self, byte: int) -> None:
        place = self._place(byte)
        if place is None:
            return
        self._habits[place] = self.white
        before, depth, _ = place
        if before in b"{," and depth >= 0:
            self._on_lines = self.white[:1] == b"\n"
            if self._on_lines and depth:
                self._indentation = self.white[1 : 1 + (len(self.white) - 1) // depth]
