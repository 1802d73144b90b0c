"""Answers the jobs of a batch on a Ray cluster: Ray Data with one actor for each replica of the model.

    cluster = Cluster("auto", gpus=1)
    run(cluster.answers(jobs, config), output, summary)

Contract:

- Every job gets exactly one answer, as from `rest_local.batch.worker`: in exact mode with the same bytes, on machines
  of one kind. Only the driver, which calls `answers`, writes.
- Jobs of a node or a replica that is lost are done again, by the others. A job that three replicas did not survive is
  answered with an error.

How: the jobs go through Ray Data in groups; a replica sends what it has answered about once a second. Ray does not
repeat a group by itself, because it would repeat it on the same actor, which waits for a node to come back. The driver
knows which answers are missing when a dataset is through, and makes another dataset of these jobs.

Ray is imported inside the functions. It is an extra: `pip install rest-local[ray]`.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import pickle
import socket
import time
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rest_local import __version__
from rest_local.api.errors import ApiError
from rest_local.batch.jobs import Job, in_order
from rest_local.batch.worker import JobAnswer, Worker, failed, failed_line
from rest_local.catalog.stores import model_file
from rest_local.cluster import check_address, connected, first_line, is_rays
from rest_local.decoding.config import EngineConfig
from rest_local.decoding.request_state import error_of
from rest_local.errors import ClusterFailed, ModelInvalid, OptionError

if TYPE_CHECKING:
    import pyarrow as pa

    from rest_local.decoding.engine import Engine

Opened = Callable[[EngineConfig], "Engine"]

GROUP = 128  # jobs of a group at most: a replica decodes fewer at a time at the end of each group
GROUPS_PER_REPLICA = 4  # at least, so that no replica waits long for the last one
SEND_S = 1.0
TRIES = 3
_HEADER_BYTES = 1 << 20
_LOST_GROUPS = 16  # of one dataset, and 4 for each replica, before its jobs begin again with new replicas


@dataclass(frozen=True)
class Cluster:
    """Where the replicas run.

    address   `auto`: the cluster that this machine is a node of; host:port: the same, where there are several; `local`:
              processes of this machine alone, which end with the batch
    cpus      CPUs of a replica, and its threads; None: the engine's threads, 1 with a GPU, else those of the smallest
              node

    Raises OptionError for numbers out of range.
    """

    address: str
    replicas: int | None = None  # how many; None: as many as the nodes have room for now
    cpus: int | None = None
    gpus: float | None = None  # GPUs of a replica, also parts of one; None: 1 where the cluster has GPUs

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
        """The answers to all jobs, as they arrive. `opened`: opens the engine of a replica; `model` and
        `max_tokens`: as for `Worker`. What runs is stopped where the iterator is closed.

        Raises ClusterFailed where Ray is missing, the cluster cannot be reached, or no replica stays alive.
        """
        yield from (failed_line(job) for job in jobs if job.error is not None)
        left = {job.number: job for job in in_order(jobs) if job.error is None}
        if not left:
            return
        setup = _Setup(config, opened, model, max_tokens, _identity(config))
        lost: Counter[int] = Counter()  # by number of the job: datasets that ended without its answer
        without = 0  # datasets in a row that gave no answer
        with connected(self.address):
            while left:  # one dataset
                before, cause = len(left), ""
                try:
                    yield from _once(left, lost, _share(self, config), setup)
                    lost.update(left.keys())
                except Exception as error:
                    if not is_rays(error):
                        raise
                    cause = ": " + first_line(error)
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
    """What one replica gets. `count`: how many replicas."""

    cpus: int
    gpus: float
    count: int


@dataclass(frozen=True)
class _Setup:
    """How a replica answers. `identity`: of the model's file, as the driver has it."""

    config: EngineConfig
    opened: Opened | None
    model: str | None
    max_tokens: int | None
    identity: tuple[int, str]
    version: str = __version__


