"""The edits in the history of a repository become recorded answers."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.repository import Repository

from benchmarks.recorded import PER_COMMIT, load_edits
from rest_local.llama.model import Model
from rest_local.llama.vocabulary import Vocabulary


@pytest.fixture
def vocabulary(tiny_model: Callable[..., Path]) -> Iterator[Vocabulary]:
    with Model.open(tiny_model("llama"), vocab_only=True) as model:
        yield model.vocabulary


OLD = "".join(f"line {n} of the file\n" for n in range(30))


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "repository")


def text(vocabulary: Vocabulary, tokens: list[int]) -> str:
    return b"".join(map(vocabulary.piece, tokens)).decode()


def test_the_answer_starts_at_the_first_change(repository: Repository, vocabulary: Vocabulary) -> None:
    new = OLD.replace("line 7 of", "line SEVEN of")
    repository.commit("first", {"a file.txt": OLD})
    repository.commit("Write the number\n\nin capitals", {"a file.txt": new})
    (edit,) = load_edits(repository.path, vocabulary)
    assert edit.prediction == ()
    (predicted,) = load_edits(repository.path, vocabulary, predict=True)
    assert (predicted.prompt, predicted.answer) == (edit.prompt, edit.answer)
    assert text(vocabulary, list(predicted.prediction)).startswith("7 of the file\nline 8")
    assert edit.name.endswith(":a file.txt")
    prompt, answer = text(vocabulary, edit.prompt), text(vocabulary, edit.answer)
    assert prompt.startswith("Write the number\n\nin capitals\n\na file.txt:\nline 0 of")
    assert OLD in prompt
    assert prompt.endswith("line 6 of the file\nline ")
    assert answer.startswith("SEVEN of the file\nline 8")
    assert prompt.endswith(new[: -len(answer)])
    assert new.endswith(answer)


def test_the_newest_edits_come_first_and_are_bounded(repository: Repository, vocabulary: Vocabulary) -> None:
    names = [f"{n}.txt" for n in range(6)]
    repository.commit("first", dict.fromkeys(names, OLD))
    repository.commit("all", dict.fromkeys(names, OLD + "and more\n"))
    for n in range(3):
        repository.commit(f"edit {n}", {"0.txt": OLD + f"ends with {n}\n"})
    found = load_edits(repository.path, vocabulary)
    messages = [text(vocabulary, edit.prompt).partition("\n")[0] for edit in found]
    assert messages == ["edit 2", "edit 1", "edit 0", *["all"] * PER_COMMIT]
    assert len(load_edits(repository.path, vocabulary, 2)) == 2
