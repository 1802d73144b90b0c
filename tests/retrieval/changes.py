"""A datastore in which every kind of change has something to do, and the changes."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from edited import Bytes, Folder, merge_all

from rest_local.retrieval.building.indexing import build_datastore
from rest_local.retrieval.files import Files
from rest_local.retrieval.format import file_name, owns
from rest_local.retrieval.home import read_manifest
from rest_local.retrieval.staging import stagings
from rest_local.retrieval.update import merging, updating
from rest_local.retrieval.update.forgetting import forget

SMALL = 30
MUCH = "much\n" * 20
HOW = ["update", "forget", "merge", "rebuild"]


def prepared(directory: Path) -> Folder:
    """Make a folder whose datastore has three segments and deleted text, and in which files changed since."""
    folder = Folder(directory)
    folder.write("a.py", "alpha")
    folder.write("kept.py", "kept " * 10)
    folder.build()
    folder.write("s.py", "secret " * 10)
    folder.write("t.py", "text " * 10)
    folder.update()
    folder.write("s.py", "another secret " * 5)
    folder.write("u.py", "more " * 10)
    folder.update()
    folder.write("a.py", "changed")
    folder.write("much.py", MUCH)
    folder.delete("t.py")
    return folder


def change(folder: Folder, how: str, files: Files) -> None:
    """Make a change in the way of `how`."""
    known = Bytes()
    if how == "update":
        folder.update(files=files, merging=True)
    elif how == "forget":
        forget(folder.path, {str(folder.source / "s.py")}, files=files)
    elif how == "merge":
        merge_all(folder.path, files=files)
    elif how == "rebuild":
        build_datastore(folder.path, [folder.source], vocabulary=known, files=files)


def set_small(to: Callable[[object, str, object], None]) -> None:
    """Make segments of more than SMALL tokens large ones."""
    to(updating, "SMALL_SEGMENT", SMALL)
    to(merging, "SMALL_SEGMENT", SMALL)


def in_child() -> None:
    """Do what the fixtures do, in processes that are killed."""
    set_small(setattr)
    os.fsync = lambda descriptor: None


def copied(folder: Folder, name: str) -> Folder:
    """Copy the folder with its datastore, which is then called `name`."""
    path = folder.path.parent / name
    shutil.copytree(folder.path, path)
    return opened(folder.source, path)


def opened(source: Path, path: Path) -> Folder:
    """Open a folder and its datastore, which another process made."""
    folder = Folder.__new__(Folder)
    folder.source, folder.path = source, path
    return folder


def left_over(path: Path) -> set[str]:
    """Return files that no manifest names, and staging directories."""
    kept = {file_name(entry.name, kind) for entry in read_manifest(path).segments for kind in entry.files}
    files = {name for name in os.listdir(path) if owns(name) and name not in kept}
    return files | {place.name for place in stagings(path)}
