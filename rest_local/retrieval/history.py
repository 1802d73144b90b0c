"""Keep earlier answers of a model across runs, and search them like a datastore.

    history = History.open(history_home() / "qwen2-0f3a", vocabulary)
    history.rows(context, 48, 16)     # searches what any process committed, and new answers of this process
    history.add(answer)               # keeps the answer in memory; begins a commit after COMMIT_TOKENS new tokens
    history.close()                   # commits what is new

On disk a history is a datastore (docs/FORMAT.md). Its documents are answers, named by a digest of their tokens, so that
each answer is stored once. A commit adds a segment. It reads and writes under the datastore's lock, so several
processes can use one history. Small segments are merged into the new one, and beyond `cap` tokens the oldest answers
are deleted.

A commit that `add` begins runs in a thread of its own, so that generation goes on: it syncs files, merges for up to a
second, and waits for the lock of other processes. The answers stay searchable in memory until the first `add` after
its end.

No failure here is fatal, because a history can only make an answer faster:

- A directory that is damaged, of another version or no history is renamed (`NAME.damaged-1`), with one warning.
- Answers that cannot be written, or whose lock cannot be taken, wait for the next commit, with one warning.

Knows nothing about models: an answer is a list of token ids. Not thread-safe for callers.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import logging
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rest_local.errors import (
    DatastoreCorrupt,
    DatastoreError,
    DatastoreLocked,
    DatastoreNotFound,
    DatastoreUnwritable,
    DatastoreVersion,
    DatastoreVocabulary,
    HistoryNotFound,
)
from rest_local.paths import data_dir
from rest_local.retrieval.building.build import SMALL_SEGMENT
from rest_local.retrieval.building.build import commit as commit_datastore
from rest_local.retrieval.datastore import OUTSIDE, Datastore
from rest_local.retrieval.files import WAIT_S, Files, locked, mapping_os_errors
from rest_local.retrieval.format import MANIFEST, Manifest, SegmentEntry, VocabularyId
from rest_local.retrieval.home import holds_files, read_manifest
from rest_local.retrieval.rows import Context, Int32Array, Rows
from rest_local.retrieval.segment import Segment, search_all
from rest_local.retrieval.staging import clear, clear_folder, remove

log = logging.getLogger("rest_local.history")

KIND = "history"
# Maximum number of tokens: 24 to 28 MB. If there are more, the oldest answers are deleted until KEPT of it is left.
CAP = 4_000_000
KEPT = 0.75

# A commit follows after so many new tokens; a kill can lose as many. It takes 50 ms, nearly all of it for fsync.
COMMIT_TOKENS = 4096

# Maximum of new tokens in memory while nothing can be written, so that a full disk does not fill the memory too.
UNWRITTEN = 1 << 16

# A segment is merged until it is so many times larger than all newer ones. So there are two segments up to a million
# tokens and three below CAP. Each costs a search. In return a token is written about 20 times.
MERGE = 16

DAMAGE = (DatastoreCorrupt, DatastoreVersion, DatastoreVocabulary)
DAMAGED = ".damaged-"
_ATTEMPTS = 3

Answers = list[tuple[str, Int32Array]]
Pending = dict[str, Int32Array]  # digest -> tokens, the oldest first


def history_home() -> Path:
    """Make and return the directory of all histories, in the user's data directory.

    Raises:
        OSError: it cannot be made
    """
    return data_dir() / "history"


class History:
    """The answers of one model. Make one with `History.open`, and `close` it.

    Attributes:
        path: its directory, which the first commit creates
        vocabulary: the model's; only its ids are ever returned
    """

    def __init__(
        self,
        path: Path,
        vocabulary: VocabularyId,
        recipe: Mapping[str, Any] | None,
        *,
        cap: int,
        wait_s: float,
        files: Files | None,
        mmap: bool,
    ) -> None:
        self.path, self.vocabulary, self.cap = path, vocabulary, cap
        self._mmap = mmap
        self._recipe = {**(recipe or {}), "kind": KIND}
        self._wait_s, self._files = wait_s, files or Files()
        self._longest = int(KEPT * cap) - 1  # the longest answer that fits after old ones were deleted
        if self._longest < 1:
            raise ValueError(f"cap {cap} is too small for an answer")
        self._store: Datastore | None = None
        self._pending: Pending = {}  # answers that are not committed yet
        self._pending_tokens = 0  # includes one separator for each answer
        self._searched: list[tuple[int, Segment]] | None = None
        self._commit_at = COMMIT_TOKENS
        self._warned: set[str] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rest-local-history")
        self._writing: Future[tuple[Pending, Datastore | None] | None] | None = None

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        vocabulary: VocabularyId,
        recipe: Mapping[str, Any] | None = None,
        *,
        cap: int = CAP,
        wait_s: float = WAIT_S,
        files: Files | None = None,
        mmap: bool = True,
    ) -> History:
        """Open a history, which need not exist yet. Reads up to 32 MB. No content there raises an error.

        Args:
            path: its directory
            vocabulary: the model's
            recipe: information for the manifest (`model`)
            cap: maximum number of tokens
            wait_s: seconds to wait for the lock
            files: file operations, as for `build`
            mmap: False never maps a file, not even a large one or during a commit

        Raises:
            ValueError: the cap has no room for an answer
        """
        history = cls(Path(path), vocabulary, recipe, cap=cap, wait_s=wait_s, files=files, mmap=mmap)
        history._store = history._opened()
        return history

    @property
    def tokens(self) -> int:
        """Count the searchable tokens, with one separator for each answer."""
        return self._pending_tokens + self._stored_tokens

    @property
    def _stored_tokens(self) -> int:
        return len(self._store) if self._store else 0

    def rows(self, context: Context, limit: int = 64, depth: int = 16) -> Rows:
        """Search stored and new answers as `Datastore.rows` does. Among equal matches the older comes first."""
        try:
            return search_all(self._segments(), context, limit, depth)
        except IndexError:
            if self._store is None:
                raise
            opened = self._store.manifest
            self._close_store()
            self._set_aside(DatastoreCorrupt(self.path, OUTSIDE), opened)
            return self.rows(context, limit, depth)

    def _segments(self) -> list[tuple[int, Segment]]:
        """Return all segments to search, the largest first, because the search of the others then ends early: with
        three segments at 1 M tokens a lookup took 56 us, and 93 us with the newest first; with one segment it took 28
        us. New answers are sorted again after each `add`, in a millisecond at most.
        """
        if self._searched is None:
            self._searched = list(self._store.placed) if self._store else []
            if self._pending:
                new = Segment.of(self._pending.values(), self.vocabulary.size)
                self._searched.append((self._stored_tokens, new))
        return self._searched

    def add(self, answer: npt.ArrayLike) -> None:
        """Keep an answer, unless it is empty or already waits for a commit.

        Args:
            answer: its token ids. Only its end is kept if it is longer than the cap allows.

        Raises:
            ValueError: an id is outside the vocabulary
        """
        tokens = np.asarray(answer, np.int32).reshape(-1)[-self._longest :]
        if not len(tokens):
            return
        if int(tokens.min()) < 0 or int(tokens.max()) >= self.vocabulary.size:
            raise ValueError(f"an answer's token ids must be from 0 to {self.vocabulary.size - 1}")
        name = hashlib.sha256(tokens.astype("<i4").tobytes()).hexdigest()[:16]
        if self._writing is not None and self._writing.done():
            self._end_writing()
        if name in self._pending:
            return
        self._pending[name] = tokens.copy()
        self._pending_tokens += len(tokens) + 1
        self._searched = None
        if self._pending_tokens >= self._commit_at and self._writing is None:
            self._writing = self._thread.submit(self._write, dict(self._pending))

    def commit(self) -> None:
        """Write new answers as a segment, wait for that, and open the result with the answers of other processes.

        Answers that cannot be written wait for the next commit; above UNWRITTEN tokens they are dropped.
        """
        self._end_writing()
        if self._pending:
            self._use(self._write(self._pending))

    def close(self) -> None:
        """Commit new answers and close the files. A second call does nothing."""
        self._end_writing()
        if self._pending and self._commit(self._pending):
            self._keep_pending({})
        self._close_store()
        self._thread.shutdown()

    def _write(self, pending: Pending) -> tuple[Pending, Datastore | None] | None:
        """Commit these answers and open the result, or return None if they cannot be written. It runs in the thread, so
        it changes nothing of the object but the warnings that were given.
        """
        return (pending, self._opened()) if self._commit(pending) else None

    def _end_writing(self) -> None:
        """Wait for the commit that `add` has begun, and use its result."""
        if (writing := self._writing) is not None:
            wait([writing])
            self._writing = None
            self._use(writing.result())

    def _use(self, written: tuple[Pending, Datastore | None] | None) -> None:
        if written is not None:
            answers, store = written
            self._close_store()
            self._store = store
            self._keep_pending({name: tokens for name, tokens in self._pending.items() if name not in answers})
        elif self._pending_tokens > UNWRITTEN:
            self._keep_pending({})
        self._commit_at = self._pending_tokens + COMMIT_TOKENS

    def _keep_pending(self, pending: Pending) -> None:
        self._pending, self._searched = pending, None
        self._pending_tokens = sum(len(tokens) + 1 for tokens in pending.values())

    def _commit(self, pending: Pending) -> bool:
        """Write answers to the disk. Return False, after a warning, if that fails."""
        try:
            clear(self.path, self._files)
            for _ in range(_ATTEMPTS):
                with locked(self.path, self._wait_s, make=self._files):
                    try:
                        self._append(pending)
                        return True
                    except DAMAGE as error:
                        self._rename(error)
        except DatastoreLocked as error:
            self._warn("locked", f"{cause_of(error)}; new answers are kept in memory until it is free")
        except DatastoreUnwritable as error:
            self._warn("refused", f"cannot be written: {cause_of(error)}; new answers are not kept beyond this process")
        except DatastoreError as error:
            self._warn("refused", f"{cause_of(error)}; new answers are not kept beyond this process")
        return False

    def _append(self, pending: Pending) -> None:
        """Make one commit, under the lock. Raises DAMAGE, DatastoreUnwritable."""
        with contextlib.ExitStack() as stack:
            store = self._snapshot(whole=False)
            if store:
                stack.enter_context(store)
            known = set(store.document_names()) if store else set()
            fresh = [(name, tokens) for name, tokens in pending.items() if name not in known]
            if not fresh:  # The answers are stored already, so only the time of last use changes.
                with contextlib.suppress(OSError):
                    os.utime(self.path / MANIFEST)
                return
            keep, answers = self._plan(store, fresh)
        commit_datastore(
            self.path, answers, vocabulary=self.vocabulary, recipe=self._recipe, keep=keep, files=self._files
        )

    def _plan(self, store: Datastore | None, fresh: Answers) -> tuple[tuple[SegmentEntry, ...], Answers]:
        """Return the segments that stay, and the new segment's answers, oldest first: merged ones, then `fresh`."""
        entries = list(store.manifest.segments) if store else []
        size = sum(len(tokens) + 1 for _, tokens in fresh)
        full = size + sum(entry.tokens for entry in entries) > self.cap
        answers = list(fresh)
        while store and entries and (full or entries[-1].tokens <= max(MERGE * size, SMALL_SEGMENT)):
            entry = entries.pop()
            store.check([entry])  # or damaged tokens would get a new, valid checksum
            answers[:0] = [(name, tokens) for name, tokens, _ in store.documents(len(entries))]
            size += entry.tokens
        if full:
            sizes = np.cumsum([len(tokens) + 1 for _, tokens in reversed(answers)])
            answers = answers[-int(np.searchsorted(sizes, KEPT * self.cap, side="right")) :]
        return tuple(entries), answers

    def _snapshot(self, whole: bool) -> Datastore | None:
        """Open the newest commit, or return None without one. With `whole` it will be searched; otherwise only parts of
        it are read, so it is mapped if allowed. Raises DAMAGE, or DatastoreError if it cannot be read.
        """
        try:
            store = Datastore.open(
                self.path,
                vocabulary_hash=self.vocabulary.hash,
                vocabulary_name=self.vocabulary.name,
                mmap=self._mmap and (None if whole else True),
            )
        except DatastoreNotFound:
            return None
        if store.manifest.recipe.get("kind") == KIND and store.manifest.vocabulary.size == self.vocabulary.size:
            return store
        store.close()
        raise DatastoreVersion(self.path, "of a datastore that is not this model's history", KIND)

    def _opened(self) -> Datastore | None:
        """Open the newest commit to search it. Return None without one, and after a warning for a damaged one."""
        try:
            return self._snapshot(whole=True)
        except DAMAGE as error:
            self._set_aside(error)
        except DatastoreError as error:
            self._warn("refused", f"{cause_of(error)}; going on without it")
        return None

    def _set_aside(self, error: Exception, opened: Manifest | None = None) -> None:
        """Rename the directory, unless its commit can be opened by now and is not the one `opened`."""
        try:
            with locked(self.path, self._wait_s):
                try:
                    store = self._snapshot(whole=False)
                    bad = store is not None and store.manifest == opened
                    if store:
                        store.close()
                except DAMAGE:
                    bad = True
                if bad:
                    self._rename(error)
        except DatastoreError as also:
            self._warn("refused", f"{cause_of(error)}, and cannot be set aside: {cause_of(also)}; going on without it")

    def _rename(self, error: Exception) -> None:
        """Rename the directory with its lock. A process that waits for the lock finds that it protects nothing."""
        for number in range(1, 1000):
            new = self.path.with_name(f"{self.path.name}{DAMAGED}{number}")
            if not new.exists():
                break
        with mapping_os_errors(self.path):
            self._files.rename(self.path, new)
            self._files.sync_directory(self.path.parent)
        log.warning("history %s: %s; set aside as %s, starting anew", self.path, cause_of(error), new.name)

    def _close_store(self) -> None:
        store, self._store, self._searched = self._store, None, None
        if store:
            store.close()

    def _warn(self, kind: str, message: str) -> None:
        """Log one warning of each kind, because an error may repeat at every commit."""
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("history %s: %s", self.path, message)


