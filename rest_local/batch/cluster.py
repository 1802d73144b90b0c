"""Answer the jobs of a batch on a Ray cluster: Ray Data with one actor for each replica of the model.

    cluster = Cluster("auto", gpus=1)
    run(cluster.answers(jobs, config), output, summary)

Contract:

- Every job gets exactly one answer, as from `rest_local.batch.worker`: in exact mode with the same bytes, on machines
  of one kind. Only the driver, which calls `answers`, writes.
- Other replicas repeat the jobs of a node or a replica that is lost. A job that three replicas did not survive is
  answered with an error.

How it works: the jobs go through Ray Data in groups, and a replica sends its new answers about once a second. Ray does
not repeat a group by itself, because it would repeat it on the same actor, which waits for a node to come back. When a
dataset is through, the driver knows which answers are missing, and makes another dataset of these jobs.

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
from rest_local.decoding.core import error_of
from rest_local.errors import ClusterFailed, ModelInvalid, OptionError

if TYPE_CHECKING:
    import pyarrow as pa

    from rest_local.decoding.engine import Engine

Opened = Callable[[EngineConfig], "Engine"]

GROUP = 128  # maximum jobs per group; a replica decodes fewer at a time at the end of each group
GROUPS_PER_REPLICA = 4  # minimum, so that no replica waits long for the last one
SEND_S = 1.0
TRIES = 3
_HEADER_BYTES = 1 << 20
# A dataset that has lost this many groups, plus 4 for each replica, begins again with new replicas.
_LOST_GROUPS = 16


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
        lost: Counter[int] = Counter()  # job number -> datasets that ended without its answer
        without = 0  # datasets in a row that gave no answer
        with connected(self.address):
            while left:
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
    """Answer jobs with one dataset, and remove them from `left`.

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
    """Yield number, record and timings of each job as it is answered. `alone` gives a replica one group at a time."""
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
            max_restarts=-1,
            max_task_retries=0,
        )
        for batch in dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1):
            for data in batch["answers"].to_pylist():  # type: ignore[union-attr]
                answers = pickle.loads(data)
                if isinstance(answers, str):
                    raise ClusterFailed(answers)
                yield from answers


class Replica:
    """One actor with an engine, which its first group opens. Ray Data calls it with one group at a time."""

    def __init__(self, setup: _Setup, threads: int) -> None:
        self._setup, self._threads = setup, threads
        self._stack = ExitStack()
        self._worker: Worker | None = None

    def __call__(self, batch: pa.Table) -> Iterator[dict[str, Any]]:
        """Yield parts of the answers, pickled. If the engine does not open, yield one text that says why."""
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
        except Exception as error:  # no job caused it, but the model, the machine or a bug; the driver raises it
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
    """Return the size of the model's file, and a digest of its header (metadata, tensor places). Raises ModelError."""
    path = model_file(config.model)
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_size, hashlib.sha256(file.read(_HEADER_BYTES)).hexdigest()
    except OSError as error:
        raise ModelInvalid(path, error.strerror or str(error)) from error


def _share(cluster: Cluster, config: EngineConfig) -> _Share:
    """Divide the nodes that are up among replicas. Raises ClusterFailed if no node has room for one."""
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
    """Set Ray Data to be quiet, to send parts of answers at once, and to survive `lost_groups` in a dataset."""
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
