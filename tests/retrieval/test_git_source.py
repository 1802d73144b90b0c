"""A revision of a git repository is read without a checkout, and runs no program of the repository."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from stores import read
from support.repository import Repository

from rest_local.errors import InputInvalid, RestLocalError
from rest_local.retrieval import Skipped
from rest_local.retrieval.sources import Git
from rest_local.retrieval.sources.listing import git_command, git_environment

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="the program git is not installed")
KEY = "AKIA" + "Z" * 16  # joined here, so that no secret scanner reports this file


def out(path: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(path), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def texts_of(source: Git, skipped: Skipped | None = None, **options: Any) -> dict[str, str | None]:
    """Return the texts by their names without the repository."""
    found = list(read(source, skipped or Skipped(), **options))
    return {text.name.removeprefix(f"{source.repository}@"): text.text for text in found}


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    made = Repository(tmp_path / "repo@sitory")
    (made.path / "sub").mkdir()
    made.commit("one", {"a.py": "first\n", "sub/b.py": "bee\n"})
    made.git("branch", "old")
    return made


def test_the_files_of_a_revision_without_a_checkout(repository: Repository) -> None:
    repository.commit("two", {"a.py": "second\n", "c.py": "see\n"})
    (repository.path / "a.py").write_text("not committed\n")
    (repository.path / "d.py").write_text("not tracked\n")
    path = str(repository.path)
    assert texts_of(Git(path)) == {"HEAD:a.py": "second\n", "HEAD:c.py": "see\n", "HEAD:sub/b.py": "bee\n"}
    assert texts_of(Git(path, "old")) == {"old:a.py": "first\n", "old:sub/b.py": "bee\n"}
    commit = out(repository.path, "rev-parse", "old")
    assert texts_of(Git(path, commit)) == {f"{commit[:12]}:a.py": "first\n", f"{commit[:12]}:sub/b.py": "bee\n"}
    assert texts_of(Git(path, "old", include=("*.py",), exclude=("sub/",))) == {"old:a.py": "first\n"}


def test_a_bare_repository_and_a_subdirectory(repository: Repository, tmp_path: Path) -> None:
    bare = tmp_path / "bare.git"
    out(tmp_path, "clone", "-q", "--bare", str(repository.path), str(bare))
    assert texts_of(Git(str(bare))) == {"HEAD:a.py": "first\n", "HEAD:sub/b.py": "bee\n"}
    assert set(texts_of(Git(str(repository.path / "sub")))) == {"HEAD:a.py", "HEAD:sub/b.py"}


def test_what_a_walk_skips_is_skipped(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    (repository.path / ".ci").mkdir()
    repository.commit(
        "more",
        {
            "binary.py": b"a\0b",
            "large.py": "x = 1\n" * 100,
            "wide.py": "wide".encode("utf-16"),
            "key.py": f"'{KEY}'\n",
            "credentials.py": "x",
            "x.unknown": "x",
            ".ci/hidden.py": "x",
            "bytes.py": b"caf\xe9\n",
            os.fsdecode(b"caf\xe9.py"): "name\n",
            "new\nline\tand tab.py": "strange\n",
            "empty.py": "",
        },
    )
    (repository.path / "link.py").symlink_to("a.py")
    Repository(repository.path / "module").commit("inner", {"i.py": "inner\n"})
    repository.commit("link and submodule", {})
    skipped = Skipped()
    found = texts_of(Git(str(repository.path), max_file_size=300), skipped)
    assert set(found) == {
        *("HEAD:a.py", "HEAD:sub/b.py", "HEAD:bytes.py", "HEAD:wide.py", "HEAD:new\nline\tand tab.py"),
        f"HEAD:{os.fsdecode(bytes([99, 97, 102, 233]))}.py",
    }
    assert (found["HEAD:bytes.py"], found["HEAD:wide.py"]) == ("café\n", "wide")
    assert dict(skipped.counts) == {
        "binary": 1, "too large": 1, "secret": 2, "hidden": 1, "link": 1, "submodule": 1,
        "empty": 1, "not a wanted kind of file": 1,
    }  # fmt: skip
    monkeypatch.setenv("GIT_DIR", "/nowhere")  # A hook of git sets it.
    assert set(texts_of(Git(str(repository.path), allow_secrets=True))) > set(found)


def test_after_a_branch_moved_unchanged_blobs_are_not_read(repository: Repository) -> None:
    source = Git(str(repository.path)).prepared()
    known = {text.name: text.state for text in read(source, Skipped()) if text.state}
    assert all(state.mtime_ns > 0 for state in known.values())
    assert known[f"{source.repository}@HEAD:a.py"].sha256 == hashlib.sha256(b"first\n").digest()
    repository.commit("two", {"a.py": "other\n"})  # The size is the same.

    def unchanged(name: str, size: int, mark: int) -> bool:
        return known[name][1:3] == (size, mark)

    assert texts_of(source, unchanged=unchanged) == {"HEAD:a.py": None, "HEAD:sub/b.py": None}
    moved = source.prepared()
    assert (moved.revision, source.commit) == ("HEAD", out(repository.path, "rev-parse", "HEAD~"))
    assert moved.commit == out(repository.path, "rev-parse", "HEAD")
    assert texts_of(moved, unchanged=unchanged) == {"HEAD:a.py": "other\n", "HEAD:sub/b.py": None}


@pytest.mark.parametrize(
    ("folder", "revision", "complaint"),
    [
        ("gone", "HEAD", "no such directory; clone it first"),
        (".", "HEAD", "not a git repository"),
        ("repo@sitory", "none", "no revision 'none'"),
        ("repo@sitory", "HEAD:a.py", "no revision"),
        ("empty", "HEAD", "no revision 'HEAD'"),
    ],
)
def test_what_is_no_revision_is_named(
    repository: Repository, tmp_path: Path, folder: str, revision: str, complaint: str
) -> None:
    Repository(tmp_path / "empty")
    source = Git(str(tmp_path / folder), revision)
    for use in (lambda: read(source, Skipped()), source.prepared):
        with pytest.raises(InputInvalid, match=complaint):
            use()


def test_without_git_the_way_out_is_named(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RestLocalError, match="install it"):
        read(Git(str(repository.path)), Skipped())


def spring(repository: Repository, mark: Path) -> None:
    """Set everything in the configuration and the attributes that could make git run a program."""
    trap = mark.parent / "trap"
    trap.write_text(f"#!/bin/sh\ntouch '{mark}'\ncat\n")
    trap.chmod(0o755)
    for name in (
        *("core.fsmonitor", "core.pager", "core.editor", "core.sshCommand", "core.alternateRefsCommand", "gpg.program"),
        *(
            "diff.external",
            "diff.x.command",
            "diff.x.textconv",
            "filter.x.smudge",
            "filter.x.clean",
            "filter.x.process",
        ),
        *("interactive.diffFilter", "credential.helper", "filter.x.process", "alias.ls-tree", "alias.log"),
    ):
        repository.git("config", name, f"!{trap}" if name.startswith("alias") else str(trap))
    for name, value in (
        *(("log.showSignature", "true"), ("core.hooksPath", str(mark.parent)), ("diff.submodule", "log")),
        *(("diff.noprefix", "true"), ("diff.suppressBlankEmpty", "true"), ("diff.mnemonicPrefix", "true")),
        *(("diff.orderFile", "/nowhere"), ("diff.relative", "true"), ("color.ui", "always"), ("format.pretty", "full")),
        *(("diff.renames", "copies"), ("diff.context", "0"), ("diff.interHunkContext", "9"), ("log.follow", "true")),
    ):
        repository.git("config", name, value)
    (repository.path / ".git" / "info" / "attributes").write_text("* filter=x diff=x\n")
    for hook in ("post-checkout", "pre-commit", "fsmonitor-watchman", "reference-transaction"):
        (repository.path / ".git" / "hooks").mkdir(exist_ok=True)
        shutil.copy(trap, repository.path / ".git" / "hooks" / hook)
        shutil.copy(trap, mark.parent / hook)


def test_no_program_of_the_repository_runs(repository: Repository, tmp_path: Path) -> None:
    repository.commit("two", {"a.py": "first\n\nsecond\n"})
    plain = texts_of(Git(str(repository.path), history=True))
    mark = tmp_path / "sprung"
    spring(repository, mark)
    assert texts_of(Git(str(repository.path), history=True)) == plain
    assert not mark.exists()
    subprocess.run(["git", "-C", str(repository.path), "diff", "HEAD~"], capture_output=True, check=False)
    assert mark.exists()  # plain git runs one


@pytest.mark.parametrize("how", ["signature", "missing blob"])
def test_plain_git_would_run_a_program_and_ours_does_not(repository: Repository, tmp_path: Path, how: str) -> None:
    path, mark, trap = repository.path, tmp_path / "sprung", tmp_path / "trap"
    trap.write_text(f"#!/bin/sh\ntouch '{mark}'\nexit 1\n")
    trap.chmod(0o755)
    if how == "signature":
        header, _, message = out(path, "cat-file", "commit", "HEAD").partition("\n\n")
        signature = "gpgsig -----BEGIN PGP SIGNATURE-----\n \n x\n -----END PGP SIGNATURE-----"
        (tmp_path / "signed").write_text(f"{header}\n{signature}\n\n{message}\n")
        signed = out(path, "hash-object", "-t", "commit", "-w", str(tmp_path / "signed"))
        repository.git("reset", "--quiet", signed)
        settings = {"log.showSignature": "true", "gpg.program": str(trap)}
    else:
        blob = out(path, "rev-parse", "HEAD:a.py")
        (path / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
        origin = {"url": str(path), "promisor": "true", "uploadpack": str(trap)}
        settings = {"core.repositoryFormatVersion": "1", "extensions.partialClone": "origin"}
        settings |= {f"remote.origin.{name}": value for name, value in origin.items()}
    for name, value in settings.items():
        repository.git("config", name, value)
    for question in (("log", "--patch", "--format=%H"), ("cat-file", "-p", "HEAD:a.py")):
        subprocess.run(git_command(path, *question), capture_output=True, env=git_environment(), check=False)
    assert not mark.exists()
    subprocess.run(["git", "-C", str(path), "log", "--patch", "--format=%H"], capture_output=True, check=False)
    assert mark.exists()


def test_missing_and_damaged_blobs_are_counted(repository: Repository) -> None:
    path = repository.path
    for name, damaged in (("a.py", None), ("sub/b.py", b"damage")):
        blob = out(path, "rev-parse", f"HEAD:{name}")
        stored = path / ".git" / "objects" / blob[:2] / blob[2:]
        stored.chmod(0o600)
        stored.unlink() if damaged is None else stored.write_bytes(damaged)
    skipped = Skipped()
    assert texts_of(Git(str(path)), skipped) == {}
    assert skipped.counts == {"missing in the repository": 2}


def test_a_process_of_git_does_not_outlive_the_reading(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    processes: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def noted(*arguments: Any, **options: Any) -> Any:
        processes.append(popen(*arguments, **options))
        return processes[-1]

    monkeypatch.setattr(subprocess, "Popen", noted)
    for _ in range(2):
        reading = read(Git(str(repository.path), history=True), Skipped())
        next(reading)
        reading.close()
    assert len(processes) >= 4
    assert all(process.returncode is not None for process in processes)


def history(repository: Repository, skipped: Skipped | None = None, **options: Any) -> dict[str, str | None]:
    """Return what the history adds to the tree, without the commits, and a * for each older text of a file."""
    found: dict[str, str | None] = {}
    for name, text in texts_of(Git(str(repository.path), history=True, **options), skipped).items():
        revision, _, path = name.partition(":")
        if revision != "HEAD":
            assert len(revision) == 12
            while path in found:
                path += "*"
            found[path] = text
    return found


def test_the_history_of_a_checkout(tmp_path: Path) -> None:
    """Three commits, which add a line, change it, and add a key and another file."""
    made = Repository(tmp_path / "repository")
    for text in ("first = 1\n", "second = 2\n"):
        made.commit("+++ b/no file", {"naïve name.py": f"import os\n{text}print(os)\n"})
    made.commit(
        "third", {"credentials.py": "x\n", "b.py": "++ b/strange\n-- a/strange\ncommit me\n", "c.py": f"'{KEY}'\n"}
    )
    skipped = Skipped()
    newest = {"b.py": "++ b/strange\n-- a/strange\ncommit me\n"}
    assert history(made, skipped) == {
        **newest,
        "naïve name.py": "import os\nsecond = 2\nprint(os)\n",
        "naïve name.py*": "import os\nfirst = 1\nprint(os)\n",
    }
    assert skipped.counts["secret"] == 4  # two in the history, two in the tree
    assert history(made, commits=1) == newest
    assert set(history(made, exclude=("b.py",))) == {"naïve name.py", "naïve name.py*"}
