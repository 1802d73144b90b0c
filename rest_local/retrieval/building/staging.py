"""A long build in steps that can be done anywhere, in any order, and again: plan, build each shard, publish.

    made = plan(recipe, memory, vocabulary)             # which files, in which shards; JSON-able
    build_shard(made, number, directory, tokenizer)     # for each number: in a process, or on another machine
    with moved(directory, index, entries, files):       # the files move into the index, one commit names them

A shard is a list of files. The files of its segments have the same names and bytes wherever and whenever they are
built, as long as the files of the shard do not change. A shard that is done leaves a record in the staging directory,
so a build that was killed goes on where it was. A staging directory belongs to the process that holds its lock; with
a free lock it is an orphan, which the next build of the same plan continues and any other build deletes.

Memory: a shard is planned so that its segment can be sorted within `memory`. Text with more tokens than planned for
gives several segments.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from rest_local.errors import CorpusTooLarge, DatastoreError, DatastoreUnwritable
from rest_local.retrieval.building.shards import Plan, fingerprint, refreshed, skipped_from_dict, skipped_to_dict
from rest_local.retrieval.building.shards import plan as plan
from rest_local.retrieval.building.staged import PLAN, delete, remove_orphans
from rest_local.retrieval.building.tokenizing import DocumentTokenizer, tokenize_documents
from rest_local.retrieval.building.writing import GrowingSegment, Progress, checked, write_file
from rest_local.retrieval.documents import Document, Text
from rest_local.retrieval.files import LOCK, Files, digest_of, locked, unwritable
from rest_local.retrieval.format import MAX_SEGMENT, FileEntry, SegmentEntry, file_name, parse_segment, sealed
from rest_local.retrieval.rows import width_of
from rest_local.retrieval.sources.corpus import read_files
from rest_local.retrieval.sources.skipped import Skipped


class Shard(NamedTuple):
    """What a shard gave. skipped: files that were left out after they were read."""

    segments: tuple[SegmentEntry, ...]
    skipped: Skipped


def build_shard(
    plan: Plan,
    number: int,
    directory: Path,
    tokenizer: DocumentTokenizer,
    progress: Progress | None = None,
    files: Files | None = None,
    workers: int | None = None,
) -> tuple[SegmentEntry, ...]:
    """Build the segments of one shard in a staging directory; usually one, none if its files hold no text.

    Their names are made of their content. All files are synced when it returns. A shard that is already done there is
    not built again: its files are compared with their checksums. workers: as for `tokenize_documents`. Raises
    ValueError for a tokenizer of another vocabulary, CorpusTooLarge, and OSError.
    """
    report, files = progress or (lambda what, amount: None), files or Files()
    if done := finished(plan, number, directory, check=True):
        report("read", plan.shard_bytes(number))
        return done.segments
    skipped = Skipped()
    grown = grow(plan, number, tokenizer, skipped, report, workers=workers)
    segments = tuple(_written(segment, directory, files, report) for segment in grown)
    record(plan, number, directory, Shard(segments, skipped), files)
    return segments


def grow(
    plan: Plan,
    number: int,
    tokenizer: DocumentTokenizer,
    skipped: Skipped,
    report: Progress,
    texts: Iterable[Text] | None = None,
    workers: int | None = None,
) -> Iterator[GrowingSegment]:
    """The segments of a shard, not yet sorted; no more than one is in memory. texts: None: read from its files.

    Raises ValueError for a tokenizer of another vocabulary, CorpusTooLarge.
    """
    if tokenizer.hash != plan.vocabulary.hash:
        raise ValueError(f"the plan is for vocabulary {plan.vocabulary.hash}, not {tokenizer.hash}")
    if texts is None:
        paths = (file.path for file in plan.shards[number])
        texts = read_files(paths, plan.filters, skipped, lambda size: report("read", size))
    documents = tokenize_documents(_without_copies(texts), tokenizer, workers)
    return _grown(documents, plan.vocabulary.size, plan.tokens, report)


def record(plan: Plan, number: int, directory: Path, shard: Shard, files: Files) -> None:
    """Note in a staging directory that a shard is done. Its files are there and synced."""
    segments = [entry.to_dict() for entry in shard.segments]
    put(
        files,
        directory / plan.record(number),
        sealed({"segments": segments, "skipped": skipped_to_dict(shard.skipped)}),
    )


def finished(plan: Plan, number: int, directory: Path, check: bool = False) -> Shard | None:
    """What is recorded of a shard, None if it is not done. check: compare its files with their checksums."""
    fields = unsealed(directory / plan.record(number))
    if fields is None:
        return None
    try:
        width = width_of(plan.vocabulary.size)
        segments = tuple(parse_segment(entry, width) for entry in fields["segments"])
        skipped = skipped_from_dict(fields["skipped"])
    except (KeyError, TypeError, ValueError):
        return None
    if check and not all(_intact(directory, entry) for entry in segments):
        return None
    return Shard(segments, skipped)


def _grown(documents: Iterable[Document], vocab_size: int, most: int, report: Progress) -> Iterator[GrowingSegment]:
    """Documents as segments of at most `most` tokens, unless one document has more."""
    growing, last = GrowingSegment(vocab_size), 0
    digest = b""  # of the file of document `last`
    for name, tokens, states in documents:
        if not len(tokens):  # a copy of the document before it, or nothing
            if states and digest and states[0].sha256 == digest:
                growing.add_state(last, states[0])
            continue
        if len(tokens) + 1 >= MAX_SEGMENT:
            raise CorpusTooLarge(len(tokens))
        if growing.tokens and growing.tokens + len(tokens) + 1 > most:
            yield growing
            growing = GrowingSegment(vocab_size)
        last = growing.add(name, checked(name, tokens, vocab_size), states)
        digest = states[0].sha256 if states else b""
        report("tokenized", len(tokens))
    if growing.tokens:
        yield growing


def _without_copies(texts: Iterable[Text]) -> Iterator[Text]:
    """Texts, without the text of a file that has the content of the one before it."""
    last: bytes | None = None
    for text in texts:
        digest = text.state.sha256 if text.state else None
        yield text._replace(text="") if digest and digest == last else text
        last = digest


def _written(growing: GrowingSegment, directory: Path, files: Files, report: Progress) -> SegmentEntry:
    content = growing.content()
    report("sorted", content.tokens)
    new = secrets.token_hex(8)  # two processes may build the same shard after a kill
    entries = {kind: write_file(files, directory / f"{kind}.new-{new}", data) for kind, data in content.files.items()}
    name = segment_name(entries)
    for kind in entries:
        files.rename(directory / f"{kind}.new-{new}", directory / file_name(name, kind))
    files.sync_directory(directory)
    report("written", content.tokens)
    return SegmentEntry(name, content.tokens, content.documents, entries, content.states)


def segment_name(entries: Mapping[str, FileEntry]) -> str:
    """Made of the content of a segment's files."""
    return fingerprint({kind: entry.sha256 for kind, entry in entries.items()})


