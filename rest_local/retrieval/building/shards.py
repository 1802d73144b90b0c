"""Which files a build takes, and how they are divided into shards that can be built apart from each other."""

from __future__ import annotations

import hashlib
import json
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rest_local.errors import OptionError
from rest_local.retrieval.format import MAX_SEGMENT, VocabularyId
from rest_local.retrieval.rows import PADDING, width_of
from rest_local.retrieval.sources.corpus import Filters, list_files
from rest_local.retrieval.sources.reading import read_regular
from rest_local.retrieval.sources.skipped import Skipped

FIXED_MEMORY = 400 << 20
"""Of a process that builds a shard, whatever its size: Python, the vocabulary, known words, a batch of text."""
SORTED_MEMORY = {2: 17, 3: 23}
"""Bytes for each token while a segment is sorted, by the width of a token: its bytes twice, 4 for each of them, 4 for
the position, and a little."""
TEXT_BYTES = 2.5
"""Bytes of text that are planned for a token. Code and English have 3 to 4, Chinese 3; data in hexadecimal 1.5."""
LEAST_SHARD = 4 << 20
"""Bytes of text for which a process of its own pays: it starts in about a second."""


class PlannedFile(NamedTuple):
    """A file when it was listed. mtime_ns: its time of change."""

    path: str
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Plan:
    """A build. recipe: of the walk, see `indexing.recipe_of`; tokens: the most in a segment; shards: their files, in
    order; skipped: files that the walk left out without reading them.
    """

    recipe: Mapping[str, Any]
    vocabulary: VocabularyId
    tokens: int
    shards: tuple[tuple[PlannedFile, ...], ...]
    skipped: Skipped

    @property
    def filters(self) -> Filters:
        """Which files are taken."""
        return _filters(self.recipe)

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(map(self.shard_bytes, range(len(self.shards))))

    @property
    def memory(self) -> int:
        """Bytes of a process that builds a shard, about."""
        return FIXED_MEMORY + self.tokens * SORTED_MEMORY[width_of(self.vocabulary.size)]

    def shard_bytes(self, number: int) -> int:
        """Of the files of one shard."""
        return sum(file.size for file in self.shards[number])

    def record(self, number: int) -> str:
        """The name of a finished shard's record: says what it was made of, with size and time of each file."""
        made_of = [self.vocabulary.hash, self.vocabulary.size, self.tokens, self.recipe, self.shards[number]]
        return f"shard-{fingerprint(made_of)}.json"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "recipe": dict(self.recipe),
            "vocabulary": {name: getattr(self.vocabulary, name) for name in ("hash", "size", "name")},
            "tokens": self.tokens,
            "shards": [[list(file) for file in shard] for shard in self.shards],
            "skipped": skipped_to_dict(self.skipped),
        }

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> Plan:
        """The inverse of `to_dict`. Raises KeyError, TypeError and ValueError for anything else."""
        shards = tuple(tuple(PlannedFile(str(a), int(b), int(c)) for a, b, c in shard) for shard in fields["shards"])
        skipped = skipped_from_dict(fields["skipped"])
        return Plan(fields["recipe"], VocabularyId(**fields["vocabulary"]), int(fields["tokens"]), shards, skipped)


def plan(recipe: Mapping[str, Any], memory: int, vocabulary: VocabularyId, least: int = 1) -> Plan:
    """List the files of a walk and divide them into shards whose segments can be sorted in `memory` bytes.

    Files with the same content come one after another, so that one document holds them. least: number of shards, if
    the text suffices for so many. Reads the files that have the size of another one. Raises InputInvalid, OptionError.
    """
    skipped = Skipped()
    listed = [PlannedFile(*file) for file in list_files(recipe["paths"], _filters(recipe), skipped)]
    tokens = segment_tokens(memory, vocabulary.size)
    shards = tuple(map(tuple, _divided(_together(listed), round(tokens * TEXT_BYTES), least)))
    return Plan(dict(recipe), vocabulary, tokens, shards, skipped)


def segment_tokens(memory: int, vocab_size: int) -> int:
    """The most tokens of a segment that is made in `memory` bytes. Raises OptionError if there is no room for any."""
    width = width_of(vocab_size)
    tokens = (memory - FIXED_MEMORY) // SORTED_MEMORY[width]
    if tokens < 1 << 20:
        least = FIXED_MEMORY + (SORTED_MEMORY[width] << 20)
        raise OptionError(f"memory of {memory >> 20} MB for each process: at least {(least >> 20) + 1} MB are needed")
    return min(tokens, (MAX_SEGMENT - 1) // width - PADDING)  # the bytes are sorted with 32-bit positions


def refreshed(old: Plan, new: Plan) -> Plan:
    """The plan `new` with the shards of `old` if it is of the same files, whatever changed in them."""
    files = {file.path: file for shard in new.shards for file in shard}
    paths = [[file.path for file in shard] for shard in old.shards]
    if (old.tokens, dict(old.recipe)) != (new.tokens, dict(new.recipe)) or sum(map(len, paths)) != len(files):
        return new
    if any(path not in files for shard in paths for path in shard):
        return new
    return replace(new, shards=tuple(tuple(files[path] for path in shard) for shard in paths))


def _together(files: Sequence[PlannedFile]) -> list[list[PlannedFile]]:
    """The files in order, those with the same content together."""
    sizes = Counter(file.size for file in files)
    groups: dict[object, list[PlannedFile]] = {}
    for number, file in enumerate(files):
        groups.setdefault(_content(file) if sizes[file.size] > 1 else number, []).append(file)
    return list(groups.values())


def _content(file: PlannedFile) -> object:
    """Equal for files with the same content. A file that cannot be read is only like itself."""
    with suppress(OSError):
        status, data, _ = read_regular(file.path, file.size + 1)
        if data is not None and stat.S_ISREG(status.st_mode):
            return hashlib.sha256(data).digest()
    return file


def _divided(groups: Sequence[Sequence[PlannedFile]], most: int, least: int) -> Iterator[list[PlannedFile]]:
    """Shards of about the same size, of at most `most` bytes unless one file has more; copies do not count."""
    total = sum(group[0].size for group in groups)
    number = max(-(-total // most), min(least, total // LEAST_SHARD), 1)
    shard: list[PlannedFile] = []
    size = done = 0
    for group in groups:
        if shard and (size + group[0].size > most or done + size >= -(-total // number)):
            yield shard
            shard, size, done = [], 0, 0
        shard += group
        size += group[0].size
    if shard:
        yield shard


def skipped_to_dict(skipped: Skipped) -> dict[str, Any]:
    """JSON-ready."""
    return {"counts": dict(skipped.counts), "kinds": dict(skipped.kinds), "secrets": list(skipped.secrets)}


def skipped_from_dict(fields: Mapping[str, Any]) -> Skipped:
    """The inverse of `skipped_to_dict`."""
    return Skipped(Counter(fields["counts"]), Counter(fields["kinds"]), list(fields["secrets"]))


def _filters(recipe: Mapping[str, Any]) -> Filters:
    return Filters(tuple(recipe["include"]), tuple(recipe["exclude"]), recipe["allow_secrets"], recipe["max_file_size"])


def fingerprint(fields: Any) -> str:
    """16 hexadecimal digits of the sha256 of JSON-ready fields."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]
