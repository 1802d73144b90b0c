"""Documents to token ids, in parallel, in order. Knows no tokenizer: the caller brings one that bears any text."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from rest_local.retrieval.rows import Int32Array

_SURROGATES = re.compile("[\ud800-\udfff]")

Tokenize = Callable[[str], Int32Array]


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
    """Lone surrogates, as a caller's JSON or file names may bring, become U+FFFD: UTF-8 cannot hold them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        text = _SURROGATES.sub("\ufffd", text)
    return tokenize(text)
