"""Sources of a size that takes minutes: 100 000 small files, with and without git.

Not collected by `make test`; `make soak` runs it.
"""

import os
import resource
import subprocess
from pathlib import Path

import pytest

from rest_local.retrieval import Skipped
from rest_local.retrieval.sources import Reading, Walk

FILES = 100_000
GROWTH = 96 << 20  # bytes of resident memory; the states of all files, which this test holds, are 30 MB of it


@pytest.mark.parametrize("with_git", [False, True])
def test_many_small_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_git: bool) -> None:
    root = (tmp_path / "root").resolve()
    for number in range(FILES):
        if number % 1000 == 0:
            (root / f"{number // 1000:03}").mkdir(parents=True)
        path = root / f"{number // 1000:03}" / f"{number:06}.py"
        path.write_text(f"number = {number}\n")
        os.utime(path, (1e9, 1e9))
    if with_git:
        subprocess.run(["git", "init", "-q", str(root)], check=True)
    else:
        monkeypatch.setenv("PATH", "")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    walk, known = Walk((str(root),)), dict[str, tuple[int, int]]()
    for text in walk.texts(Reading(Skipped())):
        assert text.state is not None
        known[text.name] = text.state[1:3]
    assert len(known) == FILES
    skipped = Skipped()
    unread = 0
    for text in walk.texts(Reading(skipped, lambda name, *state: known.get(name) == tuple(state))):
        unread += text.text is None
    assert (unread, dict(skipped.counts)) == (FILES, {})
    one = f"{root}/050/050000.py"
    assert [text.name for text in walk.texts(Reading(skipped, only=[one]))] == [one]
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before < GROWTH
