"""A disk that counts and names the steps of a change, fails at any of them, and knows what a kill or a power cut before
any of them would leave.
"""

import os
import re
import shutil
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from rest_local.retrieval.files import LOCK, STAGING, Files
from rest_local.retrieval.format import MANIFEST

Tree = dict[str, bytes]
"""The files below a directory: content by relative path. The path of a directory ends in a slash."""


class Named(Files):
    """Calls `at` with the number and the name of each operation before it is done.

    Names are an action and what it is done to: "create tokens", "write order", "sync documents", "publish tokens" (from
    a staging directory into the index), "rename manifest" (the commit), "sync index", "delete tokens", "delete staged
    order" ...

    renamed, durable: the commits so far of which the manifest has its name, and of which the name was synced. halves:
    a write is two steps, so that one half of a file may be on the disk.
    """

    def __init__(self, at: Callable[[int, str], None] = lambda step, name: None, *, halves: bool = False) -> None:
        self.steps, self.at, self.halves = 0, at, halves
        self.trace: list[str] = []
        self.renamed = self.durable = 0

    def _step(self, name: str) -> None:
        self.steps += 1
        self.trace.append(name)
        self.at(self.steps, name)

    def make_directory(self, path: Path) -> None:
        if not path.exists():
            self._step(f"make {_part(path)}")
        super().make_directory(path)

    def create(self, path: Path) -> int:
        self._step(f"create {_file(path)}")
        return super().create(path)

    def write(self, descriptor: int, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        middle = len(view) // 2 if self.halves else 0
        for part in (view[:middle], view[middle:]) if self.halves else (view,):
            self._step(f"write {_file(path_of(descriptor))}")
            super().write(descriptor, part)

    def sync(self, descriptor: int) -> None:
        self._step(f"sync {_file(path_of(descriptor))}")
        super().sync(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        is_commit = new.name == MANIFEST
        self._step(f"{'rename' if is_commit or old.parent == new.parent else 'publish'} {_file(new)}")
        super().rename(old, new)
        self.renamed += is_commit

    def sync_directory(self, path: Path) -> None:
        self._step(f"sync {_part(path)}")
        super().sync_directory(path)
        if _part(path) == "index":
            self.durable = self.renamed

    def unlink(self, path: Path) -> None:
        self._step(f"delete {_file(path)}")
        super().unlink(path)


def path_of(descriptor: int) -> Path:
    """Return the path of an open file."""
    return Path(os.readlink(f"/proc/self/fd/{descriptor}"))


def _part(path: Path) -> str:
    if STAGING.match(path.name):
        return "staging"
    return "index" if any(path.glob(f"{MANIFEST}*")) or path.name.startswith("vocabulary-") else "parent"


def _file(path: Path) -> str:
    kind = path.name.split(".")[1] if path.name.endswith(".bin") else path.name.partition(".")[0]
    return f"staged {kind}" if STAGING.match(path.parent.name) else kind


def fail_at(step: int, code: int, *, for_good: bool = False) -> Callable[[int, str], None]:
    """Return a function for `Named` that lets an operation fail, and with `for_good` all after it."""

    def fail(now: int, name: str) -> None:
        if now == step or (for_good and now > step):
            raise OSError(code, os.strerror(code))

    return fail


class Killed(NamedTuple):
    """What a kill leaves. before: the step; renamed: the commits so far; tree: without the files of locks."""

    before: str
    renamed: int
    tree: Tree


def kills(root: Path, work: Callable[[Files], object], *, halves: bool = False) -> list[Killed]:
    """Return what is below `root` if `work` is killed before any of its steps or at its end, equal states once.

    A kill loses nothing that was written. So the work is done once, and what is on the disk is noted before each step.
    `test_failpoints` compares this with processes that are killed.
    """
    found: dict[frozenset[tuple[str, bytes]], Killed] = {}

    def note(step: int, name: str) -> None:
        tree = tree_of(root)
        found.setdefault(frozenset(tree.items()), Killed(name, files.renamed, tree))

    files = Named(note, halves=halves)
    work(files)
    note(0, "the end")
    return list(found.values())


def tree_of(root: Path) -> Tree:
    tree: Tree = {}
    for folder, folders, names in os.walk(root):
        where = os.path.relpath(folder, root) + "/" if folder != str(root) else ""
        tree.update({f"{where}{name}/": b"" for name in folders})
        tree.update({where + name: Path(folder, name).read_bytes() for name in names if name != LOCK})
    return tree


def shape(tree: Tree) -> Counter[str]:
    """Count the names, without what is random in them."""
    return Counter(re.sub("[0-9a-f]{16}", "*", name) for name in tree)


Names = dict[int, dict[str, int]]
"""What is in each directory: inodes by name, by the inode of the directory."""


class Disk(Named):
    """Records what a power cut before any step could leave below `root`, in `trees`, each once.

    A disk keeps what was synced: the content of a file at its last fsync, and the names in a directory at its last
    fsync. Of the rest it keeps anything. So these are recorded: nothing else; all names; all deletions and no new
    names; the newest manifests, with no other new names; and each change of a name alone. A file that was not synced
    has half of its size, of zeros. lost: the number of a sync that the disk confirms and does not do.
    """

    def __init__(self, root: Path, lost: int = 0) -> None:
        super().__init__(lambda step, name: self.look())
        self.root, self.lost, self.syncs = root, lost, 0
        self.contents: dict[int, bytes] = {}  # inode: content on the disk
        self._held: dict[int, int] = {}  # inode: descriptor, so that no inode is used again
        self.trees: list[Tree] = []
        self._seen: set[frozenset[tuple[str, int]]] = set()
        self.on_disk: Names = self._now()
        for file in files_of(root):
            self.contents[file.stat().st_ino] = file.read_bytes()

    def close(self) -> None:
        for descriptor in self._held.values():
            os.close(descriptor)

    def create(self, path: Path) -> int:
        descriptor = super().create(path)
        self._hold(path)
        return descriptor

    def sync(self, descriptor: int) -> None:
        super().sync(descriptor)
        if self._is_done():
            self.contents[os.fstat(descriptor).st_ino] = path_of(descriptor).read_bytes()

    def sync_directory(self, path: Path) -> None:
        super().sync_directory(path)
        if self._is_done() and (path == self.root or self.root in path.parents):
            self.on_disk[path.stat().st_ino] = self._in(path)

    def _is_done(self) -> bool:
        self.syncs += 1
        return self.syncs != self.lost

    def look(self) -> None:
        """Record what a power cut would leave now."""
        old, new = self.on_disk, self._now()
        pairs = {where: (old.get(where, {}), new.get(where, {})) for where in {*old, *new}}
        self._record(old)
        self._record(new)
        self._record({where: {n: i for n, i in a.items() if n in b} for where, (a, b) in pairs.items()})
        self._record({where: {**a, **{n: b[n] for n in b if n == MANIFEST}} for where, (a, b) in pairs.items()})
        for where, (a, b) in pairs.items():
            for name in {*a, *b}:
                if a.get(name) != b.get(name):
                    one = {n: i for n, i in a.items() if n != name} | ({name: b[name]} if name in b else {})
                    self._record({**old, where: one})

    def _now(self) -> Names:
        return {Path(folder).stat().st_ino: self._in(Path(folder)) for folder, _, _ in os.walk(self.root)}

    def _in(self, folder: Path) -> dict[str, int]:
        found = {path.name: path.stat().st_ino for path in folder.iterdir() if path.name != LOCK}
        for name in found:
            self._hold(folder / name)
        return found

    def _hold(self, path: Path) -> None:
        if (inode := path.stat().st_ino) not in self._held:
            self._held[inode] = os.open(path, os.O_RDONLY)

    def _record(self, names: Names) -> None:
        tree = dict(self._files(names, self.root.stat().st_ino, ""))
        key = frozenset((name, hash(content)) for name, content in tree.items())
        if key not in self._seen:
            self._seen.add(key)
            self.trees.append(tree)

    def _files(self, names: Names, folder: int, where: str) -> Iterator[tuple[str, bytes]]:
        for name, inode in names.get(folder, {}).items():
            status = os.fstat(self._held[inode])
            if stat.S_ISDIR(status.st_mode):
                yield from self._files(names, inode, f"{where}{name}/")
            else:
                yield where + name, self.contents.get(inode, bytes(status.st_size // 2))


def files_of(root: Path) -> list[Path]:
    """List the files of a datastore without the locks."""
    return [file for file in root.rglob("*") if file.is_file() and file.name != LOCK] if root.exists() else []


def put_tree(path: Path, tree: Tree) -> None:
    """Make `path` hold these files and nothing else."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    for name, content in tree.items():
        (path / name if name.endswith("/") else (path / name).parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            (path / name).write_bytes(content)
