"""Read texts from rows of JSON Lines, from chats and from the standard input, in bounded memory."""

from __future__ import annotations

import glob
import gzip
import json
import os
import stat
import sys
import time
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, BinaryIO, ClassVar, NamedTuple

from rest_local.errors import InputInvalid, printable
from rest_local.retrieval.documents import Text
from rest_local.retrieval.sources.listing import certain
from rest_local.retrieval.sources.source import Reading, Skipped, Source
from rest_local.retrieval.sources.walk import absolute, decoded

MAX_ROW = 1 << 24  # longer lines of JSON are skipped; parsed they can take 30 times as much memory

_GLOB = frozenset("*?[")
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO must not block


class Row(NamedTuple):
    """A row of a file, named `FILE:LINE` with lines from 1. `mark` is for `Reading.text`."""

    name: str
    value: Any
    mark: int


def dig(value: Any, field: str) -> Any:
    """Return the value in a field of a row, or None. Dots lead into objects and lists (`messages.0.content`), unless
    the object has a field whose name contains the dots.
    """
    while field:
        if isinstance(value, dict) and field in value:
            return value[field]
        first, _, field = field.partition(".")
        if isinstance(value, dict):
            value = value.get(first)
        elif isinstance(value, list) and first.isascii() and first.isdigit() and len(first) < 10:
            value = value[int(first)] if int(first) < len(value) else None
        else:
            return None
    return value


def files_of(path: str) -> list[str]:
    """Return the sorted files that a path or a glob means. Raises InputInvalid."""
    if os.path.lexists(path) or not _GLOB.intersection(path):
        found = [path]
    else:
        found = sorted(glob.glob(path, recursive=True))
    if not found:
        raise InputInvalid("path", printable(path), "no file matches it")
    for name in found:
        try:
            regular = stat.S_ISREG(os.stat(name).st_mode)
        except OSError as error:
            raise InputInvalid("path", printable(name), (error.strerror or "cannot be read").lower()) from error
        if not regular:
            raise InputInvalid("path", printable(name), "not a regular file")
    return [str(Path(name).resolve()) for name in found]


def open_file(path: str) -> tuple[IO[bytes], int]:
    """Open a regular file for reading, and return it with the mark of its rows. Raises InputInvalid."""
    try:
        now = time.time_ns()
        file = os.fdopen(os.open(path, os.O_RDONLY | _FLAGS), "rb")
    except OSError as error:
        raise InputInvalid("path", printable(path), (error.strerror or "cannot be read").lower()) from error
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        file.close()
        raise InputInvalid("path", printable(path), "not a regular file")
    return file, certain(status.st_mtime_ns, now)


def json_rows(path: str, skipped: Skipped, looked_at: Callable[[int], None]) -> Iterator[Row]:
    """Yield the values of a JSON Lines file, which may be compressed with gzip. A damaged line is counted, and so is
    the rest of a damaged compressed file. Raises InputInvalid if it cannot be opened.
    """
    raw, mark = open_file(path)
    with raw:
        lines: IO[bytes] | gzip.GzipFile = gzip.GzipFile(fileobj=raw) if path.lower().endswith(".gz") else raw
        number = seen = 0
        while True:
            try:
                line = lines.readline(MAX_ROW + 1)
                cut = len(line) > MAX_ROW
                while cut and not line.endswith(b"\n") and (line := lines.readline(MAX_ROW)):
                    pass
            except (OSError, EOFError, zlib.error):
                skipped.add("damaged: the rest of a file", path)
                return
            looked_at(raw.tell() - seen)
            seen = raw.tell()
            if not line and not cut:
                return
            number += 1
            if cut:
                skipped.add("too large", path)
            elif line.strip():
                yield from _parsed(f"{path}:{number}", line, mark, skipped)


def _parsed(name: str, line: bytes, mark: int, skipped: Skipped) -> Iterator[Row]:
    try:
        yield Row(name, json.loads(line.decode("utf-8", "replace").removeprefix("\ufeff")), mark)
    except (ValueError, RecursionError):
        skipped.add("damaged JSON", name)


ENDINGS = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")


@dataclass(frozen=True, slots=True)
class _Files(Source):
    """The files that a path or a glob means, each with texts."""

    path: str

    def texts(self, reading: Reading) -> Iterator[Text]:
        files = files_of(self.path)
        return (text for file in files for text in self._texts(file, reading))

    def prepared(self) -> Source:
        return replace(self, path=absolute(self.path))

    @abstractmethod
    def _texts(self, file: str, reading: Reading) -> Iterator[Text]: ...


