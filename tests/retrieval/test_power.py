"""Power cuts of imports, repairs and merges: whatever was not synced is lost or comes in any order, and syncs are lost.

`failpoints.Disk` says what a disk may then hold. Power cuts of the other changes are in `test_failpoints`.
"""

import shutil
from pathlib import Path

import pytest
from edited import texts_in
from failpoints import Disk, put_tree
from test_traces import WAYS, Work, secret_files, with_secret

from rest_local.errors import DatastoreError, DatastoreNotFound
from rest_local.retrieval.files import Files
from rest_local.retrieval.format import MANIFEST
from rest_local.retrieval.staging import clear

Texts = dict[str, str] | None
POWER = ["repair", "repair of a manifest", "merge", "removal"]


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return secret_files(tmp_path, monkeypatch)


def without_manifest(home: Path) -> None:
    """Damage the manifest, and leave the intact copy of a killed commit."""
    with_secret(home)
    manifest = home / "store" / MANIFEST
    shutil.copy(manifest, manifest.with_name(f"{MANIFEST}.new-{'1' * 16}"))
    manifest.write_bytes(b"damaged")


def texts_or_none(home: Path) -> Texts:
    """Return the texts of the newest commit, or None without one. Raises DatastoreError for a damaged one."""
    try:
        return texts_in(home / "store")
    except DatastoreNotFound:
        return None


def cut(base: Path, way: str, lost: int = 0) -> tuple[Disk, Path, Work]:
    """Return what the disk may hold after a power cut in a change, and a folder of datastores after the change."""
    prepare, work = (without_manifest, WAYS["repair"][1]) if way == "repair of a manifest" else WAYS[way]
    home = base / f"cut-{lost}"
    prepare(home)
    disk = Disk(home, lost)
    work(home, disk)
    disk.look()
    disk.close()
    return disk, home, work


@pytest.mark.parametrize("way", POWER)
def test_any_power_cut_leaves_a_whole_commit(base: Path, way: str) -> None:
    """The old or the new one; of what is damaged before a repair, what can be repaired."""
    disk, home, work = cut(base, way)
    after = base / "after"
    old: Texts | str = "damaged" if "repair" in way else None
    if way in ("merge", "removal"):
        WAYS[way][0](base / "old")
        old = texts_or_none(base / "old")
    new, seen = texts_or_none(home), []
    for number, tree in enumerate(disk.trees):
        put_tree(after, tree)
        try:
            seen.append(texts_or_none(after))
        except DatastoreError:
            seen.append("damaged")
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
    way = "repair"
    syncs, noticed = cut(base, way)[0].syncs, 0
    old = new = texts_or_none(base / "cut-0")
    after, seen = base / "after", set()
    for lost in range(1, syncs + 1):
        disk, home, _ = cut(base, way, lost)
        for tree in disk.trees:
            if (key := frozenset(tree.items())) in seen:
                continue
            seen.add(key)
            put_tree(after, tree)
            try:
                assert texts_or_none(after) in (old, new), sorted(tree)
            except DatastoreError:
                noticed += 1
        shutil.rmtree(home)
    assert noticed, "some syncs are needed"
