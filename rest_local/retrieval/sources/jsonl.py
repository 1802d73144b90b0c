"""A field of each row of JSON Lines files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from rest_local.retrieval.documents import Text
from rest_local.retrieval.sources.fields import WRONG, dig, files_of, json_rows, size_of
from rest_local.retrieval.sources.source import Reading, Source
from rest_local.retrieval.sources.walk import absolute

ENDINGS = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")


@dataclass(frozen=True, slots=True)
class Jsonl(Source):
    """One document for each row, named `FILE:LINE`. path: a file, compressed with gzip if it ends in `.gz`, or a glob;
    field: as for `fields.dig`.
    """

    kind: ClassVar[str] = "jsonl"
    path: str
    field: str
    allow_secrets: bool = False

    def texts(self, reading: Reading) -> Iterator[Text]:
        files = files_of(self.path)
        return (text for file in files for text in self._texts(file, reading))

    def measure(self) -> tuple[int, int]:
        return size_of(self.path)

    def about(self) -> str:
        return f"{self.path}:{self.field}"

    def prepared(self) -> Jsonl:
        return replace(self, path=absolute(self.path))

    def _texts(self, file: str, reading: Reading) -> Iterator[Text]:
        for row in json_rows(file, reading.skipped, reading.looked_at):
            text = dig(row.value, self.field)
            if isinstance(text, str):
                yield from reading.text(row.name, text, row.mark, allow_secrets=self.allow_secrets)
            else:
                reading.skipped.add(WRONG, row.name)
