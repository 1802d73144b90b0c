"""Which model answers: by name, by default, in the query; the lists of models; and all kinds of models."""

import json
import socket
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import httpx
import ollama
import pytest

from rest_local.decoding.config import EngineConfig
from rest_local.router.memory import Need, need_of
from rest_local.server.settings import ServerSettings
from tests.router.conftest import Routed, choice
from tests.support.encoders import MEAN_POOLING, encoder

Start = Callable[..., Routed]
Files = Callable[..., list[Path]]
HELLO = [{"role": "user", "content": "Hello"}]


def test_a_request_names_its_model(pair: Routed) -> None:
    answers = {name: pair.ask(name) for name in ("one", "coder", "two", None)}
    assert {name: answer.json()["model"] for name, answer in answers.items()} == {
        "one": "one", "coder": "coder", "two": "two", None: "coder"
    }  # fmt: skip
    assert len({answer.json()["content"] for answer in answers.values()}) == 1, "they are the same model"
    for path in ("/completion", "/v1/chat/completions", "/tokenize"):
        answer = pair.ask("three", path, messages=HELLO, content="x")
        assert answer.status_code == 404
        assert answer.json()["error"]["param"] == "model"


def test_calls_without_a_name_in_their_body_take_that_of_the_query(pair: Routed) -> None:
    assert pair.get("/props", params={"model": "two"}).json()["model_alias"] == "two"
    assert pair.get("/props").json()["model_alias"] == "coder"
    assert pair.get("/props", params={"model": "three"}).status_code == 404
    assert pair.ask(None, "/completion?model=two").json()["model"] == "two"
    assert pair.ask("one", "/completion?model=two").json()["model"] in ("one", "coder")
    assert pair.get("/v1/models/one%20two?x=%2F").status_code == 404, "a quoted path stays as it was sent"
    assert pair.get("/datastores?model=one").json()["object"] == "list"


def test_all_models_are_listed_in_each_api(pair: Routed) -> None:
    pair.ask("one")
    pair.ask("two")
    names = ["coder", "one", "two"]
    rows = pair.get("/v1/models").json()["data"]
    assert [row["id"] for row in rows] == names
    assert {row["status"]["value"] for row in rows} == {"loaded"}
    assert all(row["meta"]["n_ctx"] == 2048 for row in rows)
    assert pair.get("/v1/models/two").json() == rows[2]
    assert pair.get("/v1/models/three").status_code == 404
    assert [(row["display_name"], row["type"]) for row in rows] == [(name, "model") for name in names], "Anthropic's"
    assert {datetime.fromisoformat(row["created_at"].replace("Z", "+00:00")).year >= 2026 for row in rows} == {True}
    in_memory = pair.get("/api/ps").json()["models"]
    assert [row["name"] for row in in_memory] == [f"{name}:latest" for name in names]
    years = [datetime.fromisoformat(row["expires_at"].replace("Z", "+00:00")).year for row in in_memory]
    assert min(years) > 2100, "without a limit models stay"


def test_a_model_is_loaded_when_it_is_asked_for(routed: Start, files: Files) -> None:
    """Each has its own options, looks load none, and any name will do if the alias says so."""
    one, two = files("one", "two")
    models = [choice(one, n_ctx=512, aliases=("coder",)), choice(two, n_ctx=256, slots=1)]
    live = routed(models, settings=ServerSettings(metrics=True, aliases=("*",)), idle=600.0, eager=False)
    assert live.get("/health").json() == {"status": "ok"}
    assert live.get("/").text.startswith("<!")
    with ollama.Client(host=live.url) as client:
        listed = client.list().models
        assert [model.model for model in listed] == ["coder:latest", "one:latest", "two:latest"]
        assert listed[2].size == two.stat().st_size
        assert len({model.digest for model in listed}) == 2, "one for each file"
        assert not client.ps().models
        for path, text in (("/slots", "[]"), ("/metrics", "")):
            answer = live.get(path, params={"model": "two"})
            assert (answer.status_code, answer.text) == (200, text)
        assert live.statuses() == {"coder": "unloaded", "one": "unloaded", "two": "unloaded"}
        with live.client() as caller:
            assert caller.post("/models/load", json={"model": "two"}).json() == {"success": True}
            assert live.statuses() == {"coder": "unloaded", "one": "unloaded", "two": "loaded"}
            (loaded,) = client.ps().models
            assert loaded.model == "two:latest"
            assert 0 < loaded.expires_at.timestamp() - time.time() <= 600
            assert client.list().models[2].details.quantization_level == "Q8_0"
            assert live.get("/props?model=two").json()["default_generation_settings"]["n_ctx"] == 256
            assert len(live.get("/slots", params={"model": "two"}).json()) == 1
            assert "llamacpp:" in live.get("/metrics?model=two").text
            assert live.ask("gpt-9").json()["model"] == "gpt-9"
            assert live.get("/props?model=one").json()["default_generation_settings"]["n_ctx"] == 512
            assert caller.post("/models/unload", json={"model": "one"}).json() == {"success": True}
            assert live.statuses() == {"coder": "unloaded", "one": "unloaded", "two": "loaded"}


