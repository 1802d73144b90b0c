"""Tokenize the text of a build on a Ray cluster.

    build_datastore("mycode", ["~/src"], vocabulary=vocabulary, cluster=Cluster("auto"))

The driver reads the text, sorts and writes, as in a build without a cluster, so the index has the same bytes. Tasks on
all nodes tokenize, which takes most of the time. Nodes need neither the files nor the model: texts and vocabulary are
sent to them. Ray repeats the tasks of a node or a process that is lost.

Ray is imported inside the functions. It is an extra: `pip install rest-local[ray]`.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from rest_local import __version__
from rest_local.cluster import check_address, first_line, nodes
from rest_local.errors import ClusterFailed, OptionError, RestLocalError, printable
from rest_local.retrieval.documents import (
    Document,
    DocumentTokenizer,
    Opener,
    Text,
    Texts,
    document_of,
    grouped,
    read_texts,
    tokens_of,
)
from rest_local.retrieval.rows import Int32Array

GROUP = 1 << 20  # characters of text in a task: tokenizing them takes about a second
WAITING = 3  # tasks for each CPU of the cluster that run or wait, so that no CPU waits for the driver
TRIES = 3
# This text shows whether a node tokenizes as the driver does, because its library may have another version.
SAMPLE = "def f(x, y=12345):\n\t# it's \u00e9\u4f60\U0001f600  \r\n    return x['a'] != 0.5e-7 and not (y)\n" * 3


class Shipped(NamedTuple):
    """The vocabulary of a build, as tasks get it."""

    hash: str
    opener: Opener
    sample: Int32Array  # the tokens of SAMPLE
    version: str


@dataclass(frozen=True)
class Cluster:
    """The cluster that a build runs on. Raises OptionError for an address outside the cluster. `address` is `auto` for
    the cluster that this machine is a node of, host:port for the same if there are several, or `local` for processes of
    this machine alone, which end with the build.
    """

    address: str

    def __post_init__(self) -> None:
        check_address(self.address)

    def documents(self, texts: Texts, vocabulary: DocumentTokenizer) -> Iterator[Document]:
        """Yield what `tokenize_documents` yields, from the cluster that this process is connected to.

        Raises OptionError for a vocabulary that other machines cannot open, and ClusterFailed for a node of another
        version, for an error there, and if processes die again and again.
        """
        import ray

        ship: Callable[[], Opener | None] | None = getattr(vocabulary, "ship", None)
        opener = ship() if ship else None
        if opener is None:
            raise OptionError(f"vocabulary {vocabulary.name}: other machines cannot open it")
        room = WAITING * int(sum(node.get("CPU", 0) for node in nodes()))
        if not room:
            raise ClusterFailed("no node of the cluster has a CPU for a build")
        shipped = ray.put(Shipped(vocabulary.hash, opener, vocabulary.tokenize(SAMPLE), __version__))
        remote: Any = ray.remote(_tokenized).options(num_cpus=1, max_retries=TRIES - 1, scheduling_strategy="SPREAD")
        running: deque[tuple[list[Text], Any]] = deque()
        try:
            for group in grouped(read_texts(texts), lambda text: len(text.text or ""), GROUP):
                running.append((group, remote.remote(group, shipped)))
                if len(running) > room:
                    yield from _received(*running.popleft())
            while running:
                yield from _received(*running.popleft())
        finally:
            for _, task in running:
                ray.cancel(task, force=True)


def _received(texts: Sequence[Text], task: Any) -> Iterable[Document]:
    """Wait for a task, and return the documents of its texts."""
    import ray
    from ray.exceptions import RayError

    try:
        answer: list[Int32Array] | str = ray.get(task)
    except RayError as error:
        what = f"{TRIES} processes ended while they tokenized the text after {printable(texts[0].name)}"
        raise ClusterFailed(f"{what}: {printable(first_line(error))}") from error
    if isinstance(answer, str):
        raise ClusterFailed(answer)
    return map(document_of, texts, answer)


def _tokenized(texts: Sequence[Text], vocabulary: Shipped) -> list[Int32Array] | str:
    """Return the tokens of each text, or what went wrong. This is the task."""
    try:
        tokenizer = _opened_tokenizer(vocabulary)
        return [tokens_of(text, tokenizer.tokenize) for text in texts]
    except Exception as error:
        return f"node {socket.gethostname()}: {error if isinstance(error, RestLocalError) else printable(repr(error))}"


# Ray uses a process for several tasks. So vocabularies stay open, by hash, until the process ends.
_opened: dict[str, DocumentTokenizer] = {}
_open = ExitStack()


def _opened_tokenizer(vocabulary: Shipped) -> DocumentTokenizer:
    """Open the vocabulary. Raises ClusterFailed if this machine would tokenize in another way."""
    if vocabulary.version != __version__:
        raise ClusterFailed(f"has rest-local {__version__} and the driver {vocabulary.version}; install the same")
    if vocabulary.hash not in _opened:
        tokenizer = _open.enter_context(vocabulary.opener())
        if not np.array_equal(tokenizer.tokenize(SAMPLE), vocabulary.sample):
            raise ClusterFailed("tokenizes in another way than the driver; install the same llama-cpp-python")
        _opened[vocabulary.hash] = tokenizer
    return _opened[vocabulary.hash]
