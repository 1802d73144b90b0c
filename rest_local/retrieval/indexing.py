"""A datastore in one call: walk, tokenize in parallel, sort, commit, and note how it was made.

    with Model.open("model.gguf", vocab_only=True) as model:
        built = build_datastore("mycode", ["~/src/mycode"], vocabulary=model.vocabulary)
    print(built.tokens, "tokens,", built.skipped.summary())

Knows no model: any tokenizer with a name, a size and a hash will do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rest_local.errors import CorpusEmpty
from rest_local.retrieval.build import build
from rest_local.retrieval.corpus import MAX_FILE_SIZE, Skipped, walk
from rest_local.retrieval.format import Manifest, VocabularyId
from rest_local.retrieval.home import datastore_path
from rest_local.retrieval.rows import Int32Array
from rest_local.retrieval.tokenizing import tokenize_documents

Progress = Callable[[str, int], None]
"""Called with ("tokenized" | "sorted" | "written", tokens since the last call)."""


class Tokenizer(Protocol):
    """A vocabulary. `tokenize` is called from several threads at once."""

    @property
    def hash(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def name(self) -> str: ...
    def tokenize(self, text: str) -> Int32Array: ...


@dataclass(frozen=True)
class Built:
    """What became of a build: where it lies, the commit, and what the walk left out."""

    path: Path
    manifest: Manifest
    skipped: Skipped

    @property
    def tokens(self) -> int:
        """A separator for each document included."""
        return sum(segment.tokens for segment in self.manifest.segments)

    @property
    def documents(self) -> int:
        return sum(segment.documents for segment in self.manifest.segments)

    @property
    def bytes(self) -> int:
        """On disk, without the manifest."""
        return sum(file.size for segment in self.manifest.segments for file in segment.files.values())

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "path": str(self.path),
            "tokens": self.tokens,
            "documents": self.documents,
            "segments": len(self.manifest.segments),
            "bytes": self.bytes,
            "skipped": dict(self.skipped.counts),
            "secrets": self.skipped.secrets,
        }


def build_datastore(
    name: str | os.PathLike[str],
    paths: Sequence[str | os.PathLike[str]],
    *,
    vocabulary: Tokenizer,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    allow_secrets: bool = False,
    max_file_size: int = MAX_FILE_SIZE,
    recipe: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Built:
    """Build the datastore `name` (or a path) of the text files below `paths`, in place of what was there.

    What is taken and what is skipped: `rest_local.retrieval.corpus.walk`. `recipe`: what to note beside paths and
    filters. Memory does not depend on the corpus, time is mostly the tokenizer's.

    Raises InputInvalid (no such path), OptionError (bad glob or name), CorpusEmpty, CorpusTooLarge, DatastoreLocked,
    DatastoreUnwritable; in each case what was there before is intact.
    """
    skipped, given = Skipped(), [str(Path(path).expanduser().absolute()) for path in paths]
    files = walk(given, include, exclude, allow_secrets=allow_secrets, max_file_size=max_file_size, skipped=skipped)
    noted = recipe_of(given, include, exclude, allow_secrets=allow_secrets, max_file_size=max_file_size)
    try:
        return build_from_texts(
            name, files, vocabulary=vocabulary, recipe={**noted, **(recipe or {})}, progress=progress, skipped=skipped
        )
    except CorpusEmpty as error:
        raise CorpusEmpty(", ".join(str(path) for path in paths), skipped.summary()) from error


def build_from_texts(
    name: str | os.PathLike[str],
    texts: Iterable[tuple[str, str]],
    *,
    vocabulary: Tokenizer,
    recipe: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    skipped: Skipped | None = None,
) -> Built:
    """As `build_datastore`, of (document name, text) that come from anywhere."""
    path, told = datastore_path(name), progress or (lambda what, tokens: None)
    documents = _counted(tokenize_documents(texts, vocabulary.tokenize), told)
    identity = VocabularyId(vocabulary.hash, vocabulary.size, vocabulary.name)
    manifest = build(path, documents, vocabulary=identity, recipe=recipe, progress=told)
    return Built(path, manifest, skipped or Skipped())


def recipe_of(
    paths: Sequence[str],
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    *,
    allow_secrets: bool = False,
    max_file_size: int = MAX_FILE_SIZE,
) -> dict[str, Any]:
    """What the manifest notes of a walk."""
    return {
        "paths": list(paths),
        "include": list(include),
        "exclude": list(exclude),
        "allow_secrets": allow_secrets,
        "max_file_size": max_file_size,
    }


def _counted(documents: Iterator[tuple[str, Int32Array]], progress: Progress) -> Iterator[tuple[str, Int32Array]]:
    for name, tokens in documents:
        progress("tokenized", len(tokens))
        yield name, tokens
