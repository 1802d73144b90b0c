"""The scripts in `datastore/` index what their table says."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rest_local.retrieval import Datastore

FOLDER = Path(__file__).parents[2] / "datastore"
SCRIPTS = sorted(FOLDER.glob("*.sh"))
TURNS = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because it was asked for, twice."}]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return the variables of an empty home in which `rest-local` is this project."""
    command = tmp_path / "bin/rest-local"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m rest_local "$@"\n')
    command.chmod(0o755)
    data = {"REST_LOCAL_DATA": str(tmp_path / "home/data"), "HOME": str(tmp_path / "home")}
    return os.environ | {"PATH": f"{command.parent}:{os.environ['PATH']}", "PYTHONPATH": str(FOLDER.parent)} | data


@pytest.fixture
def run(tmp_path: Path, environment: dict[str, str], tiny_model: Callable[..., Path]) -> Callable[..., Datastore]:
    """Return a function that runs a script in a folder and opens the datastore that it built."""

    def build(name: str, folder: Path) -> Datastore:
        store = tmp_path / "store"
        given = (str(FOLDER / f"{name}.sh"), "-o", str(store), "-m", str(tiny_model("llama")))
        done = subprocess.run(given, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return Datastore.open(store)

    return build


def names(store: Datastore) -> list[str]:
    with store:
        return store.document_names()


def test_the_table_names_every_script() -> None:
    named = re.findall(r"^\| `(.*)\.sh` \|", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert sorted(named) == [path.stem for path in SCRIPTS]


@pytest.mark.parametrize("script", [path.stem for path in SCRIPTS])
def test_a_script_gives_options_that_exist(script: str, environment: dict[str, str], tmp_path: Path) -> None:
    """`--help` is read after all other options, so an unknown one is an error."""
    given = [str(FOLDER / f"{script}.sh"), "--help"]
    done = subprocess.run(given, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Usage:" in done.stdout


def test_packages_of_the_working_directory(run: Callable[..., Datastore], tmp_path: Path) -> None:
    package = tmp_path / "project/node_modules/left-pad"
    package.mkdir(parents=True)
    (package / "index.js").write_text("module.exports = (text, n) => text.padStart(n)\n" * 3)
    (package / "README.md").write_text("Pads on the left.\n")
    assert [Path(name).name for name in names(run("node-modules", tmp_path / "project"))] == ["index.js"]


def test_answers_of_saved_sessions(run: Callable[..., Datastore], tmp_path: Path) -> None:
    sessions = tmp_path / "home/data/sessions"
    sessions.mkdir(parents=True)
    (sessions / "one.json").write_text(json.dumps({"messages": TURNS}))
    assert len(names(run("chats", tmp_path))) == 1


def test_what_commits_wrote(run: Callable[..., Datastore], tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "shop.py").write_text("def is_open(day):\n    return day < 6\n" * 3)
    author = {f"GIT_{who}_{what}": "a@b.c" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "Open a shop"]):
        subprocess.run(["git", *command], cwd=project, env=os.environ | author, check=True)
    with run("git-history", project) as store:
        assert len(store) > 20
