"""Walks files that are worth indexing and gives their text; everything else is skipped, counted and reported.

Only regular files are opened, symbolic links never followed, archives never looked into. What is skipped by default:
hidden and git-ignored files, names and content that look like secrets, binary, oversized and minified files. A file
that the caller names itself is taken whatever its extension, hidden or ignored or not.
"""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pathspec import GitIgnoreSpec

from rest_local.errors import InputInvalid, OptionError
from rest_local.retrieval.secret import secret_content, secret_name

MAX_FILE_SIZE = 1 << 20
MAX_LINE = 20_000
MAX_MEAN_LINE = 300
"""Longer lines than these are minified or data. The 1 790 modules of Python 3.11's standard library, tests included,
stay below 1 200 bytes a line and 52 in the mean."""

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
"""Extensions taken when no `include` is given."""

NAMES = frozenset({"Makefile", "Dockerfile", "CMakeLists.txt", "Rakefile", "Gemfile", "Justfile", "BUILD", "WORKSPACE"})
_SKIPPED_DIRECTORIES = frozenset({"__pycache__", "node_modules"})
_NAMED = 20


@dataclass(slots=True)
class Skipped:
    """What a walk left out. counts: files by reason; secrets: the first names that looked like secrets."""

    counts: Counter[str] = field(default_factory=Counter)
    secrets: list[str] = field(default_factory=list)

    def add(self, reason: str, name: str = "") -> None:
        """Counts one file."""
        self.counts[reason] += 1
        if reason == "secret" and len(self.secrets) < _NAMED:
            self.secrets.append(printable(name))

    def summary(self) -> str:
        """For people, one line: "12 binary, 3 too large", or "nothing skipped"."""
        return ", ".join(f"{count} {reason}" for reason, count in self.counts.most_common()) or "nothing skipped"


