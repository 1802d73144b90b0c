"""Answer the jobs of a batch on a Ray cluster, with one actor for each replica of the model.

    cluster = Cluster("auto", gpus=1)
    run(cluster.answers(jobs, config), output, summary)

Contract:

- Every job gets exactly one answer, as from `rest_local.batch.worker`: in exact mode with the same bytes, on machines
  of one kind. Only the driver, which calls `answers`, writes.
- Other replicas repeat the jobs of a node or a replica that is lost. A job that three replicas did not survive is
  answered with an error.

How it works: a replica gets the jobs in groups, and sends its new answers about once a second. Ray does not repeat a
group by itself, because it would repeat it on the same actor, which waits for a node to come back. So the driver gives
the jobs that a lost replica has not answered to the others, in smaller groups and at last alone: one of them may be
what ended the replica.

Ray is imported inside the functions. It is an extra: `pip install rest-local[ray]`.
"""

from __future__ import annotations

import hashlib
import math
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rest_local import __version__
from rest_local.api.errors import ApiError
from rest_local.batch.jobs import Job, in_order
from rest_local.batch.worker import JobAnswer, Worker, failed, failed_line
from rest_local.catalog.stores import model_file
from rest_local.cluster import Lost, check_address, connected, messages_of, nodes, ready
from rest_local.decoding.config import EngineConfig
from rest_local.decoding.core import error_of
from rest_local.errors import ClusterFailed, ModelInvalid, OptionError

if TYPE_CHECKING:
    from rest_local.decoding.engine import Engine

Opened = Callable[[EngineConfig], "Engine"]

GROUP = 128  # maximum jobs per group; a replica decodes fewer at a time at the end of each group
GROUPS_PER_REPLICA = 4  # minimum, so that no replica waits long for the last one
SEND_S = 1.0
GROUPS_AGAIN = (16, 1)  # maximum jobs per group that one replica, or two, did not survive
TRIES = len(GROUPS_AGAIN) + 1
CLOSE_S = 30.0  # for replicas to save their histories at the end
_HEADER_BYTES = 1 << 20


@dataclass(frozen=True)
class Cluster:
    """The cluster that replicas run on. Raises OptionError for numbers out of range.

    Args:
        address: `auto` is the cluster that this machine is a node of, host:port the same if there are several, `local`
            starts processes on this machine, which end with the batch
        replicas: None: as many as the nodes have room for now
        gpus: GPUs of a replica, also parts of one; None: 1 if the cluster has GPUs
    """

    address: str
    replicas: int | None = None
    gpus: float | None = None

    def __post_init__(self) -> None:
        check_address(self.address)
        for name, value, least in (("replicas", self.replicas, 1), ("gpus", self.gpus, 0)):
            if value is not None and value < least:
                raise OptionError(f"{name} {value}: give at least {least}")

    def answers(
        self,
        jobs: Sequence[Job],
        config: EngineConfig,
        *,
        opened: Opened | None = None,
        model: str | None = None,
        max_tokens: int | None = None,
        warn: Callable[[str], None] = lambda _: None,
    ) -> Generator[JobAnswer, None, None]:
        """Yield the answers to all jobs as they arrive. Closing the iterator stops what still runs.

        `opened` opens the engine of a replica. `model` and `max_tokens` are as for `Worker`. Raises ClusterFailed if
        Ray is missing, the cluster cannot be reached, or no replica stays alive.
        """
        yield from (failed_line(job) for job in jobs if job.error is not None)
        good = [job for job in in_order(jobs) if job.error is None]
        if not good:
            return
        setup = _Setup(config, opened, model, max_tokens, _identity(config))
        with connected(self.address):
            yield from _answers(good, _share(self, config), setup, warn)


@dataclass(frozen=True)
class _Share:
    """The resources of one replica, and the `count` of replicas."""

    cpus: int
    gpus: float
    count: int


@dataclass(frozen=True)
class _Setup:
    """The instructions for a replica. `identity` identifies the driver's model file."""

    config: EngineConfig
    opened: Opened | None
    model: str | None
    max_tokens: int | None
    identity: tuple[int, str]
    version: str = __version__


@dataclass
class _Group:
    """Jobs that a replica answers, and how many replicas were lost with them before."""

    jobs: dict[int, Job]
    losses: int = 0


def _groups(jobs: Iterable[Job], size: int, losses: int = 0) -> Iterator[_Group]:
    listed = list(jobs)
    for start in range(0, len(listed), size):
        yield _Group({job.number: job for job in listed[start : start + size]}, losses)


