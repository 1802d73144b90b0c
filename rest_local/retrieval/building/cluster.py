"""Builds the shards of a plan on a Ray cluster: one task for each shard, which gives its segments.

    cluster = Cluster("auto")
    build_datastore("mycode", ["~/src"], vocabulary=vocabulary, cluster=cluster)

Contract:

- The bytes of a segment are those of a local build of the same plan. Both leave the same records in the staging
  directory, so either goes on with what the other has done.
- Only the driver writes. A task makes the files of a segment in memory and sends them in parts; the driver writes them,
  compares their checksums and syncs them. So nodes need no file system of the driver, and a task that dies leaves no
  file.
- A task reads the files of its shard where it is, if the node has them with the size and the time that the driver saw.
  If one differs, Ray Data reads the files of this shard on the driver's node. The vocabulary comes with the build.
- A node or a process that is lost costs the shards that it worked on. They are built again.

Ray is imported inside the functions. It is an extra: `pip install rest-local[ray]`.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Queue
from typing import TYPE_CHECKING, Any

import numpy as np

from rest_local import __version__
from rest_local.cluster import check_address, first_line
from rest_local.errors import ClusterFailed, DatastoreError, OptionError, RestLocalError, printable
from rest_local.retrieval.building.build import GrowingSegment, Progress, grown
from rest_local.retrieval.building.shards import Plan, Shard, record, shard_documents
from rest_local.retrieval.documents import DocumentTokenizer, Opener, Text, grouped, opener_of
from rest_local.retrieval.files import Files
from rest_local.retrieval.format import FileEntry, SegmentEntry, file_name, parse_segment
from rest_local.retrieval.rows import Int32Array, width_of
from rest_local.retrieval.sources.source import Skipped
from rest_local.retrieval.sources.walk import Filters, read_files

if TYPE_CHECKING:
    import pyarrow as pa


PART = 8 << 20
"""Bytes of a segment's file in one message."""
WAITING = 4
"""Messages of a task that wait for the driver; then the task waits."""
TRIES = 3
REPORT_S = 0.5
SAMPLE = "def f(x, y=12345):\n\t# it's \u00e9\u4f60\U0001f600  \r\n    return x['a'] != 0.5e-7 and not (y)\n" * 3
"""A text that shows whether a node tokenizes as the driver does: its library may have another version."""

Message = tuple[Any, ...]
Shipped = tuple[Opener, Int32Array]
"""How a node opens the vocabulary, and the tokens of SAMPLE."""


