"""Files that are edited: what is read of them, what stays, and how they are replaced."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from rest_local.editing.text_file import BOM, TextFile, write_whole
from rest_local.errors import InputInvalid


def read(folder: Path, content: bytes) -> TextFile:
    path = folder / "f.txt"
    path.write_bytes(content)
    return TextFile.read(path)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", ""),
        (b"a\nb\n", "a\nb\n"),
        (b"a\r\nb\r\n", "a\nb\n"),
        (b"a\nb\r\nc", "a\nb\nc"),
        (BOM + b"a\n", "a\n"),
        (b"progress\r50%\n", "progress\r50%\n"),
        ("a\x0cb\u2028c\x85d\n".encode(), "a\x0cb\u2028c\x85d\n"),
    ],
)
def test_text_has_line_feeds_and_no_mark(tmp_path: Path, content: bytes, text: str) -> None:
    assert read(tmp_path, content).text == text


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (b"a\r\nb\r\n", "a\nx\nb\n", b"a\r\nx\r\nb\r\n"),
        (b"a\nb", "a\nx\n", b"a\nx"),
        (b"a\nb", "a\nx", b"a\nx"),
        (b"a\nb\n", "a\nx", b"a\nx\n"),
        (b"", "x", b"x\n"),
        (b"x\n", "", b""),
        (BOM + b"a\r\n", "b\n", BOM + b"b\r\n"),
        (b"a\r\nb\r\nc\nd\n", "a\nb\nnew\nc\nd\n", b"a\r\nb\r\nnew\nc\nd\n"),  # mixed: a kept line keeps its own
        (b"a\r\nb\r\nc", "a\nb\nc\nd\n", b"a\r\nb\r\nc\r\nd"),
        (b"a\nb\r\nc\r\n", "a\nz\nc\n", b"a\nz\r\nc\r\n"),
    ],
)
def test_line_ends_mark_and_last_line_feed_stay(tmp_path: Path, old: bytes, new: str, expected: bytes) -> None:
    assert read(tmp_path, old).with_text(new) == expected


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"ab\xff", "not UTF-8 text at byte 2"),
        (BOM + b"ab\xff", "not UTF-8 text at byte 5"),
        ("a\n".encode("utf-16"), "not UTF-8 text at byte 0"),
        (b"a\0b", "a NUL character"),
        ("na\u00efve".encode("latin-1"), "not UTF-8 text at byte 2"),
    ],
)
def test_other_encodings_are_refused(tmp_path: Path, content: bytes, cause: str) -> None:
    with pytest.raises(InputInvalid, match=cause):
        read(tmp_path, content)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name, cause in [
        (".", "is a directory"),
        ("none", "No such file"),
        ("pipe", "not a regular file"),
        ("loop", "loop|too many levels"),
        ("dangling", "No such file"),
    ]:
        with pytest.raises(InputInvalid, match=f"(?i){cause}"):
            TextFile.read(tmp_path / name)


def test_a_file_that_may_not_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As root every file may be written, so the answer of the system is given here."""
    path = tmp_path / "f"
    path.write_bytes(b"a\n")
    monkeypatch.setattr(os, "access", lambda place, mode: not (Path(place) == path and mode == os.W_OK))
    with pytest.raises(InputInvalid, match="permissions"):
        TextFile.read(path)


@pytest.mark.parametrize("mode", [0o644, 0o755, 0o600, 0o4755])
def test_permissions_stay(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old")
    path.chmod(mode)
    write_whole(path, b"new", like=path)
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert os.listdir(tmp_path) == ["f"]


def test_a_symbolic_link_keeps_pointing(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    real, link = tmp_path / "real" / "f.py", tmp_path / "link.py"
    real.write_bytes(b"old\n")
    link.symlink_to("real/f.py")
    file = TextFile.read(link)
    write_whole(file.target, file.with_text("new\n"), like=file.target)
    assert (link.is_symlink(), os.readlink(link)) == (True, "real/f.py")
    assert real.read_bytes() == b"new\n"
    assert os.listdir(tmp_path / "real") == ["f.py"]


@pytest.mark.parametrize("step", ["fsync", "replace", "chmod"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_the_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise error

    path = tmp_path / "f"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, step, broken)
    with pytest.raises(InputInvalid if isinstance(error, OSError) else KeyboardInterrupt):
        write_whole(path, b"new", like=path)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["f"]


def test_content_is_on_the_disk_before_it_has_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, done = tmp_path / "f", []
    path.write_bytes(b"old")
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (done.append("fsync"), fsync(descriptor)))
    monkeypatch.setattr(os, "replace", lambda old, new: (done.append("replace"), replace(old, new)))
    write_whole(path, b"new", like=path)
    assert done == ["fsync", "replace", "fsync"]  # the last one is of the folder


def test_a_change_on_the_disk_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"a\n")
    (tmp_path / "link").symlink_to("real")
    file = TextFile.read(tmp_path / "link")
    assert file.is_unchanged()
    (tmp_path / "other").write_bytes(b"a\n")
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to("other")
    assert not file.is_unchanged()
    (tmp_path / "link").unlink()
    assert not file.is_unchanged()
    file = TextFile.read(tmp_path / "real")
    (tmp_path / "real").write_bytes(b"b\n")
    assert not file.is_unchanged()
