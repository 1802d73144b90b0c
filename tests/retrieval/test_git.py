"""git in a hostile checkout runs no program that the configuration names, although plain git would."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from rest_local.retrieval.sources.listing import git_command, git_environment

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="the program git is not installed")


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """A program that creates a file when it runs."""
    program = tmp_path / "trap"
    program.write_text(f"#!/bin/sh\ntouch '{tmp_path}/sprung'\nexit 1\n")
    program.chmod(0o755)
    return program


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository of one commit with one file."""
    path = tmp_path / "repository"
    path.mkdir()
    (path / "a.py").write_text("first = 1\n")
    run(path, "init", "--quiet")
    run(path, "add", ".")
    run(path, "commit", "--quiet", "-m", "one")
    return path


def run(repository: Path, *arguments: str, text: str | None = None) -> str:
    """Run plain git. Returns its output, whatever the exit code."""
    own = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(repository), *own, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, input=text, timeout=30, check=False)
    return done.stdout.strip()


def sprung(repository: Path, *arguments: str) -> tuple[bool, bool]:
    """Whether the trap springs for plain git, and for git with our settings."""
    mark = repository.parent / "sprung"
    found = []
    for command, environment in (
        (["git", "-C", str(repository), *arguments], dict(os.environ)),
        (git_command(repository, *arguments), git_environment()),
    ):
        mark.unlink(missing_ok=True)
        subprocess.run(command, capture_output=True, env=environment, timeout=30, check=False)
        found.append(mark.exists())
    return found[0], found[1]


def test_no_program_checks_signatures(repository: Path, trap: Path) -> None:
    header, _, message = run(repository, "cat-file", "commit", "HEAD").partition("\n\n")
    signature = "gpgsig -----BEGIN PGP SIGNATURE-----\n \n x\n -----END PGP SIGNATURE-----"
    signed = run(
        repository, "hash-object", "-t", "commit", "-w", "--stdin", text=f"{header}\n{signature}\n\n{message}\n"
    )
    run(repository, "reset", "--quiet", signed)
    run(repository, "config", "log.showSignature", "true")
    run(repository, "config", "gpg.program", str(trap))
    assert sprung(repository, "log", "--patch", "--format=%H") == (True, False)


def test_no_missing_blob_is_fetched(repository: Path, trap: Path) -> None:
    blob = run(repository, "rev-parse", "HEAD:a.py")
    (repository / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    for name, value in (
        ("core.repositoryFormatVersion", "1"),
        ("extensions.partialClone", "origin"),
        ("remote.origin.url", str(repository)),
        ("remote.origin.promisor", "true"),
        ("remote.origin.uploadpack", str(trap)),
    ):
        run(repository, "config", name, value)
    assert sprung(repository, "log", "--patch", "--format=%H") == (True, False)
    assert sprung(repository, "cat-file", "-p", blob) == (True, False)


def test_no_monitor_watches_the_files(repository: Path, trap: Path) -> None:
    run(repository, "config", "core.fsmonitor", str(trap))
    assert sprung(repository, "status") == (True, False)
