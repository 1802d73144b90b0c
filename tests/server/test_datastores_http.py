"""Datastores by HTTP: what is added can be found and is drafted from, what is forgotten cannot."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from live import Live, served

from rest_local.decoding.engine import Engine
from rest_local.retrieval.home import datastore_path
from rest_local.server.run import Serving
from rest_local.server.settings import Settings

TEXT = "def quixotic_name(first, second):\n    return first * 17 + second * 23\n"


def put(live: Live, store: str, name: str, text: str = TEXT, **more: object) -> int:
    return live.post(f"/datastores/{store}/documents", {"name": name, "text": text, **more}).status_code


def names(live: Live) -> dict[str, bool]:
    return {row["name"]: row["open"] for row in live.get("/datastores").json()["data"]}


def test_a_text_is_added_found_and_forgotten(demo: Live) -> None:
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
        assert client.delete("/datastores/mine/documents/src/b.py").status_code == 400, "the last one stays"
    assert demo.post("/datastores/mine/search", ask).json()["match"] < found["match"]


def test_what_was_added_is_drafted_from(demo: Live) -> None:
    prompt = "x = 1\n" + TEXT + "y = 2\n" + TEXT[:40]
    body = {"prompt": prompt, "n_predict": 30, "temperature": 0, "rest_local": {"policy": "rest"}}
    plain = demo.post("/completion", body | {"datastore": []}).json()
    assert put(demo, "drafts", "answer.py", prompt + plain["content"]) == 200
    drafted = demo.post("/completion", body | {"datastore": "drafts"}).json()
    assert drafted["content"] == plain["content"]
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


def test_changes_while_generations_run(demo: Live) -> None:
    """Readers of the old commit go on; nothing fails, and the text is that of plain decoding."""
    put(demo, "busy", "a.py")
    body = {"prompt": TEXT, "n_predict": 60, "temperature": 0}
    expected = demo.post("/completion", body | {"rest_local": {"policy": "off"}}).json()["content"]
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
    assert len(answers) == 8
    assert all(len(answer) > 0 for answer in answers)
    assert expected in answers


def test_new_datastores_made_at_once_are_all_open(demo: Live) -> None:
    threads = [threading.Thread(target=put, args=(demo, f"at-once-{number}", "a")) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    opened = names(demo)
    assert all(opened[f"at-once-{number}"] for number in range(6))


def test_reload_opens_the_newest_commit() -> None:
    from rest_local.llama.model import Model
    from rest_local.paths import demo_model
    from rest_local.retrieval.edit import add
    from rest_local.retrieval.format import VocabularyId

    with Model.open(demo_model(), vocab_only=True) as model:
        identity = VocabularyId(*model.vocabulary.identity)

        def write(name: str, text: str) -> None:
            add(datastore_path("hup"), [(name, model.vocabulary.tokenize(text))], vocabulary=identity)

        write("a", "first text")
        serving = Serving(Settings(port=0), "demo", lambda: Engine.load(datastores=["hup"]), drain_seconds=1)
        with served(serving):
            assert serving.loaded.wait(300)
            engine = serving.state.engine
            assert engine is not None
            size = len(engine.datastores[0])
            write("b", "second text")
            assert len(engine.datastores[0]) == size
            serving.reload()
            assert len(engine.datastores[0]) > size
