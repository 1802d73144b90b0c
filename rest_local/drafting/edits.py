"""Files that an answer writes or patches are recognised in the conversation and followed, as if a client had sent them
as a prediction.

Contract: token ids of a prompt and of its answer go in; rows that continue the answer come out. What the conversation
shows is kept as lines of files (`rest_local.drafting.shown`). The line that the answer is writing is read in two ways:
as it stands, and, inside a JSON string, decoded. Where lines of the answer, or the beginning of one, stand in the
conversation, the lines after them are written as the answer writes (escaped in a string, marked in a patch), tokenized,
and followed by `Prediction`, which finds its place again after a change. Text that was copied into a string or a block
and is followed by another string or block is expected there again: the old and the new text of an edit.

No client, tool or key is named here. A wrong guess is a rejected draft, like one of any other source.

Cost: 3 us for a token of the answer, 10 us for rows while nothing is recognised. Text that is tokenized is paid from an
allowance of `EARNED` bytes for each token of the answer, so it takes 0.1 ms a token at most. The conversation is read
`LUMP` tokens at a time, when rows are asked for.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from rest_local.drafting.prediction import START, Prediction
from rest_local.drafting.shown import KEYS, Lines, Mark, Shown
from rest_local.retrieval.rows import Int32Array, Rows

LUMP = 8192  # tokens of the conversation that are read at once: 3 ms
MARKED = 1024  # tokens between two places to which the conversation can be cut back
FIRST, FURTHER = 768, 2048  # bytes that are tokenized when a place is found, and when they are nearly used up
AHEAD = 192  # tokens that are left when more are tokenized
BACK = 6  # lines before the place, to which a change may go back
OVERLAP = 48  # bytes that are tokenized again, so that tokens go on as those of the whole text
MOST = 1 << 16  # tokens of one file
ALLOWED, EARNED, CALL = 16_384, 96, 128  # bytes that may be tokenized at first, for each token; and what a call costs
MOST_RUNS = 32  # places that are compared line by line
SECTION_LINES = 512  # of the text that the answer may repeat
SOON = 3  # lines after a separator
MOST_HEAD = 64  # bytes of the text between two values
OTHER = 3  # level of evidence of another mark
SHORT = 200  # bytes that are tokenized for it
MOST_ROWS = 6

# A line between two blocks: a fence, a row of signs with a word, a tag.
_SEPARATOR = re.compile(rb"\s*(?:[=\-+<>*#~`@|]{3,}\s*\w*|</?[A-Za-z][\w.:=-]*>)\s*$")
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NEXT_VALUE = re.compile(rb'"\s*,\s*(?:"[^"\\]{1,40}"\s*:|\w{1,40}=)\s*"')
_REST = re.compile(rb".*", re.DOTALL)
_QUOTE = b'<|"|>'
_ESCAPES = {ord("n"): 10, ord("t"): 9, ord("r"): 13, ord("b"): 8, ord("f"): 12}


class Spelling(Protocol):
    """What of a vocabulary is used: `rest_local.llama.vocabulary.Vocabulary`."""

    def piece(self, token: int) -> bytes: ...
    def tokenize(self, text: bytes) -> Int32Array: ...


class Place(NamedTuple):
    """A line that the answer may be writing. `run`: lines before it that the answer has written."""

    lines: Lines
    line: int
    run: int


class Reading:
    """One way to read what the answer writes: its lines since the last separator, and where they were shown."""

    def __init__(self) -> None:
        self.line = bytearray()  # that is being written
        self.section: list[bytes] = []  # whole lines
        self.found = 0  # of them that were shown
        self.repeats = False  # the section repeats the one before it
        self._runs: dict[tuple[int, int], int] = {}  # by list and place of the next line: lines before it that agree

    def begin(self, repeats: bool = False) -> None:
        """Begin a section."""
        self.section, self.found, self.repeats = [], 0, repeats

    def end_line(self, shown: Shown) -> bool:
        """The line is complete. Returns whether it was shown. 3 us, and 1 us for each place."""
        line = bytes(self.line)
        self.line.clear()
        if len(self.section) < SECTION_LINES:
            self.section.append(line)
        key = line.lstrip()
        stores = (shown.lines, shown.strings)
        found: dict[tuple[int, int], int] = {}
        for text in _unmarked(key):
            for (store, place), run in self._runs.items():
                lines = stores[store].lines
                if place < len(lines) and lines[place].lstrip() == text and lines[place] != Lines.ENDS:
                    found[store, place + 1] = run + 1
            if len(text) >= KEYS[0]:
                for store, index in enumerate(stores):
                    for place in index.beginning_with(text):
                        if index.lines[place].lstrip() == text:
                            found.setdefault((store, place + 1), 1)
        if len(found) > MOST_RUNS:
            best = sorted(found, key=lambda place: (found[place], place[1]))[-MOST_RUNS:]
            found = {place: found[place] for place in best}
        self._runs = found
        self.found += bool(found)
        return bool(found)

    def places(self, shown: Shown) -> tuple[list[Place], bytes]:
        """Lines that the answer may be writing, and its beginning without indentation and mark."""
        stores = (shown.lines, shown.strings)
        for text in _unmarked(bytes(self.line.lstrip())):
            found = []
            for (store, place), run in self._runs.items():
                lines = stores[store].lines
                if place < len(lines) and lines[place] != Lines.ENDS and lines[place].lstrip().startswith(text):
                    found.append(Place(stores[store], place, run))
            if not found and len(text) >= KEYS[0]:
                found = [Place(index, place, 0) for index in stores for place in index.beginning_with(text)]
            if found:
                return found, text
        return [], b""


def _unmarked(key: bytes) -> tuple[bytes, ...]:
    """A line without indentation, and without the mark of a patch if it has one."""
    return (key, key[1:].lstrip()) if key[:1] in (b"-", b"+") and len(key) > 1 else (key,)


class Followed:
    """Lines that are followed, in the way the answer writes them. `string`: escaped, for a JSON string; `mark`: before
    each line.
    """

    def __init__(self, spelling: Spelling, lines: Sequence[bytes], string: bool, mark: bytes, end: bytes = b"") -> None:
        self._spelling, self._lines, self._end = spelling, lines, end
        self.string, self.mark, self.level, self.repeated = string, mark, 0, False
        self._next = 0  # line that is not tokenized yet
        self._text = b""  # the newest bytes that were tokenized
        self.prediction = Prediction(())
        self._breaks = bytearray()

    def begin(self, line: int, written: int, level: int, prefix: bytes = b"", size: int = FIRST) -> int:
        """Expect what follows the first `written` bytes of a line without indentation; `prefix` comes before. At least
        `size` bytes are tokenized; returns how many were.
        """
        first, back = line, BACK
        while first and line - first < back and self._lines[first - 1] != Lines.ENDS:
            first -= 1
        self._next = first
        before = self._encoded(line)
        whole = self._lines[line]
        indentation = len(whole) - len(whole.lstrip())
        at = min(indentation + written, len(whole))
        begun = self._escaped(self.mark + whole[:at]) if written else b""
        self._next = line + 1
        rest = prefix + self._escaped(whole[at:] if written else self.mark + whole)
        rest += self._encoded_from(line, size)
        text = before + begun + rest
        self.level = level
        tokens = self._tokens_of(text)
        place, behind = len(tokens), 0
        while place and behind < len(rest):
            place -= 1
            behind += len(self._spelling.piece(int(tokens[place])))
        if behind != len(rest):  # a token reaches over the place
            tokens = np.concatenate([tokens[:place], self._tokens_of(rest)])
        self._text = text[-OVERLAP:]
        self.prediction = Prediction(tokens, place, level)
        self._find_breaks(0)
        return len(text)

    def _encoded(self, end: int) -> bytes:
        """The next lines before line `end`, each with its end."""
        found = b"".join(self._escaped(self.mark + line + b"\n") for line in self._lines[self._next : end])
        self._next = end
        return found

    def _encoded_from(self, line: int, size: int) -> bytes:
        """The end of line number `line`, and whole lines after it, to about `size` bytes."""
        found: list[bytes] = []
        length = 0
        while length < size and self._next < len(self._lines) and self._lines[self._next] != Lines.ENDS:
            found.append(self._escaped(b"\n" + self.mark + self._lines[self._next]))
            length += len(found[-1])
            self._next += 1
        if self._is_whole:
            found.append(self._end)
            self._end = b""
        return b"".join(found)

    @property
    def _is_whole(self) -> bool:
        return self._next >= len(self._lines) or self._lines[self._next] == Lines.ENDS

    def _escaped(self, text: bytes) -> bytes:
        if not self.string:
            return text
        return json.dumps(text.decode("utf-8", "replace"), ensure_ascii=False)[1:-1].encode("utf-8", "replace")

    def _tokens_of(self, text: bytes) -> Int32Array:
        return self._spelling.tokenize(text)

    def rows(self, context: Sequence[int], depth: int) -> tuple[Rows, list[bytes]]:
        """As `Edits.rows`."""
        rows = self.prediction.rows(context, depth)
        return rows, [bytes(self._breaks[place : place + depth]) for place in rows.positions.tolist()]

    def _find_breaks(self, begin: int) -> None:
        """Note where lines end in the tokens from `begin` on: at the end itself and at the token after it."""
        breaks = self._breaks
        del breaks[begin:]
        before = self._spelling.piece(int(self.prediction.tokens[begin - 1])) if begin else b""
        ended = False
        for token in self.prediction.tokens[begin:].tolist():
            piece = self._spelling.piece(token)
            if self.string:
                ends = b"\\n" in piece or piece[-1:] == b"\\" or (before[-1:] == b"\\" and piece[:1] == b"n")
            else:
                ends = b"\n" in piece
            breaks.append(ends or ended)
            before, ended = piece, ends

    def extend(self) -> int:
        """Tokenize more lines if few tokens are left. Returns the bytes."""
        prediction = self.prediction
        if self._is_whole or prediction.left > AHEAD or prediction.place > MOST:
            return 0
        more = self._encoded_from(self._next - 1, FURTHER)
        text = self._text + more
        tokens = self._tokens_of(text)
        old = {}  # number of tokens to keep, by bytes that follow them in the old text
        behind = 0
        known = prediction.tokens
        for kept in range(len(known) - 1, prediction.place, -1):
            behind += len(self._spelling.piece(int(known[kept])))
            if behind > len(self._text) - 8:
                break
            old[behind + len(more)] = kept
        behind, place = 0, len(tokens)
        while place and behind < len(more):
            place -= 1
            behind += len(self._spelling.piece(int(tokens[place])))
        while behind not in old and place and behind < len(text):
            place -= 1
            behind += len(self._spelling.piece(int(tokens[place])))
        keep = old.get(behind, len(known))
        prediction.append(tokens[place:] if behind in old else self._tokens_of(more), keep)
        self._find_breaks(keep)
        self._text = text[-OVERLAP:]
        return len(text)


class Edits:
    """The source of one sequence of a model."""

    def __init__(self, spelling: Spelling) -> None:
        self._spelling = spelling
        self._shown = Shown()
        self._marks: list[tuple[int, Mark]] = [(0, self._shown.mark)]
        self._read = 0  # tokens of the conversation that are in `_shown`
        self._waiting = array("i")  # the others
        self._begin()

    def _begin(self) -> None:
        self._pending: list[int] = []  # tokens of the answer that were not read yet
        self._raw, self._string = Reading(), Reading()
        self._own = Lines()  # lines of the answer
        self._in_string = self._is_value = self._escaped = False
        self._head = b""  # what stands before the newest value: `"old_string": "`
        self._closed = 0  # bytes of the line up to the end of the newest string
        self._before = 0  # the last byte outside of strings that is not white space
        self._old: list[bytes] | None = None  # the text that a new section may repeat
        self._old_level = START + 2
        self._separator = b""  # the line before the section
        self._since_old = 0  # lines since the old text
        self._followed: Followed | None = None
        self._others: list[Followed] = []  # other ways to go on at the beginning of a line of a patch
        self._mark = b""  # of the newest lines of a patch
        self._removed: list[bytes] = []  # the newest lines that a patch removes
        self._allowance = ALLOWED

    def restart(self, tokens: Sequence[int], same: int) -> None:
        """Set the conversation, of which the first `same` tokens are those of the last sequence."""
        same = min(same, self._read)
        while self._marks[-1][0] > same:
            self._marks.pop()
        self._read, mark = self._marks[-1]
        self._shown.back_to(mark)
        self._waiting = array("i", tokens[self._read :])
        self._begin()
        self._raw.line += self._newest_line(tokens)

    def _newest_line(self, tokens: Sequence[int]) -> bytes:
        """The line that the conversation ends with."""
        line = b""
        for token in reversed(tokens[-64:]):
            _, end, piece = self._spelling.piece(token).rpartition(b"\n")
            line = piece + line
            if end:
                break
        return line

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens of the answer. They are read when they matter."""
        self._pending.extend(tokens)

    @property
    def way(self) -> int:
        """How the text of the newest rows was found, and is written: a number of evidence, below 4."""
        followed = self._followed
        return 0 if followed is None else 2 * followed.repeated + followed.string

    @property
    def follows(self) -> bool:
        """Whether rows are likely: the answer follows a file, or begins to repeat what it has copied."""
        self._read_answer()
        followed = self._followed
        return (followed is not None and followed.prediction.catch_up()) or self._repeated() is not None

    def rows(self, context: Sequence[int], depth: int) -> tuple[Rows, list[bytes]]:
        """Rows that continue the answer after `context`, the likeliest first; and for each 1 where a line ends, else 0.
        """
        self._read_conversation()
        self._read_answer()
        self._find()
        followed = self._followed
        if followed is None:
            return Rows.empty(depth), []
        if self._allowance > 0:
            self._allowance -= followed.extend()
        rows, breaks = followed.rows(context, depth)
        for other in self._others:
            further, ends = other.rows(context, depth)
            rows, breaks = Rows.merge([rows, further], MOST_ROWS, depth), breaks + ends
        return rows, breaks

    # What the conversation shows

    def _read_conversation(self) -> None:
        for _ in range(0, min(LUMP, len(self._waiting)), MARKED):
            part, self._waiting = self._waiting[:MARKED], self._waiting[MARKED:]
            piece = self._spelling.piece
            self._shown.add(b"".join([piece(token) for token in part]))
            self._read += len(part)
            self._marks.append((self._read, self._shown.mark))

    # What the answer writes

    def _read_answer(self) -> None:
        pending, self._pending = self._pending, []
        if not pending:
            return
        self._allowance = min(self._allowance + EARNED * len(pending), ALLOWED)
        piece = self._spelling.piece
        for token in pending:
            if self._followed is not None:
                self._followed.prediction.extend((token,))
                for other in self._others:
                    other.prediction.extend((token,))
            self._feed(piece(token))

    def _feed(self, piece: bytes) -> None:
        raw, string = self._raw, self._string
        for byte in piece:
            if byte == 10:
                self._end_raw_line()
                continue
            raw.line.append(byte)
            if not self._in_string:
                if byte == 34:
                    self._open_string()
                    string = self._string
                elif byte != 32 and byte != 9:
                    self._before = byte
            elif self._escaped:
                self._escaped = False
                if byte == 110:
                    self._end_line(string)
                else:
                    string.line.append(_ESCAPES.get(byte, byte))
            elif byte == 92:
                self._escaped = True
            elif byte == 34:
                self._end_string()
            else:
                string.line.append(byte)
        if raw.line.endswith(_QUOTE):
            self._end_section(bytes(raw.line))
            raw.line.clear()
            self._in_string = False

    def _end_line(self, reading: Reading) -> bool:
        """A line is complete, in a string or outside. Returns whether it was shown."""
        self._others = []
        mark, line = bytes(reading.line[:1]), bytes(reading.line[1:])
        shown = reading.end_line(self._shown)
        if self._mark:
            if mark == b"-":
                self._removed.append(line)
            elif self._removed and mark != b"+":
                self._removed = []
            if shown and mark in (b" ", b"-"):
                self._mark = mark
            self._branch(reading)
        return shown

    def _end_raw_line(self) -> None:
        raw = self._raw
        line = bytes(raw.line)
        shown = self._end_line(raw)
        self._own.add(line)
        self._in_string = False
        self._drop()
        self._since_old += 1
        if not shown and _SEPARATOR.match(line):
            raw.section.pop()
            self._end_section(line)

    def _end_section(self, separator: bytes) -> None:
        raw = self._raw
        if raw.found and not raw.repeats and raw.section:
            self._old, self._since_old = raw.section, 0
        self._separator = separator
        raw.begin()

    def _open_string(self) -> None:
        line = self._raw.line
        self._in_string, self._escaped, self._string = True, False, Reading()
        self._is_value = self._before in b":="
        if self._is_value:
            begin = max(line.rfind(sign, 0, len(line) - 1) for sign in (b",", b"{", b"("))
            self._head = bytes(line[begin + 1 :][-MOST_HEAD:])

    def _end_string(self) -> None:
        string = self._string
        self._in_string = False
        self._before = 34
        self._drop()
        self._mark = b""
        self._closed = len(self._raw.line)
        if not self._is_value:
            return
        known = string.found
        if not known and len(string.line) >= KEYS[0]:
            known = len(string.places(self._shown)[0])
        self._old = [*string.section, bytes(string.line)] if known and not string.repeats else None

    def _drop(self) -> None:
        """A string or a line has ended: forget what the answer did not follow to there."""
        followed = self._followed
        if followed is not None and followed.string and not followed.prediction.catch_up():
            self._followed, self._others = None, []

    # What is followed

    def _repeated(self) -> list[bytes] | None:
        """The text that the section which begins here, or is about to begin, is likely to repeat."""
        old = self._old
        if old is None:
            return None
        if self._in_string:
            string = self._string
            fits = self._is_value and not string.section and old[0].startswith(string.line) and not string.repeats
        elif self._closed:
            fits = len(self._raw.line) - self._closed < 2
        else:
            raw = self._raw
            fits = self._since_old < SOON and not raw.section and not raw.repeats and not raw.line
        return old if fits else None

    def _find(self) -> None:
        followed = self._followed
        if followed is not None and followed.prediction.catch_up():
            return
        for other in self._others:
            if other.prediction.catch_up() and other.prediction.level > other.level:
                self._followed, self._others, self._mark = other, [], other.mark
                return
        if old := self._repeated():
            self._repeat(old)
        else:
            self._look()

    def _repeat(self, old: list[bytes]) -> None:
        if not self._in_string and self._closed:
            between = self._after(self._head, bytes(self._raw.line[self._closed - 1 :]), _NEXT_VALUE)
            if not between:
                return
            followed = Followed(self._spelling, old, True, b"", b'"')
            followed.repeated = True
            self._allowance -= CALL + followed.begin(0, 0, START + 2, between)
            self._followed = followed
            return
        reading = self._string if self._in_string else self._raw
        reading.repeats = True
        self._old = None
        end = (self._after(self._head, b'"', _REST) or b'"') if self._in_string else b"\n" + self._ending()
        if self._in_string and end != b'"':
            end = b'"' + end
        followed = Followed(self._spelling, old, self._in_string, b"", end)
        followed.repeated = True
        written = len(reading.line.lstrip())
        self._allowance -= CALL + followed.begin(0, written, START + 2)
        self._followed = followed

    def _after(self, head: bytes, begun: bytes, pattern: re.Pattern[bytes]) -> bytes:
        """What came after the value of `head` in an earlier call, from its closing quote on, without what has `begun`
        of it.
        """
        line = bytes(self._raw.line)
        at = line.rfind(head, 0, max(line.rfind(head), 0))
        for before, following in ((line, b""), *self._earlier(line)) if at < 0 else ((line, b""),):
            if before is not line:
                at = before.find(head)
            value = _STRING.match(before, at + len(head) - 1) if at >= 0 else None
            if value is None:
                continue
            rest = (before[value.end() - 1 :] + following)[: 2 * MOST_HEAD]
            found = pattern.match(rest)
            if found is not None and found[0].startswith(begun):
                return found[0][len(begun) :]
            return b""
        return b""

    def _earlier(self, line: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Earlier lines that begin as the one that is written, each with its end and the line after it, newest first."""
        key = line.lstrip()[: KEYS[-1]]
        if len(key) < KEYS[0]:
            return
        for index in (self._own, self._shown.lines):
            for place in reversed(index.beginning_with(key)[-4:]):
                following = b"\n" + b"\n".join(index.lines[place + 1 : place + 2])
                yield index.lines[place].lstrip(), following

    def _ending(self) -> bytes:
        """What ended the section after the last separator of this kind: the next separator and the line after it."""
        for index in (self._own, self._shown.lines):
            lines = index.lines
            last = len(lines) - 1 if index is self._own else len(lines)  # the newest one is that of this section
            for place in reversed(index.beginning_with(self._separator.strip())):
                if place >= last:
                    continue
                for end in range(place + 1, min(place + SECTION_LINES, len(lines))):
                    if _SEPARATOR.match(lines[end]):
                        return b"\n".join(lines[end : end + 2]) + b"\n"
        return b""

    def _look(self) -> None:
        """Look for the line that the answer is writing."""
        if self._allowance <= CALL:
            return
        for reading in (self._string, self._raw) if self._in_string else (self._raw,):
            places, text = reading.places(self._shown)
            if places:
                self._anchor(reading, places, text)
                return

    def _anchor(self, reading: Reading, places: list[Place], text: bytes) -> None:
        best = max(places, key=lambda place: place.run)
        equal = [place for place in places if place.run == best.run]
        best = equal[-1]
        if self._followed is not None and best.run < 2:
            return
        mark = b""
        line, shown = bytes(reading.line), best.lines.lines[best.line]
        if not line.lstrip().startswith(text) or (line[:1] in (b"-", b"+") and shown[:1] != line[:1]):
            mark = line[:1]
        elif line[:1] == b" " and len(line) - len(line.lstrip()) == len(shown) - len(shown.lstrip()) + 1:
            mark = b" "
        if not text and self._mark:
            mark = self._mark
        new = Followed(self._spelling, best.lines.lines, reading is self._string, mark)
        level = START if len(equal) == 1 else 4
        self._allowance -= CALL + new.begin(best.line, len(text), level)
        self._followed, self._mark, self._others = new, mark, []

    def _branch(self, reading: Reading) -> None:
        """A line of a patch has ended: the next one may have another mark."""
        if self._allowance < ALLOWED // 2:
            return
        string = reading is self._string
        if self._removed:
            other = Followed(self._spelling, self._removed[:], string, b"+")
            self._allowance -= CALL + other.begin(0, 0, OTHER, size=SHORT)
            self._others.append(other)
        places, _ = reading.places(self._shown)
        if places:
            best = max(places, key=lambda place: (place.run, place.line))
            for mark in (b" ", b"-"):
                if mark != self._mark:
                    other = Followed(self._spelling, best.lines.lines, string, mark)
                    self._allowance -= CALL + other.begin(best.line, 0, OTHER, size=SHORT)
                    self._others.append(other)
