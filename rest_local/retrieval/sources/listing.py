"""The paths of files below a directory that are neither hidden nor ignored, in the order of git.

In a git work tree git lists them; elsewhere the .gitignore files are obeyed. Symbolic links are never followed.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

from pathspec import GitIgnoreSpec

from rest_local.retrieval.sources.git import git_files
from rest_local.retrieval.sources.reading import read_regular
from rest_local.retrieval.sources.skipped import Skipped

_SKIPPED_DIRECTORIES = frozenset({"__pycache__", "node_modules"})
_MAX_RULES = 1 << 20  # bytes of a .gitignore that are read


def candidates(root: Path, skipped: Skipped, only: Collection[str] | None = None) -> Iterator[str]:
    """Paths of files below a directory that are neither hidden nor ignored. only: no other paths than these, which are
    absolute; then the directory is not walked. Some paths may be of directories or no longer exist.
    """
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
    """The paths of names that git listed, without hidden ones and those in linked folders: the index may list files
    below a folder that was replaced by a link.
    """
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
        if reason := _left_out(path, name, folder, ignores):
            skipped.add(reason)
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


def _scan_names(root: str, names: list[str], skipped: Skipped) -> Iterator[str]:
    """The paths of those names below `root` that `_scan` would yield. O(names x depth)."""
    known: dict[str, tuple[str, _Ignores]] = {"": ("", _ignores(root, None))}  # folder: why it is not walked, its rules
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
    """Why a folder is not walked, "" if it is, and the rules in it. Notes it and the folders above it in `known`."""
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
    """Why a name in a walked directory is left out, or ""."""
    if base.startswith("."):
        return "hidden"
    return "ignored" if _ignored(path, folder, ignores) else ""


def _ignores(directory: str, above: _Ignores) -> _Ignores:
    """The rules of `above` and of the directory's own .gitignore, unless that is a link: git does not follow it."""
    try:
        data = read_regular(os.path.join(directory, ".gitignore"), _MAX_RULES).data or b""
        lines = data.decode("utf-8", "replace").splitlines()
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
