"""`rest-local index build` from sources of every kind, and `index recipes`."""

import json
from pathlib import Path
from typing import Any

import pytest
from index_calls import answer, call, replace_models
from support.repository import Repository

from rest_local.cli.index.build import described_sources, row_source, split_revision
from rest_local.errors import DatastoreError, InputInvalid, OptionError
from rest_local.retrieval import Datastore, datastore_path
from rest_local.retrieval.sources import Jsonl, Parquet


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory, with a byte vocabulary in place of a model's."""
    replace_models(monkeypatch, tmp_path)
    return tmp_path.resolve()


def build(*arguments: str, **options: Any) -> dict[str, Any]:
    return answer("build", *arguments, **options)


def names(name: str = "default") -> list[str]:
    with Datastore.open(datastore_path(name)) as store:
        return [Path(document).name for document in store.document_names()]


def test_several_sources_in_one_datastore(home: Path) -> None:
    (home / "src").mkdir()
    (home / "src" / "a.py").write_text("import os\n")
    (home / "rows.jsonl").write_text('{"text": "one"}\n{"no": 1}\n')
    repository = Repository(home / "repository")
    repository.commit("one", {"b.py": "import sys\n"})
    repository.git("branch", "old")
    repository.commit("two", {"b.py": "import re\n"})
    repository.git("checkout", "-q", "old")
    repository.commit("three", {"b.py": "import sys\nimport io\n"})
    built = build("src", "rows.jsonl:text", "-", "--git", "repository@old", "--history", stdin="typed\n")
    assert names() == ["a.py", "rows.jsonl:1", "-", "repository@old:b.py", names()[4]]
    assert names()[4].endswith(":b.py")
    assert (built["documents"], built["skipped"]) == (5, {"without text in the field": 1})
    info = call("info", "default").stdout
    assert f"source      {home}/src\n" in info
    assert f"source      {home}/repository@old with its history (revision old; commit " in info
    with pytest.raises(DatastoreError, match="the standard input, which cannot be read again"):
        call("rebuild", "default", "--replace")


def test_a_datastore_is_built_again_from_its_sources(home: Path) -> None:
    repository = Repository(home / "repository")
    repository.commit("one", {"b.py": "import sys\n"})
    build("--git", "repository", "--include", "*.py", "-o", "mine")
    repository.commit("two", {"c.py": "import re\n", "d.md": "x\n"})
    assert answer("rebuild", "mine", "--replace")["documents"] == 2
    recipe = answer("info", "mine")["indexes"][0]["recipe"]
    (source,) = recipe["sources"]
    assert (source["revision"], source["include"], len(source["commit"])) == ("HEAD", ["*.py"], 40)
    assert described_sources({"sources": [{"kind": "torrent"}]}) == ['[{"kind": "torrent"}]']


def test_a_recipe_names_the_datastore(home: Path) -> None:
    (home / "mine.toml").write_text('licence = "MIT"\n[[sources]]\nkind = "walk"\npaths = ["src", "gone"]\n')
    (home / "src").mkdir()
    (home / "src" / "a.py").write_text("import os\n")
    build("--recipe", "mine.toml")
    assert names("mine") == ["a.py"]
    build("--recipe", "mine.toml", "-o", "other")
    for name in ("mine", "other"):
        recipe = answer("info", name)["indexes"][0]["recipe"]
        assert (recipe["recipe"], recipe["licence"]) == ("mine", "MIT")
    answer("rebuild", "mine", "--replace")
    assert answer("info", "mine")["indexes"][0]["recipe"] == recipe


@pytest.mark.parametrize(
    ("arguments", "error", "complaint"),
    [
        (["--text", "a.txt:x"], OptionError, "--text a.txt:x: give FILE:FIELD"),
        (["--text", "a.jsonl"], OptionError, "give FILE:FIELD"),
        (["a.jsonl:x"], InputInvalid, r"a\.jsonl: no such file"),
        (["gone"], InputInvalid, "no such file"),
        (["--git", "gone@main"], InputInvalid, "gone: no such directory; clone it first"),
        (["--recipe", "none"], OptionError, "recipe 'none': not known"),
        ([".", "--memory=300M"], OptionError, "memory of 300 MB: at least"),
    ],
)
def test_wrong_sources_are_named(arguments: list[str], error: type[Exception], complaint: str) -> None:
    with pytest.raises(error, match=complaint):
        call("build", *arguments)
    assert not datastore_path("default").exists()


def test_names_with_colons_and_at_signs(home: Path) -> None:
    assert row_source("a/b.jsonl.gz:a.b") == Jsonl("a/b.jsonl.gz", "a.b")
    assert row_source("C:\\b.PARQUET:a") == Parquet("C:\\b.PARQUET", "a")
    assert row_source("a.py:x") is row_source("a.jsonl") is row_source("a.jsonl:") is None
    assert split_revision("a@b@main") == ("a@b", "main")
    (home / "a@b").mkdir()
    assert split_revision("a@b") == ("a@b", "HEAD")
    assert split_revision("@") == ("@", "HEAD")
    (home / "a.jsonl:x").write_text("a file with this very name\n")
    build("a.jsonl:x")
    assert names() == ["a.jsonl:x"]


def test_a_chat_gives_what_the_assistant_wrote(home: Path) -> None:
    messages = [{"role": "user", "content": "What is <b>?"}, {"role": "assistant", "content": "It is bold."}]
    (home / "a.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    build("--chat", "a.jsonl", "-o", "chats")
    assert names("chats") == ["a.jsonl:1#1"]
