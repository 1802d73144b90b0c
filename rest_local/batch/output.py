"""The output of a batch: one line for each request, written as it is answered. A run resumes where it stopped.

Contract, whenever a process was killed:

- Every line that was written whole stays, and its request is not answered again.
- The next run removes a line that was written in part, and answers its request again.
- An output of another input or of another model is refused, and stays as it is.

How it works: a line contains the id of its request, which is a digest of the request (`rest_local.batch.jobs`), and the
name of the model. A line reaches the file in one write. There is no other state, except for a lock in the cache
directory, which ends with its process. `run` writes an answer before it takes the next one, so an interrupt leaves an
output with every answer so far.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pydantic_core import from_json, to_json

from rest_local.batch.jobs import Job
from rest_local.batch.worker import JobAnswer
from rest_local.decoding.results import Timings
from rest_local.errors import OutputInvalid, OutputUnwritable
from rest_local.paths import cache_dir

STDOUT = Path("-")
SYNC_S = 5.0  # a power cut costs at most these seconds


@dataclass
class Done:
    """The names of an output's answered jobs, how many of them failed, and the bytes of their whole lines."""

    names: set[str] = field(default_factory=set)
    failed: int = 0
    size: int = 0


class Output:
    """A file, or the standard output, that lines are added to. A context manager.

    Args:
        path: `-` is the standard output
        jobs: the jobs of this run
        model: name of the model in the answers; None: not compared
        replace: start over, whatever the file contains

    `done` is what a regular file already contains of these jobs. Nothing is changed before `start`, except that a
    missing file is made. It is removed if the context ends with an exception before a line was written. Raises
    OutputInvalid for a file of another input or model, and for one that another process writes; OutputUnwritable;
    BrokenPipeError if the reader of a pipe is gone.
    """

    def __init__(self, path: Path, jobs: Iterable[Job], model: str | None, *, replace: bool = False) -> None:
        self.done = Done()
        self._path, self._synced = path, time.monotonic()
        self._lock = _locked(path) if path != STDOUT else None
        self._descriptor = -1
        self._made = path != STDOUT and not path.exists()
        self._discards = False
        try:
            self._descriptor = self._opened()
            self._regular = path != STDOUT and stat.S_ISREG(os.fstat(self._descriptor).st_mode)
            if self._regular and not replace:
                self._look({job.custom_id: job.id for job in jobs}, model)
        except BaseException:
            self._release()
            raise
        self._at = self.done.size

    def _opened(self) -> int:
        if self._path == STDOUT:
            sys.stdout.flush()
            return os.dup(sys.stdout.fileno())
        try:
            special = self._path.exists() and not self._path.is_file()
            flags = os.O_WRONLY if special else os.O_RDWR | os.O_CREAT
            return os.open(self._path, flags, 0o666)
        except OSError as error:
            raise OutputUnwritable(self._path, error.strerror or str(error), "give another output") from error

    def _look(self, expected: Mapping[str, str], model: str | None) -> None:
        """Read what the file contains into `done`."""
        with self._path.open("rb") as file:
            end = os.fstat(file.fileno()).st_size
            file.seek(max(end - 1, 0))
            ends_in_zeros = file.read(1) == b"\0"
            file.seek(0)
            try:
                for line in file:
                    if line.endswith(b"\n"):
                        self._note(line, expected, model)
                        self.done.size += len(line)
            except ValueError as error:
                if not ends_in_zeros:  # a power cut leaves zeros, a kill does not
                    raise OutputInvalid(self._path, f"is damaged after byte {self.done.size} ({error})") from error

    def _note(self, line: bytes, expected: Mapping[str, str], model: str | None) -> None:
        record = from_json(line)
        name, found = (record.get("custom_id"), record.get("id")) if isinstance(record, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(found, str) or expected.get(name) != found:
            shown = f"{name!r}" if isinstance(name, str) else "no request"
            raise OutputInvalid(self._path, f"belongs to another input: it answers {shown}, which is not in this one")
        if name in self.done.names:
            raise OutputInvalid(self._path, f"answers {name!r} twice")
        body = (record.get("response") or {}).get("body") or {}
        if model is not None and body.get("model", model) != model:
            raise OutputInvalid(self._path, f"has answers of another model, {body['model']!r}")
        self.done.names.add(name)
        self.done.failed += is_error(record)

    def start(self) -> None:
        """Remove what must not stay. The next `write` appends to the rest."""
        if self._regular:
            with _unwritable_as(self._path):
                os.ftruncate(self._descriptor, self._at)
                os.lseek(self._descriptor, self._at, os.SEEK_SET)

    def write(self, record: Mapping[str, Any]) -> None:
        """Write a line. It is on the disk at most SYNC_S later if more lines follow, or else after `close`."""
        self._write(to_json(record, inf_nan_mode="null") + b"\n")
        now = time.monotonic()
        if self._regular and now > self._synced + SYNC_S:
            self._synced = now
            self._sync()

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except BrokenPipeError:
            raise
        except OSError as error:
            if self._regular:
                with suppress(OSError):  # the next run does it otherwise
                    os.ftruncate(self._descriptor, self._at)
            raise _unwritable(self._path, error) from error
        self._at += len(data)

    def _sync(self) -> None:
        with _unwritable_as(self._path):
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Sync all lines to the disk. Idempotent."""
        if self._descriptor < 0:
            return
        try:
            if self._regular:
                self._sync()
        finally:
            self._release()

    def _release(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
            if self._discards and self._made and not self._at:
                self._path.unlink(missing_ok=True)
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> Output:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._discards = kind is not None
        self.close()


def is_error(record: Mapping[str, Any]) -> bool:
    response = record.get("response")
    return response is None or response.get("status_code") != 200


def _locked(path: Path) -> FileLock:
    """Acquire the lock of an output, which one process at a time holds."""
    name = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:24]
    try:
        folder = cache_dir() / "locks"
        folder.mkdir(exist_ok=True)
        lock = FileLock(folder / f"{name}.lock")
        lock.acquire(timeout=0)
    except Timeout as error:
        raise OutputInvalid(path, "is being written by another process", "wait for it, or stop it") from error
    except OSError as error:
        raise _unwritable(path, error) from error
    return lock


@contextmanager
def _unwritable_as(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> OutputUnwritable:
    return OutputUnwritable("standard output" if path == STDOUT else path, error.strerror or str(error))


@dataclass
class Summary:
    """The counts of a batch, in which errors are answers.

    Earlier runs answered `answered_before` jobs, `failed_before` of them with errors; this run answered `answered`,
    `failed` of them with errors.
    """

    total: int
    answered_before: int = 0
    answered: int = 0
    failed: int = 0
    failed_before: int = 0
    timings: Timings = field(default_factory=Timings)
    seconds: float = 0.0

    @property
    def left(self) -> int:
        return self.total - self.answered_before - self.answered

    @property
    def all_failed(self) -> int:
        """Return the number of errors in the output."""
        return self.failed + self.failed_before

    @property
    def tokens_per_second(self) -> float:
        return self.timings.predicted_tokens / self.seconds if self.seconds else 0.0

    @property
    def drafted_share(self) -> float:
        """Return the share of these tokens that were drafted and accepted."""
        return self.timings.accepted_tokens / max(self.timings.predicted_tokens, 1)

    @property
    def seconds_left(self) -> float | None:
        """Estimate the remaining time. None before the first answer."""
        return self.seconds / self.answered * self.left if self.answered else None

    def to_dict(self) -> dict[str, Any]:
        """Return the object of `--json`."""
        return {
            "requests": self.total,
            "kept": self.answered_before,
            "answered": self.answered,
            "failed": self.all_failed,
            "left": self.left,
            "prompt_tokens": self.timings.cached_tokens + self.timings.prompt_tokens,
            "cached_tokens": self.timings.cached_tokens,
            "completion_tokens": self.timings.predicted_tokens,
            "drafted": self.timings.drafted_tokens,
            "accepted": self.timings.accepted_tokens,
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(self.tokens_per_second, 2),
        }


def run(
    answers: Iterable[JobAnswer], output: Output, summary: Summary, report: Callable[[Summary], None] = lambda _: None
) -> Summary:
    """Write all answers, and call `report` after each. `summary` is up to date even if this raises."""
    begun = time.perf_counter()
    output.start()
    for answer in answers:
        output.write(answer.record)
        summary.answered += 1
        summary.failed += not answer.ok
        summary.timings = Timings.total((summary.timings, answer.timings))
        summary.seconds = time.perf_counter() - begun
        report(summary)
    return summary