@dataclass(frozen=True)
class Cluster:
    """Where a build runs.

    address   `auto`: the cluster that this machine is a node of; host:port: the same, where there are several; `local`:
              processes of this machine alone, which end with the build
    ship      the driver's node reads all files, also where a node seems to have them
    warn      called with a line for each shard that is built again

    Raises OptionError for an address outside of the cluster.
    """

    address: str
    ship: bool = False
    warn: Callable[[str], None] = lambda _: None

    def __post_init__(self) -> None:
        check_address(self.address)

    def slots(self, memory: int) -> int:
        """How many tasks with so many bytes the nodes have room for. Raises ClusterFailed if for none."""
        import ray

        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        room = sum(int(min(node.get("CPU", 0), node.get("memory", 0) // memory)) for node in nodes)
        if not room:
            size = f"{memory >> 20} MB"
            raise ClusterFailed(f"no node of the cluster has a CPU and {size} for a shard; give less `memory`")
        return room

    def build_shards(
        self,
        plan: Plan,
        numbers: Sequence[int],
        directory: Path,
        vocabulary: DocumentTokenizer,
        progress: Progress,
        files: Files,
    ) -> None:
        """Build the shards with these numbers on the cluster that this process is connected to. What they gave is in
        `shards.finished`.

        progress: as for `build_shard`, called in this thread, with amounts below 0 for what was lost. Raises
        DatastoreError with the node for what `build_shard` raises there, ClusterFailed if processes die again and
        again, and OSError.
        """
        tasks, losses = _Tasks(plan, vocabulary, self), Counter[int]()
        running: dict[Any, Receiving] = {}
        try:
            for number in numbers:
                running[tasks.start(number)] = Receiving(plan, number, directory, files, progress)
            while running:
                task = tasks.ready(list(running))
                receiving = running[task]
                message = tasks.message(task, receiving)
                if message is None:
                    del running[task]
                    tasks.lost(receiving, losses)
                    receiving.drop()
                    running[tasks.start(receiving.number)] = receiving
                elif receiving.take(message):
                    del running[task]
        finally:
            for task, receiving in running.items():
                tasks.cancel(task)
                receiving.drop()


class _Tasks:
    """The tasks of Ray for a build."""

    def __init__(self, plan: Plan, vocabulary: DocumentTokenizer, cluster: Cluster) -> None:
        import ray

        self._ray, self._plan, self._cluster = ray, plan, cluster
        self._opener = ray.put((_shipped(vocabulary), vocabulary.tokenize(SAMPLE)))
        self._node = ray.get_runtime_context().get_node_id()
        self._remote: Any = ray.remote(_shard).options(
            num_cpus=1,
            memory=plan.memory,
            max_retries=0,
            num_returns="streaming",
            scheduling_strategy="SPREAD",
            _generator_backpressure_num_objects=WAITING,
        )

    def start(self, number: int) -> Any:
        part = replace(self._plan, shards=(self._plan.shards[number],), skipped=Skipped())
        return self._remote.remote(part, self._opener, self._cluster.ship, self._node)

    def ready(self, tasks: list[Any]) -> Any:
        """One that has a message, or has ended."""
        (task, *_), _ = self._ray.wait(tasks, num_returns=1, fetch_local=False)
        return task

    def message(self, task: Any, receiving: Receiving) -> Message | None:
        """The next message; None if the task is lost. Raises ClusterFailed if it cannot work there."""
        from ray.exceptions import RayError, RayTaskError

        try:
            return self._checked(self._ray.get(next(task)), receiving)
        except RayTaskError as error:
            raise ClusterFailed(f"node {receiving.host or 'of a shard'}: {printable(first_line(error))}") from error
        except (RayError, StopIteration) as error:
            receiving.cause = first_line(error) if isinstance(error, RayError) else ""
            return None

    def _checked(self, message: Message, receiving: Receiving) -> Message:
        kind, *content = message
        if kind == "on" and content[1] != __version__:
            raise ClusterFailed(
                f"node {content[0]}: has rest-local {content[1]} and the driver {__version__}; install the same"
            )
        if kind == "failed":
            raise DatastoreError(f"node {receiving.host}: {content[0]}")
        return message

    def lost(self, receiving: Receiving, losses: Counter[int]) -> None:
        """Warn. Raises ClusterFailed if a shard was lost too often."""
        losses[receiving.number] += 1
        if losses[receiving.number] == TRIES:
            what = f"{TRIES} processes ended while they built shard {receiving.number + 1}, which begins with "
            where = printable(self._plan.shards[receiving.number][0].path)
            raise ClusterFailed(f"{what}{where}: {printable(receiving.cause)}; less `memory` may help")
        again = f"shard {receiving.number + 1} of {len(self._plan.shards)} is built again"
        self._cluster.warn(f"a node or a process was lost{f' ({receiving.host})' if receiving.host else ''}; {again}")

    def cancel(self, task: Any) -> None:
        self._ray.cancel(task, force=True)


def _shipped(vocabulary: DocumentTokenizer) -> Opener:
    """An opener for other machines. Raises OptionError."""
    ship: Callable[[], Opener | None] | None = getattr(vocabulary, "ship", None)
    opener = ship() if ship else opener_of(vocabulary)
    if opener is None:
        raise OptionError(f"vocabulary {vocabulary.name}: other machines cannot open it")
    return opener


def _shard(part: Plan, vocabulary: Shipped, ship: bool, driver: str) -> Iterator[Message]:
    """A task: the messages about the only shard of a plan, until ("end", what was skipped) or ("failed", why).

    ("on", host, version); ("progress", {what: amount}); ("segment", entry, kinds of its files); ("data", uint8 [n]),
    the files in that order.
    """
    yield "on", socket.gethostname(), __version__
    messages: Queue[Message] = Queue(1)
    threading.Thread(target=_work, args=(part, vocabulary, ship, driver, messages), daemon=True).start()
    while True:
        message = messages.get()
        yield message
        if message[0] in ("end", "failed"):
            return


def _work(part: Plan, vocabulary: Shipped, ship: bool, driver: str, messages: Queue[Message]) -> None:
    """The thread that builds."""
    report, skipped = _Report(messages), Skipped()
    try:
        tokenizer = _tokenizer(part.vocabulary.hash, *vocabulary)
        texts = shipped_texts(part, driver, skipped, report) if ship or not _is_here(part) else None
        documents = shard_documents(part, 0, tokenizer, skipped, report, texts, workers=1)
        for growing in grown(documents, part.vocabulary.size, part.tokens):
            content = growing.content()
            report("sorted", growing.tokens)
            for message in _sent(growing, content):
                messages.put(message)
            report("written", growing.tokens)
            del content, growing
        report.flush()
        messages.put(("end", skipped.to_dict()))
    except BaseException as error:
        failure = str(error) if isinstance(error, RestLocalError) else printable(repr(error))
        messages.put(("failed", failure))


class _Report:
    """Progress of a task, in few messages."""

    def __init__(self, messages: Queue[Message]) -> None:
        self._messages, self._amounts, self._sent = messages, Counter[str](), time.monotonic()

    def __call__(self, what: str, amount: int) -> None:
        self._amounts[what] += amount
        if time.monotonic() - self._sent >= REPORT_S:
            self.flush()

    def flush(self) -> None:
        self._messages.put(("progress", dict(self._amounts)))
        self._amounts.clear()
        self._sent = time.monotonic()


def _sent(growing: GrowingSegment, content: Mapping[str, bytes | memoryview]) -> Iterator[Message]:
    views = {kind: memoryview(data).cast("B") for kind, data in content.items()}
    entries = {kind: FileEntry(len(view), hashlib.sha256(view).hexdigest()) for kind, view in views.items()}
    entry = growing.entry(secrets.token_hex(8), entries)
    yield "segment", entry.to_dict(), list(views)
    for view in views.values():
        for start in range(0, len(view), PART):
            yield "data", np.array(view[start : start + PART])


def _is_here(part: Plan) -> bool:
    """Whether this node has the files of the shard as the driver saw them."""
    for file in part.shards[0]:
        try:
            status = os.lstat(file.path)
        except OSError:
            return False
        if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns) or not os.access(file.path, os.R_OK):
            return False
    return True


_opened: dict[str, DocumentTokenizer] = {}  # by hash: Ray uses a process for several tasks
_open = ExitStack()  # until the process ends


def _tokenizer(wanted: str, opener: Opener, sample: Int32Array) -> DocumentTokenizer:
    """Raises ClusterFailed if this machine tokenizes in another way."""
    if wanted not in _opened:
        tokenizer = _open.enter_context(opener())
        if not np.array_equal(tokenizer.tokenize(SAMPLE), sample):
            raise ClusterFailed("tokenizes in another way than the driver; install the same llama-cpp-python")
        _opened[wanted] = tokenizer
    return _opened[wanted]


class Receiving:
    """One shard. `host`: where it is built; `cause`: why its task was lost, for messages."""

    def __init__(self, plan: Plan, number: int, directory: Path, files: Files, report: Progress) -> None:
        self.number, self.host, self.cause = number, "", ""
        self._plan, self._directory, self._files, self._report = plan, directory, files, report
        self._done: list[SegmentEntry] = []
        self._segment: _Segment | None = None
        self._reported: Counter[str] = Counter()

    def take(self, message: tuple[Any, ...]) -> bool:
        """Take a message of the task (`cluster`); whether it was the last, and the shard is recorded as done.

        Raises DatastoreError for data with another checksum, and OSError.
        """
        kind, *content = message
        if kind == "on":
            self.host = content[0]
        elif kind == "progress":
            self._reported.update(content[0])
            for what, amount in content[0].items():
                self._report(what, amount)
        elif kind == "segment":
            entry = parse_segment(content[0], width_of(self._plan.vocabulary.size))
            self._segment = _Segment(entry, content[1], self._directory, self._files)
        elif kind == "data" and self._segment and self._segment.add(content[0]):
            self._done.append(self._segment.entry)
            self._segment = None
        elif kind == "end":
            record(
                self._plan,
                self.number,
                self._directory,
                Shard(tuple(self._done), Skipped.from_dict(content[0])),
                self._files,
            )
            return True
        return False

    def drop(self) -> None:
        """Delete what has arrived, because the task is lost."""
        if self._segment:
            self._segment.close()
            self._done.append(self._segment.entry)
        for name in (name for entry in self._done for name in entry.named_files):
            with suppress(OSError):
                self._files.unlink(self._directory / name)
        self._segment, self.host = None, ""
        self._done.clear()
        for what, amount in self._reported.items():
            self._report(what, -amount)
        self._reported.clear()


class _Segment:
    """A segment that arrives: its files one after another, in the order of `kinds`."""

    def __init__(self, entry: SegmentEntry, kinds: list[str], directory: Path, files: Files) -> None:
        self.entry, self._directory, self._files = entry, directory, files
        self._left = list(kinds)
        self._begin()

    def add(self, data: Any) -> bool:
        """Write a part, uint8 [n]; whether it was the last of the segment, which is durable then."""
        path, wanted = self._path(self._left[0]), self.entry.files[self._left[0]]
        try:
            self._files.write(self._descriptor, memoryview(data))
            self._digest.update(data)
            self._size += len(data)
            if self._size < wanted.size:
                return False
            self._files.sync(self._descriptor)
        except OSError as error:
            error.filename = error.filename or str(path)
            raise
        self.close()
        if FileEntry(self._size, self._digest.hexdigest()) != wanted:
            raise DatastoreError(f"{path}: damaged on its way from the node that built it; build again")
        self._left.pop(0)
        if self._left:
            self._begin()
            return False
        self._files.sync_directory(self._directory)
        return True

    def _begin(self) -> None:
        self._descriptor = self._files.create(self._path(self._left[0]))
        self._digest, self._size = hashlib.sha256(), 0

    def close(self) -> None:
        """Close the file that is written."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def _path(self, kind: str) -> Path:
        return self._directory / file_name(self.entry.name, kind)


GROUP = 4 << 20
"""Bytes of the files that are read together."""


def shipped_texts(part: Plan, node: str, skipped: Skipped, report: Progress) -> Iterator[Text]:
    """The texts of the only shard of a plan, in its order, read on the node with this id."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    _be_quiet_and_ordered()
    items = [
        {"paths": pickle.dumps([file.path for file in group])}
        for group in grouped(part.shards[0], lambda file: file.size, GROUP)
    ]
    if not items:
        return
    read: Any = _read
    dataset = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
        read,
        fn_args=(part.walk.filters(),),
        batch_size=1,
        batch_format="pyarrow",
        num_cpus=0,
        concurrency=2,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    )
    for batch in dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1):
        for data in batch["texts"].to_pylist():  # type: ignore[union-attr]
            texts, counted, size = pickle.loads(data)
            skipped.include(counted)
            report("read", size)
            yield from texts


def _read(batch: pa.Table, filters: Filters) -> pa.Table:
    """A task of Ray Data: (texts, what was skipped, bytes) of some files."""
    import pyarrow as pa

    found = []
    for paths in batch["paths"].to_pylist():
        skipped, sizes = Skipped(), list[int]()
        texts = list(read_files(pickle.loads(paths), filters, skipped, sizes.append))
        found.append(pickle.dumps((texts, skipped, sum(sizes))))
    return pa.table({"texts": pa.array(found, pa.large_binary())})


def _be_quiet_and_ordered() -> None:
    from ray.data import DataContext

    context: Any = DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    context.print_on_execution_start = False
