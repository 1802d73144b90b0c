"""Walks files that are worth indexing and yields their text. Other files are skipped, counted and reported.

Only regular files are opened; symbolic links are never followed and archives never unpacked. Skipped by default are
hidden and git-ignored files, names and content that look like secrets, and binary, oversized and minified files. A file
that the caller names explicitly is taken with any extension, even if it is hidden or ignored.

Secrets are names of files with keys or passwords, and strings in the form of access tokens. A datastore returns its
text, so no secret may enter it. To skip a harmless file is better than to index a key.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from pathspec import GitIgnoreSpec

from rest_local.errors import InputInvalid, OptionError, printable
from rest_local.retrieval.files import AS_IT_IS
from rest_local.retrieval.git import git_files

SECRET_NAMES = (
    ".env*",
    "*.pem",
    "*.key",
    "*.p12",
    "*.pfx",
    "*.kdbx",
    "*.keystore",
    "id_rsa*",
    "id_dsa*",
    "id_ecdsa*",
    "id_ed25519*",
    ".npmrc",
    ".netrc",
    "_netrc",
    ".pypirc",
    ".git-credentials",
    ".htpasswd",
    "credentials*",
)
"""Names of files that are never read. Upper and lower case do not matter."""

_RUN = rb"[0-9A-Za-z_-]"
_MIXED = rb"(?=%b{0,40}[0-9])" % _RUN  # random, unlike words with dashes in a style sheet or an address
_SHAPES = re.compile(
    rb"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY"
    rb"|\b(?:"
    rb"(?:AKIA|ASIA)[0-9A-Z]{16}\b"
    rb"|AIza%(run)b{35}"
    rb"|GOCSPX-%(run)b{20}"
    rb"|gh[opsur]_[0-9A-Za-z]{36}"
    rb"|github_pat_[0-9A-Za-z_]{40}"
    rb"|glpat-%(run)b{20}"
    rb"|xox[abprs]-[0-9A-Za-z-]{10}"
    rb"|sk-(?:ant-|proj-)?[0-9A-Za-z_]{20}"
    rb"|sk-(?:ant|proj|svcacct|admin|or)-%(mixed)b%(run)b{20}"
    rb"|[rs]k_live_[0-9A-Za-z]{20}"
    rb"|hf_[0-9A-Za-z]{34}"
    rb"|npm_[0-9A-Za-z]{36}"
    rb"|pypi-%(mixed)b%(run)b{40}"
    rb"|eyJ%(run)b{10,300}\.eyJ%(run)b{10,4000}\.%(run)b{20}"  # a JSON web token; bounded, because input is arbitrary
    rb"|Account[Kk]ey=[0-9A-Za-z+/]{40}"
    rb")" % {b"run": _RUN, b"mixed": _MIXED}
)


def secret_name(name: str) -> bool:
    """Whether a file name (without directory) is on the deny-list. `id_*` is denied if it has no extension."""
    name = name.lower()
    return any(fnmatchcase(name, pattern) for pattern in SECRET_NAMES) or (name.startswith("id_") and "." not in name)


def secret_content(data: bytes) -> bool:
    """Whether the bytes of a file contain a string in the form of a key or an access token. O(n)."""
    return _SHAPES.search(data) is not None


MAX_FILE_SIZE = 1 << 20
MAX_LINE = 20_000
MAX_MEAN_LINE = 300
"""Longer lines are minified text or data. The 1 790 modules of Python 3.11's standard library, including tests, stay
below 1 200 bytes in a line and 52 in the mean."""

EXTENSIONS = frozenset(
    """
    .adb .ads .asm .astro .awk .bas .bash .bzl .c .cc .cfg .cl .clj .cljs .cmake .coffee .cpp .cr .cs .css .cu .cuh
    .cxx .d .dart .el .elm .erl .ex .exs .f .f90 .f95 .fish .fs .fsx .gd .glsl .go .gradle .graphql .groovy .h .hcl
    .hh .hlsl .hpp .hrl .hs .html .hxx .ini .ipp .java .jl .js .jsx .kt .kts .less .lisp .lua .m .md .mjs .mk .ml
    .mli .mm .nim .nix .odin .org .pas .php .pl .pm .proto .ps1 .pxd .py .pyi .pyx .r .rb .rkt .rs .rst .s .sass
    .sbt .scala .scm .scss .sh .sol .sql .svelte .swift .sv .tcl .tex .tf .toml .ts .tsx .txt .typ .v .vala .vb .vhd
    .vhdl .vim .vue .xml .yaml .yml .zig .zsh
    """.split()  # noqa: SIM905  a list literal would be one extension a line
)
"""Extensions that are taken without `include`."""

NAMES = frozenset({"Makefile", "Dockerfile", "CMakeLists.txt", "Rakefile", "Gemfile", "Justfile", "BUILD", "WORKSPACE"})
_SKIPPED_DIRECTORIES = frozenset({"__pycache__", "node_modules"})
UNWANTED = "not a wanted kind of file"
_NAMED = 20
_KINDS, _KINDS_SHOWN, _KIND_LENGTH = 100, 8, 20


@dataclass(slots=True)
class Skipped:
    """The files that a walk skipped. Its size does not depend on their number.

    counts: files by reason; kinds: unwanted files by extension, `other` after the first 100 extensions; secrets: the
    first names of files that looked like secrets.
    """

    counts: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    secrets: list[str] = field(default_factory=list)

    def add(self, reason: str, name: str = "") -> None:
        """Count one file."""
        self.counts[reason] += 1
        if reason == UNWANTED:
            kind = printable(os.path.splitext(name)[1].lower()[:_KIND_LENGTH]) or "no extension"
            self.kinds[kind if kind in self.kinds or len(self.kinds) < _KINDS else "other"] += 1
        elif reason == "secret" and len(self.secrets) < _NAMED:
            self.secrets.append(printable(name))

    def summary(self) -> str:
        """One line: "12 binary, 9 not a wanted kind of file (6 .json, 3 .ipynb)", or "nothing skipped"."""
        parts = [f"{count} {reason}" for reason, count in self.counts.most_common()]
        kinds = [f"{count} {kind}" for kind, count in self.kinds.most_common(_KINDS_SHOWN)]
        kinds += ["..."] if len(self.kinds) > _KINDS_SHOWN else []
        parts = [f"{part} ({', '.join(kinds)})" if kinds and part.endswith(UNWANTED) else part for part in parts]
        return ", ".join(parts) or "nothing skipped"


@dataclass(frozen=True, slots=True)
class Filters:
    """Which files are taken. include, exclude: globs as in .gitignore, matched against the path below the root.

    include replaces the list of extensions; max_file_size: bytes. Raises OptionError for a bad glob or size.
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


