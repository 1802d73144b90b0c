"""Answer the jobs of a batch on a Ray cluster, with one actor for each replica of the model.

    cluster = Cluster("auto", gpus=1)
    run(cluster.answers(jobs, config), output, summary)

Contract:

- Every job gets exactly one answer, as from `rest_local.batch.worker`: in exact mode with the same bytes, on machines
  of one kind. Only the driver, which calls `answers`, writes.
- Other replicas repeat the jobs of a node or a replica that is lost. A job that three replicas did not survive is
  answered with an error.

How it works: a replica gets the jobs in groups, and sends its new answers about once a second. Ray does not repeat a
group by itself, because it would repeat it on the same actor, which waits for a node to come back. After a round of all
groups, the driver knows which answers are missing, and makes another round of these jobs.

Ray is imported inside the functions. It is an extra: `pip install rest-local[ray]`.
"""

from __future__ import annotations

import hashlib
import math
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
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
TRIES = 3
CLOSE_S = 30.0  # for replicas to save their histories at the end
_HEADER_BYTES = 1 << 20


@dataclass(frozen=True)
class Cluster:
    """The cluster that replicas run on. Raises OptionError for numbers out of range.

    Args:
        address: `auto` is the cluster that this machine is a node of, host:port the same if there are several, `local`
            starts processes on this machine, which end with the batch
        replicas: None: as many as the nodes have room for now
        cpus: CPUs and threads of a replica; None: the engine's threads, 1 with a GPU, else those of the smallest node
        gpus: GPUs of a replica, also parts of one; None: 1 if the cluster has GPUs
    """

    address: str
    replicas: int | None = None
    cpus: int | None = None
    gpus: float | None = None

    def __post_init__(self) -> None:
        check_address(self.address)
        for name, value, least in (("replicas", self.replicas, 1), ("cpus", self.cpus, 1), ("gpus", self.gpus, 0)):
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
        left = {job.number: job for job in in_order(jobs) if job.error is None}
        if not left:
            return
        setup = _Setup(config, opened, model, max_tokens, _identity(config))
        lost: Counter[int] = Counter()  # job number -> rounds that ended without its answer
        without = 0  # rounds in a row that gave no answer
        with connected(self.address):
            while left:
                before, cause = len(left), ""
                try:
                    yield from _once(left, lost, _share(self, config), setup)
                    lost.update(left.keys())
                except Lost as error:
                    cause = f": {error}"
                without = 0 if len(left) < before else without + 1
                if without == TRIES - 1 and len(left) > 1:
                    raise ClusterFailed(f"no replica stays alive{cause}; see the logs of Ray")
                if left:
                    warn(f"a node or a replica was lost; {len(left)} of {before} requests are done again")
                for number in [number for number, tries in lost.items() if tries >= TRIES]:
                    del lost[number]
                    text = f"{TRIES} replicas ended while they answered this request; see the logs of Ray"
                    yield failed(left.pop(number), ApiError(500, text))


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


def _once(left: dict[int, Job], lost: Counter[int], share: _Share, setup: _Setup) -> Iterator[JobAnswer]:
    """Answer jobs in one round, and remove them from `left`.

    Lost jobs go in smaller groups, and at last alone, because one of them may end its replica.
    """
    losses = max(lost.values(), default=0)
    alone = losses == TRIES - 1
    size = 1 if alone else max(min(GROUP >> 3 * losses, len(left) // (GROUPS_PER_REPLICA * share.count)), 1)
    jobs = list(left.values())
    groups = [jobs[start : start + size] for start in range(0, len(jobs), size)]
    for number, record, timings in _stream(groups, share, setup, alone=alone):
        job = left.pop(number, None)
        if job is not None:  # a replica that was thought lost may have answered it before
            del lost[number]
            yield JobAnswer(job, record, timings)


def _stream(
    groups: Sequence[Sequence[Job]], share: _Share, setup: _Setup, *, alone: bool
) -> Iterator[tuple[int, dict[str, Any], Any]]:
    """Yield number, record and timings of each job as it is answered, except for jobs of groups that are lost.

    A lost replica is replaced. A replica has two groups, so that it never waits, or with `alone` one. Raises Lost if
    replicas are lost again and again, and nothing is answered.
    """
    import ray

    actor: Any = ray.remote(Replica).options(num_cpus=share.cpus, num_gpus=share.gpus, scheduling_strategy="SPREAD")
    waiting = list(reversed(groups))
    replicas: dict[int, Any] = {}
    # Streaming tasks, with the number of their replica. A replica gets groups after `begin` has run: one that waits for
    # room on a node would keep them from the others.
    starting: dict[Any, int] = {}
    running: dict[Any, int] = {}
    started = losses = 0

    def start() -> None:
        nonlocal started
        started += 1
        replicas[started] = replica = actor.remote(setup, share.cpus)
        for _ in range(1 if alone else 2):
            starting[replica.begin.options(num_returns="streaming").remote()] = started

    try:
        for _ in range(min(share.count, len(groups))):
            start()
        while waiting or running:
            task = ready([*running, *starting])
            number = running[task] if task in running else starting[task]
            try:
                part = next(messages_of(task, "replica"), None)
            except Lost as error:
                running.pop(task, None)
                starting.pop(task, None)
                if replicas.pop(number, None) is not None:
                    losses += 1
                    if losses > 2 * share.count:
                        raise Lost(f"{losses} replicas were lost: {error}") from error
                    start()
                continue
            if isinstance(part, str):
                raise ClusterFailed(part)
            if part is not None:
                losses = 0
                yield from part
                continue
            running.pop(task, None)
            starting.pop(task, None)
            if waiting:
                running[replicas[number].answers.options(num_returns="streaming").remote(waiting.pop())] = number
        idle = [replica.close.remote() for number, replica in replicas.items() if number not in starting.values()]
        if idle:
            ray.wait(idle, num_returns=len(idle), timeout=CLOSE_S)
    finally:
        for replica in replicas.values():
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
    """Divide the nodes that are up among replicas. Raises ClusterFailed if no node has room for one."""
    up = nodes()
    gpus = cluster.gpus
    if gpus is None:
        gpus = 1 if config.n_gpu_layers != 0 and any(node.get("GPU", 0) >= 1 for node in up) else 0
    cpus = cluster.cpus or config.threads
    if cpus is None:
        cpus = 1 if gpus else int(min((node["CPU"] for node in up if node.get("CPU", 0) >= 1), default=1))
    room = sum(int(min(node.get("CPU", 0) // cpus, node.get("GPU", 0) / gpus if gpus else math.inf)) for node in up)
    if not room and cluster.replicas is None:
        wanted = f"{cpus} CPUs" + (f" and {gpus:g} GPUs" if gpus else "")
        raise ClusterFailed(f"no node of the cluster has {wanted} for a replica; give fewer `cpus` or `gpus`")
    return _Share(cpus, gpus, cluster.replicas or room)
