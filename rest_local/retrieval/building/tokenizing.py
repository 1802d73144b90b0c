"""Texts to documents: the token ids of many texts, in order.

Knows no model. A tokenizer may offer `bulk`, which is several times as fast and holds the GIL: then texts are tokenized
here, about a megabyte at a time, and a build uses a process for each core (`retrieval.building.shards`). Without it
each text is tokenized in a thread.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import numpy as np

from rest_local.retrieval.documents import Document, Text
from rest_local.retrieval.rows import Int32Array

BATCH_CHARACTERS = 1 << 20

Bulk = Callable[[Sequence[str]], list[Int32Array]]


@runtime_checkable
class DocumentTokenizer(Protocol):
    """A vocabulary. `tokenize` is called from several threads at once.

    It may have two more methods. `bulk() -> Bulk | None`: a tokenizer for many texts, for one thread, with the ids of
    `tokenize`. `reopen() -> Opener | None`: how another process opens the same vocabulary.
    """

    @property
    def hash(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def name(self) -> str: ...
    def tokenize(self, text: str, /, *, special: bool = ...) -> Int32Array: ...


Opener = Callable[[], AbstractContextManager[DocumentTokenizer]]
"""Opens a vocabulary. It can be pickled."""

Texts = Iterable[Text | tuple[str, str]]


def bulk_of(tokenizer: DocumentTokenizer) -> Bulk | None:
    """The tokenizer's own way for many texts, if it has one."""
    make: Callable[[], Bulk | None] | None = getattr(tokenizer, "bulk", None)
    return make() if make else None


def opener_of(tokenizer: DocumentTokenizer) -> Opener | None:
    """How another process opens this tokenizer, if it can."""
    reopen: Callable[[], Opener | None] | None = getattr(tokenizer, "reopen", None)
    return reopen() if reopen else None


def tokenize_documents(
    texts: Texts, tokenizer: DocumentTokenizer | TokenizeParts, workers: int | None = None
) -> Iterator[Document]:
    """The document of each text that was read, in order.

    tokenizer: a vocabulary, or its `tokenize`, which has no `bulk`; workers: threads without `bulk`, by default one for
    each core. Some megabytes of text or four documents for each thread are in memory, whatever the size of the corpus.
    """
    given = (text if isinstance(text, Text) else Text(*text) for text in texts)
    read = (text for text in given if text.text is not None)
    workers = workers or os.cpu_count() or 1
    if not isinstance(tokenizer, DocumentTokenizer):
        return _in_threads(read, tokenizer, workers)
    bulk = bulk_of(tokenizer)
    return _in_batches(read, tokenizer, bulk) if bulk else _in_threads(read, tokenizer.tokenize, workers)


def counted(documents: Iterable[Document], progress: Callable[[str, int], None]) -> Iterator[Document]:
    """The documents, of which each is reported when it was tokenized."""
    for document in documents:
        progress("tokenized", len(document.tokens))
        yield document


def _in_batches(texts: Iterable[Text], tokenizer: DocumentTokenizer, bulk: Bulk) -> Iterator[Document]:
    for batch in _batches(texts):
        plain = iter(bulk([encodable(text.text or "") for text in batch if not text.parts]))
        for text in batch:
            yield _document(text, tokens_of(text, tokenizer.tokenize) if text.parts else next(plain))


def _batches(texts: Iterable[Text]) -> Iterator[list[Text]]:
    batch: list[Text] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text.text or "")
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _in_threads(texts: Iterable[Text], tokenize: TokenizeParts, workers: int) -> Iterator[Document]:
    """Works in threads, because a tokenizer that is called through ctypes does not hold the GIL."""
    waiting: deque[tuple[Text, Future[Int32Array]]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="tokenize")
    try:
        for text in texts:
            waiting.append((text, pool.submit(tokens_of, text, tokenize)))
            if len(waiting) >= 4 * workers:
                done, future = waiting.popleft()
                yield _document(done, future.result())
        while waiting:
            done, future = waiting.popleft()
            yield _document(done, future.result())
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _document(text: Text, tokens: Int32Array) -> Document:
    return Document(text.name, tokens, (text.state,) if text.state else ())


_SURROGATES = re.compile("[\ud800-\udfff]")


class TokenizeParts(Protocol):
    """A tokenizer. special: spellings of special tokens become special tokens; asked for only for texts with parts."""

    def __call__(self, text: str, /, *, special: bool = ...) -> Int32Array: ...


def tokens_of(text: Text, tokenize: TokenizeParts) -> Int32Array:
    """The token ids of a text that was read: int32 [n]. Lone surrogates, which JSON or file names may contain, become
    U+FFFD, because UTF-8 cannot encode them.
    """
    if not text.parts:
        return tokenize(encodable(text.text or ""))
    parts = [(encodable(part), special) for part, special in text.parts]
    return np.concatenate([tokenize(part, special=True) if special else tokenize(part) for part, special in parts])


def encodable(text: str) -> str:
    """The text with U+FFFD for lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return _SURROGATES.sub("\ufffd", text)
    return text
