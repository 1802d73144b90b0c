"""The text files below paths."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from rest_local.retrieval.documents import Text
from rest_local.retrieval.sources.corpus import MAX_FILE_SIZE, Filters, measure, walk_files
from rest_local.retrieval.sources.source import Reading, Source


@dataclass(frozen=True, slots=True)
class Walk(Source):
    """Files below `paths`, as `corpus.walk_files` takes them; the other fields are those of `corpus.Filters`."""

    kind: ClassVar[str] = "walk"
    paths: tuple[str, ...]
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    allow_secrets: bool = False
    max_file_size: int = MAX_FILE_SIZE

    def __post_init__(self) -> None:
        self.filters()

    def filters(self) -> Filters:
        return Filters(self.include, self.exclude, self.allow_secrets, self.max_file_size)

    def texts(self, reading: Reading) -> Iterator[Text]:
        return walk_files(
            self.paths,
            self.filters(),
            reading.skipped,
            unchanged=reading.unchanged,
            only=reading.only,
            looked_at=reading.looked_at,
        )

    def measure(self) -> tuple[int, int]:
        return measure(
            self.paths,
            self.include,
            self.exclude,
            allow_secrets=self.allow_secrets,
            max_file_size=self.max_file_size,
        )

    def about(self) -> str:
        return ", ".join(self.paths)

    def prepared(self) -> Walk:
        return replace(self, paths=tuple(absolute(path) for path in self.paths))


def absolute(path: str | os.PathLike[str]) -> str:
    """The path as a recipe holds it: `~` stands for the home directory, and links are kept."""
    return str(Path(path).expanduser().absolute())
