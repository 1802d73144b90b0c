"""Divide a long build into steps that can run anywhere, in any order, and again: plan, build each shard, commit.

    made = plan(walk, memory, vocabulary)               # divides the files into shards; JSON-ready
    build_shard(made, number, directory, tokenizer)     # runs for each number, in a process or on another machine

A shard is a list of files. The files of its segments have the same bytes wherever and whenever they are built, as long
as the files of the shard do not change. A shard that is done leaves a record in the staging directory, so a killed
build goes on where it was. A staging directory belongs to the process that holds its lock; with a free lock it is
an orphan, which the next build of the same plan continues and any other build deletes.

A shard is planned so that its segment can be sorted in `memory`. Text with more tokens than planned gives several.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import secrets
import signal
import stat
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from rest_local.errors import DatastoreError, DatastoreUnwritable, OptionError, RestLocalError, printable
from rest_local.retrieval.building.build import Progress, no_progress, write_file, write_segments
from rest_local.retrieval.documents import Document, DocumentTokenizer, Opener, Text, counted, tokenize_documents
from rest_local.retrieval.files import LOCK, Files, digest_of, locked, mapping_os_errors
from rest_local.retrieval.format import MAX_SEGMENT, SegmentEntry, VocabularyId, parse_segment, sealed, unsealed
from rest_local.retrieval.rows import PADDING, width_of
from rest_local.retrieval.sources.listing import read_regular
from rest_local.retrieval.sources.source import Reading, Skipped, made
from rest_local.retrieval.sources.walk import Walk, list_files, read_files
from rest_local.retrieval.staging import PLAN, delete, remove_orphans

# A process that builds a shard of any size takes so many bytes for Python, the vocabulary and some texts.
FIXED_MEMORY = 400 << 20
# Bytes for each token while a segment is sorted, by the width of a token: its bytes twice, 4 for each of them, 4 for
# the position, and a little.
SORTED_MEMORY = {2: 17, 3: 23}
# Bytes of text that are planned for a token. Code and English have 3 to 4, Chinese 3; data in hexadecimal 1.5.
TEXT_BYTES = 2.5
LEAST_SHARD = 4 << 20  # a process starts in about a second, so it pays only for so many bytes of text


class PlannedFile(NamedTuple):
    """A file when it was listed."""

    path: str
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class ShardPlan:
    """A plan of a build: the files of each shard, in order."""

    walk: Walk
    vocabulary: VocabularyId
    tokens: int  # the most in a segment
    shards: tuple[tuple[PlannedFile, ...], ...]
    skipped: Skipped  # files that the walk left out

    @property
    def bytes(self) -> int:
        return sum(map(self.shard_bytes, range(len(self.shards))))

    @property
    def memory(self) -> int:
        """Return the approximate bytes of a process that builds a shard."""
        return FIXED_MEMORY + self.tokens * SORTED_MEMORY[width_of(self.vocabulary.size)]

    def shard_bytes(self, number: int) -> int:
        return sum(file.size for file in self.shards[number])

    def record(self, number: int) -> str:
        """Return the name of a finished shard's record, which depends on size and time of each file."""
        made_of = [self.vocabulary.hash, self.vocabulary.size, self.tokens, self.walk.to_dict(), self.shards[number]]
        return f"shard-{fingerprint(made_of)}.json"

    def to_dict(self) -> dict[str, Any]:
        return {
            "walk": self.walk.to_dict(),
            "vocabulary": self.vocabulary.to_dict(),
            "tokens": self.tokens,
            "shards": [[list(file) for file in shard] for shard in self.shards],
            "skipped": self.skipped.to_dict(),
        }

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> ShardPlan:
        """Invert `to_dict`. Raises KeyError, TypeError, ValueError and OptionError for anything else."""
        shards = tuple(tuple(PlannedFile(str(a), int(b), int(c)) for a, b, c in shard) for shard in fields["shards"])
        vocabulary, skipped = VocabularyId(**fields["vocabulary"]), Skipped.from_dict(fields["skipped"])
        return ShardPlan(made(Walk, fields["walk"]), vocabulary, int(fields["tokens"]), shards, skipped)


def plan(walk: Walk, memory: int, vocabulary: VocabularyId, least: int = 1) -> ShardPlan:
    """Divide the files of a walk into shards whose segments can be sorted in `memory` bytes, at least `least` shards if
    the text suffices. Files with the same content come one after another, so that one document holds them; to find
    them, files of equal size are read. Raises InputInvalid, OptionError.
    """
    skipped = Skipped()
    listed = [PlannedFile(*file) for file in list_files(walk.paths, walk, skipped)]
    tokens = segment_tokens(memory, vocabulary.size)
    shards = tuple(map(tuple, _divided(_together(listed), round(tokens * TEXT_BYTES), least)))
    return ShardPlan(walk, vocabulary, tokens, shards, skipped)


