"""`index update`, `forget` and `remove` with byte vocabularies in place of those of models."""

from pathlib import Path

import pytest
from index_calls import NamedVocabulary, answer, call, replace_models

from rest_local.cli import terminal
from rest_local.errors import OptionError
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.home import datastore_path, indexes


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make three files. `one.gguf` and `two.gguf` stand for models, whose vocabulary has the name that they hold."""

    replace_models(monkeypatch, tmp_path, lambda path: NamedVocabulary(path.read_text()))
    for name in ("one", "two"):
        (tmp_path / f"{name}.gguf").write_text(name)
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "a.py").write_text("def alpha(): pass")
    (source / "b.py").write_text("def beta(): pass")
    (source / "sub/c.py").write_text("def gamma(): pass")
    call("build", source, "-o", "mine", "-m", "one.gguf")
    call("rebuild", "mine", "-m", "two.gguf")
    return source


def names_in(name: str) -> list[list[str]]:
    found = []
    for directory in indexes(datastore_path(name)):
        with Datastore.open(directory) as store:
            store.check()
            found.append(sorted(Path(held).name for held in store.document_names()))
    return found


def test_update_changes_all_indexes(corpus: Path) -> None:
    (corpus / "a.py").write_text("changed")
    (corpus / "new.py").write_text("new")
    (corpus / "b.py").unlink()
    changed = answer("update", "mine")
    assert [row["vocabulary"] for row in changed["indexes"]] == ["one", "two"]
    for row in changed["indexes"]:
        assert [row[what] for what in ("added", "changed", "deleted", "unchanged")] == [1, 1, 1, 1]
        assert (row["tokens"], row["documents"], changed["stale"]) == (10, 3, [])
    assert names_in("mine") == [["a.py", "c.py", "new.py"]] * 2
    assert "mine (one): nothing changed; " in call("update", "mine").stdout


def test_an_index_whose_model_is_gone_is_stale_and_the_others_are_updated(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "one.gguf").unlink()
    (corpus / "new.py").write_text("new")
    result = call("update", "mine")
    assert "mine (two): 1 added (3 tokens); " in result.stdout
    assert "the index for vocabulary one is stale: the model it was built with is gone" in result.stderr
    assert "`rest-local index remove mine --vocabulary 6f6e65000000`" in result.stderr
    assert names_in("mine") == [["a.py", "b.py", "c.py"], ["a.py", "b.py", "c.py", "new.py"]]
    (tmp_path / "elsewhere.gguf").write_text("one")
    stale = answer("update", "mine", "-m", "elsewhere.gguf")
    assert [row["vocabulary"] for row in stale["indexes"]] == ["one"]
    assert names_in("mine") == [["a.py", "b.py", "c.py", "new.py"]] * 2


def test_forget_removes_from_all_indexes_for_good(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(corpus)
    result = call("forget", "mine", "a.py")
    assert result.stdout.splitlines()[:2] == [  # a third one where earlier answers are kept
        f"mine: forgot {corpus / 'a.py'}",
        "recorded: no update brings this back; `index info` shows what is left out",
    ]
    call("update", "mine")
    assert names_in("mine") == [["b.py", "c.py"]] * 2
    for file in datastore_path("mine").rglob("*.tokens.bin"):
        assert b"alpha"[::-1] not in file.read_bytes()[1::2]


def test_forget_asks_at_a_terminal(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(terminal, "can_ask", lambda: True)
    monkeypatch.setattr(terminal, "ask", lambda question, default: bool(asked.append(question)))
    assert call("forget", "mine", "b.py").exit_code == 1
    assert names_in("mine") == [["a.py", "b.py", "c.py"]] * 2
    assert asked == [f"Delete {corpus / 'b.py'} from datastore mine? Later updates leave it out as well."]
    assert call("forget", "mine", "b.py", "--yes").exit_code == 0
    assert (len(asked), names_in("mine")) == (1, [["a.py", "c.py"]] * 2)


def test_forget_everything_asks_or_needs_yes(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="give --yes"):
        call("forget", "mine", "*.py")
    monkeypatch.setattr(terminal, "can_ask", lambda: True)
    monkeypatch.setattr(terminal, "ask", lambda question, default: False)
    assert call("forget", "mine", "*.py").exit_code == 1
    assert names_in("mine") == [["a.py", "b.py", "c.py"]] * 2
    assert answer("forget", "mine", "*.py", "--yes")["removed"] is True
    assert not datastore_path("mine").exists()


def test_forget_names_what_may_still_quote_a_file(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REST_LOCAL_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("REST_LOCAL_CACHE", str(tmp_path / "cache"))
    assert "history forget" not in call("forget", "mine", corpus / "a.py").stdout
    (tmp_path / "data" / "chat_history").write_text("what was typed")
    said = call("forget", "mine", corpus / "b.py").stdout
    assert said.endswith("`rest-local history forget --all --prompts` deletes them\n")
