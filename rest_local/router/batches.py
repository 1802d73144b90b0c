"""Batches of requests, run by the server itself while people do not need it, and kept on the disk.

    batches = Batches(folder, ask, keys=settings.keys)
    batches.start()  # in the event loop
    ...
    await batches.close()

`ask(method, path, body, key)` does one call in the server and returns its status and body; `key` is that of the client
who made the batch. Contract:

- A batch goes on after a restart or `kill -9` where it stopped; each line of it has exactly one line in its output or
  its errors (`rest_local.router.batch_lines.Results`).
- One batch runs at a time; keys take turns, each with its oldest. It leaves one slot of the model free, starts no line
  while requests of others are running, and its requests ask for the tier `flex`, which gives way to others in every
  forward pass.
- A batch and its files belong to the key they were made with. On the disk is a hash of the key. A batch whose key the
  server no longer knows fails.
- A full disk ends the batch with an error, and nothing else.
- One process at a time uses the folder. Another one answers 503 until the first has ended.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import anyio
from filelock import FileLock, Timeout
from pydantic_core import from_json, to_json

from rest_local.errors import OutputInvalid, OutputUnwritable
from rest_local.paths import delete_unfinished, write_atomically
from rest_local.router.batch_bodies import BatchBody, seconds_of
from rest_local.router.batch_lines import Line, Results, Wrong, batch_error, not_run, read_lines
from rest_local.router.batch_running import Ask, Runner
from rest_local.router.files import Files, Limits, disk_error, is_file_id, new_file_id, owner_of
from rest_local.server.errors import RETRY_SECONDS, ApiError

log = logging.getLogger("rest_local.server")

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
DONE = frozenset(("failed", "completed", "expired", "cancelled"))
SWEEP_SECONDS = 60.0
LOCK_SECONDS = 2.0
_ID = re.compile(r"batch_[0-9a-f]{32}")


@dataclass
class Batch:
    """One batch. Times: seconds since 1970. `output`, `errors_file`: ids of files that are there once it is done."""

    id: str
    owner: str
    input: str
    endpoint: str
    window: str
    created: float
    expires: float
    output: str
    errors_file: str
    metadata: dict[str, str] | None = None
    keep_seconds: int | None = None
    status: Status = "validating"
    times: dict[str, float] = field(default_factory=dict)  # by status
    total: int = 0
    completed: int = 0
    failed: int = 0
    errors: list[dict[str, Any]] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)  # of the two files, those with lines, once it is done

    @property
    def done(self) -> bool:
        """Whether nothing will change any more."""
        return self.status in DONE

    def become(self, status: Status, now: float) -> None:
        """Change the status."""
        self.status = status
        self.times[status] = now

    def to_dict(self) -> dict[str, Any]:
        """OpenAI's object."""
        names = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.input,
            "completion_window": self.window,
            "status": self.status,
            "output_file_id": self.output if self.output in self.shown else None,
            "error_file_id": self.errors_file if self.errors_file in self.shown else None,
            "created_at": int(self.created),
            "expires_at": int(self.expires),
            **{f"{name}_at": int(self.times[name]) if name in self.times else None for name in names},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }


