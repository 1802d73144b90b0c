"""Build the shards of a plan on a Ray cluster, with one task for each shard.

    cluster = Cluster("auto")
    build_datastore("mycode", ["~/src"], vocabulary=vocabulary, cluster=cluster)

Contract:

- The bytes of a segment are those of a local build of the same plan. Both leave the same records in the staging
  directory, so either goes on with what the other has done.
- Only the driver writes. A task makes the files of a segment in memory and sends them in parts; the driver writes them,
  compares their checksums and syncs them. So nodes need no file system of the driver, and a task that dies leaves no
  file.
- A task reads the files of its shard where it is, if the node has them with the size and the time that the driver saw.
  If one differs, a task on the driver's node reads the files of this shard. The vocabulary comes with the build.
- The shards of a lost node or process are built again.

Ray is imported inside the functions. It is an extra: `pip install rest-local[ray]`.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np

from rest_local import __version__
from rest_local.cluster import Lost, check_address, messages_of, nodes, ready
from rest_local.errors import ClusterFailed, DatastoreError, OptionError, RestLocalError, printable
from rest_local.retrieval.building.build import Progress, grown, write_parts
from rest_local.retrieval.building.shards import Shard, ShardPlan, record, shard_documents
from rest_local.retrieval.documents import DocumentTokenizer, Opener, Text, grouped, opener_of
from rest_local.retrieval.files import Files
from rest_local.retrieval.format import FileEntry, SegmentEntry, file_name, parse_segment
from rest_local.retrieval.rows import Int32Array, width_of
from rest_local.retrieval.sources.source import Reading, Skipped
from rest_local.retrieval.sources.walk import Filters, read_files

PART = 8 << 20  # bytes of a segment's file in one message
GROUP = 4 << 20  # bytes of files that the driver's node reads for one message
WAITING = 4  # maximum messages that wait for the driver; then the task waits
TRIES = 3
REPORT_S = 0.5
# This text shows whether a node tokenizes as the driver does, because its library may have another version.
SAMPLE = "def f(x, y=12345):\n\t# it's \u00e9\u4f60\U0001f600  \r\n    return x['a'] != 0.5e-7 and not (y)\n" * 3

Message = tuple[Any, ...]
Shipped = tuple[Opener, Int32Array]  # a node's opener of the vocabulary, and the tokens of SAMPLE


@dataclass(frozen=True)
class Cluster:
    """The cluster that a build runs on. Raises OptionError for an address outside the cluster. `address` is `auto` for
    the cluster that this machine is a node of, host:port for the same if there are several, or `local` for processes of
    this machine alone, which end with the build.
    """

    address: str
    ship: bool = False  # the driver's node reads all files, even if another node seems to have them
    warn: Callable[[str], None] = lambda _: None  # gets a line for each shard that is built again

    def __post_init__(self) -> None:
        check_address(self.address)

    def slots(self, memory: int) -> int:
        """Return how many tasks with so many bytes fit on the nodes. Raises ClusterFailed if none does."""
        room = sum(int(min(node.get("CPU", 0), node.get("memory", 0) // memory)) for node in nodes())
        if not room:
            size = f"{memory >> 20} MB"
            raise ClusterFailed(f"no node of the cluster has a CPU and {size} for a shard; give less `memory`")
        return room

    def build_shards(
        self,
        plan: ShardPlan,
        numbers: Sequence[int],
        directory: Path,
        vocabulary: DocumentTokenizer,
        progress: Progress,
        files: Files,
    ) -> None:
        """Build the shards with these numbers on the cluster that this process is connected to. `shards.finished` has
        the results. `progress` is called as by `build_shard`, in this thread, with amounts below 0 for what was lost.

        Raises DatastoreError with the node for errors of `build_shard` there, ClusterFailed if processes die again and
        again, OptionError for a vocabulary that other machines cannot open, and OSError.
        """
        import ray

        ship: Callable[[], Opener | None] | None = getattr(vocabulary, "ship", None)
        opener = ship() if ship else opener_of(vocabulary)
        if opener is None:
            raise OptionError(f"vocabulary {vocabulary.name}: other machines cannot open it")
        shipped, node = ray.put((opener, vocabulary.tokenize(SAMPLE))), ray.get_runtime_context().get_node_id()
        remote: Any = ray.remote(_shard).options(
            num_cpus=1,
            memory=plan.memory,
            max_retries=0,
            num_returns="streaming",
            scheduling_strategy="SPREAD",
            _generator_backpressure_num_objects=WAITING,
        )
        losses, running = Counter[int](), dict[Any, Receiving]()

        def start(receiving: Receiving) -> None:
            part = replace(plan, shards=(plan.shards[receiving.number],), skipped=Skipped())
            running[remote.remote(part, shipped, self.ship, node)] = receiving

        try:
            for number in numbers:
                start(Receiving(plan, number, directory, files, progress))
            while running:
                task = ready(running)
                receiving = running[task]
                try:
                    if receiving.take(messages_of(task, f"node {receiving.host or 'of a shard'}")):
                        del running[task]
                    continue
                except Lost as error:
                    cause = str(error)
                del running[task]
                losses[number := receiving.number] += 1
                if losses[number] == TRIES:
                    what = f"{TRIES} processes ended while they built shard {number + 1}, which begins with "
                    where = printable(plan.shards[number][0].path)
                    raise ClusterFailed(f"{what}{where}: {printable(cause)}; less `memory` may help")
                where = f" ({receiving.host})" if receiving.host else ""
                again = f"shard {number + 1} of {len(plan.shards)} is built again"
                self.warn(f"a node or a process was lost{where}; {again}")
                receiving.drop()
                start(receiving)
        finally:
            for task, receiving in running.items():
                ray.cancel(task, force=True)
                receiving.drop()


@dataclass
class Receiving:
    """One shard, as the messages of `_shard` arrive. Messages to people name its `host`."""

    plan: ShardPlan
    number: int
    directory: Path
    files: Files
    report: Progress
    host: str = ""
    _segments: list[SegmentEntry] = field(default_factory=list)
    _reported: Counter[str] = field(default_factory=Counter)

    def take(self, messages: Iterator[Message]) -> bool:
        """Take the next message, and all data of a segment. Return True after the last one, when the shard is recorded
        as done. Raises Lost, DatastoreError for data with another checksum and for failures on the node,
        ClusterFailed for a node with another version, and OSError.
        """
        kind, *content = _next(messages)
        if kind == "on":
            self.host, version = content
            if version != __version__:
                text = f"node {self.host}: has rest-local {version} and the driver {__version__}; install the same"
                raise ClusterFailed(text)
        elif kind == "failed":
            raise DatastoreError(f"node {self.host}: {content[0]}")
        elif kind == "progress":
            self._reported.update(content[0])
            for what, amount in content[0].items():
                self.report(what, amount)
        elif kind == "segment":
            entry = parse_segment(content[0], width_of(self.plan.vocabulary.size))
            self._segments.append(entry)  # `drop` deletes its files even if only some arrive
            for part, wanted in entry.files.items():
                path = self.directory / file_name(entry.name, part)
                if write_parts(self.files, path, _data(messages, wanted.size)) != wanted:
                    raise DatastoreError(f"{path}: damaged on its way from the node that built it; build again")
            self.files.sync_directory(self.directory)
        else:
            shard = Shard(tuple(self._segments), Skipped.from_dict(content[0]))
            record(self.plan, self.number, self.directory, shard, self.files)
            return True
        return False

    def drop(self) -> None:
        """Delete what has arrived, because the task is lost."""
        for name in (name for entry in self._segments for name in entry.named_files):
            with suppress(OSError):
                self.files.unlink(self.directory / name)
        for what, amount in self._reported.items():
            self.report(what, -amount)
        self.host = ""
        self._segments.clear()
        self._reported.clear()


def _next(messages: Iterator[Message]) -> Message:
    message = next(messages, None)
    if message is None:
        raise Lost("its messages ended early")
    return message


def _data(messages: Iterator[Message], left: int) -> Iterator[memoryview]:
    while left > 0:
        _, data = _next(messages)
        left -= len(data)
        yield memoryview(data)


def _shard(part: ShardPlan, vocabulary: Shipped, ship: bool, driver: str) -> Iterator[Message]:
    """Yield the messages about the only shard of a plan, until ("end", skipped) or ("failed", cause). This is the task.
    They are ("on", host, version); ("progress", {what: amount}); ("segment", entry), and then the content of its files
    in order, each as one or more ("data", uint8 [n]).
    """
    yield "on", socket.gethostname(), __version__
    messages: Queue[Message] = Queue(1)
    threading.Thread(target=_build, args=(part, vocabulary, ship, driver, messages), daemon=True).start()
    while True:
        message = messages.get()
        yield message
        if message[0] in ("end", "failed"):
            return


def _build(part: ShardPlan, vocabulary: Shipped, ship: bool, driver: str, messages: Queue[Message]) -> None:
    """Build the shard, in a thread of the task."""
    amounts, sent, skipped = Counter[str](), time.monotonic(), Skipped()

    def report(what: str, amount: int) -> None:
        nonlocal sent
        amounts[what] += amount
        if what == "written" or time.monotonic() - sent >= REPORT_S:
            messages.put(("progress", dict(amounts)))
            amounts.clear()
            sent = time.monotonic()

    try:
        tokenizer = _tokenizer(part.vocabulary.hash, *vocabulary)
        texts = shipped_texts(part, driver, skipped, report) if ship or not _is_here(part) else None
        documents = shard_documents(part, 0, tokenizer, skipped, report, texts, workers=1)
        for growing in grown(documents, part.vocabulary.size, part.tokens):
            content = {kind: memoryview(data).cast("B") for kind, data in growing.content().items()}
            report("sorted", growing.tokens)
            entries = {kind: FileEntry(len(data), hashlib.sha256(data).hexdigest()) for kind, data in content.items()}
            messages.put(("segment", growing.entry(secrets.token_hex(8), entries).to_dict()))
            for data in content.values():
                for start in range(0, len(data), PART):
                    messages.put(("data", np.array(data[start : start + PART])))
            report("written", growing.tokens)
            del content, growing
        report("written", 0)
        messages.put(("end", skipped.to_dict()))
    except BaseException as error:
        messages.put(("failed", str(error) if isinstance(error, RestLocalError) else printable(repr(error))))


def _is_here(part: ShardPlan) -> bool:
    """Return True if this node has the files of the shard as the driver saw them."""
    for file in part.shards[0]:
        try:
            status = os.lstat(file.path)
        except OSError:
            return False
        if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns) or not os.access(file.path, os.R_OK):
            return False
    return True


# Ray uses a process for several tasks. So vocabularies stay open, by hash, until the process ends.
_opened: dict[str, DocumentTokenizer] = {}
_open = ExitStack()


def _tokenizer(wanted: str, opener: Opener, sample: Int32Array) -> DocumentTokenizer:
    """Open the vocabulary. Raises ClusterFailed if this machine tokenizes in another way."""
    if wanted not in _opened:
        tokenizer = _open.enter_context(opener())
        if not np.array_equal(tokenizer.tokenize(SAMPLE), sample):
            raise ClusterFailed("tokenizes in another way than the driver; install the same llama-cpp-python")
        _opened[wanted] = tokenizer
    return _opened[wanted]


def shipped_texts(part: ShardPlan, node: str, skipped: Skipped, report: Progress) -> Iterator[Text]:
    """Yield the texts of a plan's only shard in order, read by a task on the node with this id."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    read: Any = ray.remote(_read).options(
        num_cpus=0,
        num_returns="streaming",
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        _generator_backpressure_num_objects=WAITING,
    )
    groups = [[file.path for file in group] for group in grouped(part.shards[0], lambda file: file.size, GROUP)]
    for answer in read.remote(groups, part.walk):
        texts, counted, size = ray.get(answer)
        skipped.include(counted)
        report("read", size)
        yield from texts


def _read(groups: Sequence[Sequence[str]], filters: Filters) -> Iterator[tuple[list[Text], Skipped, int]]:
    """Yield (texts, skipped files, bytes) of each group of files, in a task."""
    for paths in groups:
        skipped, sizes = Skipped(), list[int]()
        texts = list(read_files(paths, filters, Reading(skipped, looked_at=sizes.append)))
        yield texts, skipped, sum(sizes)
