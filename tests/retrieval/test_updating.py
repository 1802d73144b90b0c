"""An update reads only what changed and gives what a new build gives; so does adding paths."""

import shutil
from pathlib import Path

import pytest
from edited import IDENTITY, Bytes, Folder, texts_in

from rest_local.errors import InputInvalid
from rest_local.retrieval.building.build import build
from rest_local.retrieval.building.indexing import build_datastore
from rest_local.retrieval.files import Files, locked
from rest_local.retrieval.home import read_manifest
from rest_local.retrieval.sources import Walk
from rest_local.retrieval.update import updating
from rest_local.retrieval.update.updating import Updated


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Make three files, of which two have the same content."""
    folder = Folder(tmp_path)
    folder.write("a.py", "alpha")
    folder.write("b.py", "beta")
    folder.write("copy.py", "alpha")
    folder.build()
    return folder


def counts(updated: Updated) -> tuple[int, int, int, int]:
    return updated.added, updated.changed, updated.deleted, updated.unchanged


def test_nothing_changed_is_no_commit_and_reads_nothing(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    before = read_manifest(folder.path)
    monkeypatch.setattr("rest_local.retrieval.sources.walk.read_regular", None)
    assert counts(folder.update()) == (0, 0, 0, 3)
    assert read_manifest(folder.path) == before


def test_only_new_content_is_tokenized(folder: Folder) -> None:
    folder.write("b.py", "gamma")
    folder.write("new.py", "delta")
    folder.delete("copy.py")
    vocabulary = Bytes()
    updated = folder.update(vocabulary)
    assert counts(updated) == (1, 1, 1, 1)
    assert (sorted(vocabulary.tokenized), updated.tokens) == (["delta", "gamma"], 10)
    assert texts_in(folder.path) == folder.texts()
    assert updated.manifest == read_manifest(folder.path)
    assert counts(folder.update()) == (0, 0, 0, 3)


def test_another_time_of_change_alone_is_recorded_once(folder: Folder) -> None:
    folder.touch("b.py")
    before = read_manifest(folder.path)
    assert counts(folder.update()) == (0, 0, 0, 3)
    after = read_manifest(folder.path)
    assert after != before
    assert counts(folder.update()) == (0, 0, 0, 3)
    assert read_manifest(folder.path) == after


def test_a_deleted_folder_takes_its_files_along(folder: Folder) -> None:
    folder.write("sub/x.py", "one")
    folder.write("sub/deep/y.py", "two")
    folder.update()
    shutil.rmtree(folder.source / "sub")
    assert counts(folder.update(only=[str(folder.source / "sub")])) == (0, 0, 2, 0)
    assert texts_in(folder.path) == folder.texts()


def test_paths_by_way_of_a_link(tmp_path: Path) -> None:
    real = Folder(tmp_path / "real")
    real.write("a.py", "alpha")
    real.write("b.py", "beta")
    (tmp_path / "link").symlink_to(real.source)
    linked = Folder(tmp_path / "linked")
    linked.source = tmp_path / "link"
    linked.build()
    real.delete("a.py")
    real.write("b.py", "changed")
    given = [str(tmp_path / "link" / name) for name in ("a.py", "b.py")]
    assert counts(linked.update(only=given)) == (0, 1, 1, 0)
    assert texts_in(linked.path) == real.texts()


def test_a_file_that_is_out_of_reach_stays(folder: Folder, unprivileged: None) -> None:
    folder.write("sub/x.py", "one")
    folder.update()
    held = texts_in(folder.path)
    (folder.source / "sub").chmod(0)
    try:
        assert folder.update().deleted == 0
    finally:
        (folder.source / "sub").chmod(0o700)
    assert texts_in(folder.path) == held


@pytest.mark.parametrize("how", ["gone", "empty"])
def test_a_recorded_path_that_vanished_deletes_nothing_unless_told(folder: Folder, tmp_path: Path, how: str) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "o.py").write_text("o")
    build_datastore(folder.path, [folder.source, other], vocabulary=Bytes())
    held = texts_in(folder.path)
    assert held[str(other / "o.py")] == "o"
    shutil.rmtree(other)
    if how == "empty":
        other.mkdir()
    with pytest.raises(InputInvalid, match="missing=True"):
        folder.update()
    assert texts_in(folder.path) == held
    assert folder.update(missing=True).deleted == 1
    assert texts_in(folder.path) == folder.texts()


def test_a_datastore_without_states_gets_them(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.write("a.py", "alpha")
    gone = str(folder.source / "gone.py")
    known = Bytes()
    documents = [(folder.write("a.py", "alpha"), known.tokenize("alpha")), (gone, known.tokenize("gone"))]
    build(
        folder.path,
        documents,
        vocabulary=IDENTITY,
        recipe={"sources": [Walk((str(folder.source),)).to_dict()]},
    )
    assert counts(folder.update()) == (0, 1, 1, 0)
    assert texts_in(folder.path) == folder.texts()
    assert counts(folder.update()) == (0, 0, 0, 1)


def test_many_tokens_are_written_without_the_lock(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updating, "SMALL_SEGMENT", 20)
    folder.write("b.py", "much\n" * 50)

    class Looking(Files):
        free = 0

        def create(self, path: Path) -> int:
            if path.name.endswith("tokens.bin"):
                with locked(folder.path):  # raises DatastoreLocked while it is held
                    self.free += 1
            return super().create(path)

    files = Looking()
    folder.update(files=files)
    assert files.free == 1
    assert texts_in(folder.path) == folder.texts()
    assert not list(folder.path.glob("staging-*"))


class Between(Files):
    """Calls `what` once, before the first file of the new text is written."""

    def __init__(self, what: object) -> None:
        self.what = what

    def create(self, path: Path) -> int:
        what, self.what = self.what, None
        if what:
            what()  # type: ignore[operator]
        return super().create(path)


def test_another_writer_between_reading_and_the_commit(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updating, "SMALL_SEGMENT", 20)
    much = folder.write("much.py", "much\n" * 50)
    gone = folder.delete("b.py")

    def other() -> None:
        folder.update(only=[folder.write("a.py", "by the other"), gone])

    updated = folder.update(only=[much, gone], files=Between(other))
    assert (updated.added, updated.deleted) == (1, 0), "the other one deleted it"
    assert texts_in(folder.path) == folder.texts()


def test_the_same_file_by_two_writers_is_read_again(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updating, "SMALL_SEGMENT", 20)
    folder.write("much.py", "old\n" * 50)
    folder.update(files=Between(lambda: (folder.write("much.py", "new\n" * 60), folder.update())))
    assert texts_in(folder.path) == folder.texts()