def test_only_models_that_there_are_can_be_unloaded(pair: Routed) -> None:
    with pair.client() as client:
        assert client.post("/models/unload", json={"model": "none"}).status_code == 404
        assert client.post("/models/unload", json={}).json()["error"]["param"] == "model"


def test_the_port_of_a_model_is_the_routers_own(pair: Routed) -> None:
    pair.ask("one")
    port = pair.process("one").port
    answer = httpx.post(f"http://127.0.0.1:{port}/completion", json={"prompt": "a", "n_predict": 1})
    assert answer.status_code == 403


def test_a_stream_arrives_as_it_is_written(pair: Routed) -> None:
    """Each line of Ollama's API is a part of its own."""
    body = {"prompt": "def main", "n_predict": 30, "stream": True, "ignore_eos": True}
    with pair.client() as client, client.stream("POST", "/completion", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert len(lines) > 1
    assert '"stop":true' in lines[-1]
    content = json.dumps({"model": "two", "messages": HELLO, "options": {"num_predict": 12, "seed": 1}}).encode()
    head = f"POST /api/chat HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", pair.port), timeout=60) as connection:
        connection.sendall(head.encode() + content)
        received = b""
        while part := connection.recv(1 << 16):
            received += part
    rest, parts = received.partition(b"\r\n\r\n")[2], []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        if int(size, 16):
            parts.append(json.loads(rest[: int(size, 16)]))
        rest = rest[int(size, 16) + 2 :]
    assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]


def test_a_name_with_its_tag_reaches_the_model(pair: Routed) -> None:
    with ollama.Client(host=pair.url) as client:
        answer = client.chat("two:latest", HELLO, options={"num_predict": 2})
        assert answer.model == "two:latest"
        assert client.show("two").modelinfo["general.architecture"] == "llama"
        with pytest.raises(ollama.ResponseError, match="no such model"):
            client.chat("three", HELLO)
    with pair.client() as client_:
        shown = client_.post("/api/show", json={"name": "two:latest"}).json()
        assert shown["modelfile"].splitlines()[1] == "FROM two:latest"
        assert client_.post("/api/show", json={"name": "three"}).status_code == 404
        assert client_.get("/api/version").json()["version"]


def test_each_kind_of_model_answers_its_calls(routed: Start, files: Files, tmp_path: Path) -> None:
    """One that generates next to one that only embeds."""
    (chat,) = files("chat")
    embed = tmp_path / "embed.gguf"
    encoder(embed, MEAN_POOLING)
    assert need_of(EngineConfig(model=embed, slots=4)) == Need(embed.stat().st_size, 0)
    live = routed([choice(chat), choice(embed)])
    vectors = live.ask("embed", "/v1/embeddings", input=["a b", "c"]).json()["data"]
    assert [len(row["embedding"]) for row in vectors] == [len(vectors[0]["embedding"])] * 2
    assert live.ask("embed", "/completion", prompt="a").status_code == 501
    assert live.ask("chat", "/v1/embeddings", input="a").status_code == 501
    with ollama.Client(host=live.url) as client:
        assert len(client.embed("embed", ["the cat", "a dog"]).embeddings) == 2
        assert client.show("embed").capabilities == ["embedding"]
        assert client.chat("chat", HELLO, options={"num_predict": 1}).done
        with pytest.raises(ollama.ResponseError, match="generates no text"):
            client.chat("embed", HELLO)
