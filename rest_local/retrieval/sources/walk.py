"""Walk files that are worth indexing, and yield their text. Other files are skipped, counted and reported.

Only regular files are opened; symbolic links are never followed and archives never unpacked. Skipped by default are
hidden and git-ignored files, names and content that look like secrets, and binary, oversized and minified files. A file
that the caller names explicitly is taken with any extension, even if it is hidden or ignored.

Secrets are names of files with keys or passwords, and strings in the form of access tokens. A datastore returns its
text, so no secret may enter it. To skip a harmless file is better than to index a key.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from pathspec import GitIgnoreSpec

from rest_local.errors import InputInvalid, OptionError, printable
from rest_local.retrieval.documents import FileState, Text
from rest_local.retrieval.sources.listing import candidates, read_regular
from rest_local.retrieval.sources.source import (
    UNWANTED,
    Reading,
    Skipped,
    Source,
    Unchanged,
    secret_content,
    secret_name,
)

MAX_FILE_SIZE = 1 << 20
# Longer lines are minified text or data. The 1 790 modules of Python 3.11's standard library, including tests, stay
# below 1 200 bytes in a line and 52 in the mean.
MAX_LINE = 20_000
MAX_MEAN_LINE = 300

# Files with these extensions are taken without `include`.
EXTENSIONS = frozenset(
    """
    .adb .ads .asm .astro .awk .bas .bash .bzl .c .cc .cfg .cl .clj .cljs .cmake .coffee .cpp .cr .cs .css .cu .cuh
    .cxx .d .dart .el .elm .erl .ex .exs .f .f90 .f95 .fish .fs .fsx .gd .glsl .go .gradle .graphql .groovy .h .hcl
    .hh .hlsl .hpp .hrl .hs .html .hxx .ini .ipp .ipynb .java .jl .js .jsx .kt .kts .less .lisp .lua .m .md .mjs .mk .ml
    .mli .mm .nim .nix .odin .org .pas .php .pl .pm .proto .ps1 .pxd .py .pyi .pyx .r .rb .rkt .rs .rst .s .sass
    .sbt .scala .scm .scss .sh .sol .sql .svelte .swift .sv .tcl .tex .tf .toml .ts .tsx .txt .typ .v .vala .vb .vhd
    .vhdl .vim .vue .xml .yaml .yml .zig .zsh
    """.split()  # noqa: SIM905  a list literal would be one extension a line
)

NAMES = frozenset({"Makefile", "Dockerfile", "CMakeLists.txt", "Rakefile", "Gemfile", "Justfile", "BUILD", "WORKSPACE"})
NOTEBOOK = ".ipynb"

# Byte order marks and their encodings.
_WIDE = {b"\xff\xfe\0\0": "utf-32", b"\0\0\xfe\xff": "utf-32", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """The choice of files. Globs are as in .gitignore, matched against the path below the root; `include` replaces the
    list of extensions; `max_file_size` is in bytes. Raises OptionError for a bad glob or size.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    allow_secrets: bool = False
    max_file_size: int = MAX_FILE_SIZE

    def __post_init__(self) -> None:
        if self.max_file_size < 1:
            raise OptionError(f"max file size {self.max_file_size}: must be at least 1 byte")
        for glob in (*self.include, *self.exclude):
            _spec([glob])