@dataclass(frozen=True, slots=True)
class Filters:
    """Which files are taken. include, exclude: globs as in .gitignore, against the path below the root.

    include replaces the list of extensions; max_file_size: bytes. OptionError for a bad glob or size.
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
) -> Iterator[tuple[str, str]]:
    """(name, text) of every file worth indexing under `paths`, sorted within a directory, each file once.

    The name is the absolute path; bytes that are not UTF-8 are lone surrogates in it, as in `os.fsdecode`. The text is
    UTF-8 with U+FFFD for what is not, so it always encodes. skipped: counts what was left out.

    Raises, before the first file, InputInvalid for a path that does not exist, OptionError for a bad glob. Nothing
    that happens to a file during the walk raises.
    """
    filters = Filters(tuple(include), tuple(exclude), allow_secrets, max_file_size)
    roots = [Path(path) for path in paths]
    for root in roots:
        if not root.exists():
            raise InputInvalid("path", printable(str(root)), "no such file or directory")
    return _walk(roots, filters, skipped if skipped is not None else Skipped())


def printable(name: str) -> str:
    """A file name that any terminal and any UTF-8 file takes: control characters and lone surrogates as U+FFFD."""
    return "".join(character if character.isprintable() else "\ufffd" for character in name)


def _walk(roots: Iterable[Path], filters: Filters, skipped: Skipped) -> Iterator[tuple[str, str]]:
    include, exclude = _spec(filters.include), _spec(filters.exclude)
    seen: set[tuple[int, int]] = set()
    for root in roots:
        root = root.resolve()
        single = not root.is_dir()
        for path in [str(root)] if single else _candidates(root, skipped):
            base = os.path.basename(path)
            relative = base if single else os.path.relpath(path, root)
            wanted = include.match_file(relative) if filters.include else _by_extension(base)
            if exclude.match_file(relative) or not (wanted or (single and not filters.include)):
                skipped.add("not a wanted kind of file")
            elif not filters.allow_secrets and secret_name(base):
                skipped.add("secret", path)
            else:
                text = _text(path, filters, skipped, seen)
                if text:
                    yield path, text


def _spec(globs: Sequence[str]) -> GitIgnoreSpec:
    try:
        return GitIgnoreSpec.from_lines(globs)
    except ValueError as error:
        raise OptionError(f"glob {' '.join(globs)!r}: {error}") from error


def _by_extension(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in EXTENSIONS or name in NAMES


def _candidates(root: Path, skipped: Skipped) -> Iterator[str]:
    """Paths of files below a directory that are neither hidden nor ignored."""
    listed = _git_files(root)
    if listed is None:
        yield from _scan(str(root), [], skipped)
        return
    # git lists what its index holds, also below a directory that has become a link since: that must not be followed
    here: dict[str, bool] = {}
    for relative in listed:
        path = os.path.join(root, relative)
        folder = os.path.dirname(path)
        if folder not in here:
            here[folder] = os.path.realpath(folder) == folder
        if any(part.startswith(".") for part in relative.split("/")):
            skipped.add("hidden")
        elif not here[folder]:
            skipped.add("link")
        else:
            yield path


def _git_files(root: Path) -> list[str] | None:
    """What git tracks or would track below `root`, or None outside a work tree, in an ignored directory, without git.

    No program that a repository's own configuration names is run (core.fsmonitor would be).
    """
    safe = ["git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-C", str(root)]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    for variable in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        environment.pop(variable, None)

    def git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [*safe, *arguments], env=environment, capture_output=True, stdin=subprocess.DEVNULL, check=False
        )

    try:
        inside = git("rev-parse", "--is-inside-work-tree")
        if inside.returncode != 0 or inside.stdout.strip() != b"true" or git("check-ignore", "-q", ".").returncode == 0:
            return None
        listed = git("ls-files", "-z", "--cached", "--others", "--exclude-standard")
    except OSError:
        return None
    if listed.returncode != 0:
        return None
    return sorted({os.fsdecode(name) for name in listed.stdout.split(b"\0") if name})


def _scan(directory: str, ignores: list[tuple[str, GitIgnoreSpec]], skipped: Skipped) -> Iterator[str]:
    """A walk that respects .gitignore files by itself. ignores: those of the directories above, outermost first."""
    try:
        with os.scandir(directory) as found:
            entries = sorted(found, key=lambda entry: entry.name)
    except OSError:
        skipped.add("unreadable", directory)
        return
    if any(entry.name == ".gitignore" for entry in entries):
        with contextlib.suppress(OSError, ValueError):
            lines = Path(directory, ".gitignore").read_text("utf-8", "replace").splitlines()
            ignores = [*ignores, (directory, GitIgnoreSpec.from_lines(lines))]
    for entry in entries:
        folder = entry.is_dir(follow_symlinks=False)
        if entry.name.startswith("."):
            skipped.add("hidden")
        elif _ignored(entry.path, folder, ignores):
            skipped.add("ignored")
        elif not folder:
            yield entry.path
        elif entry.name not in _SKIPPED_DIRECTORIES:
            yield from _scan(entry.path, ignores, skipped)


def _ignored(path: str, folder: bool, ignores: list[tuple[str, GitIgnoreSpec]]) -> bool:
    """The innermost .gitignore that has something to say decides."""
    for base, spec in reversed(ignores):
        decided = spec.check_file(os.path.relpath(path, base) + ("/" if folder else "")).include
        if decided is not None:
            return decided
    return False


def _text(path: str, filters: Filters, skipped: Skipped, seen: set[tuple[int, int]]) -> str:
    """The text of a file, or "" if it is skipped, with the reason counted."""
    try:
        # Opened before it is looked at, so that what is looked at is what is read; O_NONBLOCK: a FIFO must not wait.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        skipped.add("vanished")
        return ""
    except OSError:
        skipped.add("link" if os.path.islink(path) else "unreadable")
        return ""
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            skipped.add("not a regular file")
            return ""
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(filters.max_file_size + 1)
    except OSError:
        skipped.add("unreadable")
        return ""
    finally:
        os.close(descriptor)
    identity = (status.st_dev, status.st_ino)
    reason = "duplicate" if identity in seen else _reason(data, filters)
    if reason:
        skipped.add(reason, path)
        return ""
    seen.add(identity)
    return data.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace")


def _reason(data: bytes, filters: Filters) -> str:
    """Why the content of a file is not taken, or ""."""
    if len(data) > filters.max_file_size:
        return "too large"
    if not data:
        return "empty"
    if b"\0" in data:  # binary, or UTF-16 and UTF-32
        return "binary"
    lines = data.split(b"\n")
    if max(map(len, lines)) > MAX_LINE or len(data) > MAX_MEAN_LINE * (len(lines) + 10):
        return "minified"
    if not filters.allow_secrets and secret_content(data):
        return "secret"
    return ""