class Batches:
    """The files and batches of one server.

    folder   private; made where it is missing
    ask      does a call in the server
    keys     that clients may use; none: the server asks for none
    clock    seconds since 1970; tests replace it
    """

    def __init__(
        self,
        folder: Path,
        ask: Ask,
        *,
        keys: Sequence[bytes] = (),
        limits: Limits | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.limits = limits or Limits()
        self.keys = tuple(keys)
        self._folder, self._ask, self._clock = folder, ask, clock
        self._files = Files(folder / "files", self.limits, clock)
        self._batches: dict[str, Batch] = {}  # the oldest first
        self._changed = asyncio.Event()  # a batch was made or is to be cancelled
        self._saving = asyncio.Lock()
        self._unsaved: set[str] = set()  # batches that the disk has no room for, by id
        self._unpublished: set[str] = set()  # whose files it has no room for
        self._lock = FileLock(folder / "lock", thread_local=False)  # acquired in a worker thread
        self._loaded = False
        self._problem = "files and batches are being read"
        self._running: Batch | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Read the folder and go on with what is not done, in tasks of the event loop."""
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._work())]

    def begin_stop(self) -> None:
        """Stop running, before the processes of the models do. What is not done goes on with the next start."""
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Stop, and let another process use the folder."""
        self.begin_stop()
        tasks, self._tasks = self._tasks, []
        await asyncio.gather(*tasks, return_exceptions=True)
        self._loaded, self._problem = False, "the server stops"
        self._lock.release()

    # Calls of clients

    @property
    def files(self) -> Files:
        """The files. Raises ApiError 503 while they cannot be used."""
        self._check()
        return self._files

    def _check(self) -> None:
        if not self._loaded:
            raise ApiError(503, self._problem, code="busy", headers={"retry-after": RETRY_SECONDS})

    def get(self, owner: str, batch_id: str) -> Batch:
        """A batch of an owner. Raises ApiError 404."""
        self._check()
        batch = self._batches.get(batch_id)
        if batch is None or batch.owner != owner:
            raise ApiError(404, "no such batch; GET /v1/batches lists them", code="batch_not_found", param="batch_id")
        return batch

    def of(self, owner: str) -> list[Batch]:
        """The batches of an owner, the oldest first."""
        self._check()
        return [batch for batch in self._batches.values() if batch.owner == owner]

    async def create(self, owner: str, body: BatchBody) -> Batch:
        """Make a batch. Raises ApiError."""
        seconds = seconds_of(body.completion_window)
        try:
            file = self.files.get(owner, body.input_file_id)
        except ApiError as error:
            error.param = "input_file_id" if error.status == 404 else None
            raise
        if file.purpose != "batch":
            message = "input_file_id: give a file that was uploaded with the purpose `batch`"
            raise ApiError(400, message, code="invalid_value", param="input_file_id")
        if sum(not batch.done for batch in self._batches.values()) >= self.limits.batches:
            message = f"{self.limits.batches} batches are not done; wait for one, or cancel one"
            raise ApiError(429, message, code="too_many_batches")
        now = self._clock()
        batch = Batch(
            id=f"batch_{secrets.token_hex(16)}",
            owner=owner,
            input=file.id,
            endpoint=body.endpoint,
            window=body.completion_window,
            created=now,
            expires=now + seconds,
            output=new_file_id(),
            errors_file=new_file_id(),
            metadata=body.metadata,
            keep_seconds=body.output_expires_after.seconds if body.output_expires_after else None,
        )
        self._batches[batch.id] = batch
        try:
            await self._write(batch)
        except OSError as error:
            del self._batches[batch.id]
            raise disk_error(error) from error
        self._changed.set()
        return batch

    async def cancel(self, batch: Batch) -> None:
        """Cancel a batch. Raises ApiError 400 where it is done."""
        if batch.status in ("cancelling", "cancelled"):
            return
        if batch.done or batch.status == "finalizing":
            raise ApiError(400, f"the batch is {batch.status} already", code="invalid_status", param="batch_id")
        now = self._clock()
        waits = batch.status == "validating" and batch is not self._running
        if waits:  # nothing of it was run
            batch.times["cancelling"] = now
        batch.become("cancelled" if waits else "cancelling", now)
        await self._save(batch)
        self._changed.set()

    def user_of(self, file_id: str) -> Batch | None:
        """The batch that is not done and needs the file."""
        return next((each for each in self._batches.values() if each.input == file_id and not each.done), None)

    # On the disk

    def _load(self) -> bool:
        """Read the folder; False where another process uses it. Raises OSError."""
        for folder in (self._folder, self._folder / "files", self._folder / "batches"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with suppress(OSError):  # of another user, where the mode is theirs
                folder.chmod(0o700)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            return False
        try:
            found = [batch for path in (self._folder / "batches").glob("*.json") if (batch := _read(path))]
            delete_unfinished(self._folder / "batches")
            self._batches = {batch.id: batch for batch in sorted(found, key=lambda batch: batch.created)}
            unfinished = [batch for batch in found if not batch.done]
            self._files.load({name for batch in unfinished for name in (batch.output, batch.errors_file)})
        except BaseException:
            self._lock.release()
            raise
        return True

    async def _write(self, batch: Batch) -> None:
        """Write a batch to the disk. Raises OSError."""
        async with self._saving:  # so that of two writes the newer one stays
            content = to_json(asdict(batch))
            path = self._folder / "batches" / f"{batch.id}.json"
            await anyio.to_thread.run_sync(partial(write_atomically, path, content, durable=True))
            self._unsaved.discard(batch.id)

    async def _save(self, batch: Batch) -> None:
        """As `_write`, and later where it is not possible now: a restart before that goes on from what is written."""
        try:
            await self._write(batch)
        except OSError as error:
            disk_error(error)
            self._unsaved.add(batch.id)

    async def _sweep(self) -> None:
        """Write what could not be written, remove what is too old."""
        for batch in [self._batches[batch_id] for batch_id in self._unpublished]:
            await self._publish(batch)
            self._unsaved.add(batch.id)
        for batch in [self._batches[batch_id] for batch_id in self._unsaved]:
            await self._save(batch)
        await self._files.expire({batch.input for batch in self._batches.values() if not batch.done})
        of_owners: dict[str, list[Batch]] = {}
        for batch in self._batches.values():
            if batch.done:
                of_owners.setdefault(batch.owner, []).append(batch)
        for done in of_owners.values():
            for batch in done[: max(len(done) - self.limits.records, 0)]:
                path = self._folder / "batches" / f"{batch.id}.json"
                with suppress(OSError):
                    await anyio.to_thread.run_sync(partial(path.unlink, missing_ok=True))
                    del self._batches[batch.id]
                    self._unsaved.discard(batch.id)
                    self._unpublished.discard(batch.id)

    # Running

    async def _work(self) -> None:
        """Everything that is done without a call of a client."""
        while not self._loaded:
            try:
                self._loaded = await anyio.to_thread.run_sync(self._load)
                self._problem = "another server of this user has these files and batches"
            except OSError as error:
                problem = f"files and batches cannot be kept: {error.strerror or 'the disk failed'}"
                if problem != self._problem:
                    log.warning("%s", problem)
                self._problem = problem
            if not self._loaded:
                await asyncio.sleep(LOCK_SECONDS)
        await asyncio.gather(self._sweep_often(), self._run_all())

    async def _sweep_often(self) -> None:
        while True:
            try:
                await self._sweep()
            except Exception:
                log.exception("files and batches could not be looked through")
            await asyncio.sleep(SWEEP_SECONDS)

    async def _run_all(self) -> None:
        """One batch after another: one that has begun, else the oldest of the key whose turn is longest ago."""
        turns: dict[str, int] = {}  # by owner
        for turn in itertools.count(1):
            self._changed.clear()
            waiting = [batch for batch in self._batches.values() if not batch.done]
            if not waiting:
                await self._changed.wait()
                continue
            self._running = batch = min(
                waiting, key=lambda batch: (batch.status == "validating", turns.get(batch.owner, 0))
            )
            turns[batch.owner] = turn
            try:
                final = await self._run(batch)
            except Exception:
                log.exception("a batch failed")
                final = _failed(batch, "server_error", "the server failed at this batch; see its log")
            await self._publish(batch)
            batch.become(final, self._clock())
            await self._save(batch)
            self._running = None
            fields = {"event": "batch", "id": batch.id, "status": batch.status, **batch.to_dict()["request_counts"]}
            log.info("batch", extra={"fields": fields})

    async def _run(self, batch: Batch) -> Status:
        """Run a batch to its end, also one that was begun before; what becomes of it."""
        key = next((key for key in (*self.keys, None) if owner_of(key) == batch.owner), None)
        if (self.keys and key is None) or batch.owner != owner_of(key):
            return _failed(batch, "key_unknown", "the server does not know the key any more that made the batch")
        source = self._files.content(batch.input)
        try:
            lines = await anyio.to_thread.run_sync(read_lines, source, batch.endpoint, self.limits.lines)
        except Wrong as wrong:
            batch.errors = wrong.errors
            return "failed"
        except OSError as error:
            return _failed(batch, "input_unreadable", f"the input cannot be read: {error.strerror}")
        batch.total = len(lines)
        if batch.status == "validating":
            batch.become("in_progress", self._clock())
            await self._save(batch)
        paths = self._files.content(batch.output), self._files.content(batch.errors_file)
        try:
            results = await anyio.to_thread.run_sync(self._results, paths, lines)
        except (OSError, OutputInvalid, OutputUnwritable) as error:
            return _failed(batch, "output_unusable", f"the results so far cannot be used: {_cause(error)}")
        try:
            return await self._answer_all(batch, lines, results, key, source)
        except (OSError, OutputUnwritable) as error:
            return _failed(batch, "disk_full", f"the results cannot be written: {_cause(error)}")
        except _NoRoom:
            message = f"all files together are larger than {self.limits.total_bytes} bytes; delete some"
            return _failed(batch, "storage_full", message)
        finally:
            with suppress(OutputUnwritable):
                await anyio.to_thread.run_sync(results.close)

    def _results(self, paths: tuple[Path, Path], lines: list[Line]) -> Results:
        for path in paths:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
        return Results(*paths, lines)

    async def _answer_all(
        self, batch: Batch, lines: list[Line], results: Results, key: bytes | None, source: Path
    ) -> Status:
        """Write a record for each line that has none. Raises OutputUnwritable, _NoRoom."""
        grown = results.size
        self._files.used += grown

        async def write(*records: Mapping[str, Any]) -> None:
            nonlocal grown
            await anyio.to_thread.run_sync(results.write, *records)
            batch.completed, batch.failed = results.completed, results.failed
            self._files.used += results.size - grown
            grown = results.size
            if self._files.used > self.limits.total_bytes:
                raise _NoRoom

        def over() -> bool:
            return batch.status != "in_progress" or self._clock() >= batch.expires

        try:
            batch.completed, batch.failed = results.completed, results.failed
            left = [line for line in lines if line.job.custom_id not in results.names]
            await Runner(source, self._ask, key, write, over, self._changed).run(left)
            left = [line for line in lines if line.job.custom_id not in results.names]
            final: Status = "cancelled" if batch.status == "cancelling" else "expired" if left else "completed"
            if final == "completed":
                batch.become("finalizing", self._clock())
            await write(*(not_run(line.job, f"batch_{final}", _UNRUN[final]) for line in left))
            await anyio.to_thread.run_sync(results.close)
            return final
        finally:
            self._files.used -= grown  # it counts as that of files from now on

    async def _publish(self, batch: Batch) -> None:
        """Make files of what a batch gave. Where the disk is full, later."""
        try:
            for file_id, name in ((batch.output, "output"), (batch.errors_file, "errors")):
                path = self._files.content(file_id)
                size = path.stat().st_size if path.exists() else 0
                if size and not self._files.has(file_id) and file_id not in batch.shown:
                    await self._files.add(
                        file_id, batch.owner, f"{batch.id}_{name}.jsonl", size, "batch_output", batch.keep_seconds
                    )
                if size and file_id not in batch.shown:
                    batch.shown.append(file_id)
                elif not size:
                    path.unlink(missing_ok=True)
        except OSError as error:
            disk_error(error)
            self._unpublished.add(batch.id)
        else:
            self._unpublished.discard(batch.id)


_UNRUN = {
    "cancelled": "The batch was cancelled before this request was executed.",
    "expired": "This request could not be executed before the completion window expired.",
}


def _failed(batch: Batch, code: str, message: str) -> Status:
    log.warning("a batch failed: %s", message)
    batch.errors = [batch_error(code, message)]
    return "failed"


class _NoRoom(Exception):
    """The files take more than they may."""


def _cause(error: Exception) -> str:
    """What is wrong, without a path."""
    cause = error.cause if isinstance(error, (OutputInvalid, OutputUnwritable)) else getattr(error, "strerror", None)
    return cause or "the disk failed"


def _read(path: Path) -> Batch | None:
    """The batch that a record describes; None, and a line in the log, for a damaged one."""
    try:
        found = from_json(path.read_bytes())
        batch = Batch(**{each.name: found[each.name] for each in fields(Batch)})
        known = batch.id == path.stem and _ID.fullmatch(batch.id) and batch.status in get_args(Status)
        ids = (batch.input, batch.output, batch.errors_file)
        if known and all(isinstance(each, str) and is_file_id(each) for each in ids):
            return batch
    except (OSError, ValueError, TypeError, KeyError):
        pass
    log.warning("a damaged record of a batch is not read: %s", path.name)
    return None
