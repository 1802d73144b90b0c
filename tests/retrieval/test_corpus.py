"""A walk takes the text files that a user means. Nothing on the disk makes it crash, hang or read forbidden files."""

import contextlib
import json
import os
import socket
import subprocess
import threading
import tracemalloc
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from stores import walk_files
from support.repository import Repository

from rest_local.errors import printable
from rest_local.retrieval import Skipped, tokenize_documents
from rest_local.retrieval.sources import listing
from rest_local.retrieval.sources.source import secret_content, secret_name
from rest_local.retrieval.sources.walk import MAX_LINE


def files(root: Path, content: dict[str, str | bytes]) -> Path:
    for name, data in content.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return root


def found(*paths: Path, skipped: Skipped | None = None, **options: Any) -> dict[str, str]:
    root = paths[0].resolve() if paths[0].is_dir() else paths[0].resolve().parent
    return {os.path.relpath(name, root): text for name, text, _ in walk_files(paths, skipped, filters=options)}


def test_text_files_by_extension_or_glob(tmp_path):
    files(tmp_path, {"a.py": "a", "b.bin": "b", "Makefile": "m", "sub/c.rs": "c", "sub/node_modules/d.js": "d"})
    assert set(found(tmp_path)) == {"a.py", "Makefile", "sub/c.rs"}
    assert set(found(tmp_path, include=["*.bin", "sub/*.rs"])) == {"b.bin", "sub/c.rs"}
    assert set(found(tmp_path, exclude=["sub/"])) == {"a.py", "Makefile"}
    assert set(found(tmp_path / "b.bin")) == {"b.bin"}


def test_links_fifos_sockets_and_devices_are_not_followed(tmp_path, monkeypatch):
    root = files(tmp_path / "root", {"a.py": "a"})
    files(tmp_path / "outside", {"secret.py": "s"})
    (root / "loop").symlink_to(root)
    (root / "out").symlink_to(tmp_path / "outside")
    (root / "link.py").symlink_to(tmp_path / "outside" / "secret.py")
    os.mkfifo(root / "fifo.py")
    listener = socket.socket(socket.AF_UNIX)
    monkeypatch.chdir(root)  # the path of a socket has a limit
    listener.bind("socket.py")
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
            "binary.py": b"a\0b", "utf16.py": "wi\0de".encode("utf-16"), "large.py": "x = 1\n" * 200,
            "line.js": "x" * (MAX_LINE + 1), "mean.js": ("y" * 900 + "\n") * 100, "empty.py": "", "good.py": "x\n",
        },
    )  # fmt: skip
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("inside.py", "z")
    skipped = Skipped()
    assert set(found(tmp_path, skipped=skipped, max_file_size=1000)) == {"good.py"}
    unwanted = {"binary": 2, "empty": 1, "not a wanted kind of file": 1}
    assert skipped.counts == {**unwanted, "too large": 3}
    skipped = Skipped()
    assert set(found(tmp_path, skipped=skipped)) == {"good.py", "large.py"}
    assert skipped.counts["minified"] == 2
    assert "2 minified" in skipped.summary()
    assert Skipped().summary() == "nothing"


def test_any_bytes_become_valid_text(tmp_path):
    content = {"a.py": b"\xff \xfe ok \xed\xa0\x80 \xc3", "b.py": b"\xef\xbb\xbfx\r\ny"}
    wide = {f"{codec}.py": "\ufeff漢字".encode(codec) for codec in ("utf-16-le", "utf-16-be", "utf-32-le")}
    other = {"odd.py": b"\xff\xfea", "latin.py": b"caf\xe9 \x80\n", "mixed.py": b"\xc3\xa9\xe9"}
    files(tmp_path, {**content, **wide, **other})
    texts = found(tmp_path)
    assert {texts[name] for name in wide} == {"漢字"}
    assert [texts[name] for name in other] == ["\ufffd", "café €\n", "é\ufffd"]
    assert texts["b.py"] == "x\r\ny"
    assert "ok" in texts["a.py"]
    for text in texts.values():
        text.encode("utf-8")


def test_of_a_notebook_the_cells_are_taken(tmp_path: Path) -> None:
    """Their outputs are not, which can be a line of a megabyte."""
    plot = [{"data": {"image/png": "x" * 2 * MAX_LINE}}]
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "text \ud800"]},
        {"cell_type": "code", "source": "import numpy\nplot()", "outputs": plot},
    ]
    damaged = {"none.ipynb": '{"x": 1}', "cells.ipynb": '{"cells": [1]}', "deep.ipynb": "[" * 3000}
    files(tmp_path, {"a.ipynb": json.dumps({"cells": cells}), **damaged})
    texts = found(tmp_path)
    assert texts == {"a.ipynb": "# Title\ntext ?\n\nimport numpy\nplot()", **damaged}


