"""Datastores over HTTP: added documents are found and drafted from, removed ones are not."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live import Live, Scripted, until
from support.toy import demo_model

from rest_local.llama.model import Model
from rest_local.retrieval import VocabularyId, build
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.home import datastore_path
from rest_local.retrieval.update.updating import add

TEXT = "def quixotic_name(first, second):\n    return first * 17 + second * 23\n"


def put(live: Live, store: str, name: str, text: str = TEXT, **more: object) -> int:
    return live.post(f"/datastores/{store}/documents", {"name": name, "text": text, **more}).status_code


def names(live: Live) -> dict[str, bool]:
    return {row["name"]: row["open"] for row in live.get("/datastores").json()["data"]}


def test_a_document_is_added_found_and_removed(demo: Live) -> None:
    assert put(demo, "mine", "src/a.py") == 200
    assert put(demo, "mine", "src/b.py", "other = 1\n") == 200
    assert names(demo)["mine"] is True
    ask = {"text": "quixotic_name(first, second):\n"}
    found = demo.post("/datastores/mine/search", ask).json()
    assert found["found"] == [{"document": "src/a.py", "line": 2, "token": found["found"][0]["token"]}]
    assert found["match"] == found["tokens"]
    assert found["continuations"][0].startswith("    return first")
    with demo.client() as client:
        assert client.delete("/datastores/mine/documents/src/a.py").json() == {"forgotten": 1}
        assert client.delete("/datastores/mine/documents/src/a.py").status_code == 404
    assert demo.post("/datastores/mine/search", ask).json()["match"] < found["match"]


def test_an_added_document_is_drafted_from(demo: Live) -> None:
    prompt = "x = 1\n" + TEXT + "y = 2\n" + TEXT[:40]
    body = {"prompt": prompt, "n_predict": 30, "temperature": 0, "rest_local": {"policy": "rest"}}
    plain = demo.post("/completion", body | {"datastore": []}).json()
    assert put(demo, "drafts", "answer.py", prompt + plain["content"]) == 200
    drafted = demo.post("/completion", body | {"datastore": "drafts"}).json()
    assert plain["timings"]["draft_n"] == 0
    assert drafted["timings"]["draft_n_accepted"] > 0
    assert demo.post("/completion", body | {"datastore": ["nothing"]}).status_code == 400


@pytest.mark.parametrize("name", ["..", "%2e%2e%2fx", "a%20b", "a%00b", "x" * 100, ".hidden", "%2fetc"])
def test_names_are_never_paths(demo: Live, name: str, tmp_path: Path) -> None:
    assert put(demo, name, "a") in (400, 404)
    assert demo.post(f"/datastores/{name}/search", {"text": "x"}).status_code == 404


def test_unknown_names_are_404(demo: Live) -> None:
    assert demo.post("/datastores/nothing/search", {"text": "x"}).status_code == 404
    with demo.client() as client:
        assert client.delete("/datastores/nothing/documents/x").status_code == 404


def test_secrets_are_refused(demo: Live) -> None:
    key = "token = 'ghp_" + "a" * 36 + "'"
    assert put(demo, "secret", "a.py", key) == 400
    assert put(demo, "secret", ".env", "x = 1") == 400
    assert "secret" not in names(demo)
    assert put(demo, "secret", "a.py", key, allow_secrets=True) == 200


def test_datastores_change_while_generations_run(demo: Live) -> None:
    """Readers of the old commit continue; nothing fails, and the text is that of plain decoding."""
    put(demo, "busy", "a.py")
    body = {"prompt": TEXT, "n_predict": 60, "temperature": 0, "rest_local": {"exact": True, "policy": "rest"}}
    plain = {"rest_local": {"exact": True, "policy": "off"}}
    expected = demo.post("/completion", body | plain).json()["content"]
    answers: list[str] = []

    def ask() -> None:
        answers.extend(demo.post("/completion", body).json()["content"] for _ in range(4))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    statuses = [put(demo, "busy", f"{number}.py", f"{TEXT}# {number}\n") for number in range(6)]
    for thread in threads:
        thread.join(120)
    assert statuses == [200] * 6
    assert expected
    assert answers == [expected] * 8


def test_reload_opens_the_newest_commit(scripted: Scripted) -> None:
    live = scripted()
    assert put(live, "hup", "a.py") == 200
    engine = live.service.engine
    vocabulary, size = engine.model.vocabulary, len(engine.datastores.in_use[0])
    identity = VocabularyId(*vocabulary.identity)
    add(datastore_path("hup"), [("b.py", vocabulary.tokenize("second text"))], vocabulary=identity)
    assert len(engine.datastores.in_use[0]) == size
    live.serving.reload()  # It reloads in a thread of its own.
    until(lambda: len(engine.datastores.in_use[0]) > size)


def test_removing_the_last_document_removes_the_datastore(demo: Live) -> None:
    """No file contains it any more, it is closed, and its name is free."""
    assert put(demo, "short", "only.py") == 200
    path = datastore_path("short")
    assert path.exists()
    with demo.client() as client:
        assert client.delete("/datastores/short/documents/only.py").json() == {"forgotten": 1}
        assert client.delete("/datastores/short/documents/only.py").status_code == 404
    assert not path.exists()
    assert not list(path.parent.glob(".removed-*"))
    assert "short" not in names(demo)
    assert demo.post("/completion", {"prompt": TEXT, "n_predict": 2}).status_code == 200
    assert put(demo, "short", "only.py") == 200
    assert names(demo)["short"] is True


def test_a_datastore_of_several_vocabularies_is_that_of_the_model(demo: Live) -> None:
    """It is shown, searched and changed for the model; the other vocabulary's documents stay. One without an index for
    the model is shown, but gets no document, which would be all that the model has of it."""
    other = VocabularyId("cd" * 32, 1000, "other")
    document = [("of another", np.array([1, 2, 3], np.int32))]
    for name in ("several", "foreign"):
        add(datastore_path(name), document, vocabulary=other)
    with Model.open(demo_model(), vocab_only=True) as model:
        own = VocabularyId(*model.vocabulary.identity)
        build(datastore_path("several"), [("a.py", model.vocabulary.tokenize(TEXT))], vocabulary=own)
    rows = {row["name"]: row for row in demo.get("/datastores").json()["data"]}
    assert (rows["several"]["fits_model"], rows["several"]["vocabulary"]["hash"]) == (True, own.hash)
    assert (rows["foreign"]["fits_model"], rows["foreign"]["tokens"]) == (False, 4)
    assert put(demo, "several", "b.py", "other = 1\n") == 200
    assert demo.post("/datastores/several/search", {"text": "other = 1"}).json()["found"][0]["document"] == "b.py"
    assert put(demo, "foreign", "b.py") == 409
    with demo.client() as client:
        assert client.delete("/datastores/foreign/documents/of%20another").status_code == 409
        for name in ("a.py", "b.py"):
            assert client.delete(f"/datastores/several/documents/{name}").json() == {"forgotten": 1}
    for name in ("several", "foreign"):
        with Datastore.open(datastore_path(name), vocabulary_hash=other.hash) as store:
            assert store.document_names() == ["of another"]
    assert names(demo)["several"] is False


KEY = {"authorization": "Bearer k"}


def damaged(name: str) -> Path:
    """Make a datastore with an invalid manifest."""
    path = datastore_path(name)
    path.mkdir(parents=True)
    (path / "manifest.json").write_bytes(b"{")
    return path


@pytest.mark.parametrize(
    "reached",
    [
        {"host": "0.0.0.0", "keys": (b"k",)},
        {"allowed_hosts": ("llm.example.org",), "keys": (b"k",)},
        {"keys": (b"k", b"other")},
    ],
)
def test_other_users_see_neither_what_datastores_hold_nor_where_they_lie(
    scripted: Scripted, reached: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REST_LOCAL_DATASTORES", str(tmp_path / "home"))
    damaged("broken")
    live = scripted(**reached)
    search = live.post("/datastores/broken/search", {"text": "x"}, headers=KEY)
    assert search.status_code == 403
    assert "--share-statistics" in search.text
    (row,) = live.get("/datastores", headers=KEY).json()["data"]
    assert str(tmp_path) not in row["error"]
    assert "log" in row["error"]
    sharing = scripted(statistics=True, **reached)
    shown = sharing.post("/datastores/broken/search", {"text": "x"}, headers=KEY)
    assert shown.status_code == 500, "searched, and found damaged"
    assert str(tmp_path) not in shown.text


def test_other_users_change_nothing_without_the_option_and_only_what_is_open(scripted: Scripted) -> None:
    """A key of one of several users deletes no document of another's."""
    assert put(scripted(), "private", "a.py") == 200
    two = {"keys": (b"k", b"other")}

    def changes(live: Live, store: str) -> tuple[int, int]:
        with live.client(headers=KEY) as client:
            added = client.post(f"/datastores/{store}/documents", json={"name": "b.py", "text": TEXT})
            return added.status_code, client.delete(f"/datastores/{store}/documents/a.py").status_code

    refused, allowed = scripted(**two), scripted(change_datastores=True, **two)
    assert changes(refused, "private") == changes(refused, "new") == (403, 403)
    assert changes(allowed, "private") == changes(allowed, "new") == (404, 404)
    with Datastore.open(datastore_path("private")) as store:
        assert store.document_names() == ["a.py"]
        allowed.service.engine.datastores.in_use.append(store)
        assert changes(allowed, "private") == (200, 200)


