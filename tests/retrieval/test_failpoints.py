"""Every way to change a datastore is atomic, step by step: the commit protocol is kept, a kill or a failing disk leaves
exactly the commits that were done, and so does a power cut.

The steps have names, see `failpoints`. Imports and repairs have tests of their own in `test_moving`, `test_repair`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from changes import HOW, change, copied, left_over, opened, prepared, set_small
from edited import Folder, text_on_disk, texts_in
from failpoints import Disk, Named, fail_at, put_tree

from rest_local.errors import DatastoreUnwritable
from rest_local.retrieval.files import Files
from rest_local.retrieval.home import read_manifest

pytestmark = pytest.mark.usefixtures("unsynced")

Commit = tuple[dict[str, str], int]
"""The texts and the revision."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    set_small(monkeypatch.setattr)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return prepared(tmp_path)


def commit_of(path: Path) -> Commit:
    return texts_in(path), read_manifest(path).revision


def commits_of(folder: Folder, how: str) -> tuple[list[Commit], Named]:
    """The commits before, during and after a change, and its steps."""
    changed = copied(folder, "counted")
    commits = [commit_of(changed.path)]

    def note(step: int, name: str) -> None:
        if files.renamed == len(commits):
            commits.append(commit_of(changed.path))

    files = Named(note)
    change(changed, how, files)
    return commits, files


def finish(folder: Folder, how: str, last: Commit) -> None:
    """The change works now, and its commit or the next one deletes what was left over."""
    change(folder, how, Files())
    assert texts_in(folder.path) == last[0]
    if how == "forget":
        assert not any("secret" in text for text in text_on_disk(folder.path))
    change(folder, "add", Files())
    assert left_over(folder.path) == set()


@pytest.mark.parametrize("how", HOW)
def test_the_commit_protocol(folder: Folder, how: str) -> None:
    """Each file is synced after it was written; names are synced before the commit, and the commit before anything is
    deleted.
    """
    commits, files = commits_of(folder, how)
    assert files.renamed == files.durable == len(commits) - 1 > 0
    unsynced, unnamed, is_durable = set[str](), False, True
    for name in files.trace:
        action, _, what = name.partition(" ")
        if action in ("create", "write"):
            unsynced.add(what)
        elif name == "sync index":
            unnamed, is_durable = False, True
        elif action == "sync":
            unsynced.discard(what)
        elif action == "publish":
            assert f"staged {what}" not in unsynced
        elif name == "rename manifest":
            assert not unnamed
            assert not unsynced
            is_durable = False
        elif action == "delete" and not what.startswith("staged"):
            assert is_durable or what == "manifest"
        unnamed |= action in ("publish", "create") and not what.startswith(("staged", "manifest"))


@pytest.mark.parametrize("how", HOW)
def test_a_disk_that_fails_at_a_step_leaves_the_commits_before(
    folder: Folder, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    commits, counted = commits_of(folder, how)
    for step in range(1, counted.steps + 1):
        again, files = copied(folder, "again"), Named(fail_at(step, errno.ENOSPC))
        error = ""
        try:
            change(again, how, files)
        except DatastoreUnwritable as caught:
            error = str(caught)
        failed = files.trace[step - 1]
        assert commit_of(again.path) == commits[files.durable], failed
        if files.durable and "could not be merged" in caplog.text:  # the change itself is done
            error = caplog.text
        assert error or failed.startswith("delete"), failed
        assert not error or (os.strerror(errno.ENOSPC) in error and str(again.path) in error)
        caplog.clear()
        finish(again, how, commits[-1])
        shutil.rmtree(again.path)


@pytest.mark.parametrize("how", ["update and merge", "add", "forget", "rebuild"])
def test_a_disk_that_fails_for_good_leaves_a_whole_commit(folder: Folder, how: str) -> None:
    commits, counted = commits_of(folder, how)
    for step in range(1, counted.steps + 1):
        again, files = copied(folder, "again"), Named(fail_at(step, errno.EIO, for_good=True))
        with contextlib.suppress(DatastoreUnwritable):
            change(again, how, files)
        assert commit_of(again.path) == commits[files.renamed], files.trace[step - 1]
        finish(again, how, commits[-1])
        shutil.rmtree(again.path)


_KILLED = """
import os, signal, sys
sys.path[:0] = sys.argv[2:]
from pathlib import Path
from changes import change, in_child, opened
from failpoints import Named

def die(step, name):
    if step == killed_at:
        os.kill(os.getpid(), signal.SIGKILL)

in_child()
for line in sys.stdin.read().splitlines():
    how, _, steps = line.partition(":")
    for killed_at in range(1, int(steps) + 1):
        child = os.fork()
        if child == 0:
            directory = Path(sys.argv[1])
            change(opened(directory / "source", directory / f"{how} {killed_at}"), how, Named(die))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL, (how, killed_at, status)
"""


def test_killed_at_every_step(folder: Folder) -> None:
    """By SIGKILL, in a process for each kind of change and step."""
    directory = folder.path.parent
    found = {}
    for how in HOW:
        found[how] = commits_of(folder, how)
        shutil.rmtree(directory / "counted")
        for step in range(1, found[how][1].steps + 1):
            copied(folder, f"{how} {step}")
    here = Path(__file__).parent
    command = [sys.executable, "-c", _KILLED, str(directory), str(here), str(here.parents[1])]
    lines = "\n".join(f"{how}:{files.steps}" for how, (_, files) in found.items())
    single = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, input=lines, text=True, check=True, env=single, timeout=300)
    for how, (commits, files) in found.items():
        for step, failpoint in enumerate(files.trace, 1):
            again = opened(folder.source, directory / f"{how} {step}")
            done = files.trace[: step - 1].count("rename manifest")
            assert commit_of(again.path) == commits[done], f"{how}, killed before: {failpoint}"
            finish(again, how, commits[-1])


@pytest.mark.parametrize("how", HOW)
def test_a_power_cut_before_any_step_leaves_a_whole_commit(folder: Folder, how: str) -> None:
    commits, _ = commits_of(folder, how)
    changed = copied(folder, "changed")
    disk = Disk(changed.path)
    change(changed, how, disk)
    disk.look()
    disk.close()
    again = opened(folder.source, folder.path.parent / "after")
    seen = []
    for tree in disk.trees:
        put_tree(again.path, tree)
        seen.append(commit_of(again.path))
        assert seen[-1] in commits
        finish(again, how, commits[-1])
    assert all(commit in seen for commit in commits)
    assert seen[-1] == commits[-1]


@pytest.mark.parametrize("how", HOW)
def test_a_directory_that_cannot_be_written_is_one_error(folder: Folder, how: str, unprivileged: None) -> None:
    """And so is a real limit on the size of files."""
    before, paths = commit_of(folder.path), sorted(folder.path.iterdir())
    folder.path.chmod(0o500)
    try:
        with pytest.raises(DatastoreUnwritable, match="EACCES"):
            change(folder, how, Files())
    finally:
        folder.path.chmod(0o700)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (150, limits[1]))
        with pytest.raises(DatastoreUnwritable, match="EFBIG"):
            change(folder, how, Files())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert commit_of(folder.path) == before
    change(folder, "add", Files())
    assert left_over(folder.path) <= {place.parent.name for place in folder.path.glob("staging-*/plan.json")}
    assert sorted(folder.path.iterdir()) != paths
