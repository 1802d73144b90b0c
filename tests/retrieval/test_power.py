"""Power cuts of merges and removals: whatever was not synced is lost or comes in any order, and syncs are lost.

`failpoints.Disk` says what a disk may then hold. Power cuts of the other changes are in `test_failpoints`.
"""

import shutil
from pathlib import Path

import pytest
from edited import texts_in
from failpoints import Disk, put_tree
from test_traces import WAYS, secret_files

from rest_local.errors import DatastoreError, DatastoreNotFound
from rest_local.retrieval.files import Files
from rest_local.retrieval.staging import clear

Texts = dict[str, str] | None


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return secret_files(tmp_path, monkeypatch)


def texts_or_none(home: Path) -> Texts:
    """Return the texts of the newest commit, or None without one. Raises DatastoreError for a damaged one."""
    try:
        return texts_in(home / "store")
    except DatastoreNotFound:
        return None


def cut(base: Path, way: str, lost: int = 0) -> tuple[Disk, Path]:
    """Return what the disk may hold after a power cut in a change, and a folder of datastores after the change."""
    prepare, work = WAYS[way]
    home = base / f"cut-{lost}"
    prepare(home)
    disk = Disk(home, lost)
    work(home, disk)
    disk.look()
    disk.close()
    return disk, home


@pytest.mark.parametrize("way", ["merge", "removal"])
def test_any_power_cut_leaves_a_whole_commit(base: Path, way: str) -> None:
    disk, home = cut(base, way)
    prepare, work = WAYS[way]
    prepare(base / "old")
    after, old, new = base / "after", texts_or_none(base / "old"), texts_or_none(home)
    seen = []
    for number, tree in enumerate(disk.trees):
        put_tree(after, tree)
        seen.append(texts_or_none(after))
        assert seen[-1] in (old, new), sorted(tree)
        if way != "removal" and number % 3 == 0:
            work(after, Files())
            assert texts_or_none(after) == new
            clear(after / "store")
            assert [path.name for path in after.iterdir()] == ["store"]
    assert seen[0] == old
    assert seen[-1] == new


def test_a_sync_that_the_disk_did_not_do_is_no_wrong_text(base: Path) -> None:
    """No protocol survives that, but the text is the old or the new one, or is found to be damaged."""
    way = "merge"
    syncs, noticed = cut(base, way)[0].syncs, 0
    right = texts_or_none(base / "cut-0")
    after, seen = base / "after", set()
    for lost in range(1, syncs + 1):
        disk, home = cut(base, way, lost)
        for tree in disk.trees:
            if (key := frozenset(tree.items())) in seen:
                continue
            seen.add(key)
            put_tree(after, tree)
            try:
                assert texts_or_none(after) == right, sorted(tree)
            except DatastoreError:
                noticed += 1
        shutil.rmtree(home)
    assert noticed, "some syncs are needed"