@pytest.mark.parametrize("kind", ["order", "documents"])
def test_a_damaged_segment_is_an_error_in_json(
    scripted: Scripted, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is not reset, and the next request is served."""
    monkeypatch.setenv("REST_LOCAL_DATASTORES", str(tmp_path / "home"))
    live = scripted()
    assert put(live, "cut", "a.py") == 200
    path = datastore_path("cut")
    (file,) = path.glob(f"*.{kind}.bin")
    file.write_bytes(file.read_bytes()[:24] + b"\xff" * (file.stat().st_size - 24))
    for method, call, fields in (
        ("POST", "search", {"text": TEXT[:40]}),
        ("POST", "documents", {"name": "b", "text": "x"}),
    ):
        with live.client() as client:
            answer = client.request(method, f"/datastores/cut/{call}", json=fields)
        assert answer.status_code == 500, answer.text
        assert answer.json()["error"]["code"] == "failed"
        assert str(path) in answer.json()["error"]["message"]
    assert live.get("/datastores").status_code == 200


@pytest.mark.parametrize("mmap", [True, False])
def test_what_http_opens_is_mapped_only_where_the_engine_maps(
    scripted: Scripted, mmap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--no-mmap: a file that is truncated on a network drive must not end the server by SIGBUS."""
    monkeypatch.setenv("REST_LOCAL_DATASTORES", str(tmp_path / "home"))
    monkeypatch.setattr("rest_local.retrieval.datastore.SMALL", 0)
    asked: list[object] = []
    kept = Datastore.open.__func__  # type: ignore[attr-defined]

    def opened(cls: type[Datastore], path: Path, **options: Any) -> Datastore:
        asked.append(options.get("mmap"))
        return kept(cls, path, **options)

    monkeypatch.setattr(Datastore, "open", classmethod(opened))
    live = scripted()
    live.service.engine.model.options = replace(live.service.engine.model.options, mmap=mmap)
    assert put(live, "mine", "a.py") == 200
    assert put(live, "mine", "b.py") == 200
    assert live.post("/datastores/mine/search", {"text": "x"}).status_code == 200
    with live.client() as client:
        assert client.delete("/datastores/mine/documents/a.py").status_code == 200
    (store,) = live.service.engine.datastores.in_use
    assert bool(store._maps) == mmap
    assert (False not in asked) if mmap else (set(asked) == {False})