def walk(
    paths: Iterable[str | os.PathLike[str]],
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    *,
    allow_secrets: bool = False,
    max_file_size: int = MAX_FILE_SIZE,
    skipped: Skipped | None = None,
    looked_at: Callable[[int], None] = lambda size: None,
) -> Iterator[tuple[str, str]]:
    """(name, text) of every file worth indexing under `paths`, sorted within a directory, each file once.

    The name is the absolute path; bytes that are not UTF-8 become lone surrogates, as in `os.fsdecode`. In the text
    they become U+FFFD, so it can always be encoded. skipped: counts the skipped files. looked_at: called with the size
    of each file that `measure` counts, when it was read.

    Raises InputInvalid for a path that does not exist and OptionError for a bad glob, both before the first file. A
    problem with a single file during the walk raises nothing.
    """
    filters = Filters(tuple(include), tuple(exclude), allow_secrets, max_file_size)
    roots = _roots(paths)
    return _walk(roots, filters, skipped if skipped is not None else Skipped(), looked_at)


def measure(
    paths: Iterable[str | os.PathLike[str]],
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    *,
    allow_secrets: bool = False,
    max_file_size: int = MAX_FILE_SIZE,
) -> tuple[int, int]:
    """(files, bytes) that `walk` would read, by their size alone: some that it skips for their content are among them.

    O(files). Raises as `walk`.
    """
    filters = Filters(tuple(include), tuple(exclude), allow_secrets, max_file_size)
    files = total = 0
    for path in _wanted(_roots(paths), filters, Skipped()):
        with contextlib.suppress(OSError):
            status = os.lstat(path)
            if stat.S_ISREG(status.st_mode) and status.st_size <= max_file_size:
                files, total = files + 1, total + status.st_size
    return files, total


