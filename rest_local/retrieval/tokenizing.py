"""Documents to token ids, in parallel, in order, in bounded pieces. Knows no tokenizer: the caller brings one."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from rest_local.retrieval.rows import Int32Array

CHUNK = 1 << 17
"""Characters that a tokenizer is given at once. A tokenizer's cost and memory on hostile text need a bound."""

Tokenize = Callable[[str], Int32Array]


def chunks(text: str, size: int = CHUNK) -> Iterator[str]:
    """`text` in parts of at most `size` characters, cut after a line break where there is one."""
    start = 0
    while len(text) - start > size:
        end = text.rfind("\n", start, start + size) + 1
        end = end if end > start else start + size
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def tokenize_documents(
    documents: Iterable[tuple[str, str]], tokenize: Tokenize, workers: int | None = None
) -> Iterator[tuple[str, Int32Array]]:
    """(name, token ids) of each (name, text), in order.

    Threads: a tokenizer called through ctypes runs without the interpreter's lock. workers: default one a core. At
    most four documents a worker are under way, so memory does not depend on the corpus.
    """
    workers = workers or os.cpu_count() or 1
    waiting: deque[tuple[str, Future[Int32Array]]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="tokenize")
    try:
        for name, text in documents:
            waiting.append((name, pool.submit(_tokens, tokenize, text)))
            if len(waiting) >= 4 * workers:
                done, future = waiting.popleft()
                yield done, future.result()
        while waiting:
            done, future = waiting.popleft()
            yield done, future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _tokens(tokenize: Tokenize, text: str) -> Int32Array:
    parts = [tokenize(part) for part in chunks(text)]
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, np.int32)