def cause_of(error: Exception) -> str:
    """Return the cause of an error, without the remedy that the message gives for a datastore."""
    if isinstance(error, DatastoreCorrupt):
        return f"damaged: {error.what}"
    if isinstance(error, DatastoreVersion):
        return f"format {error.found}"
    if isinstance(error, DatastoreVocabulary):
        return f"of the vocabulary {error.found}"
    if isinstance(error, DatastoreLocked):
        return f"locked by {error.owner}"
    if isinstance(error, DatastoreUnwritable):
        return error.cause
    return str(error).partition(": ")[2] or str(error)


@dataclass(frozen=True)
class HistoryEntry:
    """A history in the list. Its numbers may be 0 if there is an `error`."""

    name: str
    model: str = ""
    answers: int = 0
    tokens: int = 0  # does not count separators
    bytes: int = 0  # size on disk
    last_use: str = ""  # UTC, ISO 8601
    error: str = ""  # why it cannot be read, or that it was set aside after damage


def list_histories() -> list[HistoryEntry]:
    """List all histories by name, with those that were set aside, and delete remains of removed ones.

    Raises:
        OSError: their directory is unreadable
    """
    with contextlib.suppress(DatastoreError):
        clear_folder(history_home(), Files())
    try:
        with os.scandir(history_home()) as entries:
            names = sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())
    except FileNotFoundError:
        return []
    return [entry for entry in map(_entry, names) if entry]