def test_names_that_are_not_utf8(tmp_path):
    (tmp_path / os.fsdecode(b"caf\xe9.py")).write_text("x")
    ((name, text, _),) = walk_files([tmp_path])
    assert os.fsencode(name).endswith(b"caf\xe9.py")
    assert text == "x"
    assert printable(name).endswith("caf\ufffd.py")
    assert printable("a\x1b[31m\n") == "a\ufffd[31m\ufffd"


def test_hidden_and_ignored_files_without_git(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    content = {
        ".gitignore": "*.log.py\n/build/\n", "a.py": "a", "x.log.py": "x", "build/b.py": "b", ".hidden/h.py": "h",
    }  # fmt: skip
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
        tmp_path, {".gitignore": "ignored/\n", "a.py": "a", "ignored/b.py": "b", ".ci/c.py": "c", "kept/d.py": "d"}
    )


def test_a_git_work_tree_gives_what_git_would_track(repository):
    subprocess.run(["git", "-C", str(repository), "add", "a.py"], check=True)
    assert set(found(repository)) == {"a.py", "kept/d.py"}
    assert set(found(repository / "kept")) == {"d.py"}


def test_a_tracked_directory_that_has_become_a_link_is_not_followed(repository, tmp_path_factory):
    subprocess.run(["git", "-C", str(repository), "add", "kept/d.py"], check=True)
    outside = files(tmp_path_factory.mktemp("outside"), {"d.py": "not ours"})
    (repository / "kept" / "d.py").unlink()
    (repository / "kept").rmdir()
    (repository / "kept").symlink_to(outside)
    skipped = Skipped()
    assert set(found(repository, skipped=skipped)) == {"a.py"}
    assert skipped.counts["link"] >= 1


