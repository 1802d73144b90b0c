"""KV cells on disk: one format, for sessions of `chat`, sessions of `serve`, and slots that clients save by name.

A file is MAGIC and records: length (8 bytes, little-endian), SHA-256, content. The first record is JSON (`Head`): the
tokens, what the cells were computed with, and what records follow:

- `parts`: the states of PART tokens each (`Slot.part`), and of the rest.
- `states`: the whole state, then checkpoints before it (`Slot.states`), where memory cannot be cut back, and where the
  beginning of the text has left a sliding window. `marks` says how many tokens each has.

The digest of a record covers its number and the digest of the first, and that of the first the name of the file where
it is a digest of the text. So each record is checked as it is read, once, before llama.cpp sees it, and a file that was
cut, changed, renamed or moved is not used. A file is written under another name and renamed: it is whole or not there.

`CellFiles` are the files of texts that a server keeps by itself. They are shared by processes, and bounded in size and
age:

- A part is the cells of PART tokens. The name of its file is a digest of all tokens up to its end, of what the cells
  were computed with, and of the owner. So a text is found by its tokens, and what two texts begin with is stored once.
- What follows the last whole part is a file as well: one for each beginning, the newest.
- Servers share the folder without locks: they write the same content under the same name, and a file that another one
  has deleted is a part that has to be evaluated.
- Writing and reading take place in threads of their own. What waits to be written is in memory, `MOST_WAITING` bytes
  at most, and can be read from there.
- The folder holds `limit` bytes at most, those of all models and servers together. The least recently used files go
  first, of one text its end; so do files that were not used for `MOST_DAYS`. `LEAST_FREE` bytes of the disk stay free.

SHA-256 because processors have instructions for it: 0.9 GB/s here, BLAKE2b 0.3 GB/s.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import logging
import os
import re
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol, TypeVar

import numpy as np

from rest_local import stop
from rest_local.errors import OptionError, ServiceClosed, SlotBusy
from rest_local.kv_cache.slot import Slot
from rest_local.kv_cache.slots import Slots
from rest_local.llama import library
from rest_local.llama.context import ContextSettings
from rest_local.llama.model import Model
from rest_local.paths import delete_unfinished, replacing
from rest_local.stop import Closing

log = logging.getLogger("rest_local.sessions")

PART = 128  # tokens. 16 MB for a model of 8B, which are copied in some 5 ms, and read in 20

FORMAT = 3
MAGIC = b"RLCELLS2"
SUFFIX = ".cells"
SESSIONS = "sessions"  # the folder of all, in the cache
NAMED = "slots"  # in it, the folder of slots that were saved by name
NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9 ._-]{0,126}[A-Za-z0-9_-])?")
USER_DIGITS = 32  # of the digest of a key, in the names of its files
LARGEST_STATE = 1 << 30  # bytes: a text that is one record is copied in memory
MOST_WAITING = 256 << 20
LEAST_FREE = 1 << 30
MOST_DAYS = 30.0
PAUSE_S = 60.0  # after a write that failed
SCANNED = 16  # the folder is looked through again when a share of 1/16 of the limit was written
_LENGTH = 8
_DIGEST = hashlib.sha256().digest_size

T = TypeVar("T")


class Unusable(Exception):
    """A file cannot be used, with what is wrong with it."""


# The format


@dataclass(frozen=True)
class Head:
    """The first record. `names`: of the texts up to each mark, where a file is found by them."""

    made_with: Mapping[str, str]
    tokens: Sequence[int]
    kind: str
    marks: Sequence[int]
    names: Sequence[str] = ()


def made_with(model: Model, settings: ContextSettings, exact: bool) -> dict[str, str]:
    """What the bits in the cells depend on, as digests; not on lengths, nor numbers of texts, threads, snapshots."""
    computing = replace(
        settings,
        n_ctx=8,
        n_batch=1,
        n_ubatch=0,
        n_slots=1,
        n_cells=0,
        n_branches=1,
        n_rs_seq=0,
        threads=0,
        threads_batch=0,
    )
    # The context's settings say what was chosen of these, and an exact request may have to give flash attention up.
    loading = replace(model.options, rollback=None, flash_attention="auto", cache_type_k=None, cache_type_v=None)
    parts = {
        "another model": [model.cache_key, model.adapters.identity, asdict(loading)],
        "other settings": [computing.to_dict(), model.n_gpu_layers, exact],
        "another build of llama.cpp": [FORMAT, library.fingerprint()],
    }
    return {what: hashlib.sha256(json.dumps(part, default=str).encode()).hexdigest() for what, part in parts.items()}


def write(path: Path, head: Head, records: Iterable[bytes], identity: str = "") -> int:
    """Write a file whole or not at all; its bytes. Raises OSError, and as `records`; a file from before then stays."""
    first = json.dumps(asdict(head)).encode()
    root, size = _digest(identity.encode(), 0, first), len(MAGIC)
    with replacing(path) as file:
        file.write(MAGIC)
        for number, record in enumerate(itertools.chain((first,), records)):
            digest = _digest(root, number, record) if number else root
            file.write(len(record).to_bytes(_LENGTH, "little") + digest)
            file.write(record)
            size += _LENGTH + _DIGEST + len(record)
    return size


class Reader(Closing):
    """Reads a file of `write`; a context manager. `identity`: as it was written with. Raises OSError, Unusable."""

    def __init__(self, path: Path, identity: str = "") -> None:
        self.size = 0
        self._file: BinaryIO = path.open("rb")
        try:
            self._left = os.fstat(self._file.fileno()).st_size
            if self._exactly(len(MAGIC)) != MAGIC:
                raise Unusable("it is no file of cells")
            self._root = identity.encode()  # until the first record was read
            self.head = _head(self._record(0))
        except BaseException:
            self._file.close()
            raise

    def check(self, made: Mapping[str, str], n_ctx: int) -> None:
        """Raises Unusable where the cells were computed with something else, or have no place in the context."""
        if differs := next((what for what in made if self.head.made_with.get(what) != made[what]), None):
            raise Unusable(f"it is of {differs}")
        if not 0 < len(self.head.tokens) < n_ctx:
            raise Unusable(f"its {len(self.head.tokens)} tokens do not fit the context")

    def records(self) -> Iterator[bytes]:
        """Those after the first, each when it was checked."""
        for number in range(1, 1 + len(self.head.marks)):
            yield self._record(number)

    def _record(self, number: int) -> bytes:
        head = self._exactly(_LENGTH + _DIGEST)
        record = self._exactly(int.from_bytes(head[:_LENGTH], "little"))
        digest = _digest(self._root, number, record)
        if digest != head[_LENGTH:]:
            raise Unusable("it is damaged")
        if not number:
            self._root = digest
        return record

    def _exactly(self, n: int) -> bytes:
        """The next bytes. No more memory than the file has is taken, whatever it says."""
        data = self._file.read(n) if n <= self._left else b""
        if len(data) < n:
            raise Unusable("it is damaged")
        self._left -= n
        self.size += n
        return data

    def close(self) -> None:
        self._file.close()


def _head(record: bytes) -> Head:
    try:
        found = json.loads(record)
        return Head(
            dict(found["made_with"]), list(found["tokens"]), str(found["kind"]), list(found["marks"]),
            list(found["names"]),
        )  # fmt: skip
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Unusable("it is damaged") from error


def _digest(root: bytes, number: int, record: bytes) -> bytes:
    digest = hashlib.sha256(root + number.to_bytes(8, "little"))
    digest.update(record)
    return digest.digest()


# One text in a file of its own


class SavePlan(NamedTuple):
    """What is to be written of a slot. `states`: the records, unless they are parts that are copied one by one."""

    head: Head
    states: list[bytes]
    size: int


def plan(slot: Slot, made: Mapping[str, str], part: int, shares: bool, most: int = LARGEST_STATE) -> SavePlan | None:
    """How to save the text of a slot, in the thread that decodes; None where its state has more than `most` bytes."""
    tokens = slot.tokens[: slot.n_past]
    if shares and min(tokens) >= 0 and slot.part(0, min(part, len(tokens))):
        marks = [*range(part, len(tokens), part), len(tokens)]
        return SavePlan(Head(made, tokens, "parts", marks), [], slot.backend.state_size(slot.first_id))
    states = slot.states(most)
    if states is None:
        return None
    records = [state for _, state in states]
    return SavePlan(Head(made, tokens, "states", [n for n, _ in states]), records, sum(map(len, records)))


class Run(Protocol):
    """Calls something in the thread that decodes, between two passes."""

    def __call__(self, call: Callable[[], T], /) -> T: ...


def directly(call: Callable[[], T]) -> T:
    """Be the `Run` of the thread that decodes itself."""
    return call()


class Moved(NamedTuple):
    """Tokens and bytes that were written or read."""

    tokens: int
    size: int


def save(slot: Slot, path: Path, planned: SavePlan, run: Run = directly) -> Moved:
    """Write the text of a slot to a file, as `plan` says. Raises OSError."""

    def copies() -> Iterator[bytes]:
        for begin, end in zip([0, *head.marks], head.marks, strict=False):
            stop.check()
            yield run(partial(slot.part, begin, end))

    head = planned.head
    return Moved(len(head.tokens), write(path, head, planned.states or copies()))


def load(
    slot: Slot,
    path: Path,
    made: Mapping[str, str],
    run: Run = directly,
    begin: Callable[[Slot, list[int]], None] = Slot.begin_anew,
) -> Moved:
    """Have the text of a file in a slot, in the place of what it held. `begin`: gives the slot its tokens. Raises
    OSError, and Unusable; the slot is empty then, or as it was.
    """
    with Reader(path) as reader:
        reader.check(made, slot.backend.n_ctx)
        head, records = reader.head, zip(reader.head.marks, reader.records(), strict=True)
        calls: Iterable[Callable[[], bool]] = (partial(slot.add_part, record, end) for end, record in records)
        if head.kind == "states":
            calls = [partial(slot.load_states, list(records), len(head.tokens))]
        try:
            run(partial(begin, slot, list(head.tokens)))
            for call in calls:
                stop.check()
                if not run(call):
                    raise Unusable("there is no room for it, or it is of another context")
        except BaseException:
            run(slot.clear)
            raise
        return Moved(len(head.tokens), reader.size)


class SlotFileUnusable(OptionError):
    """The file of a slot cannot be used here."""

    def __init__(self, name: str, cause: str) -> None:
        super().__init__(f"filename: {name!r} is not restored: {cause}")


class NamedSlots:
    """Saves slots of one context by name, and restores them, while other requests go on.

    Any thread may call. A step in the thread that decodes copies the cells of PART tokens at most, and the file is read
    and written in the caller's thread. The slot has to be idle, and no request gets it meanwhile; where there is no
    other, requests wait. `user`: as in `Slot`; the files and texts of others are not there. `shares`: memory can be cut
    back. Raises OSError, SlotBusy, SlotFileUnusable, OptionError.
    """

    def __init__(self, files: CellFiles, slots: Slots, shares: bool, run: Run, user: str = "") -> None:
        self._files, self._slots, self._shares, self._run, self._user = files, slots, shares, run, user

    def save(self, number: int, name: str) -> Moved:
        path = self._path(name)
        with self._held(number) as slot:
            planned = self._run(partial(self._plan, slot, number))
            self._files.make_room(planned.size)
            return save(slot, path, planned, self._run)

    def _plan(self, slot: Slot, number: int) -> SavePlan:
        if not slot.n_past or slot.user != self._user:
            raise OptionError(f"id_slot: slot {number} holds nothing")
        if min(slot.tokens[: slot.n_past]) < 0:
            raise OptionError(f"id_slot: slot {number} holds images, which are not saved")
        planned = plan(slot, self._files.made, self._files.part, self._shares)
        if planned is None:
            raise OptionError(f"id_slot: the state of slot {number} has more than {LARGEST_STATE >> 20} MB")
        return planned

    def restore(self, number: int, name: str) -> Moved:
        """Have a saved text in a slot, in the place of what it holds."""
        path = self._path(name)
        try:
            with self._held(number) as slot:
                moved = load(slot, path, self._files.made, self._run, self._begin)
                path.touch()
                return moved
        except Unusable as error:
            raise SlotFileUnusable(name, str(error)) from error

    def _begin(self, slot: Slot, tokens: list[int]) -> None:
        self._slots.before_loss(slot)
        slot.begin_anew(tokens)
        slot.own(self._user, is_kept=True)

    def erase(self, number: int) -> int:
        """Forget what a slot holds; how many tokens."""
        with self._held(number) as slot:
            n = slot.n_past if slot.user == self._user else 0
            if n:
                self._run(slot.clear)
            return n

    @contextlib.contextmanager
    def _held(self, number: int) -> Iterator[Slot]:
        """A slot, which no request gets meanwhile."""
        if not 0 <= number < len(self._slots.slots):
            raise OptionError(f"id_slot: there are slots 0 to {len(self._slots.slots) - 1}")
        slot = self._slots.slots[number]
        if not self._run(partial(self._slots.hold, slot)):
            raise SlotBusy(number)
        try:
            yield slot
        finally:
            with contextlib.suppress(ServiceClosed):
                self._run(partial(self._slots.release, slot))

    def _path(self, name: str) -> Path:
        path = path_of(self._files.home, name, self._user)
        if path is None:
            raise OptionError(f"filename: {name!r} is no plain name of letters, digits, spaces and . _ -")
        return path


def path_of(home: Path, name: str, user: str = "") -> Path | None:
    """The file of that name, of a user (a digest, or empty); None for no plain name. Its folder is made (OSError)."""
    if not NAME.fullmatch(name):
        return None
    folder = home / NAMED
    folder.mkdir(mode=0o700, exist_ok=True)
    of_user = f"+{user[:USER_DIGITS]}" if user else ""  # no name has a +
    return folder / f"slot{of_user}-{name}{SUFFIX}"


# The texts that a server keeps


class Names(NamedTuple):
    """parts: of PART tokens each; ends: by the number of parts before it, of what follows them."""

    parts: list[str]
    ends: list[str]


class Cells(NamedTuple):
    """The content of a file, and its bytes in all."""

    head: Head
    records: Sequence[bytes]
    size: int


class CellFiles:
    """The files of one context. `home`: the folder of all; `made`: what the cells are computed with; `limit`: bytes;
    `part`: tokens of a part.

    Any thread, except `put`: one thread. Makes the folder, 0700. Raises OSError where that fails.
    """

    def __init__(self, home: Path, made: Mapping[str, str], limit: int, *, part: int = PART) -> None:
        self.home, self.made, self.limit, self.part = home, made, limit, part
        fingerprint = "\0".join(f"{what}={made[what]}" for what in sorted(made))
        self._fingerprint = hashlib.sha256(fingerprint.encode()).hexdigest()
        self.folder = home / self._fingerprint[:32]
        self._make_folder()
        self._lock = threading.Condition()
        self._waiting: dict[str, Cells] = {}
        self._bytes = 0  # that wait
        self._queue: deque[tuple[str, float]] = deque()
        self._closing = False
        self._paused_until = 0.0
        self._trimming = threading.Lock()
        self._size, self._since = 0, 0  # of the folder when it was looked through, and what was written since
        self._writer: threading.Thread | None = None
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="rest-local-sessions")
        self._readers.submit(self._trim_at_start)

    def _make_folder(self) -> None:
        for folder in (self.home, self.folder):  # `parents` would be made with another mode
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def names(self, tokens: Sequence[int], owner: str) -> Names:
        """The names of the parts of a text. 1 ms for 30 000 tokens."""
        ids = np.asarray(tokens, np.int64)
        part, links = self.part, [hashlib.sha256(f"{self._fingerprint}\n{owner}\n{self.part}".encode()).digest()]
        for begin in range(0, len(ids) // part * part, part):
            links.append(hashlib.sha256(links[-1] + ids[begin : begin + part].tobytes()).digest())
        ends = [hashlib.sha256(link + b"end").hexdigest()[:40] for link in links]
        return Names([link.hex()[:40] for link in links[1:]], ends)

    def name_of(self, tokens: Sequence[int], owner: str) -> str:
        """The name of a text as a whole, however long."""
        ids = np.asarray(tokens, np.int64).tobytes()
        return hashlib.sha256(f"{self._fingerprint}\n{owner}\nwhole\n".encode() + ids).hexdigest()[:40]

    def path(self, name: str) -> Path:
        """Where the part of that name is, if it is there."""
        return self.folder / (name + SUFFIX)

    def has(self, name: str) -> bool:
        """Whether the part is there, or waits to be written."""
        return name in self._waiting or self.path(name).exists()

    def present(self) -> list[str]:
        """The names of all that are there."""
        try:
            names = os.listdir(self.folder)
        except OSError:
            return []
        kept = [name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX)]
        return list(dict.fromkeys([*kept, *list(self._waiting)]))

    @property
    def writes(self) -> bool:
        """Whether parts are taken now: not while the last one could not be written."""
        return not self._closing and time.monotonic() >= self._paused_until

    def wait_for_room(self, seconds: float) -> bool:
        """Wait until another part may be put; whether that is so."""
        with self._lock:
            return self._lock.wait_for(lambda: self._bytes < MOST_WAITING or not self.writes, max(seconds, 0.0))

    def put(self, name: str, head: Head, records: Sequence[bytes], place: int = 0) -> None:
        """Write a part soon. `place`: its number in its text; of a text, the last goes first."""
        first = len(json.dumps(asdict(head)))
        size = len(MAGIC) + first + sum(map(len, records)) + (1 + len(records)) * (_LENGTH + _DIGEST)
        cells = Cells(head, records, size)
        with self._lock:
            if not self.writes:
                return
            before = self._waiting.get(name)
            self._waiting[name] = cells  # of an end: what is written next is the newest
            self._bytes += cells.size - (before.size if before else 0)
            if before is not None:
                return
            self._queue.append((name, time.time() - 1e-3 * place))
            if self._writer is None:
                self._writer = threading.Thread(target=self._write, name="rest-local-sessions-writer", daemon=True)
                self._writer.start()
            self._lock.notify_all()

    def touch(self, names: Sequence[str]) -> None:
        """These were used now. Soon, in another thread."""
        now = time.time()

        def work() -> None:
            for place, name in enumerate(names):
                with contextlib.suppress(OSError):
                    os.utime(self.path(name), (now, now - 1e-3 * place))

        with contextlib.suppress(RuntimeError):  # closed
            self._readers.submit(work)

    def _write(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                name, used = self._queue.popleft()
                cells = self._waiting[name]
            try:
                if self.writes or self._closing:
                    self.make_room(cells.size)
                    self._make_folder()  # a server may delete the empty folder of another
                    write(self.path(name), cells.head, cells.records, name)
                    os.utime(self.path(name), (used, used))
            except OSError as error:
                self._paused_until = time.monotonic() + PAUSE_S
                log.warning("sessions are not kept on disk for now: %s: %s", self.folder, error.strerror or error)
                self._drop_waiting()
                continue
            except Exception:
                log.exception("a part of a session is not kept")
            with self._lock:
                if self._waiting.get(name) is cells:
                    del self._waiting[name]
                    self._bytes -= cells.size
                elif name in self._waiting:  # another end was put meanwhile
                    self._queue.append((name, used))
                self._lock.notify_all()

    def _drop_waiting(self) -> None:
        with self._lock:
            self._queue.clear()
            self._waiting.clear()
            self._bytes = 0
            self._lock.notify_all()

    def flush(self, seconds: float) -> bool:
        """Wait until all is written; whether it is."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._bytes, seconds)

    def close(self, seconds: float) -> None:
        """Write what waits, for so long at most; a second call does nothing. What is being written then to a disk that
        hangs has another name, and is deleted by a later start.
        """
        over = time.monotonic() + seconds
        if not self.flush(seconds):
            log.warning("sessions: %d MB could not be written in time", self._bytes >> 20)
        self._closing = True
        self._drop_waiting()
        if self._writer is not None:
            self._writer.join(max(over - time.monotonic(), 0.0))
        self._readers.shutdown(wait=True, cancel_futures=True)

    def get(self, name: str) -> Future[Cells | None]:
        """Read a part; None where there is none, or it cannot be used."""
        return self._readers.submit(self._read, name)

    def _read(self, name: str) -> Cells | None:
        with self._lock:
            waiting = self._waiting.get(name)
        return waiting or self._checked(name, lambda reader: Cells(reader.head, list(reader.records()), reader.size))

    def head(self, name: str) -> Head | None:
        """The first record of a part, in the calling thread; None where it cannot be used."""
        waiting = self._waiting.get(name)
        return waiting.head if waiting else self._checked(name, lambda reader: reader.head)

    def _checked(self, name: str, read: Callable[[Reader], T]) -> T | None:
        path = self.path(name)
        try:
            with Reader(path, name) as reader:
                return read(reader)
        except FileNotFoundError:
            return None
        except (OSError, Unusable) as error:
            log.warning("sessions: %s is not used, its text is evaluated again: %s", path, error)
            with contextlib.suppress(OSError):
                path.unlink()
            return None

    # The bound

    def make_room(self, size: int) -> None:
        """Delete the least recently used until `size` bytes may be added. OSError: too many for limit or disk."""
        with self._trimming:
            if self._size + self._since + size > self.limit or self._since > self.limit // SCANNED:
                self._trim(size)
            self._since += size
        if shutil.disk_usage(self.folder).free < size + LEAST_FREE:
            raise OSError(errno.ENOSPC, f"less than {LEAST_FREE >> 20} MB of the disk would stay free")

    def _trim_at_start(self) -> None:
        with self._trimming, contextlib.suppress(OSError):
            self._trim(0)

    def _trim(self, size: int) -> None:
        if size > self.limit:
            raise OSError(errno.EFBIG, f"{size >> 20} MB are more than the {self.limit >> 20} MB for all sessions")
        files = sorted(scan(self.home))
        total, oldest = sum(n for _, n, _ in files), time.time() - 86400 * MOST_DAYS
        for used, n, path in files:
            if total + size <= self.limit and used > oldest:
                break
            with contextlib.suppress(OSError):
                os.unlink(path)
                total -= n
        for folder in _folders(self.home):
            if Path(folder) not in (self.folder, self.home / NAMED):  # something is about to be written there
                with contextlib.suppress(OSError):
                    os.rmdir(folder)  # only where it is empty
        self._size, self._since = total, 0


def scan(home: Path) -> list[tuple[float, int, str]]:
    """(last use, bytes, path) of each file of cells. What killed processes left unfinished is deleted."""
    found = []
    for folder in _folders(home):
        delete_unfinished(Path(folder))
        try:
            entries = list(os.scandir(folder))
        except OSError:
            continue
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
                if entry.name.endswith(SUFFIX):
                    found.append((status.st_mtime, status.st_size, entry.path))
            except OSError:  # another process has deleted it
                continue
    return found


def _folders(home: Path) -> list[str]:
    try:
        return [entry.path for entry in os.scandir(home) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
