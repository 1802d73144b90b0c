"""Every way to change a datastore is atomic, step by step: the commit protocol is kept, a kill or a failing disk leaves
exactly the commits that were done, and so does a power cut.

The steps have names, see `failpoints`.
"""

import errno
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from changes import HOW, change, copied, left_over, prepared, set_small
from edited import Folder, text_on_disk, texts_in
from failpoints import Disk, Killed, Named, fail_at, kills, put_tree, shape, tree_of
from support.files import files_up_to

from rest_local.errors import DatastoreUnwritable
from rest_local.retrieval.files import Files
from rest_local.retrieval.home import read_manifest
from rest_local.retrieval.staging import clear

Commit = tuple[dict[str, str], int]
"""The texts and the revision."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folder]:
    """Make a folder of which only copies are changed. Segments of a few tokens are large ones."""
    with pytest.MonkeyPatch.context() as patch:
        set_small(patch.setattr)
        yield prepared(tmp_path_factory.mktemp("folder"))


@pytest.fixture(autouse=True)
def no_copies(folder: Folder) -> Iterator[None]:
    yield
    for path in folder.path.parent.iterdir():
        if path not in (folder.path, folder.source, folder.source.with_name("other")):
            shutil.rmtree(path)


def commit_of(path: Path) -> Commit:
    return texts_in(path), read_manifest(path).revision


class Finished:
    """Makes a change work again after it was broken off: once for each commit and kind of what was left over, or for
    one of `every` of them.
    """

    def __init__(self, how: str, last: Commit, every: int = 1) -> None:
        self.how, self.last, self.every = how, last, every
        self._seen: set[tuple[int, frozenset[tuple[str, int]]]] = set()

    def check(self, folder: Folder) -> None:
        """Check that the change works now, and that the last commit or the next writer deletes what was left over."""
        key = read_manifest(folder.path).revision, frozenset(shape(tree_of(folder.path)).items())
        if key not in self._seen:
            self._seen.add(key)
            if len(self._seen) % self.every:
                return
            change(folder, self.how, Files())
            assert texts_in(folder.path) == self.last[0]
            if self.how == "forget":
                assert not any("secret" in text for text in text_on_disk(folder.path))
            clear(folder.path)
            assert left_over(folder.path) == set()


@functools.cache
def killed(folder: Folder, how: str) -> tuple[list[Killed], list[Commit]]:
    """Return what kills leave of a change, and the commits before, during and after it."""
    changed, seen = copied(folder, "killed"), dict[int, Commit]()
    states = kills(changed.path, lambda files: change(changed, how, files))
    for state in states:
        put_tree(changed.path, state.tree)
        commit = commit_of(changed.path)
        assert commit == seen.setdefault(state.renamed, commit), f"{how}, killed before: {state.before}"
    assert seen[0] == commit_of(folder.path)
    assert len(seen) == max(seen) + 1 > 1
    return states, [seen[number] for number in sorted(seen)]


@pytest.mark.parametrize("how", HOW)
def test_the_commit_protocol(folder: Folder, how: str) -> None:
    """Each file is synced after it was written; names are synced before the commit, and the commit before anything is
    deleted.
    """
    files = Named()
    change(copied(folder, "changed"), how, files)
    assert files.renamed == files.durable > 0
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
def test_killed_before_any_step(folder: Folder, how: str) -> None:
    states, commits = killed(folder, how)
    again, finished = copied(folder, "again"), Finished(how, commits[-1])
    for state in states:
        put_tree(again.path, state.tree)
        finished.check(again)


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
    how, step = line.split(":")
    killed_at, directory = int(step), Path(sys.argv[1])
    child = os.fork()
    if child == 0:
        change(opened(directory / "source", directory / line), how, Named(die))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL, (line, status)
"""


def test_a_killed_process_leaves_what_is_tested(folder: Folder) -> None:
    """SIGKILL comes at some steps of each kind of change."""
    directory, places = folder.path.parent, dict[str, Path]()
    for how in HOW:
        counted = Named()
        change(copied(folder, "counted"), how, counted)
        commit = counted.trace.index("rename manifest") + 1
        for step in {2, commit - 1, commit, commit + 1, commit + 2, counted.steps}:
            places[f"{how}:{step}"] = copied(folder, f"{how}:{step}").path
        shutil.rmtree(directory / "counted")
    here = Path(__file__).parent
    command = [sys.executable, "-c", _KILLED, str(directory), str(here), str(here.parents[1])]
    single = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, input="\n".join(places), text=True, check=True, env=single, timeout=300)
    revision = read_manifest(folder.path).revision
    for name, place in places.items():
        states, _ = killed(folder, name.partition(":")[0])
        found = read_manifest(place).revision - revision, frozenset(shape(tree_of(place)).items())
        assert found in {(state.renamed, frozenset(shape(state.tree).items())) for state in states}, name


@pytest.mark.parametrize("how", HOW)
def test_a_disk_that_fails_at_a_step_leaves_the_commits_before(
    folder: Folder, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It fails for a moment, or at every fourth step for good. Then nothing can be cleared, as after a kill."""
    _, commits = killed(folder, how)
    counted, finished = Named(), Finished(how, commits[-1])
    change(copied(folder, "counted"), how, counted)
    for step in range(1, counted.steps + 1):
        for for_good in (False, True) if step % 4 == 0 else (False,):
            code = errno.EIO if for_good else errno.ENOSPC
            again, files = copied(folder, "again"), Named(fail_at(step, code, for_good=for_good))
            error = ""
            try:
                change(again, how, files)
            except DatastoreUnwritable as caught:
                error = str(caught)
            failed = files.trace[step - 1]
            assert commit_of(again.path) == commits[files.renamed if for_good else files.durable], failed
            if files.durable and "could not be merged" in caplog.text:  # the change itself is done
                error = caplog.text
            assert error or failed.startswith("delete"), failed
            assert not error or (os.strerror(code) in error and str(again.path) in error)
            caplog.clear()
            finished.check(again)
            shutil.rmtree(again.path)


@pytest.mark.parametrize("how", HOW)
def test_a_power_cut_before_any_step_leaves_a_whole_commit(folder: Folder, how: str) -> None:
    _, commits = killed(folder, how)
    changed = copied(folder, "changed")
    disk = Disk(changed.path)
    change(changed, how, disk)
    disk.look()
    disk.close()
    again, finished = copied(folder, "after"), Finished(how, commits[-1], every=3)
    seen = []
    for tree in disk.trees:
        put_tree(again.path, tree)
        seen.append(commit_of(again.path))
        assert seen[-1] in commits
        finished.check(again)
    assert all(commit in seen for commit in commits)
    assert seen[-1] == commits[-1]


@pytest.mark.parametrize("how", HOW)
def test_a_directory_that_cannot_be_written_is_one_error(folder: Folder, how: str, unprivileged: None) -> None:
    """A real limit on the size of files is one error, too."""
    folder = copied(folder, "changed")
    before, paths = commit_of(folder.path), sorted(folder.path.iterdir())
    folder.path.chmod(0o500)
    try:
        with pytest.raises(DatastoreUnwritable, match="EACCES"):
            change(folder, how, Files())
    finally:
        folder.path.chmod(0o700)
    with files_up_to(150), pytest.raises(DatastoreUnwritable, match="EFBIG"):
        change(folder, how, Files())
    assert commit_of(folder.path) == before
    change(folder, "update", Files())
    assert left_over(folder.path) == set()
    assert sorted(folder.path.iterdir()) != paths
