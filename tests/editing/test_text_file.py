"""Files that are edited: what is read of them, what stays, and how they are replaced."""

import os
import stat
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rest_local.editing.edit import NoFile, fence_for, file_in
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
    """Root may write every file, so the answer of the system is given here."""
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
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert os.listdir(tmp_path) == ["f"]


def test_a_symbolic_link_keeps_pointing(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    real, link = tmp_path / "real" / "f.py", tmp_path / "link.py"
    real.write_bytes(b"old\n")
    link.symlink_to("real/f.py")
    file = TextFile.read(link)
    write_whole(file.target, file.with_text("new\n"))
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
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["f"]


def test_content_is_on_the_disk_before_it_has_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, done = tmp_path / "f", []
    path.write_bytes(b"old")
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (done.append("fsync"), fsync(descriptor)))
    monkeypatch.setattr(os, "replace", lambda old, new: (done.append("replace"), replace(old, new)))
    write_whole(path, b"new")
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


# ---- The file in an answer -----------------------------------------------------------------------------------------


OLD = "import os\n\n\ndef f(a):\n    return a\n"
NEW = "import os\n\n\ndef f(b):\n    return b\n"


@pytest.mark.parametrize(
    "answer",
    [
        f"```py\n{NEW}```",
        f"```py\n{NEW}```\n",
        f"```\n{NEW}```",
        f"````python title='f.py'\n{NEW}````",
        f"~~~py\n{NEW}~~~",
        f"Sure! Here is the file:\n\n```python\n{NEW}```\n\nI renamed `a` to `b`.\n",
        NEW,
        NEW.removesuffix("\n"),
        f"```py\n{NEW}```".replace("\n", "\r\n"),
        f"First install it:\n\n```sh\npip install f\n```\n\nThen:\n\n```py\n{NEW}```\n",
        f"```py\n{NEW}```\n\nRun it with\n\n```sh\npython f.py\n```\n",
        f"```py\n{NEW}```\n\nI renamed `a` to `b`. Run it with\n\n```\n",
        "1. The file:\n\n   ```py\n" + "".join(f"   {line}\n".replace("   \n", "\n") for line in NEW.split("\n")[:-1])
        + "   ```\n",
    ],
)  # fmt: skip
def test_the_file_is_found(answer: str) -> None:
    assert file_in(answer, OLD) == NEW


def test_blocks_in_the_file_stay() -> None:
    inner = "# Title\n\n```sh\npip install f\n```\n\nText.\n\n```\nplain\n```\n\nEnd.\n"
    for outer in ("```", "````", "~~~"):
        for language in ("", "md"):
            assert file_in(f"Here:\n\n{outer}{language}\n{inner}{outer}\n\nDone.", inner) == inner, outer


def test_a_block_that_the_edit_adds_stays() -> None:
    old = "# Title\n\nText.\n\nEnd.\n"
    new = "# Title\n\nText.\n\n```\nplain\n```\n\nEnd.\n"
    assert file_in(f"```md\n{new}```\n", old) == new


@pytest.mark.parametrize(
    "answer",
    [
        f"```py\n{NEW}",
        f"```sh\npip install f\n```\n\n```py\n{NEW}",
        f"````py\n{NEW}```",
        f"```py\n{NEW}```py\n",
        f"```py\n{NEW}~~~",
    ],
)
def test_a_block_without_an_end_is_refused(answer: str) -> None:
    with pytest.raises(NoFile, match="has no end"):
        file_in(answer, OLD)


@pytest.mark.parametrize(("text", "fence"), [("a\n", "```"), ("```py\n```\n", "````"), ("   `````\n", "``````")])
def test_the_fence_is_longer_than_those_of_the_file(text: str, fence: str) -> None:
    assert fence_for(text) == fence


LINES = st.lists(st.sampled_from(["", "a", "  b", "```", "```py", "````", "    ```", "~~~", "`x`"]), min_size=1)


@given(LINES.filter(lambda lines: any(line.strip() for line in lines)), st.sampled_from(["", "Here it is:\n\n"]))
def test_an_answer_in_the_fence_that_was_asked_for_is_the_file_whatever_it_holds(lines: list[str], head: str) -> None:
    text = "".join(f"{line}\n" for line in lines)
    fence = fence_for(text)
    assert file_in(f"{head}{fence}py\n{text}{fence}\n\nDone.", text) == text


@given(st.text(st.sampled_from("`~a \n\r"), max_size=60), LINES)
def test_no_answer_breaks_it(answer: str, lines: list[str]) -> None:
    with suppress(NoFile):
        assert file_in(answer, "\n".join(lines)).endswith("\n")