def _answers(
    jobs: Sequence[Job], share: _Share, setup: _Setup, warn: Callable[[str], None]
) -> Generator[JobAnswer, None, None]:
    """Yield the answers of the replicas. A lost replica is replaced.

    Raises ClusterFailed if replicas are lost again and again, and nothing is answered.
    """
    import ray

    actor: Any = ray.remote(Replica).options(num_cpus=share.cpus, num_gpus=share.gpus, scheduling_strategy="SPREAD")
    size = max(min(GROUP, len(jobs) // (GROUPS_PER_REPLICA * share.count)), 1)
    waiting = deque(_groups(jobs, size))
    replicas: list[Any] = []
    idle: list[Any] = []
    running: dict[Any, tuple[Any, _Group]] = {}  # the streaming task of a replica, and its jobs without an answer
    lost = 0  # replicas in a row, without an answer

    def start() -> None:
        replicas.append(replica := actor.remote(setup, share.cpus))
        # It gets jobs when this task has ended: one that waits for room on a node would keep them from the others.
        running[replica.begin.options(num_returns="streaming").remote()] = replica, _Group({})

    try:
        for _ in range(min(share.count, len(waiting))):
            start()
        while waiting or any(group.jobs for _, group in running.values()):
            task = ready(running)
            replica, group = running[task]
            try:
                part = next(messages_of(task, "replica"), None)
            except Lost as error:
                del running[task]
                replicas.remove(replica)
                lost += 1
                if group.losses + 1 < TRIES:
                    if group.jobs:
                        warn(f"a node or a replica was lost; {len(group.jobs)} requests are done again")
                    waiting += _groups(group.jobs.values(), GROUPS_AGAIN[group.losses], group.losses + 1)
                else:
                    text = f"{TRIES} replicas ended while they answered this request; see the logs of Ray"
                    yield from (failed(job, ApiError(500, text)) for job in group.jobs.values())
                if lost > max(2 * share.count, TRIES):
                    raise ClusterFailed(f"no replica stays alive: {error}; see the logs of Ray") from error
                start()
                part = []
            if isinstance(part, str):
                raise ClusterFailed(part)
            if part is None:
                del running[task]
                idle.append(replica)
            for number, record, timings in part or ():
                lost = 0
                yield JobAnswer(group.jobs.pop(number), record, timings)
            while idle and waiting:
                replica, group = idle.pop(), waiting.popleft()
                task = replica.answers.options(num_returns="streaming").remote(list(group.jobs.values()))
                running[task] = replica, group
        if idle:
            ray.wait([replica.close.remote() for replica in idle], num_returns=len(idle), timeout=CLOSE_S)
    finally:
        for replica in replicas:
            ray.kill(replica)


class Replica:
    """One actor with an engine, which its first group of jobs opens."""

    def __init__(self, setup: _Setup, threads: int) -> None:
        self._setup, self._threads = setup, threads
        self._stack = ExitStack()
        self._worker: Worker | None = None

    def begin(self) -> Iterator[None]:
        """Yield nothing. The end of this task says that the replica runs."""
        yield from ()

    def answers(self, jobs: list[Job]) -> Iterator[list[tuple[int, dict[str, Any], Any]] | str]:
        """Yield parts of the answers, about one a second. If the engine does not open, yield one text that says why."""
        part: list[tuple[int, dict[str, Any], Any]] = []
        sent = time.monotonic()
        try:
            for answer in self._ready(jobs).answers(jobs):
                part.append((answer.job.number, answer.record, answer.timings))
                if time.monotonic() - sent >= SEND_S:
                    yield part
                    part, sent = [], time.monotonic()
        except Exception as error:  # no job caused it, but the model, the machine or a bug; the driver raises it
            yield f"replica on {socket.gethostname()}: {error_of(error)}"
            return
        yield part

    def close(self) -> None:
        """Close the engine, which saves its history."""
        self._stack.close()

    def _ready(self, jobs: list[Job]) -> Worker:
        from rest_local.batch.worker import fitted
        from rest_local.decoding.engine import Engine

        if self._worker is None:
            setup = self._setup
            if setup.version != __version__:
                raise ClusterFailed(f"has rest-local {__version__} and the driver {setup.version}; install the same")
            if _identity(setup.config) != setup.identity:
                raise ClusterFailed(f"model {model_file(setup.config.model)}: not the file of the driver; copy it")
            config = setup.config if setup.config.threads else replace(setup.config, threads=self._threads)
            engine = (setup.opened or Engine)(fitted(config, jobs, setup.max_tokens))
            self._stack.enter_context(engine)
            self._worker = self._stack.enter_context(Worker(engine, setup.model, max_tokens=setup.max_tokens))
        return self._worker


def _identity(config: EngineConfig) -> tuple[int, str]:
    """Return the size of the model's file, and a digest of its header (metadata, tensor places). Raises ModelError."""
    path = model_file(config.model)
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_size, hashlib.sha256(file.read(_HEADER_BYTES)).hexdigest()
    except OSError as error:
        raise ModelInvalid(path, error.strerror or str(error)) from error


def _share(cluster: Cluster, config: EngineConfig) -> _Share:
    """Divide the nodes that are up among replicas. Raises ClusterFailed if no node has room for one.

    A replica gets as many CPUs as the engine's threads, else 1 with a GPU, or those of the smallest node.
    """
    up = nodes()
    gpus = cluster.gpus
    if gpus is None:
        gpus = 1 if config.n_gpu_layers != 0 and any(node.get("GPU", 0) >= 1 for node in up) else 0
    cpus = config.threads
    if cpus is None:
        cpus = 1 if gpus else int(min((node["CPU"] for node in up if node.get("CPU", 0) >= 1), default=1))
    room = sum(int(min(node.get("CPU", 0) // cpus, node.get("GPU", 0) / gpus if gpus else math.inf)) for node in up)
    if not room and cluster.replicas is None:
        wanted = f"{cpus} CPUs" + (f" and {gpus:g} GPUs" if gpus else "")
        raise ClusterFailed(f"no node of the cluster has {wanted} for a replica; give fewer `threads` or `gpus`")
    return _Share(cpus, gpus, cluster.replicas or room)
