"""When `forget` returns, no file holds the text, wherever it was."""

from pathlib import Path

import pytest
from edited import Folder, merge_all, text_on_disk, texts_in

from rest_local.errors import OptionError
from rest_local.retrieval.building.indexing import recipe_of
from rest_local.retrieval.home import read_manifest
from rest_local.retrieval.sources import Jsonl
from rest_local.retrieval.update import updating
from rest_local.retrieval.update.forgetting import (
    Forgotten,
    excludable,
    excluding,
    forget,
    forget_where,
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """Make a segment of three files, in which two are deleted: one got another content and one another name."""
    monkeypatch.setattr(updating, "SMALL_SEGMENT", 1)
    folder = Folder(tmp_path)
    folder.write("a.py", "alpha")
    folder.build()
    for name, text in (("s.py", "secret one"), ("r.py", "renamed secret"), ("kept.py", "kept")):
        folder.write(name, text)
    folder.update()
    folder.write("s.py", "secret two")
    folder.update()
    folder.delete("r.py")
    folder.write("r2.py", "renamed secret")
    folder.update()
    return folder


def on_disk(folder: Folder, text: str) -> bool:
    return any(text in found for found in text_on_disk(folder.path))


def test_earlier_versions_and_copies_that_were_deleted_go_too(folder: Folder) -> None:
    assert on_disk(folder, "secret one")
    name = str(folder.source / "s.py")
    assert forget_where(folder.path, lambda held: held == name) == Forgotten((name,))
    assert not on_disk(folder, "secret one")
    assert not on_disk(folder, "secret two")
    assert forget(folder.path, {str(folder.source / "r2.py")}) == 1
    assert not on_disk(folder, "secret")
    assert texts_in(folder.path) == {str(folder.source / "a.py"): "alpha", str(folder.source / "kept.py"): "kept"}
    assert not any(b"s.py" in file.read_bytes() or b"r.py" in file.read_bytes() for file in folder.path.glob("*.bin"))


def test_only_an_earlier_version_is_left(folder: Folder) -> None:
    folder.delete("s.py")
    folder.update()
    assert forget(folder.path, {str(folder.source / "s.py")}) == 0, "it is not there"
    assert not on_disk(folder, "secret one")
    assert forget(folder.path, {str(folder.source / "unknown.py")}) == 0


def test_what_is_known_of_deleted_copies_goes_too(folder: Folder) -> None:
    """A segment of which only a file state is deleted, because another file has the same content."""
    copy = folder.write("copy.py", "secret two")
    folder.update()
    merge_all(folder.path)
    folder.delete("copy.py")
    folder.write("z.py", "last")
    folder.update()
    (before, _) = read_manifest(folder.path).segments
    assert before.gone
    assert not before.dead
    assert forget(folder.path, {str(folder.source / "z.py")}) == 1
    assert not any(copy.encode() in file.read_bytes() for file in folder.path.iterdir())
    assert texts_in(folder.path)[str(folder.source / "s.py")] == "secret two"


def test_segments_without_deleted_text_stay(folder: Folder) -> None:
    before = {entry.name for entry in read_manifest(folder.path).segments}
    forget(folder.path, {str(folder.source / "s.py")})
    after = {entry.name for entry in read_manifest(folder.path).segments}
    assert len(before & after) == 2, "of a.py and r2.py"


def test_what_a_process_is_writing_goes_and_it_starts_again(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    name = folder.write("s.py", "secret three " * 20)

    class Between(updating.Files):
        done = False

        def sync_directory(self, path: Path) -> None:
            super().sync_directory(path)
            if path.name.startswith("staging-") and not self.done:
                self.done = True
                assert on_disk(folder, "secret three")
                forget(folder.path, {name})
                assert not on_disk(folder, "secret three")
                assert not on_disk(folder, "secret one")

    files = Between()
    updated = folder.update(files=files)
    assert files.done
    assert updated.added == 1, "the recipe does not exclude it"
    assert texts_in(folder.path) == folder.texts()


def test_a_staged_segment_of_other_text_is_written_again(folder: Folder) -> None:
    class Between(updating.Files):
        done = False

        def sync_directory(self, path: Path) -> None:
            super().sync_directory(path)
            if path.name.startswith("staging-") and not self.done:
                self.done = True
                forget(folder.path, {str(folder.source / "a.py")})

    folder.write("new.py", "new text")
    (folder.source / "a.py").unlink()
    updated = folder.update(files=Between(), only=[str(folder.source / "new.py")])
    assert updated.added == 1
    assert texts_in(folder.path) == folder.texts()


def test_the_last_document_stays_unless_told(folder: Folder) -> None:
    held = texts_in(folder.path)
    with pytest.raises(OptionError, match="index remove"):
        forget_where(folder.path, lambda name: True)
    assert texts_in(folder.path) == held
    assert forget_where(folder.path, lambda name: True, whole=True) == Forgotten(tuple(sorted(held)), removed=True)
    assert not folder.path.exists()


@pytest.mark.parametrize(
    "name", ["plain.py", "sub/with space.py", "[x]*?.py", "!not.py", "#no comment.py", "back\\slash.py"]
)
def test_any_name_can_be_excluded(tmp_path: Path, name: str) -> None:
    folder = Folder(tmp_path)
    folder.write("kept.py", "kept")
    folder.write("x.py", "x")
    path = folder.write(name, "secret")
    folder.build()
    assert excludable(read_manifest(folder.path).recipe, path)
    forget_where(folder.path, lambda held: held == path, recipe=excluding)
    folder.update()
    assert texts_in(folder.path) == {held: text for held, text in folder.texts().items() if held != path}


def test_rows_of_a_file_cannot_be_left_out_one_by_one() -> None:
    recipe = recipe_of([Jsonl("/d/rows.jsonl", "text")])
    assert not excludable(recipe, "/d/rows.jsonl:3")
    assert excluding(recipe, ["/d/rows.jsonl:3"]) == recipe