def _once(left: dict[int, Job], lost: Counter[int], share: _Share, setup: _Setup) -> Iterator[JobAnswer]:
    """One dataset of the jobs that are left; those that are answered are taken out. Jobs that were lost go in smaller
    groups, and at last alone: one of them may end its replica.
    """
    losses = max(lost.values(), default=0)
    alone = losses == TRIES - 1
    size = 1 if alone else max(min(GROUP >> 3 * losses, len(left) // (GROUPS_PER_REPLICA * share.count)), 1)
    jobs = list(left.values())
    groups = [jobs[start : start + size] for start in range(0, len(jobs), size)]
    for number, record, timings in _stream(groups, share, setup, alone=alone):
        job = left.pop(number, None)
        if job is not None:  # else it was answered before, by a replica that was thought lost
            del lost[number]
            yield JobAnswer(job, record, timings)


def _stream(
    groups: Sequence[Sequence[Job]], share: _Share, setup: _Setup, *, alone: bool
) -> Iterator[tuple[int, dict[str, Any], Any]]:
    """The number, record and timings of each job as it is answered. `alone`: replicas hold no group in advance."""
    import ray

    with warnings.catch_warnings(), _context(-1 if alone else _LOST_GROUPS + 4 * share.count):
        warnings.simplefilter("ignore")  # Ray 2.64 takes away `max_task_retries`; the extra asks for an earlier one
        items = [{"group": pickle.dumps(list(group))} for group in groups]
        dataset = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
            Replica,
            fn_constructor_args=(setup, share.cpus),
            batch_size=1,
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(size=share.count, max_tasks_in_flight_per_actor=2 - alone),
            num_cpus=share.cpus,
            num_gpus=share.gpus,
            max_restarts=-1,  # where there is room
            max_task_retries=0,
        )
        for batch in dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1):
            for data in batch["answers"].to_pylist():  # type: ignore[union-attr]
                answers = pickle.loads(data)
                if isinstance(answers, str):
                    raise ClusterFailed(answers)
                yield from answers


class Replica:
    """One actor: an engine, opened with the first group. For Ray Data, which calls it with one group at a time."""

    def __init__(self, setup: _Setup, threads: int) -> None:
        self._setup, self._threads = setup, threads
        self._stack = ExitStack()
        self._worker: Worker | None = None

    def __call__(self, batch: pa.Table) -> Iterator[dict[str, Any]]:
        """Parts of the answers, pickled; where the engine does not open, one text that says why."""
        import pyarrow as pa

        for data in batch["group"].to_pylist():
            for part in self._parts(pickle.loads(data)):
                yield pa.table({"answers": pa.array([pickle.dumps(part)], pa.large_binary())})

    def _parts(self, jobs: list[Job]) -> Iterator[list[tuple[int, dict[str, Any], Any]] | str]:
        part: list[tuple[int, dict[str, Any], Any]] = []
        sent = time.monotonic()
        try:
            for answer in self._ready(jobs).answers(jobs):
                part.append((answer.job.number, answer.record, answer.timings))
                if time.monotonic() - sent >= SEND_S:
                    yield part
                    part, sent = [], time.monotonic()
        except Exception as error:  # of no job: the model, the machine, a fault of this program; the driver raises it
            yield f"replica on {socket.gethostname()}: {error_of(error)}"
            return
        yield part

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

    def __del__(self) -> None:
        self._stack.close()


def _identity(config: EngineConfig) -> tuple[int, str]:
    """Size of the model's file, and a digest of its header (metadata, places of tensors). Raises ModelError."""
    path = model_file(config.model)
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_size, hashlib.sha256(file.read(_HEADER_BYTES)).hexdigest()
    except OSError as error:
        raise ModelInvalid(path, error.strerror or str(error)) from error


def _share(cluster: Cluster, config: EngineConfig) -> _Share:
    """What a replica gets of the nodes that are up. Raises ClusterFailed where no node has room for one."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    gpus = cluster.gpus
    if gpus is None:
        gpus = 1 if config.n_gpu_layers != 0 and any(node.get("GPU", 0) >= 1 for node in nodes) else 0
    cpus = cluster.cpus or config.threads
    if cpus is None:
        cpus = 1 if gpus else int(min((node["CPU"] for node in nodes if node.get("CPU", 0) >= 1), default=1))
    room = sum(int(min(node.get("CPU", 0) // cpus, node.get("GPU", 0) / gpus if gpus else math.inf)) for node in nodes)
    if not room and cluster.replicas is None:
        wanted = f"{cpus} CPUs" + (f" and {gpus:g} GPUs" if gpus else "")
        raise ClusterFailed(f"no node of the cluster has {wanted} for a replica; give fewer `cpus` or `gpus`")
    return _Share(cpus, gpus, cluster.replicas or room)


@contextmanager
def _context(lost_groups: int) -> Iterator[None]:
    """Settings of Ray Data for one dataset: quiet, parts of answers are sent at once, `lost_groups` end no dataset."""
    from ray.data import DataContext

    context = DataContext.get_current()
    wanted = {
        "target_max_block_size": 1,
        "max_errored_blocks": lost_groups,
        "enable_progress_bars": False,
        "print_on_execution_start": False,
    }
    before = {name: getattr(context, name) for name in wanted if hasattr(context, name)}
    loggers = [logging.getLogger(name) for name in ("ray.data", "ray")]
    try:
        for name in before:
            setattr(context, name, wanted[name])
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        yield
    finally:
        for name, value in before.items():
            setattr(context, name, value)