def forget_history(name: str) -> None:
    """Delete a history by its name in the list.

    A process that has it open drafts from it until it ends, and stores the answers that it generates afterwards.

    Raises:
        HistoryNotFound: there is none of this name
        DatastoreLocked, DatastoreUnwritable: it cannot be changed
    """
    if name not in {entry.name for entry in list_histories()}:  # No unchecked name may become a path.
        raise HistoryNotFound(name)
    try:
        remove(history_home() / name, WAIT_S)
    except DatastoreNotFound as error:  # another process deleted it meanwhile
        raise HistoryNotFound(name) from error


def _entry(name: str) -> HistoryEntry | None:
    path = history_home() / name
    try:
        manifest = read_manifest(path)
        last_use = datetime.datetime.fromtimestamp((path / MANIFEST).stat().st_mtime, datetime.timezone.utc)
    except (DatastoreError, OSError) as error:
        if not holds_files(path):
            return None  # deleted meanwhile, or without a commit yet
        state = "set aside" if DAMAGED in name else "cannot be used"
        return HistoryEntry(name, error=f"{state}: {cause_of(error)}; `rest-local history forget {name}` deletes it")
    return HistoryEntry(
        name,
        manifest.recipe.get("model", ""),
        manifest.documents,
        manifest.tokens - manifest.documents,
        manifest.size,
        last_use.isoformat(timespec="seconds"),
        "set aside" if DAMAGED in name else "",
    )