def segment_tokens(memory: int, vocab_size: int) -> int:
    """Return the most tokens of a segment that is made in `memory` bytes. Raises OptionError if none fits."""
    width = width_of(vocab_size)
    tokens = (memory - FIXED_MEMORY) // SORTED_MEMORY[width]
    if tokens < 1 << 20:
        least = FIXED_MEMORY + (SORTED_MEMORY[width] << 20)
        raise OptionError(f"memory of {memory >> 20} MB for each process: at least {(least >> 20) + 1} MB are needed")
    return min(tokens, (MAX_SEGMENT - 1) // width - PADDING)  # the bytes are sorted with 32-bit positions


def refreshed(old: ShardPlan, new: ShardPlan) -> ShardPlan:
    """Return the plan `new`, with the shards of `old` if both have the same files, whatever changed in them."""
    files = {file.path: file for shard in new.shards for file in shard}
    paths = [[file.path for file in shard] for shard in old.shards]
    if (old.tokens, old.walk) != (new.tokens, new.walk) or sum(map(len, paths)) != len(files):
        return new
    if any(path not in files for shard in paths for path in shard):
        return new
    return replace(new, shards=tuple(tuple(files[path] for path in shard) for shard in paths))


def _together(files: Sequence[PlannedFile]) -> list[list[PlannedFile]]:
    """Group the files in order, those with the same content together."""
    sizes = Counter(file.size for file in files)
    groups: dict[object, list[PlannedFile]] = {}
    for number, file in enumerate(files):
        groups.setdefault(_content(file) if sizes[file.size] > 1 else number, []).append(file)
    return list(groups.values())


def _content(file: PlannedFile) -> object:
    """Return a value that is equal for files with the same content. An unreadable file equals only itself."""
    with suppress(OSError):
        status, data, _ = read_regular(file.path, file.size + 1)
        if data is not None and stat.S_ISREG(status.st_mode):
            return hashlib.sha256(data).digest()
    return file


def _divided(groups: Sequence[Sequence[PlannedFile]], most: int, least: int) -> Iterator[list[PlannedFile]]:
    """Yield shards of about the same size, of at most `most` bytes unless one file has more. Copies do not count."""
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


def fingerprint(fields: Any) -> str:
    """Return 16 hexadecimal digits of the sha256 of JSON-ready fields."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


class Shard(NamedTuple):
    """The result of a shard. Files that were left out after they were read are in `skipped`."""

    segments: tuple[SegmentEntry, ...]
    skipped: Skipped


def build_shard(
    plan: ShardPlan,
    number: int,
    directory: Path,
    tokenizer: DocumentTokenizer,
    progress: Progress = no_progress,
    files: Files | None = None,
    workers: int | None = None,
) -> tuple[SegmentEntry, ...]:
    """Build the segments of one shard in a staging directory: usually one, none if its files hold no text.

    All files are synced when it returns. A shard that is already done there is not built again: its files are compared
    with their checksums. Raises ValueError for a tokenizer of another vocabulary, CorpusTooLarge, and OSError.
    """
    files = files or Files()
    if done := finished(plan, number, directory, check=True):
        progress("read", plan.shard_bytes(number))
        return done.segments
    skipped = Skipped()
    segments = write_segments(
        directory,
        shard_documents(plan, number, tokenizer, skipped, progress, workers=workers),
        vocabulary=plan.vocabulary,
        progress=progress,
        segment_tokens=plan.tokens,
        files=files,
    )
    record(plan, number, directory, Shard(segments, skipped), files)
    return segments


def shard_documents(
    plan: ShardPlan,
    number: int,
    tokenizer: DocumentTokenizer,
    skipped: Skipped,
    report: Progress,
    texts: Iterable[Text] | None = None,
    workers: int | None = None,
) -> Iterator[Document]:
    """Yield the documents of a shard. Only the first of several files with the same content has tokens. `texts`
    replaces reading its files. Raises ValueError for a tokenizer of another vocabulary.
    """
    if tokenizer.hash != plan.vocabulary.hash:
        raise ValueError(f"the plan is for vocabulary {plan.vocabulary.hash}, not {tokenizer.hash}")
    if texts is None:
        paths = (file.path for file in plan.shards[number])
        texts = read_files(paths, plan.walk, Reading(skipped, looked_at=lambda size: report("read", size)))
    return counted(tokenize_documents(_without_copies(texts), tokenizer, workers), report)


def _without_copies(texts: Iterable[Text]) -> Iterator[Text]:
    """Empty each text whose file has the content of the one before it."""
    last: bytes | None = None
    for text in texts:
        digest = text.state.sha256 if text.state else None
        yield text._replace(text="") if digest and digest == last else text
        last = digest


def record(plan: ShardPlan, number: int, directory: Path, shard: Shard, files: Files) -> None:
    """Note in a staging directory that a shard is done. Its files are there and synced."""
    segments = [entry.to_dict() for entry in shard.segments]
    _put(files, directory / plan.record(number), {"segments": segments, "skipped": shard.skipped.to_dict()})


def finished(plan: ShardPlan, number: int, directory: Path, check: bool = False) -> Shard | None:
    """Return a shard's recorded result, or None if it is not done. `check` compares its files with their checksums."""
    try:
        fields = unsealed((directory / plan.record(number)).read_bytes())
        segments = tuple(parse_segment(entry, width_of(plan.vocabulary.size)) for entry in fields["segments"])
        shard = Shard(segments, Skipped.from_dict(fields["skipped"]))
        named = [named for entry in segments for named in entry.named_files.items()] if check else []
        return shard if all(digest_of(directory / name)[0] == file.sha256 for name, file in named) else None
    except (FileNotFoundError, KeyError, TypeError, ValueError):
        return None


@contextmanager
def staged(index: Path, made: ShardPlan, files: Files) -> Iterator[tuple[Path, ShardPlan]]:
    """Lock and yield the staging directory of a plan in the directory of an index, and the plan with the shards of an
    earlier build of it that did not end. Other staging directories are deleted unless a process works there.

    After an error the directory stays, so that the build can go on, unless the disk failed: a full one gets its room
    back. Raises DatastoreLocked if another process holds it.
    """
    key = fingerprint([made.vocabulary.hash, made.tokens, made.walk.to_dict()])
    directory = index / f"staging-{key}"
    with suppress(DatastoreError, OSError):
        remove_orphans(index, files, plans=True, keep=directory)
    with locked(directory, make=files), mapping_os_errors(index):
        try:
            with suppress(FileNotFoundError, KeyError, TypeError, ValueError, OptionError):
                made = refreshed(ShardPlan.from_dict(unsealed((directory / PLAN).read_bytes())), made)
            useful = {LOCK}
            for number in range(len(made.shards)):
                if done := finished(made, number, directory):
                    useful |= {made.record(number), *(name for entry in done.segments for name in entry.named_files)}
            for name in sorted(set(os.listdir(directory)) - useful):
                files.unlink(directory / name)
            _put(files, directory / PLAN, made.to_dict())
            yield directory, made
        except (OSError, DatastoreUnwritable):
            with suppress(OSError):
                delete(directory, files)
            raise


def _put(files: Files, path: Path, fields: Mapping[str, Any]) -> None:
    """Write sealed fields under a new name, sync the file and rename it to `path`."""
    new = path.with_name(f"{path.name}.new-{secrets.token_hex(8)}")
    write_file(files, new, sealed(fields))
    files.rename(new, path)
    files.sync_directory(path.parent)


def build_shards(
    plan: ShardPlan,
    numbers: Sequence[int],
    directory: Path,
    opener: Opener,
    jobs: int,
    progress: Progress = no_progress,
    files: Files | None = None,
) -> None:
    """Build the shards with these numbers in up to `jobs` processes. `finished` has the results.

    A process opens the vocabulary for itself and gets the numbers of shards one after another. It ends when the build
    ends, however that happens: it exits when the other end of its pipe is closed. `SIGINT` is left to this process,
    which also calls `progress`. Raises the errors of `build_shard` in their own words, OSError as it is, and
    DatastoreError if a process dies.
    """
    left = deque(numbers)
    context = multiprocessing.get_context("spawn")
    workers: dict[Connection, SpawnProcess] = {}

    def stop(pipe: Connection) -> None:
        """End a process now. The next build deletes its unfinished files."""
        process = workers.pop(pipe)
        pipe.close()
        process.kill()
        process.join()

    for _ in range(min(jobs, len(numbers))):
        ours, theirs = context.Pipe()
        arguments = (theirs, plan, directory, opener, files or Files())
        workers[ours] = context.Process(target=_work, args=arguments, daemon=True)
        workers[ours].start()
        theirs.close()
    try:
        while workers:
            for pipe in wait(list(workers)):
                assert isinstance(pipe, Connection)
                try:
                    kind, *content = pipe.recv()
                except (EOFError, ConnectionError) as error:
                    (ended := workers[pipe]).join()
                    what = f"a process of the build ended with code {ended.exitcode}"
                    raise DatastoreError(f"{what}; less `memory` or fewer `jobs` may help") from error
                if kind == "failed":
                    raise content[0]
                if kind == "progress":
                    progress(*content)
                elif left:  # the process waits for a shard
                    pipe.send(left.popleft())
                else:
                    stop(pipe)
    finally:
        for left_open in list(workers):
            stop(left_open)


def _work(pipe: Connection, plan: ShardPlan, directory: Path, opener: Opener, files: Files) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    numbers: SimpleQueue[int] = SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, numbers), daemon=True).start()
    try:
        with opener() as tokenizer:
            while True:
                pipe.send(("ready",))
                build_shard(
                    plan,
                    numbers.get(),
                    directory,
                    tokenizer,
                    lambda what, amount: pipe.send(("progress", what, amount)),
                    files,
                    workers=1,
                )
    except Exception as error:
        # Errors of this package take other arguments than their message, so another process cannot raise them.
        if isinstance(error, RestLocalError):
            error = DatastoreError(str(error))
        elif not isinstance(error, OSError):
            error = DatastoreError(f"a process of the build failed: {printable(repr(error))}")
        pipe.send(("failed", error))


def _listen(pipe: Connection, numbers: SimpleQueue[int]) -> None:
    """Receive numbers until the other end is closed. Then end the process, in the middle of whatever it does."""
    while True:
        try:
            numbers.put(pipe.recv())
        except (EOFError, OSError):
            os._exit(1)
