"""The text of the standard input, which cannot be read again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, ClassVar

from rest_local.retrieval.documents import Text
from rest_local.retrieval.sources.corpus import decoded
from rest_local.retrieval.sources.source import Reading, Source

PIECE = 1 << 22
"""Bytes of one document. A longer input becomes several, cut at ends of lines, so that memory is bounded."""


@dataclass(frozen=True, slots=True)
class Stdin(Source):
    """The documents are named `-`, `-:2`, `-:3` and so on."""

    kind: ClassVar[str] = "stdin"
    repeatable: ClassVar[bool] = False
    allow_secrets: bool = False

    def texts(self, reading: Reading) -> Iterator[Text]:
        return self._texts(sys.stdin.buffer, reading)

    def measure(self) -> tuple[int, int]:
        return 1, 0

    def about(self) -> str:
        return "the standard input"

    def _texts(self, file: BinaryIO, reading: Reading) -> Iterator[Text]:
        rest, number = b"", 0
        while rest or number == 0:
            data = rest + file.read(PIECE - len(rest))
            if not data:
                return
            end = _end(data) if len(data) == PIECE else len(data)
            data, rest = data[:end], data[end:]
            number += 1
            name = "-" if number == 1 else f"-:{number}"
            for text in reading.text(name, decoded(data), 0, allow_secrets=self.allow_secrets):
                yield text._replace(state=None)
            if not rest:
                rest = file.read(1)


def _end(data: bytes) -> int:
    """Where to cut: after the last line feed, else before a character that may be incomplete."""
    end = data.rfind(b"\n") + 1
    if end:
        return end
    end = len(data)
    while len(data) - end < 3 and end > 1 and data[end - 1] & 0xC0 == 0x80:
        end -= 1
    return end - 1 if end > 1 and data[end - 1] >= 0xC0 else len(data)