@dataclass(frozen=True, slots=True)
class Jsonl(_Files):
    """One document for each row, named `FILE:LINE`.

    Attributes:
        path: a file, with gzip if it ends in `.gz`, or a glob
        field: where `dig` finds the text in a row
        allow_secrets: take rows that look like secrets, too
    """

    kind: ClassVar[str] = "jsonl"
    field: str
    allow_secrets: bool = False

    def about(self) -> str:
        return f"{self.path}:{self.field}"

    def _texts(self, file: str, reading: Reading) -> Iterator[Text]:
        for row in json_rows(file, reading.skipped, reading.looked_at):
            text = dig(row.value, self.field)
            if isinstance(text, str):
                yield from reading.text(row.name, text, row.mark, allow_secrets=self.allow_secrets)
            else:
                reading.skipped.add("without text in the field", row.name)


@dataclass(frozen=True, slots=True)
class Transcripts(_Files):
    """One document for each text of an assistant, named `FILE:LINE#TURN`, both from 1. A row of JSON Lines, or an
    element of a JSON list, is a list of messages or an object with `messages`. So are sessions of `rest-local chat` and
    rows for fine-tuning.
    """

    kind: ClassVar[str] = "chat"
    allow_secrets: bool = False

    def about(self) -> str:
        return f"chats in {self.path}"

    def _texts(self, file: str, reading: Reading) -> Iterator[Text]:
        for row in _conversations(file, reading):
            said = (message for message in row.value if message["role"] in ("assistant", "model"))
            for number, message in enumerate(said, 1):
                text = _content(message.get("content"))
                yield from reading.text(f"{row.name}#{number}", text, 0, allow_secrets=self.allow_secrets)


def _content(content: Any) -> str:
    """Return the text of a message, which is text or a list of parts."""
    if isinstance(content, list):
        content = "\n".join(str(part["text"]) for part in content if isinstance(part, dict) and "text" in part)
    return content if isinstance(content, str) else ""


def _conversations(file: str, reading: Reading) -> Iterator[Row]:
    """Yield the conversations of a file, each a list of messages."""
    if _is_lines(file):
        for row in json_rows(file, reading.skipped, reading.looked_at):
            found = [row.value] if _messages(row.value) else row.value if isinstance(row.value, list) else [row.value]
            for number, value in enumerate(found, 1):
                name = row.name if len(found) == 1 else f"{row.name}.{number}"
                yield from _conversation(name, value, reading.skipped)
        return
    value = _whole(file, reading)
    found = value if isinstance(value, list) and not _messages(value) else [value]
    for number, value in enumerate(found, 1):
        yield from _conversation(f"{file}:{number}", value, reading.skipped)


def _conversation(name: str, value: Any, skipped: Skipped) -> Iterator[Row]:
    messages = _messages(value)
    if messages:
        yield Row(name, messages, 0)
    else:
        skipped.add("without messages", name)


def _messages(value: Any) -> list[Mapping[str, Any]]:
    """Return the messages of a conversation, none if it is not one."""
    messages = value.get("messages") if isinstance(value, dict) else value
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages
    ):
        return []
    return messages


def _is_lines(file: str) -> bool:
    """Return True for JSON Lines: by the name, or because the first line is a JSON value."""
    if file.lower().endswith((".jsonl", ".ndjson", ".gz")):
        return True
    raw, _ = open_file(file)
    with raw:
        line = raw.readline(MAX_ROW).strip() or b"x"
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _whole(file: str, reading: Reading) -> Any:
    """Return the value of a JSON file, or None after counting the reason."""
    raw, _ = open_file(file)
    with raw:
        data = raw.read(MAX_ROW + 1)
    reading.looked_at(len(data))
    if len(data) > MAX_ROW:
        reading.skipped.add("too large", file)
        return None
    try:
        return json.loads(data.decode("utf-8", "replace").removeprefix("\ufeff"))
    except (ValueError, RecursionError):
        reading.skipped.add("damaged JSON", file)
        return None


# Maximum bytes of a document. A longer input becomes several, cut at ends of lines, so that memory is bounded.
PIECE = 1 << 22


@dataclass(frozen=True, slots=True)
class Stdin(Source):
    """The standard input. Its documents are named `-`, `-:2`, `-:3` and so on."""

    kind: ClassVar[str] = "stdin"
    repeatable: ClassVar[bool] = False
    allow_secrets: bool = False

    def texts(self, reading: Reading) -> Iterator[Text]:
        return self._texts(sys.stdin.buffer, reading)

    def about(self) -> str:
        return "the standard input"

    def _texts(self, file: BinaryIO, reading: Reading) -> Iterator[Text]:
        pending, number = b"", 0
        while pending or number == 0:
            data = pending + file.read(PIECE - len(pending))
            if not data:
                return
            end = data.rfind(b"\n") + 1 if len(data) == PIECE else 0
            end = end or len(data)
            data, pending = data[:end], data[end:]
            number += 1
            name = "-" if number == 1 else f"-:{number}"
            for text in reading.text(name, decoded(data), 0, allow_secrets=self.allow_secrets):
                yield text._replace(state=None)
            if not pending:
                pending = file.read(1)
