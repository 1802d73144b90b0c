"""The recipes of `datastore/` run as a user runs them, on small data, and their datastores open."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from support.repository import Repository

from rest_local import Datastore, Engine
from rest_local.paths import demo_model

RECIPES = Path(__file__).parents[2] / "datastore"


def recipe(name: str, *arguments: str | Path, expected: int = 0) -> str:
    """The output of a recipe. `expected`: its exit code."""
    command = [sys.executable, str(RECIPES / name), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(RECIPES.parent)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == expected, done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository of three commits, which add a line, change it, and add a key and another file."""
    made = Repository(tmp_path / "repository")
    for text in ("first = 1\n", "second = 2\n"):
        made.commit("+++ b/no file", {"naïve name.py": f"import os\n{text}print(os)\n"})
    made.commit("third", {"id_rsa": "x\n", "b.py": "++ b/strange\n-- a/strange\ncommit me\n"})
    return made.path


def texts(path: Path) -> dict[str, str]:
    """The documents of a datastore, without their commits."""
    with Engine.load(demo_model(), n_ctx=64, threads=1) as engine, Datastore.open(path) as store:
        piece, found, start = engine.model.vocabulary.piece, {}, 0
        ids = [int(token) for segment in store.segments for token in segment.slice(0, len(segment))]
        for name in store.document_names():
            end = ids.index(store.manifest.vocabulary.size, start)
            found[name.partition(":")[2] + ("*" if name.partition(":")[2] in found else "")] = b"".join(
                map(piece, ids[start:end])
            ).decode()
            start = end + 1
        return found


def test_the_history_of_a_checkout(repository: Path, tmp_path: Path) -> None:
    output = recipe("git_history.py", repository, "-m", demo_model(), "-o", tmp_path / "store")
    assert "3 changes; skipped: 1 secret" in output
    assert texts(tmp_path / "store") == {
        "b.py": "++ b/strange\n-- a/strange\ncommit me\n",
        "naïve name.py": "import os\nsecond = 2\nprint(os)\n",
        "naïve name.py*": "import os\nfirst = 1\nprint(os)\n",
    }
    assert "1 changes" in recipe("git_history.py", repository, "-o", tmp_path / "store", "--commits", "1", "--replace")


def test_a_folder_without_repository_is_named(tmp_path: Path) -> None:
    output = recipe("git_history.py", tmp_path, "-o", tmp_path / "store", expected=1)
    assert output.startswith(f"error: repository {tmp_path}: ")
    assert (output.count("\n"), "not a git repository" in output) == (1, True)
    assert not (tmp_path / "store" / "manifest.json").exists()


@pytest.mark.parametrize("given", [[], ["--site-packages"]])
def test_installed_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str]) -> None:
    """A small library stands in for the interpreter's, through `sysconfig.get_paths`."""
    for folder in ("stdlib/test", "stdlib/site-packages", "packages/tests"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "left_out.py").write_text("import os\n")
    (tmp_path / "stdlib" / "queue.py").write_text("import threading\n")
    (tmp_path / "packages" / "click.py").write_text("import sys\n")
    paths = {"stdlib": str(tmp_path / "stdlib"), "purelib": str(tmp_path / "packages")}
    monkeypatch.setattr(sysconfig, "get_paths", lambda: paths)
    monkeypatch.setattr(sys, "argv", ["installed_python.py", *given, "-o", str(tmp_path / "store")])
    runpy.run_path(str(RECIPES / "installed_python.py"), run_name="__main__")
    with Datastore.open(tmp_path / "store") as store:
        assert [Path(name).name for name in store.document_names()] == (["click.py"] if given else ["queue.py"])
