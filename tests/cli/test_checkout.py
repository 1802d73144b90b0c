"""The checkout of a command: its root, the name of its datastore, and the question whether to draft from it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from rest_local.cli import indexer, terminal
from rest_local.cli.indexer import NEVER, NO, YES, Code, code_of, offered, recalled, remember, root_of
from rest_local.errors import InputInvalid
from rest_local.paths import data_dir


@pytest.fixture(autouse=True)
def _own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REST_LOCAL_DATA", str(tmp_path / "data"))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "my project" / ".git").mkdir(parents=True)
    (tmp_path / "my project" / "src" / "deep").mkdir(parents=True)
    return (tmp_path / "my project").resolve()


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """A terminal that gives these answers; the list holds the questions."""

    def give(*replies: str) -> list[str]:
        asked: list[str] = []
        waiting = list(replies)

        def prompt(text: str, **options: object) -> str:
            asked.append(text)
            return waiting.pop(0)

        monkeypatch.setattr(terminal, "can_ask", lambda: True)
        monkeypatch.setattr(click, "prompt", prompt)
        return asked

    return give


def test_all_folders_of_a_checkout_share_one_datastore(project: Path) -> None:
    assert code_of(project) == code_of(project / "src" / "deep") == Code(project)
    assert code_of(project).name.startswith("my-project-")
    assert code_of(project).name != Code(project / "src").name


def test_a_work_tree_is_a_checkout_of_its_own(project: Path) -> None:
    """Git writes a file there, and not a directory."""
    (project / "src" / ".git").write_text("gitdir: elsewhere\n")
    assert root_of(project / "src" / "deep") == project / "src"


def test_outside_of_git_it_is_the_folder_alone(tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    assert code_of(folder) == Code(folder.resolve())


@pytest.mark.parametrize("name", ["..", "-x", ".hidden", "ä/..", "\u202e", "a\nb", "x" * 200, os.fsdecode(b"\xff")])
def test_names_are_names_of_files(name: str) -> None:
    made = Code(Path("/somewhere") / name).name
    assert made.isprintable()
    assert made[0].isalnum()
    assert len(made) < 60
    assert os.sep not in made


def test_a_path_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputInvalid, match=r"--code .*no such file"):
        code_of(tmp_path / "none")


def test_it_is_offered_once(project: Path, answers: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answers("y")
    monkeypatch.chdir(project / "src")
    assert offered() == Code(project)
    assert offered() == Code(project)
    assert len(asked) == 1
    assert str(project) in asked[0]
    assert (data_dir() / "checkouts.json").stat().st_mode & 0o777 == 0o600


def test_never_is_never(project: Path, answers: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answers("v")
    monkeypatch.chdir(project)
    assert offered() is None
    monkeypatch.setattr(time, "time", lambda: 4e9)
    assert offered() is None
    assert len(asked) == 1


def test_no_counts_for_a_week(
    project: Path, answers: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = answers("n", "y")
    monkeypatch.chdir(project)
    assert offered() is None
    assert offered() is None
    assert len(asked) == 1
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 8 * 86_400)
    assert offered() == Code(project)


def test_nothing_is_asked_without_a_terminal_or_a_checkout(
    project: Path, tmp_path: Path, answers: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setattr(terminal, "can_ask", lambda: False)
    remember(project, YES)
    assert offered() is None
    asked = answers()
    monkeypatch.chdir(tmp_path)
    assert offered() is None
    monkeypatch.setenv("HOME", str(project))
    monkeypatch.chdir(project)
    assert offered() is None, "a home directory under git is no project"
    assert asked == []


def test_a_folder_that_is_gone_is_no_checkout(
    tmp_path: Path, answers: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = answers()
    (tmp_path / "gone" / ".git").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone" / ".git").rmdir()
    (tmp_path / "gone").rmdir()
    assert offered() is None
    assert asked == []


@pytest.mark.parametrize("content", ["", "[]", "{", '{"PATH": 3}', '{"PATH": {"answer": "maybe"}}', '{"PATH": {}}'])
def test_a_damaged_file_makes_it_ask_again(content: str, project: Path) -> None:
    (data_dir() / "checkouts.json").write_text(content.replace("PATH", str(project)))
    assert recalled(project) is None
    remember(project, NEVER)
    assert recalled(project) == NEVER


def test_a_clock_that_went_back_makes_it_ask_again(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remember(project, NO)
    monkeypatch.setattr(time, "time", lambda: 1.0)
    assert recalled(project) is None


def test_an_answer_that_cannot_be_kept_is_told(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "file").write_text("")
    monkeypatch.setattr(indexer, "_path", lambda: project / "file" / "checkouts.json")
    remember(project, YES)
    assert "the answer is not kept" in capsys.readouterr().err
