"""Read regular files, list them with git or without, and tell whether their time of change is reliable."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import stat
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from pathspec import GitIgnoreSpec

from rest_local.errors import RestLocalError
from rest_local.retrieval.documents import grouped
from rest_local.retrieval.files import AS_IT_IS
from rest_local.retrieval.sources.source import Skipped

# A file that was written so shortly before it was read may be written again with the same time of change: FAT stores
# even seconds.
RACY_NS = 2_000_000_000


class Contents(NamedTuple):
    """The content of a file."""

    status: os.stat_result  # taken before the reading
    data: bytes | None  # None if it is not a regular file
    mtime_ns: int  # 0 if not certain


def read_regular(path: str, limit: int) -> Contents:
    """Read up to `limit` bytes of a regular file. Raises OSError, also for a link."""
    # Opened before the status is read, so that both belong to the same file. O_NONBLOCK: a FIFO must not block.
    descriptor = os.open(path, os.O_RDONLY | AS_IT_IS | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        now, before = time.time_ns(), os.fstat(descriptor)
        if not stat.S_ISREG(before.st_mode):
            return Contents(before, None, 0)
        data = file.read(limit)
        after = os.fstat(descriptor)
    same = before.st_mtime_ns == after.st_mtime_ns and before.st_size == after.st_size == len(data)
    return Contents(before, data, certain(before.st_mtime_ns, now) if same else 0)


def certain(mtime_ns: int, now_ns: int) -> int:
    """Return the time of change of a file that is read at `now_ns`, or 0 if a later change could have the same time."""
    return mtime_ns if mtime_ns > 0 and now_ns - mtime_ns >= RACY_NS else 0


# A hook of git sets these variables. With them git would read another repository than the named one.
_OTHER_PLACES = (
    "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY", "GIT_NAMESPACE",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_CONFIG", "GIT_PREFIX", "GIT_SHALLOW_FILE",
)  # fmt: skip

_MOST_ARGUMENTS = 1 << 14  # bytes of names on one command line
_HARMLESS = ("core.fsmonitor=false", "core.hooksPath=/dev/null", "log.showSignature=false", "protocol.allow=never")


def git_command(repository: Path, *arguments: str) -> list[str]:
    """Return the command line of a git command. Run it with `git_environment`."""
    settings = [part for setting in _HARMLESS for part in ("-c", setting)]
    return ["git", "-C", str(repository), *settings, *arguments]


def git_environment() -> dict[str, str]:
    """Return this environment, changed so that git fetches nothing (before git 2.45 by `protocol.allow`)."""
    kept = {name: value for name, value in os.environ.items() if name not in _OTHER_PLACES}
    return {**kept, "GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0"}


def git_files(root: Path, only: Sequence[str] | None = None) -> Iterator[str] | None:
    """Return the files below `root` that git tracks or would track, sorted, each name once, or None outside a work
    tree, in an ignored directory, and without git. Names are relative to `root`, with slashes. A submodule is one name,
    and another repository inside one with a slash at its end.

    The names go through temporary files, so that memory does not depend on their number. With `only`, which is sorted,
    git is asked about these names alone; it reads its index, but only the folders of the names. For a name in a
    repository inside, it is asked about that repository.
    """
    undo, listed = contextlib.ExitStack(), []
    asked = None if only is None else sorted({_repository_of(root, name) or name for name in only})
    with undo, contextlib.suppress(OSError, RestLocalError):
        inside = run_git(root, "rev-parse", "--is-inside-work-tree")
        ignored = inside.stdout.strip() != b"true" or run_git(root, "check-ignore", "-q", ".").returncode == 0
        if inside.returncode != 0 or ignored:
            return None
        for arguments in (("--cached",), ("--others", "--exclude-standard")):
            listed.append(undo.enter_context(tempfile.TemporaryFile()))  # noqa: SIM115
            for names in [[]] if asked is None else grouped(asked, len, _MOST_ARGUMENTS):
                command = ("--literal-pathspecs", "ls-files", "-z", *arguments, "--", *names)
                if run_git(root, *command, output=listed[-1]).returncode != 0:
                    return None
        undo.pop_all()  # `_split` closes the files now
        # The index has several entries for a file with a merge conflict.
        merged = (name for name, _ in itertools.groupby(heapq.merge(*map(_split, listed))))
        wanted = frozenset(asked or ())
        return merged if asked is None else (name for name in merged if name.rstrip("/") in wanted)
    return None


def _repository_of(root: Path, name: str) -> str:
    """Return the outermost repository below `root` that contains a name, or an empty string."""
    *folders, _ = name.split("/")
    inner = itertools.accumulate(folders, "{}/{}".format)
    return next((folder for folder in inner if os.path.lexists(root / folder / ".git")), "")


def _split(file: IO[bytes]) -> Iterator[str]:
    """Yield the names in a file, which a NUL byte ends, and close it."""
    with file:
        file.seek(0)
        yield from map(os.fsdecode, records(file))


def records(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the records of a file, which a NUL byte ends."""
    tail = b""
    while chunk := file.read(1 << 16):
        *found, tail = (tail + chunk).split(b"\0")
        yield from found


def run_git(
    repository: Path, *arguments: str, output: IO[bytes] | int = subprocess.PIPE
) -> subprocess.CompletedProcess[bytes]:
    """Run a git command to its end, and return its output and complaints. Raises RestLocalError without git."""
    command, none = git_command(repository, *arguments), subprocess.DEVNULL
    try:
        return subprocess.run(
            command, env=git_environment(), stdin=none, stdout=output, stderr=subprocess.PIPE, check=False
        )
    except FileNotFoundError as error:
        raise RestLocalError("this needs the program git; install it") from error


