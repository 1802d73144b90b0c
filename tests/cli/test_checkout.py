"""The checkout of a command: its root, the name of its datastore, and the question whether to draft from it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rest_local.cli import indexer, terminal
from rest_local.cli.indexer import Code, code_of, offered, remember
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
    """Return a function for a terminal that gives these answers. The list that it returns holds the questions."""

    def give(*replies: bool) -> list[str]:
        asked: list[str] = []
        waiting = list(replies)

        def ask(question: str, default: bool) -> bool:
            asked.append(question)
            return waiting.pop(0)

        monkeypatch.setattr(terminal, "can_ask", lambda: True)
        monkeypatch.setattr(terminal, "ask", ask)
        return asked

    return give


def test_all_folders_of_a_checkout_share_one_datastore(project: Path) -> None:
    assert code_of(project) == code_of(project / "src" / "deep") == Code(project)
    assert code_of(project).name.startswith("my-project-")
    assert code_of(project).name != Code(project / "src").name


def test_outside_of_git_it_is_the_folder_alone(tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    assert code_of(folder) == Code(folder.resolve())


def test_a_path_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputInvalid, match=r"--code .*no such file"):
        code_of(tmp_path / "none")


@pytest.mark.parametrize("answer", [True, False])
def test_it_is_offered_once(
    project: Path, answers: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, answer: bool
) -> None:
    asked = answers(answer)
    monkeypatch.chdir(project / "src")
    for _ in range(2):
        assert offered() == (Code(project) if answer else None)
    assert len(asked) == 1
    assert str(project) in asked[0]
    assert (data_dir() / "answers.json").stat().st_mode & 0o777 == 0o600


def test_nothing_is_asked_without_a_terminal_or_a_checkout(
    project: Path, tmp_path: Path, answers: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setattr(terminal, "can_ask", lambda: False)
    remember(str(project), True)
    assert offered() is None
    asked = answers()
    monkeypatch.chdir(tmp_path)
    assert offered() is None
    monkeypatch.setenv("HOME", str(project))
    monkeypatch.chdir(project)
    assert offered() is None, "a home directory under git is no project"
    assert asked == []


def test_an_answer_that_cannot_be_kept_is_told(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "file").write_text("")
    monkeypatch.setattr(indexer, "_path", lambda: project / "file" / "answers.json")
    remember(str(project), True)
    assert "the answer is not kept" in capsys.readouterr().err