def _roots(paths: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """Resolve the paths. Raises InputInvalid for one that does not exist."""
    roots = [Path(path) for path in paths]
    for root in roots:
        if not root.exists():
            raise InputInvalid("path", printable(str(root)), "no such file or directory")
    return [root.resolve() for root in roots]


def resolved(only: Collection[str], paths: Iterable[str | os.PathLike[str]]) -> set[str]:
    """Return the paths in `only`; those below a linked path get the names that a walk gives them."""
    pairs = [(os.path.join(os.path.abspath(path), ""), os.path.join(os.path.realpath(path), "")) for path in paths]
    linked = [(named, real) for named, real in pairs if named != real]
    return {*only} | {
        (real + name[len(named) :]).rstrip("/")
        for named, real in linked
        for name in only
        if f"{name}/".startswith(named)
    }


def _wanted(roots: Sequence[Path], filters: Filters, skipped: Skipped, only: Collection[str] | None) -> Iterator[str]:
    """Yield the paths of files whose names are wanted and do not look like secrets."""
    wanted = wanted_name(filters)
    for root in roots:
        single, below = not root.is_dir(), os.path.join(root, "")
        if single and only is not None and str(root) not in only:
            continue
        for path in [str(root)] if single else candidates(root, skipped, only):
            relative = os.path.basename(path) if single else path[len(below) :]
            reason = wanted(relative)
            if reason and not (reason == UNWANTED and single and not filters.include):
                skipped.add(reason, path)
            elif reason and not filters.allow_secrets and secret_name(relative):
                skipped.add("secret", path)
            else:
                yield path


def wanted_name(filters: Filters) -> Callable[[str], str]:
    """Return a function that gives the reason to skip a file for its path below the root, or an empty string."""
    include, exclude = _spec(filters.include), _spec(filters.exclude)

    def reason(relative: str) -> str:
        base = os.path.basename(relative)
        if filters.exclude and exclude.match_file(relative):
            return "excluded"
        if not (include.match_file(relative) if filters.include else by_extension(base)):
            return UNWANTED
        return "secret" if not filters.allow_secrets and secret_name(base) else ""

    return reason


class _Seen:
    """The files that were taken, so that each is taken once. It remembers only files that can occur again: those with
    several hard links, and all files if one root is inside another. So a million files usually take no memory.
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        inside = (a == b or a in b.parents for i, a in enumerate(roots) for j, b in enumerate(roots) if i != j)
        self._overlap = any(inside)
        self._identities: set[tuple[int, int]] = set()

    def has(self, status: os.stat_result) -> bool:
        return (status.st_dev, status.st_ino) in self._identities

    def add(self, status: os.stat_result) -> None:
        if self._overlap or status.st_nlink > 1:
            self._identities.add((status.st_dev, status.st_ino))


def _spec(globs: Sequence[str]) -> GitIgnoreSpec:
    try:
        return GitIgnoreSpec.from_lines(globs)
    except ValueError as error:
        raise OptionError(f"glob {' '.join(globs)!r}: {error}") from error


def by_extension(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in EXTENSIONS or name in NAMES


def _texts(paths: Iterable[str], filters: Filters, reading: Reading, seen: _Seen) -> Iterator[Text]:
    for path in paths:
        if reading.unchanged and (state := _known(path, filters, reading.unchanged, seen)):
            reading.looked_at(state.size)
            yield Text(path, None, state)
            continue
        size, text, reason = 0, "", ""
        try:
            status, data, mtime_ns = read_regular(path, filters.max_file_size + 1)
        except FileNotFoundError:
            reason = "vanished"
        except OSError:
            reason = "link" if os.path.islink(path) else "unreadable"
        else:
            if data is None:
                reason = "not a regular file"
            else:
                size = len(data) if len(data) <= filters.max_file_size else 0
                text, reason = ("", "duplicate") if seen.has(status) else read_text(path, data, filters)
        reading.looked_at(size)
        if reason or data is None:
            reading.skipped.add(reason, path)
            continue
        seen.add(status)
        yield Text(path, text, FileState(path, size, mtime_ns, hashlib.sha256(data).digest()))


def _known(path: str, filters: Filters, unchanged: Unchanged, seen: _Seen) -> FileState | None:
    """Return the state of a file that need not be read."""
    try:
        status = os.lstat(path)
    except OSError:
        return None  # reading it counts the reason
    size, mtime_ns = status.st_size, status.st_mtime_ns
    comparable = stat.S_ISREG(status.st_mode) and mtime_ns > 0 and size <= filters.max_file_size
    if not comparable or seen.has(status) or not unchanged(path, size, mtime_ns):
        return None
    seen.add(status)
    return FileState(path, size, mtime_ns, b"")


def read_text(name: str, data: bytes, filters: Filters) -> tuple[str, str]:
    """Return the text of a file with this content, and the reason to skip it, or ""."""
    if len(data) > filters.max_file_size:
        return "", "too large"
    if b"\0" in data and not data.startswith(tuple(_WIDE)):
        return "", "binary"
    text = decoded(data)
    if name.lower().endswith(NOTEBOOK):
        text = _cells(text)
    if not text:
        return "", "empty"
    if "\0" in text:
        return "", "binary"
    encoded = text.encode()
    lines = encoded.split(b"\n")
    if max(map(len, lines)) > MAX_LINE or len(encoded) > MAX_MEAN_LINE * (len(lines) + 10):
        return "", "minified"
    return ("", "secret") if not filters.allow_secrets and secret_content(encoded) else (text, "")


def decoded(data: bytes) -> str:
    """Return the content of a file as text, without a byte order mark. It is read as the mark says, else as UTF-8. If
    it has other bytes than ASCII and no character of UTF-8 among them, it is taken for Latin-1 in the form of Windows.
    Unreadable bytes become U+FFFD.
    """
    codec = next((codec for mark, codec in _WIDE.items() if data.startswith(mark)), "utf-8")
    text = data.decode(codec, "replace")
    if codec == "utf-8" and "\ufffd" in text and text.replace("\ufffd", "").isascii():
        return data.decode("cp1252", "replace")
    return text.removeprefix("\ufeff")


def _cells(text: str) -> str:
    """Return the source of each cell of a Jupyter notebook, without its output, or the text itself if it is none."""
    try:
        cells = [cell["source"] for cell in json.loads(text)["cells"]]
        return "\n\n".join("".join(source) for source in cells).encode("utf-8", "replace").decode()
    except (ValueError, KeyError, TypeError, RecursionError):
        return text


@dataclass(frozen=True, slots=True)
class Walk(Filters, Source):
    """The files below `paths` that are worth indexing."""

    kind: ClassVar[str] = "walk"
    paths: tuple[str, ...]

    def texts(self, reading: Reading) -> Iterator[Text]:
        """Yield the text of each file, with its state, sorted within a directory, each file once.

        The name is the absolute path; bytes that are not UTF-8 become lone surrogates, as in `os.fsdecode`. The text
        can always be encoded (`decoded`). An unchanged file is not read, and has no text. With `reading.only` no other
        files are taken and nothing is walked, which costs a few milliseconds in a work tree of any size. A problem with
        a single file raises nothing.
        """
        roots = _roots(self.paths)
        only = None if reading.only is None else resolved(reading.only, self.paths)
        return _texts(_wanted(roots, self, reading.skipped, only), self, reading, _Seen(roots))

    def about(self) -> str:
        return ", ".join(self.paths)

    def prepared(self) -> Walk:
        return replace(self, paths=tuple(absolute(path) for path in self.paths))


def absolute(path: str | os.PathLike[str]) -> str:
    """Return the path for a recipe: `~` stands for the home directory, and links are kept."""
    return str(Path(path).expanduser().absolute())
