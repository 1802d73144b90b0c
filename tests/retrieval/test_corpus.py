"""Walking takes the text files a user means, and nothing on the disk makes it crash, hang or read what it must not."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rest_local.errors import InputInvalid, OptionError
from rest_local.retrieval import Skipped, tokenize_documents, walk
from rest_local.retrieval.corpus import MAX_LINE, printable
from rest_local.retrieval.secret import secret_content, secret_name
from rest_local.retrieval.tokenizing import CHUNK, chunks


def files(root: Path, content: dict[str, str | bytes]) -> Path:
    for name, data in content.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return root


def found(*paths: Path, skipped: Skipped | None = None, **options: Any) -> dict[str, str]:
    root = paths[0].resolve() if paths[0].is_dir() else paths[0].resolve().parent
    return {os.path.relpath(name, root): text for name, text in walk(paths, skipped=skipped, **options)}


def test_text_files_by_extension_or_glob(tmp_path):
    files(tmp_path, {"a.py": "a", "b.bin": "b", "Makefile": "m", "sub/c.rs": "c", "sub/node_modules/d.js": "d"})
    assert set(found(tmp_path)) == {"a.py", "Makefile", "sub/c.rs"}
    assert set(found(tmp_path, include=["*.bin", "sub/*.rs"])) == {"b.bin", "sub/c.rs"}
    assert set(found(tmp_path, exclude=["sub/"])) == {"a.py", "Makefile"}
    assert set(found(tmp_path / "b.bin")) == {"b.bin"}


def test_links_fifos_sockets_and_devices_are_not_followed(tmp_path):
    root = files(tmp_path / "root", {"a.py": "a"})
    files(tmp_path / "outside", {"secret.py": "s"})
    (root / "loop").symlink_to(root)
    (root / "out").symlink_to(tmp_path / "outside")
    (root / "link.py").symlink_to(tmp_path / "outside" / "secret.py")
    os.mkfifo(root / "fifo.py")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(root / "socket.py"))
    (root / "null.py").symlink_to("/dev/null")
    skipped = Skipped()
    with listener:
        assert found(root, skipped=skipped) == {"a.py": "a"}
    assert skipped.counts["link"] == 2
    assert skipped.counts["not a regular file"] == 1
    assert skipped.counts["unreadable"] == 1


def test_binary_oversized_minified_and_archives_are_skipped(tmp_path):
    files(
        tmp_path,
        {
            "binary.py": b"a\0b",
            "utf16.py": "wide".encode("utf-16"),
            "large.py": "x = 1\n" * 200,
            "line.js": "x" * (MAX_LINE + 1),
            "mean.js": ("y" * 900 + "\n") * 100,
            "empty.py": "",
            "good.py": "x\n",
        },
    )
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("inside.py", "z")
    skipped = Skipped()
    assert set(found(tmp_path, skipped=skipped, max_file_size=1000)) == {"good.py"}
    assert skipped.counts == {"binary": 2, "too large": 3, "empty": 1, "not a wanted kind of file": 1}
    skipped = Skipped()
    assert set(found(tmp_path, skipped=skipped)) == {"good.py", "large.py"}
    assert skipped.counts["minified"] == 2
    assert "2 minified" in skipped.summary()
    assert Skipped().summary() == "nothing skipped"


def test_any_bytes_become_valid_text(tmp_path):
    files(tmp_path, {"a.py": b"\xff\xfe ok \xed\xa0\x80 \xc3", "b.py": b"\xef\xbb\xbfx\r\ny"})
    texts = found(tmp_path)
    assert texts["b.py"] == "x\r\ny"
    assert "ok" in texts["a.py"]
    for text in texts.values():
        text.encode("utf-8")


def test_names_that_are_not_utf8(tmp_path):
    (tmp_path / os.fsdecode(b"caf\xe9.py")).write_text("x")
    ((name, text),) = walk([tmp_path])
    assert os.fsencode(name).endswith(b"caf\xe9.py")
    assert text == "x"
    assert printable(name).endswith("caf\ufffd.py")
    assert printable("a\x1b[31m\n") == "a\ufffd[31m\ufffd"


def test_hidden_and_ignored_files_without_git(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    content = {
        ".gitignore": "*.log.py\n/build/\n",
        "a.py": "a",
        "x.log.py": "x",
        "build/b.py": "b",
        ".hidden/h.py": "h",
    }
    files(
        tmp_path, {**content, "sub/.gitignore": "!x.log.py\nc.py", "sub/x.log.py": "x", "sub/c.py": "c", ".d.py": "d"}
    )
    skipped = Skipped()
    assert set(found(tmp_path, skipped=skipped)) == {"a.py", "sub/x.log.py"}
    assert skipped.counts == {"hidden": 4, "ignored": 3}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    return files(
        tmp_path,
        {".gitignore": "ignored/\n", "a.py": "a", "ignored/b.py": "b", ".ci/c.py": "c", "kept/d.py": "d"},
    )


def test_a_git_work_tree_gives_what_git_would_track(repository):
    subprocess.run(["git", "-C", str(repository), "add", "a.py"], check=True)
    assert set(found(repository)) == {"a.py", "kept/d.py"}
    assert set(found(repository / "kept")) == {"d.py"}


def test_an_ignored_directory_that_is_named_is_walked(repository):
    assert set(found(repository / "ignored")) == {"b.py"}
    assert set(found(repository / ".ci" / "c.py")) == {"c.py"}


def test_a_tracked_directory_that_has_become_a_link_is_not_followed(repository, tmp_path_factory):
    subprocess.run(["git", "-C", str(repository), "add", "kept/d.py"], check=True)
    outside = files(tmp_path_factory.mktemp("outside"), {"d.py": "not ours"})
    (repository / "kept" / "d.py").unlink()
    (repository / "kept").rmdir()
    (repository / "kept").symlink_to(outside)
    skipped = Skipped()
    assert set(found(repository, skipped=skipped)) == {"a.py"}
    assert skipped.counts["link"] >= 1


def test_no_program_of_the_repository_is_run(repository):
    hook = repository / "hook"
    hook.write_text(f"#!/bin/sh\ntouch {repository}/ran\n")
    hook.chmod(0o755)
    subprocess.run(["git", "-C", str(repository), "config", "core.fsmonitor", str(hook)], check=True)
    found(repository)
    assert not (repository / "ran").exists()


def test_secrets_are_left_out_and_named(tmp_path):
    # Put together here, so that no scanner takes this file for a leak.
    key = "-----BEGIN " + "RSA PRIVATE KEY-----\n"
    files(
        tmp_path,
        {"key.py": key, "token.py": "t = 'ghp_" + "a1B2" * 9 + "'", "credentials.py": "x", "good.py": "sk-learn"},
    )
    skipped = Skipped()
    assert set(found(tmp_path, skipped=skipped)) == {"good.py"}
    assert {os.path.basename(name) for name in skipped.secrets} == {"key.py", "token.py", "credentials.py"}
    assert set(found(tmp_path, allow_secrets=True)) == {"key.py", "token.py", "credentials.py", "good.py"}


@pytest.mark.parametrize(
    "name", [".env", ".env.local", "server.PEM", "id_rsa", "id_work", ".npmrc", ".netrc", "a.kdbx"]
)
def test_names_of_secrets(name):
    assert secret_name(name)


@pytest.mark.parametrize(
    "token", ["AKIA" + "Z" * 16, "sk-" + "a" * 30, "sk-proj-" + "a" * 30, "AIza" + "b" * 35, "xoxb-" + "1" * 12]
)
def test_shapes_of_secrets(token):
    assert secret_content(f"key = '{token}'".encode())
    assert not secret_content(f"key = '{token[:6]}'".encode())


@pytest.mark.parametrize("name", ["environment.py", "id_map.py", "pem.py", "keys.py"])
def test_names_of_no_secrets(name):
    assert not secret_name(name)


def test_files_that_vanish_or_change_during_the_walk(tmp_path):
    files(tmp_path, {"a.py": "a", "b.py": "b", "c/d.py": "d", "e.py": "e"})
    skipped = Skipped()
    walking = walk([tmp_path], skipped=skipped)
    next(walking)
    (tmp_path / "b.py").unlink()
    (tmp_path / "c" / "d.py").unlink()
    (tmp_path / "c").rmdir()
    (tmp_path / "e.py").unlink()
    (tmp_path / "e.py").symlink_to("/etc/passwd")
    assert list(walking) == []
    assert skipped.counts == {"vanished": 1, "unreadable": 1, "link": 1}


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_what_may_not_be_read_is_counted(tmp_path):
    files(tmp_path, {"a.py": "a", "b/c.py": "c"})
    (tmp_path / "a.py").chmod(0)
    (tmp_path / "b").chmod(0)
    skipped = Skipped()
    assert found(tmp_path, skipped=skipped) == {}
    assert skipped.counts == {"unreadable": 2}
    (tmp_path / "b").chmod(0o700)


def test_a_file_is_taken_once(tmp_path):
    files(tmp_path, {"a.py": "a"})
    os.link(tmp_path / "a.py", tmp_path / "b.py")
    assert set(found(tmp_path, tmp_path / "a.py")) == {"a.py"}


def test_wrong_arguments_are_refused_before_the_walk(tmp_path):
    with pytest.raises(InputInvalid, match="no such file"):
        walk([tmp_path / "nothing"])
    with pytest.raises(OptionError, match="size"):
        walk([tmp_path], max_file_size=0)
    with pytest.raises(OptionError, match="glob"):
        walk([tmp_path], include=["!"])


def test_chunks_are_bounded_and_whole():
    for text in ("", "a\n" * CHUNK, "x" * (2 * CHUNK + 1), "é" * 10):
        parts = list(chunks(text))
        assert "".join(parts) == text
        assert all(0 < len(part) <= CHUNK for part in parts)
    assert all(part.endswith("\n") for part in chunks("abc\n" * CHUNK))


def test_documents_are_tokenized_in_order_and_few_at_a_time():
    taken = 0

    def texts():
        nonlocal taken
        for index in range(50):
            taken = index + 1
            yield str(index), "x" * index

    def tokenize(text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    documents = tokenize_documents(texts(), tokenize, workers=2)
    assert next(documents)[0] == "0"
    assert taken <= 9
    assert [(name, len(tokens)) for name, tokens in documents] == [(str(index), index) for index in range(1, 50)]


def test_a_tokenizer_that_fails_ends_the_run_and_its_threads():
    def tokenize(text: str) -> np.ndarray:
        raise ZeroDivisionError

    before = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        list(tokenize_documents([("a", "b")] * 20, tokenize, workers=2))
    assert threading.active_count() == before