_SKIPPED_DIRECTORIES = frozenset({"__pycache__", "node_modules"})
_MAX_RULES = 1 << 20  # maximum bytes to read of a .gitignore


def candidates(root: Path, skipped: Skipped, only: Collection[str] | None = None) -> Iterator[str]:
    """Yield paths of files below a directory that are neither hidden nor ignored, those of submodules as well. With
    `only`, absolute paths, no others are taken and the directory is not walked. Some may be directories, or be gone.
    """
    stack = [_listed(root, skipped, only)]  # each submodule has its index and rules
    while stack:
        path = next(stack[-1], None)
        if path is None:
            stack.pop()
        elif path.endswith("/"):
            stack.append(_listed(Path(path), skipped, only))
        else:
            yield path


def _listed(root: Path, skipped: Skipped, only: Collection[str] | None) -> Iterator[str]:
    """Yield paths as `candidates` does, with the path of a submodule and a slash in place of its files."""
    below = os.path.join(root, "")
    names = None if only is None else sorted({path[len(below) :] for path in only if path.startswith(below)})
    listed = git_files(root, names)
    if listed is not None:
        yield from _unhidden(str(root), listed, skipped)
    elif names is None:
        yield from _scan(str(root), skipped)
    else:
        yield from _scan_names(str(root), names, skipped)


def _unhidden(root: str, listed: Iterator[str], skipped: Skipped) -> Iterator[str]:
    """Yield the paths of names that git listed, without hidden ones and those in linked folders: the index may list
    files below a folder that was replaced by a link.
    """
    chain: list[tuple[str, bool]] = []  # the last file's folders: (name, True without a link down to it)
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
            path = os.path.join(root, relative)
            if relative.endswith("/"):
                skipped.add("another repository", path)
            elif not os.path.isdir(path) or os.path.islink(path):
                yield path
            elif os.path.lexists(os.path.join(path, ".git")):
                yield path + "/"
            else:
                skipped.add("submodule that is not initialised", path)


# The .gitignore files that apply to a directory: those of the directories above it, its path, its own rules.
_Ignores = tuple["_Ignores", str, GitIgnoreSpec] | None


def _scan(root: str, skipped: Skipped) -> Iterator[str]:
    """Walk without git, and respect .gitignore files. It keeps the names in the directories from the root down to the
    current one in memory. It is not recursive, because directories may be nested deeper than Python's call stack.
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
        if reason := _left_out(path, name, folder, ignores):
            skipped.add(reason)
        elif not folder:
            yield path
        elif name.rstrip("/") not in _SKIPPED_DIRECTORIES:
            stack.append((path, _ignores(path, ignores), _names(path, skipped)))


def _names(directory: str, skipped: Skipped) -> Iterator[str]:
    """Return the names in a directory in git's order, where folders end in a slash. Empty if it cannot be read."""
    try:
        with os.scandir(directory) as found:
            names = [f"{entry.name}/" if entry.is_dir(follow_symlinks=False) else entry.name for entry in found]
    except OSError:
        skipped.add("unreadable", directory)
        return iter(())
    names.sort()
    return iter(names)


def _scan_names(root: str, names: list[str], skipped: Skipped) -> Iterator[str]:
    """Yield the paths of those names below `root` that `_scan` would yield. O(names x depth)."""
    known: dict[str, tuple[str, _Ignores]] = {"": ("", _ignores(root, None))}  # folder -> reason to skip it, its rules
    for name in names:
        folder, _, base = name.rpartition("/")
        reason, ignores = _folder(root, folder, known)
        path = os.path.join(root, name)
        reason = reason or _left_out(path, base, False, ignores)
        if reason:
            skipped.add(reason)
        elif base:
            yield path


def _folder(root: str, name: str, known: dict[str, tuple[str, _Ignores]]) -> tuple[str, _Ignores]:
    """Return the reason to skip a folder, or "", and the rules in it. Notes it and those above it in `known`."""
    parts = name.split("/")
    for depth in range(1, len(parts) + 1):
        inner = "/".join(parts[:depth])
        if inner in known:
            continue
        reason, ignores = known["/".join(parts[: depth - 1])]
        path = os.path.join(root, inner)
        reason = reason or _left_out(path, parts[depth - 1], True, ignores)
        if not reason and parts[depth - 1] in _SKIPPED_DIRECTORIES:
            reason = "ignored"
        if not reason and os.path.islink(path):
            reason = "link"
        known[inner] = reason, ignores if reason else _ignores(path, ignores)
    return known[name]


def _left_out(path: str, base: str, folder: bool, ignores: _Ignores) -> str:
    """Return the reason to skip a name in a walked directory, or an empty string."""
    if base.startswith("."):
        return "hidden"
    return "ignored" if _ignored(path, folder, ignores) else ""


def _ignores(directory: str, above: _Ignores) -> _Ignores:
    """Add the rules of the directory's .gitignore to those above, unless it is a link: git does not follow it."""
    try:
        data = read_regular(os.path.join(directory, ".gitignore"), _MAX_RULES).data or b""
        lines = data.decode("utf-8", "replace").splitlines()
        return (above, directory, GitIgnoreSpec.from_lines(lines)) if lines else above
    except (OSError, ValueError):
        return above


def _ignored(path: str, folder: bool, ignores: _Ignores) -> bool:
    """Return True if a path is ignored. The innermost .gitignore with a matching rule decides."""
    while ignores:
        ignores, base, spec = ignores
        decided = spec.check_file(os.path.relpath(path, base) + ("/" if folder else "")).include
        if decided is not None:
            return decided
    return False
