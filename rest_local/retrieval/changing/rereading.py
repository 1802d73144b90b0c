"""Reads the sources of a datastore again, and compares them with the states of its files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from rest_local.errors import InputInvalid, printable
from rest_local.retrieval.building.build import Progress
from rest_local.retrieval.documents import FileState, Text
from rest_local.retrieval.sources.python import Python
from rest_local.retrieval.sources.skipped import Skipped
from rest_local.retrieval.sources.source import Reading, Render, Source
from rest_local.retrieval.sources.walk import Walk

WALKED = ("paths", "include", "exclude", "allow_secrets", "max_file_size")
"""The fields of a recipe of format 1, instead of `sources`."""

RESTATED_BYTES = 1 << 20
"""Bytes of files whose time of change alone is new that one update stores again with it, so that the next ones need not
read them. Beyond that the others follow at the next updates."""


@dataclass
class Rereading:
    """Reads sources, compares the files with their states in the datastore, and counts.

    known: the states that may be compared, by name; unstated: the names of documents without a state, which were
    stored by an earlier version or come from no file. read: names of all new content; gone: names to delete.
    """

    known: Mapping[str, FileState]
    unstated: Collection[str] = ()
    skipped: Skipped = field(default_factory=Skipped)
    read: set[str] = field(default_factory=set)
    seen: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    added: int = 0
    changed: int = 0
    unchanged: int = 0
    tokens: int = 0
    _restated: int = 0

    def is_unchanged(self, name: str, size: int, mtime_ns: int) -> bool:
        state = self.known.get(name)
        return state is not None and state.mtime_ns != 0 and (state.size, state.mtime_ns) == (size, mtime_ns)

    def texts(
        self,
        sources: Sequence[Source],
        progress: Progress,
        render: Render | None = None,
        only: Collection[str] | None = None,
    ) -> Iterator[Text]:
        """The texts of sources. Raises as `Source.texts`."""

        def looked_at(size: int) -> None:
            progress("read", size)

        reading = Reading(self.skipped, self.is_unchanged, only, looked_at, render)
        return chain.from_iterable([source.texts(reading) for source in sources])

    def new_texts(self, texts: Iterator[Text]) -> Iterator[Text]:
        """The texts to tokenize."""
        for text in texts:
            self.seen.add(text.name)
            known = self.known.get(text.name)
            if text.text is None or (known and text.state and self._is_same(known, text.state)):
                self.unchanged += 1
                continue
            self.read.add(text.name)
            if known is None and text.name not in self.unstated:
                self.added += 1
            elif known and text.state and known.sha256 == text.state.sha256:
                self.unchanged += 1
            else:
                self.changed += 1
            yield text

    def _is_same(self, known: FileState, found: FileState) -> bool:
        """Whether the content is the same, and nothing is to be stored."""
        if known.sha256 != found.sha256:
            return False
        if found.mtime_ns in (0, known.mtime_ns) or self._restated + found.size > RESTATED_BYTES:
            return True
        self._restated += found.size
        return False

    def note_gone(self, names: Collection[str]) -> None:
        """Of files that the walk should have found."""
        self.gone = {name for name in names if name not in self.seen and _is_gone(name)}


def _is_gone(name: str) -> bool:
    """Whether a file that no walk finds is deleted or left out by now, not only out of reach."""
    try:
        os.lstat(name)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return True
    except OSError:
        return False
    return True


def is_walk(source: Source) -> bool:
    """Whether a source consists of files of the disk, so that some of them can be looked at alone."""
    return isinstance(source, (Walk, Python))


def roots_of(sources: Sequence[Source]) -> list[str]:
    """The paths below which sources walk."""
    return [path for source in sources if isinstance(source, Walk) for path in source.paths]


def united(held: Sequence[Source], more: Sequence[Source]) -> list[Source]:
    """Recorded sources and more of them, each once. Walks with the same filters become one."""
    found = list(held)
    for source in more:
        same = next((i for i, one in enumerate(found) if _filters_alike(one, source)), None)
        if same is None:
            found += [source] if source not in found else []
        else:
            paths = dict.fromkeys(roots_of([found[same], source]))
            found[same] = replace(found[same], paths=tuple(paths))  # type: ignore[call-arg]
    return found


def _filters_alike(one: Source, other: Source) -> bool:
    return isinstance(one, Walk) and isinstance(other, Walk) and replace(one, paths=()) == replace(other, paths=())


def resolved(only: Collection[str], paths: Sequence[str]) -> set[str]:
    """The paths in `only` as a walk names them, where they are below a recorded path that is a link."""
    pairs = [(os.path.join(path, ""), os.path.join(os.path.realpath(path), "")) for path in paths]
    linked = [(given, real) for given, real in pairs if given != real]
    return {
        (real + name[len(given) :]).rstrip("/")
        for given, real in linked
        for name in only
        if f"{name}/".startswith(given)
    }


def present(sources: Sequence[Source], known: Mapping[str, FileState], missing: bool) -> list[Source]:
    """The sources, of a walk only the paths that are there. Raises InputInvalid for one that is gone, or is empty while
    files of it are known, unless that may be.
    """
    found: list[Source] = []
    for source in sources:
        if not isinstance(source, Walk):
            found.append(source)
        elif paths := tuple(path for path in source.paths if _is_present(path, known, missing)):
            found.append(replace(source, paths=paths))
    return found


def _is_present(path: str, known: Mapping[str, FileState], missing: bool) -> bool:
    what = ""
    if not os.path.exists(path):
        what = "no such file or directory"
    elif os.path.isdir(path):
        with contextlib.suppress(OSError), os.scandir(path) as entries:  # the walk counts what cannot be read
            inside = os.path.join(os.path.realpath(path), "")
            if not any(True for _ in entries) and any(name.startswith(inside) for name in known):
                what = "is empty now, while the datastore holds files of it"
    if what and not missing:
        raise InputInvalid(
            "path", printable(path), f"{what}; mount it, or update with `missing=True` to delete its files"
        )
    return os.path.exists(path)