def _roots(paths: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """Raises InputInvalid for a path that does not exist."""
    roots = [Path(path) for path in paths]
    for root in roots:
        if not root.exists():
            raise InputInvalid("path", printable(str(root)), "no such file or directory")
    return [root.resolve() for root in roots]


def _walk(
    roots: Sequence[Path], filters: Filters, skipped: Skipped, looked_at: Callable[[int], None]
) -> Iterator[tuple[str, str]]:
    seen = _Seen(roots)
    for path in _wanted(roots, filters, skipped):
        text, size = _text(path, filters, skipped, seen)
        looked_at(size)
        if text:
            yield path, text


def _wanted(roots: Sequence[Path], filters: Filters, skipped: Skipped) -> Iterator[str]:
    """The paths of files whose names are wanted and do not look like secrets."""
    include, exclude = _spec(filters.include), _spec(filters.exclude)
    for root in roots:
        single, below = not root.is_dir(), os.path.join(root, "")
        for path in [str(root)] if single else _candidates(root, skipped):
            base = os.path.basename(path)
            relative = base if single else path[len(below) :]
            wanted = include.match_file(relative) if filters.include else _by_extension(base)
            if filters.exclude and exclude.match_file(relative):
                skipped.add("excluded")
            elif not (wanted or (single and not filters.include)):
                skipped.add(UNWANTED, base)
            elif not filters.allow_secrets and secret_name(base):
                skipped.add("secret", path)
            else:
                yield path


class _Seen:
    """The files that were taken, so that each is taken once. Remembers only files that can occur again: those with
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


def _by_extension(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in EXTENSIONS or name in NAMES


def _candidates(root: Path, skipped: Skipped) -> Iterator[str]:
    """Paths of files below a directory that are neither hidden nor ignored."""
    listed = git_files(root)
    if listed is None:
        yield from _scan(str(root), skipped)
        return
    # The index may list files below a directory that was replaced by a link, and links must not be followed.
    chain: list[tuple[str, bool]] = []  # the folders of the last file: name, and whether no link is above or there
    for relative in listed:
        *folders, _ = relative.split("/")
        same = next((i for i, (name, _) in enumerate(chain) if i >= len(folders) or name != folders[i]), len(chain))
        del chain[same:]
        for depth in range(same, len(folders)):
            real = (not chain or chain[-1][1]) and not os.path.islink(os.path.join(root, *folders[: depth + 1]))
            chain.append((folders[depth], real))
        if any(part.startswith(".") for part in relative.split("/")):
            skipped.add("hidden")
        elif chain and not chain[-1][1]:
            skipped.add("link")
        else:
            yield os.path.join(root, relative)


_Ignores = tuple["_Ignores", str, GitIgnoreSpec] | None
"""The .gitignore files that apply to a directory: those of the directories above it, its path, its own rules."""


def _scan(root: str, skipped: Skipped) -> Iterator[str]:
    """A walk without git that respects .gitignore files. It keeps the names in the directories from the root down to
    the current one in memory. It is not recursive, because directories may be nested deeper than Python's call stack.
    """
    ignores = _ignores(root, None)
    stack = [(root, ignores, _names(root, skipped))]
    while stack:
        directory, ignores, names = stack[-1]
        name = next(names, None)
        if name is None:
            stack.pop()
            continue
        folder, path = name.endswith("/"), os.path.join(directory, name.rstrip("/"))
        if name.startswith("."):
            skipped.add("hidden")
        elif _ignored(path, folder, ignores):
            skipped.add("ignored")
        elif not folder:
            yield path
        elif name.rstrip("/") not in _SKIPPED_DIRECTORIES:
            stack.append((path, _ignores(path, ignores), _names(path, skipped)))


def _names(directory: str, skipped: Skipped) -> Iterator[str]:
    """The names in a directory in the order of git, where folders end in a slash. Empty if it cannot be read."""
    try:
        with os.scandir(directory) as found:
            names = [f"{entry.name}/" if entry.is_dir(follow_symlinks=False) else entry.name for entry in found]
    except OSError:
        skipped.add("unreadable", directory)
        return iter(())
    names.sort()
    return iter(names)


def _ignores(directory: str, above: _Ignores) -> _Ignores:
    """The rules of `above` and of the directory's own .gitignore, unless that is a link: git does not follow it."""
    try:
        _, data = _read(os.path.join(directory, ".gitignore"), MAX_FILE_SIZE)
        lines = (data or b"").decode("utf-8", "replace").splitlines()
        return (above, directory, GitIgnoreSpec.from_lines(lines)) if lines else above
    except (OSError, ValueError):
        return above


def _ignored(path: str, folder: bool, ignores: _Ignores) -> bool:
    """Whether a path is ignored. The innermost .gitignore with a matching rule decides."""
    while ignores:
        ignores, base, spec = ignores
        decided = spec.check_file(os.path.relpath(path, base) + ("/" if folder else "")).include
        if decided is not None:
            return decided
    return False


def _read(path: str, limit: int) -> tuple[os.stat_result, bytes | None]:
    """The status and up to `limit` bytes of a regular file; None instead of bytes for any other kind. Raises OSError,
    also for a link.
    """
    # Opened before the status is read, so that both belong to the same file. O_NONBLOCK: a FIFO must not block.
    descriptor = os.open(path, os.O_RDONLY | AS_IT_IS | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        return status, file.read(limit) if stat.S_ISREG(status.st_mode) else None


def _text(path: str, filters: Filters, skipped: Skipped, seen: _Seen) -> tuple[str, int]:
    """The text of a file, or "" if it is skipped, with the reason counted; and the size that `measure` counts."""
    try:
        status, data = _read(path, filters.max_file_size + 1)
    except FileNotFoundError:
        skipped.add("vanished")
        return "", 0
    except OSError:
        skipped.add("link" if os.path.islink(path) else "unreadable")
        return "", 0
    if data is None:
        skipped.add("not a regular file")
        return "", 0
    size = len(data) if len(data) <= filters.max_file_size else 0
    reason = "duplicate" if seen.has(status) else _reason(data, filters)
    if reason:
        skipped.add(reason, path)
        return "", size
    seen.add(status)
    return data.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace"), size


def _reason(data: bytes, filters: Filters) -> str:
    """The reason to skip a file for its content, or ""."""
    if len(data) > filters.max_file_size:
        return "too large"
    if not data:
        return "empty"
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):  # byte order marks; such text has NUL bytes only for Latin letters
        return "UTF-16 or UTF-32"
    if b"\0" in data:
        return "binary"
    lines = data.split(b"\n")
    if max(map(len, lines)) > MAX_LINE or len(data) > MAX_MEAN_LINE * (len(lines) + 10):
        return "minified"
    if not filters.allow_secrets and secret_content(data):
        return "secret"
    return ""