@pytest.fixture
def outer(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a repository with two submodules, one of them not initialised, and repositories that git does not track."""
    library = Repository(tmp_path_factory.mktemp("library") / "repository")
    library.commit("all", {"s.py": "s", ".gitignore": "*.log.py\n", "deep/t.py": "t"})
    for module in ("vendor.js", "missing"):
        add = ("-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(library.path), module)
        subprocess.run(["git", "-C", str(repository), *add], check=True)
    subprocess.run(["git", "-C", str(repository), "submodule", "--quiet", "deinit", "-f", "missing"], check=True)
    Repository(repository / "nested").commit("all", {"n.py": "n"})
    Repository(repository / "vendor.js" / "deep" / "inner").commit("all", {"i.py": "i"})
    Repository(repository / "ignored" / "other").commit("all", {"o.py": "o"})
    return files(repository, {"vendor.js/x.log.py": "x", "vendor.js/new.py": "u"})


INSIDE = {"vendor.js/s.py", "vendor.js/deep/t.py", "vendor.js/new.py"}


def test_submodules_are_taken_by_their_own_rules(outer: Path) -> None:
    skipped = Skipped()
    assert set(found(outer, skipped=skipped)) == {"a.py", "kept/d.py", *INSIDE}
    assert dict(skipped.counts) == {
        "hidden": 4, "another repository": 2, "submodule that is not initialised": 1,
    }  # fmt: skip
    assert set(found(outer, include=["vendor.js/**/*.py"])) == INSIDE


def test_names_in_submodules_are_found_without_a_walk(outer: Path) -> None:
    """An update after a change asks for them."""
    asked = [*INSIDE, "a.py", "vendor.js/x.log.py", "nested/n.py", "ignored/other/o.py", "vendor.js/gone.py"]
    only = [str(outer.resolve() / name) for name in asked]
    taken = {os.path.relpath(each.name, outer.resolve()) for each in walk_files([outer], only=only)}
    assert taken == {"a.py", *INSIDE}


def test_no_program_of_the_repository_is_run(repository):
    hook = repository / "hook"
    hook.write_text(f"#!/bin/sh\ntouch {repository}/ran\n")
    hook.chmod(0o755)
    subprocess.run(["git", "-C", str(repository), "config", "core.fsmonitor", str(hook)], check=True)
    found(repository)
    assert not (repository / "ran").exists()


def test_secrets_are_left_out_and_named(tmp_path):
    # Joined here, so that no secret scanner reports this file.
    key = "-----BEGIN " + "RSA PRIVATE KEY-----\n"
    files(
        tmp_path,
        {"key.py": key, "token.py": "t = 'ghp_" + "a1B2" * 9 + "'", "credentials.py": "x", "good.py": "sk-learn"},
    )
    skipped = Skipped()
    assert set(found(tmp_path, skipped=skipped)) == {"good.py"}
    assert {os.path.basename(name) for name in skipped.secrets} == {"key.py", "token.py", "credentials.py"}
    assert set(found(tmp_path, allow_secrets=True)) == {"key.py", "token.py", "credentials.py", "good.py"}


NAMED = (".env", ".env.local", "server.PEM", "id_rsa", "id_work", ".npmrc", ".netrc", "a.kdbx", "credentials",
         "Credentials.json", "credentials-prod.yml", "credentials_backup")  # fmt: skip
HARMLESS = ("environment.py", "id_map.py", "pem.py", "keys.py")


@pytest.mark.parametrize("name", NAMED + HARMLESS)
def test_names_of_secrets(name):
    assert secret_name(name) == (name in NAMED)


MIXED = "aB3-_" * 20  # joined here, so that no secret scanner reports this file
LETTERS = MIXED.replace("-", "x").replace("_", "y")


@pytest.mark.parametrize(
    "parts",
    [
        ("AKIA", "Z" * 16),
        ("sk-", "a" * 30),
        ("sk-proj-", "a" * 30),
        ("AIza", "b" * 35),
        ("xoxb-", "1" * 12),
        ("sk-ant-", "api03-", MIXED[:90]),
        ("sk-svcacct-", MIXED[:60]),
        ("sk-proj-", "a-", MIXED[:60]),
        ("sk-or-", "v1-", "0123456789abcdef" * 4),
        ("pypi-", "AgEIcHlwaS5vcmc", MIXED),
        ("GOCSPX-", MIXED[:28]),
        ("rk_live_", LETTERS[:24]),
        ("eyJ", "hbGciOiJIUzI1NiJ9", ".", "eyJ", "zdWIiOiIxMjM0NTY3ODkwIn0", ".", LETTERS[:43]),
        ("AccountKey", "=", LETTERS[:86], "=="),
    ],
    ids=lambda parts: parts[0],
)
def test_shapes_of_secrets(parts):
    token = "".join(parts)
    for text in (f"key = '{token}'", f"KEY={token}\n", f"x;{token};y"):
        assert secret_content(text.encode())
    assert not secret_content(f"key = '{token[: min(12, len(token) // 2)]}'".encode())


@pytest.mark.parametrize(
    "text",
    [
        "class='sk-proj-navigation-item-with-many-words sk-or-something-else-entirely'",
        "pypi-server-with-a-very-long-name-that-goes-on-and-on-for-forty",
        "task-proj-" + "a1" * 20,
        "import sklearn; risk_live_view(); mark_live_" + "a" * 5,
        "eyJhbGciOiJIUzI1NiJ9.notatoken.x",
        "AccountKey=<your key>;AccountName=x",
    ],
)
def test_shapes_that_are_no_secrets(text):
    assert not secret_content(text.encode())


def test_files_that_vanish_or_change_during_the_walk(tmp_path):
    files(tmp_path, {"a.py": "a", "b.py": "b", "c/d.py": "d", "e.py": "e"})
    skipped = Skipped()
    walking = walk_files([tmp_path], skipped)
    next(walking)
    (tmp_path / "b.py").unlink()
    (tmp_path / "c" / "d.py").unlink()
    (tmp_path / "c").rmdir()
    (tmp_path / "e.py").unlink()
    (tmp_path / "e.py").symlink_to("/etc/passwd")
    assert list(walking) == []
    assert skipped.counts == {"vanished": 1, "unreadable": 1, "link": 1}


@pytest.mark.usefixtures("unprivileged")
def test_what_may_not_be_read_is_counted(tmp_path):
    files(tmp_path, {"a.py": "a", "b/c.py": "c"})
    (tmp_path / "a.py").chmod(0)
    (tmp_path / "b").chmod(0)
    skipped = Skipped()
    assert found(tmp_path, skipped=skipped) == {}
    assert skipped.counts == {"unreadable": 2}
    (tmp_path / "b").chmod(0o700)


def test_a_deep_tree_is_walked_to_its_end(tmp_path):
    """Deeper than Python's call stack. A path above the maximum length is counted as unreadable."""
    deep = 1300
    folder = str(tmp_path)
    for _ in range(deep):  # makedirs is recursive
        folder += "/d"
        os.mkdir(folder)
    Path(folder, "a.py").write_text("deep")
    Path(tmp_path, "b.py").write_text("shallow")
    skipped = Skipped()
    try:
        assert sorted(found(tmp_path, skipped=skipped).values()) == ["deep", "shallow"]
        assert skipped.counts == {}
    finally:
        subprocess.run(["rm", "-rf", str(tmp_path / "d")], check=True)


class Entry:
    """An entry that scandir returns for an invented directory."""

    def __init__(self, name: str, folder: bool) -> None:
        self.name, self.folder = name, folder

    def is_dir(self, *, follow_symlinks: bool) -> bool:
        assert not follow_symlinks
        return self.folder


FOLDERS = 30  # Each has 1 000 files. With 1 000 folders the peak is the same.


def test_skipped_files_are_counted_in_memory_that_does_not_depend_on_their_number(tmp_path, monkeypatch):
    """A generated tree: most files are unwanted, and the others have vanished when they are opened."""
    top = str(tmp_path.resolve())
    folders = [Entry(f"folder{number}", True) for number in range(FOLDERS)]
    names = [Entry(f"{number:03}.{'py' if number % 100 == 0 else f'x{number}'}", False) for number in range(1000)]
    monkeypatch.setattr(listing, "git_files", lambda root, only: None)
    monkeypatch.setattr(listing.os, "scandir", lambda path: contextlib.nullcontext(folders if path == top else names))
    skipped = Skipped()
    walking = walk_files([tmp_path], skipped)
    tracemalloc.start()
    try:
        assert list(walking) == []
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert skipped.counts == {"not a wanted kind of file": 990 * FOLDERS, "vanished": 10 * FOLDERS}
    assert sum(skipped.kinds.values()) == 990 * FOLDERS
    assert len(skipped.kinds) == 101
    assert len(skipped.summary()) < 300
    assert peak < 1_500_000  # the names alone are 2.4 MB


def test_a_gitignore_that_is_a_fifo_or_a_link_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    files(tmp_path, {"a.py": "a", "sub/b.py": "b", "rules": "*.py\n"})
    os.mkfifo(tmp_path / ".gitignore")  # reading one waits for a writer
    (tmp_path / "sub" / ".gitignore").symlink_to(tmp_path / "rules")
    assert set(found(tmp_path)) == {"a.py", "sub/b.py"}


def test_a_file_is_taken_once(tmp_path):
    files(tmp_path, {"a.py": "a"})
    os.link(tmp_path / "a.py", tmp_path / "b.py")
    assert set(found(tmp_path, tmp_path / "a.py")) == {"a.py"}
    files(tmp_path, {"sub/c.py": "c"})
    for roots in ((tmp_path, tmp_path / "sub"), (tmp_path / "sub", tmp_path), (tmp_path, tmp_path)):
        assert sorted(text.text for text in walk_files(roots)) == ["a", "c"]


def test_documents_are_tokenized_in_order_and_few_at_a_time(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    taken = 0

    def texts():
        nonlocal taken
        for index in range(50):
            taken = index + 1
            yield str(index), "x" * index

    def tokenize(text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    documents = tokenize_documents(texts(), SimpleNamespace(tokenize=tokenize))
    assert next(documents)[0] == "0"
    assert taken <= 9
    assert [(document.name, len(document.tokens)) for document in documents] == [
        (str(index), index) for index in range(1, 50)
    ]


def test_text_reaches_the_tokenizer_as_valid_utf8(tmp_path):
    """It comes in one piece, because the tokenizer knows where a cut changes no token."""
    pieces: list[str] = []

    def tokenize(text: str) -> np.ndarray:
        pieces.append(text)
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)  # strict

    content = {
        os.fsdecode(b"caf\xe9.py"): b"\xe9t\xe9\n" * 40_000,
        "surrogates.py": b"\xed\xa0\x80\xed\xb0\x80\n" * 40_000,
        "wide.py": "\U0001f600\n" * 100_000,
    }
    files(tmp_path, content)
    documents = [*walk_files([tmp_path]), ("from a caller", "a\ud800b\udfff"), ("\ud800", "c")]
    tokens = {name: tokens for name, tokens, _ in tokenize_documents(documents, SimpleNamespace(tokenize=tokenize))}
    assert len(tokens) == 5
    assert bytes(tokens["from a caller"].astype(np.uint8)).decode() == "a\ufffdb\ufffd"
    assert len(pieces) == 5


def test_a_tokenizer_that_fails_ends_the_run_and_its_threads():
    def tokenize(text: str) -> np.ndarray:
        raise ZeroDivisionError

    before = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        list(tokenize_documents([("a", "b")] * 20, SimpleNamespace(tokenize=tokenize)))
    assert threading.active_count() == before


def test_names_that_git_lists_are_not_held_in_memory(tmp_path, monkeypatch):
    """Both lists of git come as files: tracked names, some of them twice, and untracked names."""

    def run(command: list[str], stdout: Any, **options: Any) -> Any:
        if "ls-files" in command:
            kind = "b" if "--others" in command else "a"
            for number in range(500 * FOLDERS):
                stdout.write(f"{number // 1000:03}/{kind}{number % 1000:03}.x\0".encode() * (1 + number % 2))
        return subprocess.CompletedProcess(command, "check-ignore" in command, b"true")

    monkeypatch.setattr(listing.subprocess, "run", run)
    listed = listing.git_files(tmp_path)
    tracemalloc.start()
    try:
        count = sum(1 for _ in listed)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 1000 * FOLDERS
    assert peak < 2_000_000
