"""A wrong file of recorded answers is refused in one line with file, line and cause."""

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.repository import Repository

from rest_local.bench import workload
from rest_local.bench.workload import load, load_edits
from rest_local.errors import InputInvalid
from rest_local.llama.model import Model
from rest_local.llama.vocabulary import Vocabulary

GOOD = json.dumps({"instruction": "do", "output": "done"})


@pytest.fixture
def vocabulary(tiny_model: Callable[..., Path]) -> Iterator[Vocabulary]:
    with Model.open(tiny_model("llama"), vocab_only=True) as model:
        yield model.vocabulary


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("[1]", "line 2 is not an object"),
        ("{", "line 2 is not JSON"),
        ("[" * 100_000, "line 2"),
        ("1" * 5000, "line 2 is not JSON"),
        ('{"a": 1}', "line 2 holds no recorded answer"),
        ('{"instruction": "a", "output": 1}', "line 2 holds a prompt or an answer that is not text"),
        ('{"instruction": "a", "output": null}', "line 2 holds a prompt or an answer that is not text"),
        ('{"body": {}, "response": null}', "line 2 lacks a field"),
        ('{"body": {}, "response": {"body": {"choices": []}}}', "line 2 lacks a field"),
        ('{"body": [], "response": {"body": {"choices": [{"text": "a"}]}}}', "line 2 lacks a field"),
        ('{"canonical_solution": "a"}', "line 2 lacks a field"),
    ],
)
def test_a_broken_line_is_named(line: str, cause: str, tmp_path: Path, vocabulary: Vocabulary) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(f"{GOOD}\n{line}\n")
    with pytest.raises(InputInvalid) as caught:
        load(path, vocabulary)
    assert str(path) in str(caught.value)
    assert cause in str(caught.value)


def test_files_without_text_are_refused(tmp_path: Path, vocabulary: Vocabulary) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "plain.gz").write_bytes(b"not packed")
    (tmp_path / "cut.gz").write_bytes(gzip.compress(GOOD.encode() * 1000)[:-20])
    for name, cause in {
        "empty.jsonl": "no recorded answer",
        "binary.jsonl": "not UTF-8",
        "plain.gz": "gzip",
        "cut.gz": "gzip",
    }.items():
        with pytest.raises(InputInvalid, match=f"{name}.*{cause}"):
            load(tmp_path / name, vocabulary)


# ---- Edits of a repository -----------------------------------------------------------------------------------------


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
    assert messages == ["edit 2", "edit 1", "edit 0", *["all"] * workload.PER_COMMIT]
    assert len(load_edits(repository.path, vocabulary, 2)) == 2