def _intact(directory: Path, entry: SegmentEntry) -> bool:
    try:
        found = {kind: digest_of(directory / file_name(entry.name, kind))[0] for kind in entry.files}
    except FileNotFoundError:
        return False
    return found == {kind: file.sha256 for kind, file in entry.files.items()}


@contextmanager
def staged(index: Path, made: Plan, files: Files) -> Iterator[tuple[Path, Plan]]:
    """The locked staging directory of a plan in the directory of an index, and the plan: with the shards of an earlier
    build of it that did not end. Other staging directories are deleted unless a process works there.

    After an error the directory stays, to be continued, unless the disk failed: a full one gets its room back. Raises
    DatastoreLocked if another process holds it.
    """
    key = fingerprint([made.vocabulary.hash, made.tokens, made.recipe])
    directory = index / f"staging-{key}"
    with suppress(DatastoreError, OSError):
        remove_orphans(index, files, plans=True, keep=directory)
    with locked(directory, make=files), unwritable(index):
        try:
            before = unsealed(directory / PLAN)
            with suppress(KeyError, TypeError, ValueError):
                made = refreshed(Plan.from_dict(before), made) if before else made
            _clear(directory, files, _useful(directory, made))
            put(files, directory / PLAN, sealed(made.to_dict()))
            yield directory, made
        except (OSError, DatastoreUnwritable):
            with suppress(OSError):
                delete(directory, files)
            raise


def _useful(directory: Path, made: Plan) -> set[str]:
    """The names of what a plan can use again."""
    names = {LOCK}
    for number in range(len(made.shards)):
        if done := finished(made, number, directory):
            names.add(made.record(number))
            names |= {file_name(entry.name, kind) for entry in done.segments for kind in entry.files}
    return names


def _clear(directory: Path, files: Files, keep: set[str]) -> None:
    for name in sorted(set(os.listdir(directory)) - keep):
        files.unlink(directory / name)


@contextmanager
def moved(directory: Path, index: Path, entries: Iterable[SegmentEntry], files: Files) -> Iterator[None]:
    """Move the files of segments from a staging directory into an index; back, if what follows fails."""
    names = sorted({file_name(entry.name, kind) for entry in entries for kind in entry.files})
    before = set(os.listdir(index))
    done: list[str] = []
    try:
        for name in names:
            files.rename(directory / name, index / name)
            done.append(name)
        files.sync_directory(index)
        yield
    except BaseException:
        for name in done:
            if name not in before:
                with suppress(OSError):
                    files.rename(index / name, directory / name)
        raise


def put(files: Files, path: Path, content: bytes) -> None:
    """Write a file under a new name, sync it and rename it to `path`."""
    new = path.with_name(f"{path.name}.new-{secrets.token_hex(8)}")
    write_file(files, new, content)
    files.rename(new, path)
    files.sync_directory(path.parent)


def unsealed(path: Path) -> dict[str, Any] | None:
    """The fields of a file with `sealed` content; None if there is none, or a damaged one."""
    try:
        data = path.read_bytes()
        fields = json.loads(data)
        del fields["sha256"]
        return fields if sealed(fields) == data else None
    except (FileNotFoundError, KeyError, TypeError, ValueError, RecursionError):
        return None
